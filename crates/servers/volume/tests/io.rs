//! I/O on files: polled completions, and pinned memory.

mod server;

use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Device, Options};
use kit::wait::WATCHDOG;
use server::Server;
use std::time::{Duration, Instant};

const BYTES: u64 = 8 << 20;

/// Writes, reads and flushes; verifies all data that it reads.
fn load(client: &mut Client) {
    let workload = Workload {
        pattern: Pattern { random: true, reads: 50 },
        depth: 32,
        limit: Limit::Requests(2000),
        flush_every: Some(50),
        verify: true,
        sleep: true,
        patience: WATCHDOG,
        ..Workload::default()
    };
    let outcome = run(client, &workload).unwrap();
    assert_eq!(outcome.failed, 0, "{:?}", outcome.first_failure);
    assert!(outcome.verified > 500 && outcome.flushes.requests > 0);
}

/// Makes all kinds of requests on the disk that the client sees.
fn all_kinds(client: &mut Client) {
    load(client);
    client.write(4096, &[7; 16384]).unwrap();
    client.discard(8192, 4096).unwrap();
    client.write_zeroes(12288, 4096, true).unwrap();
    client.write_zeroes(16384, 4096, false).unwrap();
    client.flush().unwrap();
    let mut back = [1; 16384];
    client.read(4096, &mut back).unwrap();
    assert_eq!((&back[..4096], &back[8192..]), (&[7; 4096][..], &[0; 8192][..]));
}

#[test]
fn a_polled_disk_can_be_written_flushed_and_discarded() {
    for flags in ["--path IMAGE --iopoll", "--path IMAGE --iopoll --wait interrupt --write-cache false"] {
        let server = Server::start(BYTES, flags);
        let mut client = server.connect();
        all_kinds(&mut client);
        // Not every disk has queues to poll. The volume reports that once and continues.
        assert!(server.count("no queues to poll") <= 1, "{}", server.log());
        assert_eq!(server.count("failed"), 0, "{}", server.log());
    }
}

#[test]
fn polled_and_other_disks_in_one_target() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = |name: &str, more: &str| {
        let path = dir.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
        format!("[[disk]]\npath = {path:?}\n{more}\n")
    };
    let disks = [
        disk("polled", "iopoll = true"),
        disk("cached", "direct = \"off\""),
        disk("through", "iopoll = true\nwrite-cache = false"),
        disk("direct", ""),
    ];
    let config = dir.path().join("v.toml");
    std::fs::write(&config, format!("device = \"scsi\"\nqueues = 2\n{}", disks.concat())).unwrap();
    let server = Server::start(0, &format!("--config {} --pin-memory true", config.display()));
    for lun in 0..4 {
        let device = Device::Scsi { target: 0, lun, wide: false };
        let mut client = Client::connect(Options { device, queues: 2, ..server.options() }).unwrap();
        all_kinds(&mut client);
    }
    assert!(server.count("no queues to poll") <= 2, "{}", server.log());
    assert_eq!(server.count("failed"), 0, "{}", server.log());
}

/// Returns the amount of memory that the kernel has pinned for a volume, in KiB.
fn pinned(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPin")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn pinned_memory_is_let_go_with_its_front_end() {
    let server = Server::start(BYTES, "--path IMAGE --queues 2 --threads 2 --pin-memory true");
    for _ in 0..2 {
        let mut client = Client::connect(Options { queues: 2, ..server.options() }).unwrap();
        all_kinds(&mut client);
        assert!(pinned(&server) > 0);
        client.pause().unwrap();
        load(&mut client);
        client.close().unwrap();
        let until = Instant::now() + WATCHDOG;
        while pinned(&server) > 0 {
            assert!(Instant::now() < until, "{} kB are pinned still", pinned(&server));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let server = Server::start(BYTES, "--path IMAGE");
    let mut client = server.connect();
    load(&mut client);
    assert_eq!(pinned(&server), 0, "nobody has asked for it");
}

#[test]
fn memory_that_must_not_be_pinned_is_used_as_it_is() {
    // Root is exempt from the limit on locked memory, so the volume must not run as root.
    let user = if rustix::process::geteuid().is_root() { " --user nobody" } else { "" };
    let server = Server::start_under(
        &["prlimit", "--memlock=65536:65536"],
        BYTES,
        &format!("--path IMAGE --pin-memory true{user}"),
    );
    let mut client = server.connect();
    all_kinds(&mut client);
    assert_eq!((pinned(&server), server.count("RLIMIT_MEMLOCK")), (0, 1), "{}", server.log());
}
