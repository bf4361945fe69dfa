//! A program of an ordinary user holds locks of the kernel for ever: those of sockets and files that it has handed to the daemon, or got
//! from it. The daemon must go on serving everybody else, end when it is killed, and start anew.

use ginnel_daemon::packet;
use ginnel_fdpass::SendFlags;
use ginnel_layout::wire::{self, Header, Kind, SocketReport, SocketRole};
use kit::daemon::holder::{NOBODY, serves, silent_file, start_holder, stay};
use kit::daemon::*;
use kit::hold::lingering;
use kit::wait::{WATCHDOG, wait_for};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::json;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

kit::test_that_skips_are_seen!();

const CONFIG: &str = "
[segment.web]
size = \"8M\"
members = [\"host\"]
allow_users = [65534]
";
/// Many connections, but not more than a user may have.
const FLOOD: usize = 3000;

/// Reports a socket. Returns false if the daemon has ended the connection.
fn report<Fd: AsFd>(client: &Client, fds: &[Fd]) -> bool {
    let report = SocketReport { key: 7, role: SocketRole::ACCEPTOR, ..FromZeros::new_zeroed() };
    let header = Header { kind: Kind::SOCK_REPORT, flags: 0, request: 9 };
    packet::send(client.fd.as_fd(), &[header.as_bytes(), report.as_bytes()].concat(), fds).is_ok()
}

/// Returns the two ends of a TCP connection.
fn tcp() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near.into(), listener.accept().unwrap().0.into())
}

fn hello(socket: &std::path::Path) -> Client {
    let mut client = Client::raw(socket);
    let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: wire::features::SOCKETS };
    client.ask::<wire::HelloOk>(Kind::HELLO, hello.as_bytes(), Kind::HELLO_OK).unwrap();
    client
}

kit::program! {
    fn holder() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        let mut kept: Vec<OwnedFd> = Vec::new();
        let mut clients = Vec::new();
        for greeted in [true, false] {
            let client = || if greeted { hello(&socket) } else { Client::raw(&socket) };
            // A TCP socket that is locked by a sender.
            let (near, far) = tcp();
            silent.send_over(&near);
            let one = client();
            assert!(report(&one, &[&near]));
            // A Unix socket, with a descriptor that it lends, which is locked by a receiver.
            let kind = if greeted { SocketType::STREAM } else { SocketType::SEQPACKET };
            let (here, there) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            ginnel_fdpass::send(here.as_fd(), &[0; 100], &[] as &[OwnedFd], SendFlags::empty()).unwrap();
            silent.receive_from(&there);
            let two = client();
            assert!(report(&two, &[&there]));
            // A file that cannot be closed.
            let three = client();
            assert!(report(&three, &[&silent.file]));
            // The same file where no file belongs.
            let four = client();
            let header = Header { kind: Kind::INSPECT, flags: 0, request: 9 };
            packet::send(four.fd.as_fd(), header.as_bytes(), &[&silent.file]).unwrap();
            clients.extend([one, two, three, four]);
            kept.extend([near, far, here, there]);
        }
        stay();
    }
}

kit::program! {
    fn poisoner() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        let mut clients = Vec::new();
        // More than may be stuck at a time.
        for greeted in [false, true].into_iter().cycle().take(48) {
            let poison = silent.poison();
            let client = if greeted { hello(&socket) } else { Client::raw(&socket) };
            // The daemon takes the first ones at most, and ends a connection that does not begin with a greeting.
            let kind = if greeted { Kind::SOCK_REPORT } else { Kind::INSPECT };
            let header = Header { kind, flags: 0, request: 9 };
            let send = || {
                ginnel_fdpass::send(client.fd.as_fd(), header.as_bytes(), &[&poison], SendFlags::DONTWAIT)
            };
            (0..100).take_while(|_| send().is_ok()).for_each(drop);
            // This may be the last one that closes it.
            std::thread::spawn(move || drop(poison));
            clients.push(client);
        }
        stay();
    }
}

kit::program! {
    fn waiting_poisoner() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        let mut clients = Vec::new();
        for _ in 0..4 {
            let poison = silent.poison();
            let client = Client::raw(&socket);
            ginnel_fdpass::send(client.fd.as_fd(), &[0], &[&poison], SendFlags::DONTWAIT).unwrap();
            clients.push(client);
        }
        stay();
    }
}

kit::program! {
    /// Sends what nobody can close over many connections, one after another.
    fn flooder() {
        let Some(mut silent) = silent_file() else { return };
        let socket = program_socket();
        for _ in 0..FLOOD / 500 {
            for poison in silent.poisons(500) {
                let client = Client::raw(&socket);
                let header = Header { kind: Kind::INSPECT, flags: 0, request: 9 };
                let _ = ginnel_fdpass::send(client.fd.as_fd(), header.as_bytes(), &[&poison], SendFlags::DONTWAIT);
                // This may be the last one that closes it.
                std::thread::spawn(move || drop(poison));
            }
        }
        stay();
    }
}

#[test]
fn a_program_that_holds_locks_of_what_it_sends_holds_up_nobody_else() {
    for sockets in ["", "[sockets]\nenabled = false\n"] {
        let mut daemon = Daemon::start_new(&format!("{sockets}{CONFIG}"));
        let Some(holder) = start_holder(&daemon, holder) else { return };
        serves(&mut daemon);
        // Each connection whose descriptor blocks a helper ends.
        wait_for("the end of a connection", || daemon.log().contains("a helper is killed").then_some(()));
        serves(&mut daemon);
        // A successor, too, although helpers of the first one may live for ever.
        let before = Instant::now();
        daemon.restart();
        assert!(before.elapsed() < WATCHDOG / 4, "it ended late, or its successor began late");
        serves(&mut daemon);
        drop(holder);
        // What programs send is still examined.
        let no_connection = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = hello(&daemon.socket());
        wait_for("an answer to a report", || {
            assert!(report(&client, &[&no_connection]));
            readable(&client.fd, Duration::from_secs(1)).then_some(())
        });
    }
}

#[test]
fn what_nobody_can_close_in_the_queue_of_a_connection_does_not_keep_the_daemon_from_ending() {
    let mut daemon = Daemon::start_new(CONFIG);
    let Some(first) = start_holder(&daemon, poisoner) else { return };
    serves(&mut daemon);
    for _ in 0..2 {
        let before = Instant::now();
        daemon.restart();
        assert!(before.elapsed() < WATCHDOG / 4, "it ended late, or its successor began late");
        serves(&mut daemon);
    }
    drop(first);
    // With the program, what held up the closing ends. Then everything is closed.
    let before = open(&daemon);
    let second = start_holder(&daemon, poisoner);
    serves(&mut daemon);
    drop(second);
    wait_for("everything is closed", || (open(&daemon) <= before).then_some(()));
}

/// Returns how many descriptors the daemon has.
fn open(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count()
}

#[test]
fn what_nobody_can_close_takes_no_descriptors_of_the_daemon() {
    let mut daemon = Daemon::start_new(CONFIG);
    serves(&mut daemon);
    let before = open(&daemon);
    let Some(_flooder) = start_holder(&daemon, flooder) else { return };
    wait_for("room for descriptors", || {
        // What waits to be closed is tried again with the next connection.
        serves(&mut daemon);
        (open(&daemon) < before + FLOOD / 10).then_some(())
    });
    assert!(!daemon.log().contains("the last open files are kept"));
    daemon.restart();
    serves(&mut daemon);
}

#[test]
fn what_nobody_can_close_in_connections_that_wait_does_not_keep_the_daemon_from_ending() {
    for signal in [Signal::KILL, Signal::TERM] {
        let mut daemon = Daemon::start_new(CONFIG);
        daemon.signal(Signal::STOP);
        wait_for("it is stopped", || daemon.is_stopped().then_some(()));
        let Some(_poisoner) = start_holder(&daemon, waiting_poisoner) else { return };
        daemon.signal(signal);
        daemon.signal(Signal::CONT);
        daemon.ended();
        daemon.start();
        serves(&mut daemon);
    }
}

/// Returns the number of the process that looks at others for the daemon.
fn looker(daemon: &Daemon) -> Pid {
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    let of_name = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "ginneld-looker\n")
    };
    wait_for("a looker", || {
        let children = std::fs::read_to_string(&children).unwrap();
        let last = children.split_ascii_whitespace().rev().find(of_name)?;
        Pid::from_raw(last.parse().unwrap())
    })
}

#[test]
fn a_process_that_holds_up_whoever_looks_at_it_holds_up_nobody_else() {
    let mut daemon = Daemon::start_new(CONFIG);
    for signal in [Signal::STOP, Signal::KILL, Signal::STOP] {
        kill_process(looker(&daemon), signal).unwrap();
        serves(&mut daemon);
    }
    kill_process(looker(&daemon), Signal::STOP).unwrap();
    daemon.restart();
    serves(&mut daemon);
}

#[test]
fn without_free_descriptors_nobody_waits_for_sockets_that_linger() {
    let mut daemon = Daemon::start_new(CONFIG);
    let mut other = daemon.client();
    let (mut mine, mut ends) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        mine.push(hello(&daemon.socket()));
    }
    let pid = Pid::from_raw(daemon.pid() as i32);
    let maximum = getrlimit(Resource::Nofile).maximum;
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(1), maximum }).unwrap();
    let before = Instant::now();
    for client in &mine {
        for _ in 0..8 {
            let (near, end) = lingering();
            ends.push(end);
            let sent = report(client, &[&near]);
            // If this is the last close, it blocks until this process ends.
            std::thread::spawn(move || drop(near));
            if !sent {
                break;
            }
        }
    }
    // The connections end, because there are not even descriptors for a helper.
    for client in &mine {
        while client.receive().is_some() {}
        other.status();
    }
    assert!(before.elapsed() < WATCHDOG / 2, "others wait");
    assert!(daemon.is_running());
    prlimit(pid, Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    serves(&mut daemon);
}

kit::program! {
    /// Attaches to the segments, punches a hole into the file of each, and holds the locks of the files.
    fn writer() {
        let Some(mut silent) = silent_file() else { return };
        let mut kept = Vec::new();
        for segment in ["web", "late"] {
            let mut client = hello(&program_socket());
            let body = wire::Attach { segment: name(segment), name: name("writer"), ..wire::Attach::new_zeroed() };
            let (_, fds) = client.ask::<wire::Attached>(Kind::ATTACH, body.as_bytes(), Kind::ATTACHED).unwrap();
            let flags = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
            fallocate(&fds[0], flags, 6 << 20, 4096).unwrap();
            silent.write_to(&fds[0]);
            kept.push((client, fds));
        }
        stay();
    }
}

#[test]
fn a_program_that_holds_the_lock_of_a_segments_file_holds_up_neither_a_successor_nor_a_removal() {
    let mut daemon = Daemon::start_new(CONFIG);
    let late = json!({ "op": "segment-create", "name": "late", "size": "8M", "members": ["host"], "allow_users": [NOBODY] });
    daemon.admin(late.clone()).unwrap();
    let Some(writer) = start_holder(&daemon, writer) else { return };
    serves(&mut daemon);
    // The memory of the files must be allocated again, and the mode of one is to be another.
    daemon.write_config("", &format!("{CONFIG}mode = \"0600\"\n"));
    let before = Instant::now();
    daemon.restart();
    assert!(before.elapsed() < WATCHDOG / 4, "it ended late, or its successor began late");
    serves(&mut daemon);
    // The segment goes when its file does. Until then nobody gets its memory under its name, not even after a restart.
    let remove = json!({ "op": "segment-remove", "name": "late", "force": true });
    for _ in 0..2 {
        let refused = daemon.admin(remove.clone()).unwrap_err();
        assert!(refused.text.contains("cannot be removed yet"), "{refused:?}");
        serves(&mut daemon);
        daemon.restart();
    }
    drop(writer);
    wait_for("the removal", || daemon.admin(remove.clone()).ok());
    assert!(!daemon.shm("late").exists());
    daemon.admin(late).unwrap();
    // What was to be changed is changed now.
    let file = daemon.shm("web");
    wait_for("the mode of the file, and its memory", || {
        let stat = std::fs::metadata(&file).unwrap();
        (stat.mode() & 0o777 == 0o600 && stat.blocks() * 512 >= stat.len()).then_some(())
    });
    serves(&mut daemon);
}
