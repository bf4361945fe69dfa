//! An ordinary user takes as much as the daemon gives. Root's programs and VMs must get what they need, and the log must stay readable.

use ginnel_layout::wire::{self, Header, Kind};
use kit::daemon::qemu::Qemu;
use kit::daemon::*;
use kit::process::Process;
use kit::wait::{WATCHDOG, wait_for};
use rustix::net::RecvFlags;
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

/// The connections of a user that asks all the time.
const ASKERS: usize = 3000;

kit::program! {
    /// Asks for the daemon's state over very many connections, all the time.
    fn asker() {
        kit::hold::become_user(NOBODY);
        let maximum = getrlimit(Resource::Nofile).maximum;
        prlimit(None, Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
        let mut clients: Vec<Client> = (0..ASKERS).map(|_| Client::hello(&program_socket())).collect();
        println!("{}", clients.len());
        let mut answers = vec![0; wire::MAX_PACKET];
        loop {
            for client in &mut clients {
                while rustix::net::recv(&client.fd, &mut answers[..], RecvFlags::DONTWAIT).is_ok() {}
                client.try_send(Kind::INSPECT, wire::Inspect::FIRST.as_bytes()).unwrap();
            }
        }
    }
}

#[test]
fn a_user_that_asks_over_very_many_connections_does_not_delay_others() {
    let mut daemon = Daemon::start_new(CONFIG);
    let mut asker = Process(daemon.program(asker).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(asker.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim().parse(), Ok(ASKERS));
    let mut client = daemon.client();
    let mut waits: Vec<Duration> = (0..40)
        .map(|_| {
            let begin = Instant::now();
            client.status();
            daemon.attach("web", "root");
            begin.elapsed()
        })
        .collect();
    waits.sort_unstable();
    println!("usually {:?}, at most {:?}", waits[waits.len() / 2], waits[waits.len() - 1]);
    assert!(waits[waits.len() / 2] < Duration::from_millis(500), "others wait: {waits:?}");
    assert!(asker.try_wait().unwrap().is_none() && daemon.is_running());
}

/// The waiters that a user adds to its own end of a connection.
const WAITERS: u64 = 200_000;

kit::program! {
    /// Adds very many waiters to its connection, and then asks all the time.
    fn crowd() {
        kit::hold::become_user(NOBODY);
        let maximum = getrlimit(Resource::Nofile).maximum;
        prlimit(None, Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
        let mut client = Client::hello(&program_socket());
        let _epolls = kit::hold::crowd(&client.fd, WAITERS);
        println!("{WAITERS}");
        let mut answers = vec![0; wire::MAX_PACKET];
        loop {
            while rustix::net::recv(&client.fd, &mut answers[..], RecvFlags::DONTWAIT).is_ok() {}
            // There is no room while the daemon lets others have their turns.
            let _ = client.try_send(Kind::INSPECT, wire::Inspect::FIRST.as_bytes());
        }
    }
}

#[test]
fn a_user_with_very_many_waiters_at_its_connection_does_not_delay_others() {
    let mut daemon = Daemon::start_new(CONFIG);
    let mut crowd = Process(daemon.program(crowd).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(crowd.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim().parse(), Ok(WAITERS));
    let mut waits: Vec<Duration> = (0..20)
        .map(|_| {
            let begin = Instant::now();
            daemon.attach("web", "root");
            begin.elapsed()
        })
        .collect();
    waits.sort_unstable();
    println!("usually {:?}, at most {:?}", waits[waits.len() / 2], waits[waits.len() - 1]);
    assert!(waits[waits.len() / 2] < Duration::from_millis(500), "others wait: {waits:?}");
    assert!(crowd.try_wait().unwrap().is_none() && daemon.is_running());
}
