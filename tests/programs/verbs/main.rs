//! Unmodified RDMA programs under `ginnel run --verbs`. The only RDMA devices here are segments, and each program is told which one to
//! use, so a program that succeeds has used it.

mod adversary;
mod ends;
mod kills;
mod libfabric;
mod lost;
mod pyverbs;
mod qperf;
mod rdma_cm;
mod rsockets;
mod soak;
mod ucx;
mod waits;

kit::test_that_skips_are_seen!();

use kit::wait::wait_until;
use kit::world::World;
use programs::stage::{free_port, listens};
use programs::verbs::{DEVICE, Killed, Verbs, compiled, expect_good, text};
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[test]
fn the_segment_is_a_device() {
    kit::require_programs!(&["ibv_devices", "ibv_devinfo"]);
    let verbs = Verbs::new();
    let devices = verbs.good(&["ibv_devices"]);
    assert!(devices.contains(DEVICE) && !devices.contains("ginnel_shared"), "{devices}");
    let info = verbs.good(&["ibv_devinfo", "-v", "-d", DEVICE]);
    for line in [
        "PORT_ACTIVE (4)",
        "link_layer:\t\tInfiniBand",
        "max_mtu:\t\t4096 (5)",
        "atomic_cap:\t\t\tATOMIC_HCA",
    ] {
        assert!(info.contains(line), "{info}");
    }
}

#[test]
fn the_programs_and_queue_pairs_of_a_device_are_shown() {
    kit::require_programs!(&["ib_send_bw"]);
    let verbs = Verbs::new();
    let line = ["ib_send_bw", "-d", DEVICE, "-F", "-D", "60", "--use-srq"];
    let both = verbs.start(&line);
    wait_until_busy(both[1].0.as_ref().unwrap(), 30);
    let said = verbs.world.good("verbs web").out;
    // Requests may be waiting at the moment, which is shown behind both tables.
    let said = said.split("\n\n").take(2).collect::<String>();
    // The server only receives, so it is in RTR. The shared receive queue belongs to the server.
    for (words, times) in [("ib_send_bw ", 2), (" rc ", 2), (" RTS ", 1), (" srq ", 1)] {
        assert_eq!(said.matches(words).count(), times, "{words}: {said}");
    }
    let json = verbs.world.good("verbs --json").json();
    let pairs = |i: usize| json[0]["endpoints"][i]["queue_pairs"].as_array().unwrap();
    let connected = |i: usize| pairs(i).iter().find(|pair| pair["kind"] == "rc").unwrap();
    assert_eq!(connected(0)["peer"], connected(1)["number"]);
    assert_eq!(connected(1)["peer"], connected(0)["number"]);
    // The client's counters grow: each of its requests has 64 KiB.
    let client = || {
        let json = verbs.world.good("verbs web --json").json();
        let endpoints = json[0]["endpoints"].as_array().unwrap().clone();
        let pairs = endpoints.iter().flat_map(|endpoint| endpoint["queue_pairs"].as_array().unwrap());
        let sender = pairs.clone().find(|pair| pair["state"] == "RTS").unwrap();
        ["executed", "bytes"].map(|counter| sender[counter].as_u64().unwrap())
    };
    let [executed, bytes] = client();
    // One of the two words may have been stored a moment before the other.
    assert!(executed > 0 && bytes / 65536 >= executed / 2, "{executed}, {bytes}");
    wait_until("further requests", || {
        let [later, later_bytes] = client();
        later > executed && later_bytes > bytes
    });
    drop(both);
    let said = verbs.world.expect(1, "verbs shared").err;
    assert!(said.contains("no segment shared"), "{said}");
    wait_until("an idle device", || !verbs.world.good("verbs").out.contains("ib_send_bw"));
}

#[test]
fn without_the_option_a_program_finds_no_device() {
    kit::require_programs!(&["ibv_devices"]);
    let verbs = Verbs::new();
    let output = verbs
        .world
        .command("run --mode off -- ibv_devices")
        .env("GINNEL_PRELOAD", "/dev/null")
        .output()
        .unwrap();
    assert!(!text(&output).contains(DEVICE), "{}", text(&output));
}

/// Waits until a process has mapped and connected what it needs and is at work, which is so when it has used this much CPU time.
fn wait_until_busy(child: &Child, ticks: u64) {
    wait_until("work", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        // The fields utime and stime of proc(5).
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap() >= ticks
    });
}

#[test]
fn the_death_of_a_process_ends_its_peers() {
    kit::require_programs!(&["ib_send_bw", "ib_write_bw", "ib_read_bw"]);
    let verbs = Verbs::new();
    for program in [
        &["ib_send_bw", "-D", "60"][..],
        &["ib_send_bw", "-e", "-n", "5000000"],
        &["ib_write_bw", "-D", "60"],
        &["ib_read_bw", "-D", "60"],
    ] {
        // Which process is killed. The server of a WRITE or READ makes no verbs calls while it waits.
        let one_sided = program[0] != "ib_send_bw";
        for victim in if one_sided { 0..1 } else { 0..2 } {
            let line = [program, &["-d", DEVICE, "-F"]].concat();
            let [server, client] = verbs.start(&line);
            wait_until_busy(client.0.as_ref().unwrap(), 30);
            let mut both = [server, client];
            let survivor = both[1 - victim].0.take().unwrap();
            let killed = Instant::now();
            drop(both);
            let end = std::thread::spawn(move || survivor.wait_with_output().unwrap());
            wait_until("the end of the survivor", || end.is_finished());
            let took = killed.elapsed();
            let output = end.join().unwrap();
            let text = text(&output);
            // Either the first request has failed because the peer does not answer, or a receive was flushed.
            let is_told = ["Failed status 12:", "Failed status 5:"].iter().any(|words| text.contains(words));
            assert!(!output.status.success() && is_told, "{line:?}, {victim}: {text}");
            println!("{line:?}, {}: an error after {took:?}", ["server killed", "client killed"][victim]);
        }
    }
}

#[test]
fn the_death_of_the_daemon_does_not_disturb_programs() {
    kit::require_programs!(&["ib_send_bw"]);
    let mut verbs = Verbs::new();
    let line = ["ib_send_bw", "-d", DEVICE, "-F", "-D", "3"];
    let [server, client] = verbs.start(&line);
    wait_until_busy(client.0.as_ref().unwrap(), 30);
    verbs.world.replace_daemon();
    for mut child in [client, server] {
        expect_good(&line, child.0.take().unwrap());
    }
    // Later programs find the segment as before.
    verbs.pair(&["ibv_rc_pingpong", "-d", DEVICE]);
}

const CONNECTED: &[&[&str]] = &[
    &["-n", "1000"],
    &["-e"],
    &["-c", "-n", "1000"],
    &["-s", "100000", "-c", "-n", "100"],
    &["-m", "256", "-r", "10"],
];

const BATCHED: &[&[&str]] =
    &[&["-N", "-n", "1000"], &["-N", "-c", "-n", "1000"], &["-N", "-c", "-s", "100000", "-n", "100"]];

#[test]
fn pingpong() {
    let programs = ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong"];
    kit::require_programs!(&programs);
    let verbs = Verbs::new();
    for program in programs {
        let more: &[&[&str]] = match program {
            // A datagram has at most 4096 bytes. It does not wait for a receive, so the receiver must not run out of receives.
            "ibv_ud_pingpong" => &[&["-n", "1000"], &["-e"], &["-c", "-n", "1000", "-s", "2048"]],
            "ibv_srq_pingpong" => &[&["-n", "1000"], &["-e"], &["-c", "-n", "1000", "-q", "5"]],
            "ibv_uc_pingpong" => CONNECTED,
            // The same with the functions of the `ibv_wr_*` family.
            _ => &[CONNECTED, BATCHED].concat(),
        };
        for more in more {
            for said in verbs.pair(&[&[program, "-d", DEVICE], *more].concat()) {
                assert!(said.contains("iters in") && !said.contains("invalid"), "{program} {more:?}: {said}");
            }
        }
    }
}

const PERFTEST: [&str; 8] = [
    "ib_write_lat",
    "ib_write_bw",
    "ib_read_lat",
    "ib_read_bw",
    "ib_send_lat",
    "ib_send_bw",
    "ib_atomic_lat",
    "ib_atomic_bw",
];

#[test]
fn perftest() {
    kit::require_programs!(&PERFTEST);
    let verbs = Verbs::new();
    let try_out = |program: &str, more: &[&str]| {
        let [server, client] = verbs.pair(&[&[program, "-d", DEVICE, "-F"], more].concat());
        // The server reports nothing about accesses to its memory.
        let is_said = server.contains(DEVICE) && client.contains(DEVICE) && client.contains("#bytes");
        assert!(is_said, "{program} {more:?}: {server}{client}");
    };
    for program in PERFTEST {
        let sizes: &[&[&str]] = match program.contains("atomic") {
            true => &[&["-A", "CMP_AND_SWAP"], &["-A", "FETCH_AND_ADD"]],
            false => &[&["-s", "2"], &["-s", "100"], &["-s", "65536"]],
        };
        for more in sizes {
            try_out(program, &[*more, &["-n", "1000"]].concat());
        }
    }
    for (program, more) in [
        ("ib_write_lat", &["-c", "UC"][..]),
        ("ib_write_bw", &["-c", "UC"]),
        ("ib_send_lat", &["-c", "UC"]),
        ("ib_send_bw", &["-c", "UC"]),
        ("ib_send_lat", &["-c", "UD"]),
        ("ib_send_bw", &["-c", "UD"]),
        ("ib_send_bw", &["--use-srq", "-q", "4"]),
        ("ib_send_lat", &["--use-srq"]),
        ("ib_write_bw", &["-q", "8", "-b"]),
        ("ib_send_bw", &["-b", "-s", "4096"]),
        ("ib_read_bw", &["-b", "-q", "2"]),
        // These programs sleep until there is a completion.
        ("ib_send_lat", &["-e"]),
        ("ib_send_bw", &["-e"]),
        ("ib_send_bw", &["-e", "-c", "UD"]),
        // All sizes up to 8 MiB.
        ("ib_send_bw", &["-a", "-n", "20"]),
        ("ib_write_bw", &["-a", "-n", "20"]),
    ] {
        try_out(program, more);
    }
}

/// Compiles a program of this test's folder, as if Ginnel did not exist, and runs it over the device.
fn run_source(name: &str, run: &[&str], how: &[&str]) -> String {
    let verbs = Verbs::new();
    let program = verbs.world.files().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("verbs/{name}.c"));
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).arg("-libverbs");
    assert!(compiler.status().unwrap().success());
    let said = verbs.good(&[run, &[program.to_str().unwrap(), DEVICE], how].concat());
    assert!(said.contains("good"), "{said}");
    said
}

/// Registers memory in a program whose threads use the heap that contains it.
fn register_among_threads(run: &[&str], how: &[&str]) {
    run_source("registers", run, how);
}

#[test]
fn unsupported_calls_are_refused_and_devices_can_be_reopened() {
    programs::require_verbs_compiler!();
    let said = run_source("refused", &[], &[]);
    let number = |who: &str| said.lines().find_map(|line| line.strip_prefix(who)).unwrap().to_owned();
    // The parent and the child have devices of their own.
    assert_ne!(number("child "), number("parent "));
}

/// Reserves huge pages until the end of the test.
struct HugePages {
    before: String,
    /// Makes the tests that use this run one after the other.
    _turn: MutexGuard<'static, ()>,
}

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    /// Makes at least this many unused pages available. Returns `None` if that is impossible.
    fn reserve(wanted: u64) -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let before = fs::read_to_string(Self::COUNT).ok()?;
        let reserved = Self { before, _turn: turn };
        let count = reserved.before.trim().parse::<u64>().ok()? + wanted;
        fs::write(Self::COUNT, count.to_string()).ok()?;
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        let free = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"))?;
        (free.trim().parse::<u64>().ok()? >= wanted).then_some(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(Self::COUNT, &self.before);
    }
}

#[test]
fn memory_that_cannot_lie_in_the_segment_is_registered() {
    programs::require_verbs_compiler!();
    let _pages = HugePages::reserve(16);
    let said = run_source("shadow", &[], &[]);
    for kind in said.lines().filter_map(|line| line.strip_prefix("lacks ")) {
        kit::skip!("memory of the kind {kind}");
    }
}

/// The segment has room, but the endpoint's quota is used up. What was allocated up to that point is freed again, so there is room for
/// queues.
#[test]
fn memory_beyond_the_quota_can_be_registered() {
    kit::require_programs!(&["ib_write_bw"]);
    let limits = "[limits]\nblock_bytes_per_endpoint = '12M'\n";
    let verbs = Verbs::of(World::configured("size = '256M'\nverbs = true", limits));
    // The program registers twice as many bytes as the quota. The first ones would use up all of it.
    for size in ["4500000", "8000000"] {
        let line = ["ib_write_bw", "-d", DEVICE, "-F", "-s", size, "-n", "5"];
        let port = free_port();
        let number = port.to_string();
        let server = [&line[..], &["-p", &number]].concat();
        let mut served = Killed(Some(verbs.command(&server).spawn().unwrap()));
        wait_until("a server", || listens(port));
        let client = verbs.command(&[&line[..], &["-p", &number, "127.0.0.1"]].concat()).spawn().unwrap();
        let mut most = 0;
        let mut client = Killed(Some(client));
        wait_until("the end of the client", || {
            let shown = verbs.world.good("verbs web --json").json();
            let endpoints = shown[0]["endpoints"].as_array().cloned().unwrap_or_default();
            let shadows = endpoints.iter().filter_map(|endpoint| endpoint["shadow_regions"].as_u64());
            most = most.max(shadows.sum());
            client.0.as_mut().unwrap().try_wait().unwrap().is_some()
        });
        expect_good(&line, client.0.take().unwrap());
        expect_good(&server, served.0.take().unwrap());
        assert!(most >= 1, "{size}: nothing was a shadow region");
    }
}

#[test]
fn perftest_uses_huge_pages() {
    kit::require_programs!(&PERFTEST);
    let pages = HugePages::reserve(32);
    kit::require!(pages.is_some(), "huge pages cannot be reserved here");
    let verbs = Verbs::new();
    for program in PERFTEST {
        let line = [program, "-d", DEVICE, "-F", "-n", "200", "--use_hugepages"];
        for said in verbs.pair(&line) {
            assert!(said.contains(DEVICE), "{program}: {said}");
        }
    }
}

#[test]
fn memory_is_registered_while_threads_use_it() {
    programs::require_verbs_compiler!();
    register_among_threads(&[], &[]);
}

/// A process that may stop its threads in user mode only.
#[test]
fn memory_is_registered_without_privileges() {
    programs::require_verbs_compiler!();
    kit::require_programs!(&["unshare", "setpriv"]);
    const SCRIPT: &str =
        "if [ -e /dev/userfaultfd ]; then mount --bind /dev/null /dev/userfaultfd || exit; fi
        exec setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace \"$@\"";
    let run = ["unshare", "--mount", "sh", "-c", SCRIPT, "sh"];
    let status = Command::new(run[0]).args(&run[1..]).arg("true").output().unwrap().status;
    kit::require!(status.success(), "only root gives up privileges");
    register_among_threads(&run, &[]);
    // Without userfaultfd, as in a container.
    register_among_threads(&run, &["confined"]);
}

/// perftest posts with the `ibv_wr_*` functions only on adapters that it knows, so this makes the device look like one of them.
#[test]
fn perftest_posts_in_batches() {
    programs::require_verbs_compiler!();
    kit::require_programs!(&PERFTEST);
    let verbs = Verbs::new();
    let adapter = compiled(&verbs, "adapter", &["-shared", "-fPIC", "-ldl"]);
    let preload = format!("LD_PRELOAD={adapter}");
    let all = PERFTEST.map(|program| vec![program]);
    let more = [
        vec!["ib_write_bw", "-s", "100", "-l", "8"],
        vec!["ib_send_bw", "-s", "2", "-l", "8"],
        vec!["ib_send_lat", "-s", "65536"],
        vec!["ib_write_lat", "-s", "2", "-I", "0"],
        vec!["ib_write_lat", "-c", "UC"],
        vec!["ib_send_bw", "-c", "UC"],
        vec!["ib_send_lat", "-c", "UD"],
        vec!["ib_send_bw", "-c", "UD", "-l", "4"],
    ];
    for program in all.into_iter().chain(more) {
        let command = [&["env", &preload], &program[..], &["-d", DEVICE, "-F", "-n", "1000"]].concat();
        for said in verbs.pair(&command) {
            assert!(said.contains("ibv_wr* API     : ON") && said.contains(DEVICE), "{program:?}: {said}");
        }
    }
}

#[test]
fn requests_are_posted_in_batches() {
    programs::require_verbs_compiler!();
    let verbs = Verbs::new();
    let program = compiled(&verbs, "post", &["-libverbs"]);
    verbs.good(&[&program, DEVICE]);
}

#[test]
fn completions_are_polled_one_by_one() {
    programs::require_verbs_compiler!();
    let verbs = Verbs::new();
    let program = compiled(&verbs, "extended_poll", &["-libverbs"]);
    verbs.good(&[&program, DEVICE]);
}
