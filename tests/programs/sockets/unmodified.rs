//! Unmodified programs of the distribution under `ginnel run`: their connections change over, and their data is
//! correct.

mod asyncio;
mod bash;
mod fork;
mod go;
mod haproxy;
mod java;
mod memcached;
mod netpipe;
mod nginx;
mod node;
mod postgresql;
mod rsync;
mod ssh;
mod valgrind;

use kit::wait::retry;
use programs::stage::{MODES, Stage, changed, free_port};
use std::fs;

#[test]
fn redis() {
    kit::require_programs!(&["redis-server", "redis-benchmark", "redis-cli"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["redis-server", "--port", &at, "--save", "", "--appendonly", "no"]);
        for load in [
            &["-c", "1", "-n", "4000"][..],
            &["-c", "20", "-n", "20000"],
            &["-c", "5", "-n", "20000", "-P", "16"],
        ] {
            stage.client(&[&["redis-benchmark", "-p", &at, "-q", "-t", "set,get"], load].concat());
        }
        // A value that is longer than the ring, and the same value read back.
        let value: String = (0..100_000_u32)
            .map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 28) as u8))
            .collect();
        let file = stage.world.files().join("value");
        fs::write(&file, value.repeat(20)).unwrap();
        let input = fs::File::open(&file).unwrap();
        let (good, out, err) = stage.client_with(&["redis-cli", "-p", &at, "-x", "SET", "key"], input.into());
        assert!(good && out.trim() == "OK", "{out} {err}");
        let got = stage.client(&["redis-cli", "-p", &at, "STRLEN", "key"]);
        assert_eq!(got.trim(), (value.len() * 20).to_string());
        let connections = stage.end();
        // There are some fifty connections of each kind. How many of them end before they change over depends on the
        // machine.
        for program in ["redis-benchmark", "redis-server"] {
            let n = changed(&connections, program).len();
            assert!(n >= 5, "{mode}: {n} of {program}: {connections:#?}");
        }
    }
}

#[test]
fn iperf3() {
    kit::require_programs!(&["iperf3"]);
    for mode in MODES {
        for direction in [&[][..], &["-R"], &["-P", "3"]] {
            // How much it sends in two seconds depends on the machine.
            retry(|| {
                let mut stage = Stage::new(mode);
                let port = free_port();
                let at = port.to_string();
                stage.serve(port, &["iperf3", "-s", "-1", "-p", &at]);
                stage.client(&[&["iperf3", "-c", "127.0.0.1", "-t", "2", "-p", &at], direction].concat());
                let connections = stage.end();
                let bytes: u64 = changed(&connections, "iperf3").iter().map(|c| c.shared_received).sum();
                if bytes > 10 << 20 {
                    return Ok(());
                }
                Err(format!("{mode} {direction:?}: {bytes} bytes over shared memory: {connections:#?}"))
            });
        }
    }
}

#[test]
fn sockperf() {
    kit::require_programs!(&["sockperf"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &["sockperf", "sr", "--tcp", "-i", "127.0.0.1", "-p", &at]);
        let client = ["sockperf", "pp", "--tcp", "-i", "127.0.0.1", "-t", "1", "-p", &at];
        let out = stage.client_until_changed(&client, 1, "sockperf");
        assert!(
            out.contains("dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0"),
            "{out}"
        );
        stage.end();
    }
}
