//! TCP connections of programs.

use super::*;
use ginnel_layout::wire::{
    SocketFacts, SocketKey, SocketMatched, SocketReport, SocketRole, SocketStays, StaysReason,
};
use ginnel_tcp::Identity;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

mod forged;

/// Returns what the kernel says about the two ends of another connection on this host.
fn pair() -> (Identity, Identity) {
    static PORT: AtomicU16 = AtomicU16::new(1000);
    let port = PORT.fetch_add(1, Ordering::Relaxed);
    let [local, remote] = [port, 80].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let cookie = u64::from(port) * 2;
    let connector = Identity { local, remote, cookie, namespace: 1 };
    (connector, Identity { local: remote, remote: local, cookie: cookie + 1, namespace: 1 })
}

fn body(role: SocketRole, key: u64) -> SocketReport {
    SocketReport { key, role, ..FromZeros::new_zeroed() }
}

/// An event that a session gets.
#[derive(Debug, PartialEq)]
enum Told {
    Matched(u64, String, String),
    Stays(u64, StaysReason),
    Refused(ErrorCode),
}

impl Bench {
    fn report(
        &mut self,
        id: ClientId,
        identity: &Identity,
        role: SocketRole,
        key: u64,
    ) -> Vec<(ClientId, Told)> {
        let packet = reply::packet(Kind::SOCK_REPORT, 0, body(role, key).as_bytes());
        if let Some(report) = self.broker.socket_packet(&mut self.world, id, &packet) {
            let &Identity { local, remote, cookie, namespace } = identity;
            let address = |address: SocketAddr| match address.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            let facts = SocketFacts {
                report,
                local: address(local),
                remote: address(remote),
                local_port: local.port(),
                remote_port: remote.port(),
                cookie,
                namespace,
                ..FromZeros::new_zeroed()
            };
            self.broker.socket_found(&mut self.world, id, report.key, Ok(facts));
        }
        self.told()
    }

    fn relay(&mut self, id: ClientId, facts: &SocketFacts) -> Vec<(ClientId, Told)> {
        let packet = reply::packet(Kind::SOCK_REPORT, 0, facts.as_bytes());
        self.broker.packet(&mut self.world, id, &packet);
        self.told()
    }

    fn told(&mut self) -> Vec<(ClientId, Told)> {
        let said = |effect| {
            let Effect::Send { client, packet, .. } = effect else { panic!("{effect:?}") };
            let (header, body) = wire::split(&packet).unwrap();
            let told = match header.kind {
                Kind::SOCK_MATCHED => {
                    let SocketMatched { key, segment, listener } = wire::body(body).unwrap();
                    Told::Matched(key, segment.to_string(), listener.to_string())
                }
                Kind::SOCK_STAYS => {
                    let SocketStays { key, reason, .. } = wire::body(body).unwrap();
                    Told::Stays(key, reason)
                }
                Kind::ERROR => Told::Refused(wire::body::<wire::Error>(&body[..8]).unwrap().code),
                kind => panic!("{kind:?}"),
            };
            (client, told)
        };
        self.effects().into_iter().map(said).collect()
    }
}

/// Returns the facts about a connection between two VMs' addresses, as the daemon of one end reports them.
fn facts(role: SocketRole, key: u64, clock: u32) -> SocketFacts {
    let address = |last| Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped().octets();
    let (local, remote, local_port, remote_port) = match role {
        SocketRole::CONNECTOR => (address(1), address(2), 40_000, 80),
        _ => (address(2), address(1), 80, 40_000),
    };
    let second = 1_000_000_000;
    let report = SocketReport { before: second, after: second, ..body(role, key) };
    SocketFacts {
        report,
        local,
        remote,
        local_port,
        remote_port,
        flags: SocketFacts::CLOCK | SocketFacts::SYN,
        cookie: 1 + u64::from(local_port),
        namespace: 1,
        clock,
        syn: clock,
        clock_before: second,
        clock_after: second,
    }
}

#[test]
fn the_two_ends_of_a_connection_of_this_host_are_told_where_to_meet() {
    let mut bench = Bench::new(Limits::default());
    let (one, other) = (bench.client(HOST_MEMBER, 0), bench.client(HOST_MEMBER, 0));
    let (connector, acceptor) = pair();
    assert_eq!(bench.report(one, &connector, SocketRole::CONNECTOR, 5), []);
    let told = bench.report(other, &acceptor, SocketRole::ACCEPTOR, 6);
    let [(first, Told::Matched(6, segment, listener)), (second, Told::Matched(5, same, place))] = &told[..]
    else {
        panic!("{told:?}");
    };
    assert_eq!((*first, *second), (other, one));
    // This is the segment with the fewest members that both may use.
    assert_eq!((segment.as_str(), segment, listener), ("own", same, place));
    assert!(listener.starts_with(wire::SECRET) && listener.len() == wire::SECRET.len() + 32);
    // Another connection meets at another name.
    let (connector, acceptor) = pair();
    bench.report(one, &connector, SocketRole::CONNECTOR, 7);
    let again = bench.report(other, &acceptor, SocketRole::ACCEPTOR, 8);
    assert!(matches!(&again[0].1, Told::Matched(8, _, elsewhere) if elsewhere != listener), "{again:?}");
}

#[test]
fn only_the_two_ends_learn_the_name_where_they_meet() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.attach(HOST_MEMBER, "own");
    let body =
        wire::Listen { kind: 3, ..wire::Listen { name: name("tcp.secret"), ..FromZeros::new_zeroed() } };
    assert_eq!(bench.ask(id, Kind::LISTEN, body.as_bytes()), Kind::LISTENING);
    // A program that connects for another purpose is not the other end.
    let (other, _) = bench.attach(HOST_MEMBER, "own");
    let body = wire::Connect { kind: 2, ..connect("tcp.secret", 0, 1) };
    assert!(bench.code(other, Kind::CONNECT, body.as_bytes()).is_some());
    let body = wire::Connect { kind: 3, ..body };
    assert_eq!(bench.ask(other, Kind::CONNECT, body.as_bytes()), Kind::CHANNEL);
}

#[test]
fn invalid_reports_are_refused() {
    let mut bench = Bench::new(Limits::default());
    let id = bench.client(HOST_MEMBER, 0);
    let (connector, _acceptor) = pair();
    assert_eq!(bench.report(id, &connector, SocketRole(9), 2), [(id, Told::Refused(ErrorCode::INVALID))]);
    // A program of the host cannot state facts itself.
    assert_eq!(
        bench.relay(id, &facts(SocketRole::CONNECTOR, 3, 7)),
        [(id, Told::Refused(ErrorCode::PROTOCOL))]
    );
    assert!(bench.broker.sockets.rendezvous_is_empty());
}

#[test]
fn a_connection_without_a_common_segment_stays_on_tcp() {
    let mut bench = Bench::new(Limits::default());
    let (one, other) = (bench.client(HOST_MEMBER, 0), bench.client(HOST_MEMBER, 1000));
    let meet = |bench: &mut Bench| {
        let (connector, acceptor) = pair();
        bench.report(one, &connector, SocketRole::CONNECTOR, 1);
        bench.report(other, &acceptor, SocketRole::ACCEPTOR, 2)
    };
    let access = |sockets| Access { users: [1000].into(), groups: [].into(), sockets, verbs: false };
    let none =
        [(other, Told::Stays(2, StaysReason::NO_SEGMENT)), (one, Told::Stays(1, StaysReason::NO_SEGMENT))];
    assert_eq!(meet(&mut bench), none);
    bench.broker.set_access(name("web"), access(None));
    assert!(matches!(&meet(&mut bench)[0].1, Told::Matched(2, segment, _) if segment == "web"));
    bench.broker.set_access(name("web"), access(Some(false)));
    assert_eq!(meet(&mut bench), none);
}

#[test]
fn facts_from_a_vm_are_believed_only_for_that_vm() {
    let mut bench = Bench::new(Limits::default());
    let guest = bench.client(VM, 0);
    // Both ends are in one VM, whose daemon is believed.
    assert_eq!(bench.relay(guest, &facts(SocketRole::CONNECTOR, 1, 777)), []);
    let told = bench.relay(guest, &facts(SocketRole::ACCEPTOR, 2, 777));
    assert!(matches!(&told[0].1, Told::Matched(2, segment, _) if segment == "web"), "{told:?}");
    // A VM that claims an end of the host's connection is not believed without a proof, because it has another loopback.
    let host = bench.client(HOST_MEMBER, 0);
    let (connector, _acceptor) = pair();
    assert_eq!(bench.report(host, &connector, SocketRole::CONNECTOR, 3), []);
    let mapped = |address: SocketAddr| match address.ip() {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    };
    let claim = SocketFacts {
        local: mapped(connector.remote),
        remote: mapped(connector.local),
        local_port: connector.remote.port(),
        remote_port: connector.local.port(),
        namespace: connector.namespace,
        ..facts(SocketRole::ACCEPTOR, 4, 1)
    };
    assert_eq!(bench.relay(guest, &claim), []);
}

#[test]
fn a_report_ends_with_its_session_or_when_it_is_withdrawn() {
    let mut bench = Bench::new(Limits::default());
    let other = bench.client(HOST_MEMBER, 0);
    for withdraws in [true, false] {
        let one = bench.client(HOST_MEMBER, 0);
        let (connector, acceptor) = pair();
        assert_eq!(bench.report(one, &connector, SocketRole::CONNECTOR, 1), []);
        if withdraws {
            let key = SocketKey { key: 1 };
            bench.broker.packet(
                &mut bench.world,
                one,
                &reply::packet(Kind::SOCK_WITHDRAW, 0, key.as_bytes()),
            );
        } else {
            bench.ends(one);
        }
        assert!(bench.broker.sockets.rendezvous_is_empty());
        assert_eq!(bench.report(other, &acceptor, SocketRole::ACCEPTOR, 2), []);
        bench.broker.forget_sockets(other);
    }
}

#[test]
fn a_report_ends_with_its_kernel_or_with_a_lost_session() {
    let mut bench = Bench::new(Limits::default());
    let guest = bench.client(VM, 0);
    bench.relay(guest, &facts(SocketRole::CONNECTOR, 1, 777));
    bench.broker.member_died(VM);
    assert!(bench.broker.sockets.rendezvous_is_empty());
    bench.relay(guest, &facts(SocketRole::CONNECTOR, 1, 777));
    bench.broker.lost(guest);
    assert!(bench.broker.sockets.rendezvous_is_empty());
}

#[test]
fn a_report_replaces_an_earlier_one() {
    let mut bench = Bench::new(Limits::default());
    let (one, other) = (bench.client(HOST_MEMBER, 0), bench.client(HOST_MEMBER, 0));
    let ((first, _first_peer), (second, _second_peer)) = (pair(), pair());
    // Another socket comes with the same key; then the same socket again, about which nobody is told anything.
    for socket in [&first, &second, &second] {
        assert_eq!(bench.report(one, socket, SocketRole::CONNECTOR, 1), []);
    }
    // Another process, which has inherited the socket, reports it.
    let told = bench.report(other, &second, SocketRole::CONNECTOR, 2);
    assert_eq!(told, [(one, Told::Stays(1, StaysReason::TOO_MANY))]);
    bench.ends(one);
    assert!(!bench.broker.sockets.rendezvous_is_empty(), "the other's");
    bench.ends(other);
    assert!(bench.broker.sockets.rendezvous_is_empty());
}

#[test]
fn a_socket_with_the_addresses_of_another_replaces_it() {
    let mut bench = Bench::new(Limits::default());
    let guest = bench.client(VM, 0);
    // This socket has ended without a message, and its port was given to the next one.
    let ended = facts(SocketRole::CONNECTOR, 1, 777);
    assert_eq!(bench.relay(guest, &ended), []);
    let next = SocketFacts { cookie: 5_000, ..facts(SocketRole::CONNECTOR, 2, 777) };
    assert_eq!(bench.relay(guest, &next), [(guest, Told::Stays(1, StaysReason::TOO_MANY))]);
    let told = bench.relay(guest, &facts(SocketRole::ACCEPTOR, 3, 777));
    assert!(matches!(&told[..], [(_, Told::Matched(3, ..)), (_, Told::Matched(2, ..))]), "{told:?}");
    // In another namespace a socket with these addresses may exist at the same time.
    assert_eq!(bench.relay(guest, &ended), []);
    let elsewhere = SocketFacts { namespace: 2, ..next };
    assert_eq!(bench.relay(guest, &elsewhere), []);
}

#[test]
fn names_for_sockets_cannot_be_used_otherwise() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.attach(HOST_MEMBER, "own");
    for (kind, refused) in [(1, true), (2, true), (3, false)] {
        let body = wire::Listen { name: name("tcp.secret"), kind, ..FromZeros::new_zeroed() };
        let code = bench.code(id, Kind::LISTEN, body.as_bytes());
        assert_eq!(code, refused.then_some(ErrorCode::DENIED), "{kind}");
    }
}

#[test]
fn a_flood_of_reports_is_refused() {
    let mut bench = Bench::new(Limits::default());
    let id = bench.client(HOST_MEMBER, 0);
    let taken = |bench: &mut Bench| {
        let told: Vec<_> =
            (0..5000).flat_map(|key| bench.report(id, &pair().0, SocketRole::CONNECTOR, key)).collect();
        5000 - told.iter().filter(|(_, told)| matches!(told, Told::Stays(_, StaysReason::TOO_MANY))).count()
    };
    assert_eq!(taken(&mut bench), 2000);
    bench.world.elapsed += Duration::from_secs(1);
    assert_eq!(taken(&mut bench), 1000);
}

#[test]
fn connections_of_root_do_not_use_segments_of_other_users() {
    let mut bench = Bench::new(Limits::default());
    let names: Vec<_> = bench.broker.books().segments.keys().copied().collect();
    let mut meet = |one: u32, other: u32, access: &Access| {
        names.iter().for_each(|name| bench.broker.set_access(*name, access.clone()));
        let (one, other) = (bench.client(HOST_MEMBER, one), bench.client(HOST_MEMBER, other));
        let (connector, acceptor) = pair();
        bench.report(one, &connector, SocketRole::CONNECTOR, 1);
        let told = bench.report(other, &acceptor, SocketRole::ACCEPTOR, 2);
        assert_eq!(told.len(), 2, "{told:?}");
        told.iter().all(|(_, told)| matches!(told, Told::Matched(..)))
    };
    let of = |users: &[u32], sockets| Access {
        users: users.iter().copied().collect(),
        sockets,
        ..Access::default()
    };
    let open = of(&[1000], None);
    assert!(!meet(0, 0, &open) && meet(0, 1000, &open) && meet(1000, 1000, &open));
    assert!(meet(0, 0, &of(&[1000], Some(true))), "the operator has said so");
    assert!(meet(0, 0, &of(&[0], None)) && meet(0, 0, &of(&[], None)));
    assert!(!meet(1000, 1001, &open) && !meet(0, 1001, &of(&[], None)), "as before");
}
