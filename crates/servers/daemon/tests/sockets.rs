//! Programs report the two ends of their TCP connections to a real daemon, which tells them where to meet.

use ginnel_daemon::packet;
use ginnel_layout::wire::{
    self, Header, Kind, SocketMatched, SocketReport, SocketRole, SocketStays, StaysReason, features,
};
use kit::daemon::*;
use kit::wait::{WATCHDOG, wait_for};
use rustix::net::sockopt;
use rustix::process::Signal;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const SEGMENTS: &str = "[vm.a]\n[segment.alone]\nsize = \"8M\"\nmembers = [\"host\"]\n\
    [segment.pair]\nsize = \"16M\"\nmembers = [\"host\", \"a\"]\n";

fn pair() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connector = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (connector.into(), listener.accept().unwrap().0.into())
}

fn send(client: &Client, kind: Kind, body: &[u8], fds: &[&OwnedFd]) {
    let header = Header { kind, flags: 0, request: 0 };
    packet::send(client.fd.as_fd(), &[header.as_bytes(), body].concat(), fds).unwrap();
}

fn report(client: &Client, socket: &OwnedFd, role: SocketRole, key: u64) {
    let report = SocketReport { key, role, ..FromZeros::new_zeroed() };
    send(client, Kind::SOCK_REPORT, report.as_bytes(), &[socket]);
}

fn event<T: FromBytes>(client: &Client, expect: Kind) -> T {
    let packet = client.receive().expect("the connection ended");
    let (header, body) = wire::split(&packet.bytes).unwrap();
    assert_eq!((header.kind, header.request), (expect, 0));
    wire::body(body).unwrap()
}

/// Sends `HELLO` and returns the features of the daemon.
fn features(client: &mut Client) -> u64 {
    let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: u64::MAX };
    let ok: wire::HelloOk = client.ask(Kind::HELLO, hello.as_bytes(), Kind::HELLO_OK).unwrap().0;
    ok.features
}

/// Reports a socket that could be matched, and returns why it stays on TCP.
fn stays(daemon: &Daemon) -> StaysReason {
    let client = daemon.client();
    report(&client, &pair().0, SocketRole::CONNECTOR, 9);
    let SocketStays { key, reason, .. } = event(&client, Kind::SOCK_STAYS);
    assert_eq!(key, 9);
    reason
}

#[test]
fn the_two_ends_of_a_connection_meet_at_a_secret_listener() {
    let daemon = Daemon::start_new(SEGMENTS);
    let mut one = Client::raw(&daemon.socket());
    assert_eq!(features(&mut one), features::SOCKETS);
    let other = daemon.client();
    let (connector, acceptor) = pair();
    report(&one, &connector, SocketRole::CONNECTOR, 1);
    report(&other, &acceptor, SocketRole::ACCEPTOR, 2);
    let near: SocketMatched = event(&one, Kind::SOCK_MATCHED);
    let far: SocketMatched = event(&other, Kind::SOCK_MATCHED);
    assert_eq!((near.key, far.key), (1, 2));
    assert_eq!((near.segment, near.listener), (far.segment, far.listener));
    assert_eq!(near.segment.as_str(), "alone");
    assert!(near.listener.as_str().starts_with(wire::SECRET));
    // Neither the report nor the descriptor that came with it keeps the socket open.
    drop((connector, acceptor));
    let mut listening = daemon.attach("alone", "acceptor");
    let body = wire::Listen { name: near.listener, kind: 3, ..FromZeros::new_zeroed() };
    let _: (wire::Listening, _) =
        listening.client.ask(Kind::LISTEN, body.as_bytes(), Kind::LISTENING).unwrap();
    assert_eq!(daemon.inspect()["listeners"], serde_json::json!([]));
}

/// Returns the segment in which two programs of this user meet, or `None` if they stay on TCP because there is none.
fn meets_in(configuration: &str) -> Option<String> {
    let daemon = Daemon::start_new(configuration);
    let (one, other) = (daemon.client(), daemon.client());
    let (connector, acceptor) = pair();
    report(&one, &connector, SocketRole::CONNECTOR, 1);
    report(&other, &acceptor, SocketRole::ACCEPTOR, 2);
    let told = one.receive().expect("the connection ended");
    let (header, body) = wire::split(&told.bytes).unwrap();
    match header.kind {
        Kind::SOCK_MATCHED => Some(wire::body::<SocketMatched>(body).unwrap().segment.as_str().to_owned()),
        Kind::SOCK_STAYS => {
            assert_eq!(wire::body::<SocketStays>(body).unwrap().reason, StaysReason::NO_SEGMENT);
            None
        }
        kind => panic!("{kind:?}"),
    }
}

/// The daemon's own user may attach everywhere, as root may.
#[test]
fn connections_of_root_stay_out_of_segments_of_other_users() {
    let me = rustix::process::geteuid().as_raw();
    let shared = "[segment.shared]\nsize = \"8M\"\nmembers = [\"host\"]\nallow_users = [4711]\n";
    let cases = [
        (format!("[sockets]\nusers = [4711, {me}]\n"), Some(format!("sockets.{me}"))),
        ("[sockets]\nusers = [4711]\n".to_owned(), None),
        (format!("[sockets]\nusers = [{me}]\n{shared}"), Some(format!("sockets.{me}"))),
        (shared.to_owned(), None),
        (format!("{shared}sockets = true\n"), Some("shared".to_owned())),
        (format!("{shared}sockets = false\n"), None),
    ];
    for (configuration, expected) in cases {
        assert_eq!(meets_in(&configuration), expected, "{configuration}");
    }
}

#[test]
fn unexpected_descriptors_are_refused() {
    let daemon = Daemon::start_new(SEGMENTS);
    let (socket, _peer) = pair();
    let report = SocketReport { key: 1, role: SocketRole::CONNECTOR, ..FromZeros::new_zeroed() };
    let cases: [(Kind, &[u8], &[&OwnedFd]); 3] = [
        (Kind::INSPECT, wire::Inspect::FIRST.as_bytes(), &[&socket]),
        (Kind::SOCK_REPORT, report.as_bytes(), &[]),
        (Kind::SOCK_REPORT, report.as_bytes(), &[&socket, &socket]),
    ];
    for (kind, body, fds) in cases {
        let client = daemon.client();
        send(&client, kind, body, fds);
        let refusal = client.receive().expect("a refusal");
        assert_eq!(wire::split(&refusal.bytes).unwrap().0.kind, Kind::ERROR);
        assert!(client.receive().is_none(), "and the end of the connection");
    }
}

#[test]
fn the_configuration_can_exclude_some_programs_or_all() {
    // `stays` runs in a thread of the process that has this name.
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap();
    let excluding = format!("[sockets]\nexclude = [{:?}]\n{SEGMENTS}", comm.trim_end());
    assert_eq!(stays(&Daemon::start_new(&excluding)), StaysReason::EXCLUDED);
    let disabling = format!("[sockets]\nenabled = false\n{SEGMENTS}");
    let daemon = Daemon::start_new(&disabling);
    assert_eq!(features(&mut Client::raw(&daemon.socket())), 0);
    assert_eq!(stays(&daemon), StaysReason::DISABLED);
}

/// Returns a connection whose last close blocks for a day, and its other end, which never reads.
fn lingering() -> (OwnedFd, OwnedFd) {
    let (near, far) = pair();
    sockopt::set_socket_linger(&near, Some(Duration::from_secs(24 * 3600))).unwrap();
    rustix::io::ioctl_fionbio(&near, true).unwrap();
    while rustix::io::write(&near, &[0; 65536]).is_ok() {}
    (near, far)
}

/// Returns the number of descriptors of TCP sockets that a process has.
fn tcp_sockets(pid: u32) -> usize {
    let tcp = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let inodes: Vec<_> = tcp.lines().skip(1).filter_map(|line| line.split_whitespace().nth(9)).collect();
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links = links.filter_map(|entry| entry.path().read_link().ok());
    links
        .filter(|link| inodes.iter().any(|inode| link.as_os_str() == format!("socket:[{inode}]").as_str()))
        .count()
}

/// Sends lingering sockets while the daemon is stopped, so that the daemon holds their last descriptors. Returns their other
/// ends.
fn send_lingering(daemon: &Daemon, client: &Client, kind: Kind, count: usize) -> Vec<OwnedFd> {
    let facts = SocketReport { key: 1, role: SocketRole::CONNECTOR, ..FromZeros::new_zeroed() };
    let (near, far): (Vec<_>, Vec<_>) = (0..count).map(|_| lingering()).unzip();
    daemon.signal(Signal::STOP);
    wait_for("the daemon to stop", || daemon.is_stopped().then_some(()));
    send(client, kind, facts.as_bytes(), &near.iter().collect::<Vec<_>>());
    drop(near);
    far
}

#[test]
fn a_lingering_socket_delays_nobody() {
    let daemon = Daemon::start_new(SEGMENTS);
    let mut other = daemon.client();
    let mut far = Vec::new();
    // With a report, and with packets that may carry no descriptor, or fewer.
    for (kind, count) in [(Kind::SOCK_REPORT, 1), (Kind::INSPECT, 1), (Kind::SOCK_REPORT, 20)] {
        let client = daemon.client();
        far.extend(send_lingering(&daemon, &client, kind, count));
        daemon.signal(Signal::CONT);
        other.status();
    }
    // The daemon never receives these packets, because the connection ends first.
    let client = daemon.client();
    far.extend(send_lingering(&daemon, &client, Kind::INSPECT, 1));
    far.extend(send_lingering(&daemon, &client, Kind::SOCK_REPORT, 1));
    drop(client);
    daemon.signal(Signal::CONT);
    other.status();
    wait_for("the daemon to have closed them all", || (tcp_sockets(daemon.pid()) == 0).then_some(()));
}

#[test]
fn other_files_are_closed_as_well() {
    let daemon = Daemon::start_new(SEGMENTS);
    let (read, write) = rustix::pipe::pipe().unwrap();
    let client = daemon.client();
    report(&client, &write, SocketRole::CONNECTOR, 1);
    drop(write);
    let SocketStays { reason, .. } = event(&client, Kind::SOCK_STAYS);
    assert_eq!(reason, StaysReason::NOT_TCP);
    assert!(readable(&read, WATCHDOG), "the pipe has no writer any more");
    report(&client, &pair().0, SocketRole::CONNECTOR, 2);
    let mut other = daemon.client();
    other.status();
}

#[test]
fn the_status_shows_sockets_that_wait_for_their_other_end() {
    let daemon = Daemon::start_new(SEGMENTS);
    let client = daemon.client();
    let (connector, acceptor) = pair();
    report(&client, &connector, SocketRole::CONNECTOR, 1);
    let address =
        |socket: &OwnedFd| TcpStream::from(socket.try_clone().unwrap()).local_addr().unwrap().to_string();
    let shown = serde_json::json!([{"member": "host", "pid": std::process::id(), "local": address(&connector),
        "remote": address(&acceptor), "role": "connector"}]);
    wait_for("the report", || (daemon.inspect()["reports"] == shown).then_some(()));
    report(&client, &acceptor, SocketRole::ACCEPTOR, 2);
    let _: SocketMatched = event(&client, Kind::SOCK_MATCHED);
    assert_eq!(daemon.inspect()["reports"], serde_json::json!([]));
}

#[test]
fn the_programs_of_a_user_meet_in_a_segment_of_that_user() {
    let daemon = Daemon::start_new("[sockets]\nusers = [4711, \"root\"]\nuser_segment = \"8M\"\n");
    let segments = daemon.inspect()["segments"].clone();
    let of_user =
        segments.as_array().unwrap().iter().find(|segment| segment["name"] == "sockets.4711").unwrap();
    assert_eq!(
        (&of_user["size"], &of_user["members"]),
        (&serde_json::json!(8 << 20), &serde_json::json!(["host"]))
    );
    let mode = std::fs::metadata(daemon.shm("sockets.4711")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let taken =
        "[segment.\"sockets.4711\"]\nsize = \"8M\"\nmembers = [\"host\"]\n[sockets]\nusers = [4711]\n";
    let refused = Daemon::prepare("", taken).output(&["--check"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("sockets.users: there is another segment sockets.4711"),
        "{said}"
    );
}
