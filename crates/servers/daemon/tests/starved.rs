//! An ordinary user takes as much as the daemon gives. Root's programs and VMs must get what they need, and the log must stay readable.

use ginnel_layout::wire::{self, Header, Kind};
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::process::Process;
use kit::wait::{WATCHDOG, wait_for};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

const CONFIG: &str = "
[vm.a]
[vm.b]
[segment.web]
size = \"8M\"
members = [\"host\", \"a\", \"b\"]
allow_users = [65534]
";
const NOBODY: u32 = 65534;
/// The descriptors that the daemon may have, and the connections that the user opens.
const DESCRIPTORS: u64 = 480;
const CONNECTIONS: usize = 600;
/// The doorbell vectors of a VM, as the configuration of these tests has them.
const VECTORS: usize = 8;

kit::program! {
    /// Opens connections without end, attaches over some of them, and says how many there are.
    fn greedy() {
        kit::hold::become_user(NOBODY);
        let mut kept = Vec::new();
        for n in 0..CONNECTIONS {
            let client = Client::raw(&program_socket());
            let header = Header { kind: Kind::HELLO, flags: 0, request: 1 };
            let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
            let _ = client.send_raw(&[header.as_bytes(), hello.as_bytes()].concat());
            let answer = client.receive().and_then(|packet| wire::split(&packet.bytes).map(|(header, _)| header.kind));
            if answer != Some(Kind::HELLO_OK) {
                continue;
            }
            if n % 4 == 0 {
                if let Ok(attached) = client.attach("web", "greedy") {
                    kept.push(Box::new(attached) as Box<dyn std::any::Any>);
                }
            } else {
                kept.push(Box::new(client));
            }
        }
        println!("{}", kept.len());
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
}

/// Sets the number of descriptors that the daemon may have.
fn limit(daemon: &Daemon, descriptors: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit { current: Some(descriptors), maximum };
    prlimit(Pid::from_raw(daemon.pid() as i32), Resource::Nofile, limit).unwrap();
}

/// Returns the processor time that the daemon has used.
fn used(daemon: &Daemon) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap()..].split(' ').collect();
    let ticks: u64 = fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

/// Returns the largest number of lines of one kind in the log: lines that differ in numbers only.
fn most_of_a_kind(daemon: &Daemon) -> usize {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for line in daemon.log().lines().filter(|line| !line.contains("DEBUG")) {
        *kinds.entry(line.chars().filter(|c| !c.is_ascii_digit()).collect()).or_default() += 1;
    }
    kinds.into_values().max().unwrap_or(0)
}

#[test]
fn root_and_vms_get_descriptors_when_a_user_has_taken_all_that_it_gets() {
    let mut daemon = Daemon::prepare("vectors = 8\n", CONFIG);
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), all).unwrap();
    daemon.start();
    limit(&daemon, DESCRIPTORS);
    let begin = Instant::now();
    let mut greedy = Process(daemon.program(greedy).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(greedy.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let taken: usize = line.trim().parse().unwrap();
    assert!((100..CONNECTIONS).contains(&taken), "{taken} connections, so the limit was not reached");
    for _ in 0..10 {
        daemon.attach("web", "root");
    }
    let _qemu = Qemu::join(&daemon.run("a.sock"), VECTORS);
    // A kind of line may come 100 times at once, and then once a second.
    let most = 110 + begin.elapsed().as_secs() as usize;
    assert!(most_of_a_kind(&daemon) <= most, "{} lines of a kind", most_of_a_kind(&daemon));
    assert!(daemon.is_running());
}

#[test]
fn a_qemu_waits_for_descriptors_and_the_daemon_sleeps_meanwhile() {
    let daemon = Daemon::start_with("vectors = 8\n", CONFIG);
    limit(&daemon, 1);
    let socket = daemon.run("a.sock");
    let qemu = std::thread::spawn(move || Qemu::join(&socket, VECTORS));
    wait_for("the refusal", || daemon.log().contains("cannot be accepted, and waits").then_some(()));
    let before = used(&daemon);
    std::thread::sleep(Duration::from_secs(2));
    let busy = used(&daemon) - before;
    assert!(busy < Duration::from_millis(500), "it works {busy:?} in two seconds");
    assert!(most_of_a_kind(&daemon) < 10, "{} lines of a kind", most_of_a_kind(&daemon));
    limit(&daemon, 4096);
    let begin = Instant::now();
    qemu.join().unwrap();
    assert!(begin.elapsed() < WATCHDOG / 2);
}
