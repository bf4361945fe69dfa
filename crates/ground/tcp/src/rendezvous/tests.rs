use super::*;
use proptest::prelude::*;

const NOW: Duration = Duration::from_secs(1_000);
const SECRET: u32 = 0x7000_0000;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Makes a report of the connecting end of a connection from `a` to `b`, made at `at` milliseconds on its kernel's clock.
fn connector(member: u32, cookie: u64, a: &str, b: &str, at: u64) -> Report {
    let connecting = Connecting { before: ms(at), after: ms(at + 1) };
    let clock =
        Clock { value: SECRET.wrapping_add(at as u32 + 500), before: ms(at + 500), after: ms(at + 500) };
    Report {
        member,
        user: 0,
        identity: Identity { local: address(a), remote: address(b), cookie, namespace: 1 },
        owner: Owner::System,
        side: Side::Connector { connecting, clock: Some(clock) },
    }
}

/// Makes a report of the accepting end, whose SYN shows `at` on the connector's clock.
fn acceptor(member: u32, cookie: u64, a: &str, b: &str, at: u64) -> Report {
    Report {
        member,
        user: 0,
        identity: Identity { local: address(b), remote: address(a), cookie, namespace: 1 },
        owner: Owner::System,
        side: Side::Acceptor { syn: Some(SynTime(SECRET.wrapping_add(at as u32))) },
    }
}

const A: &str = "10.0.0.1:50000";
const B: &str = "10.0.0.2:80";

/// Reports two sockets, and returns the outcome of the second report after the time of grace.
fn meet(first: Report, second: Report) -> Outcome<char> {
    let mut reports = Rendezvous::default();
    assert_eq!(reports.report(NOW, first, 'a'), Outcome::Waits { dropped: vec![] });
    let at_once = reports.report(NOW, second, 'b');
    assert_eq!(reports.settle(NOW), None, "too early");
    match reports.settle(NOW + GRACE) {
        Some((one, other)) => {
            assert_eq!(at_once, Outcome::Waits { dropped: vec![] });
            assert!(reports.is_empty() && reports.settles_at().is_none());
            Outcome::Joined(one, other)
        }
        None => at_once,
    }
}

fn joins(first: Report, second: Report) -> bool {
    // The order of the two reports does not matter.
    let (one, other) = (meet(first, second), meet(second, first));
    assert_eq!(one, other);
    match one {
        Outcome::Joined('b', 'a') => true,
        Outcome::Waits { dropped } if dropped.is_empty() => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_kernels_need_mirrored_addresses_and_a_proof() {
    let one = connector(1, 7, A, B, 40_000);
    assert!(joins(one, acceptor(2, 7, A, B, 40_000)));
    assert!(!joins(one, acceptor(2, 7, A, B, 40_100)), "the SYN is of another time");
    assert!(!joins(one, acceptor(2, 7, A, "10.0.0.2:81", 40_000)), "another connection");
    assert!(!joins(one, connector(2, 7, B, A, 40_000)), "both have connected");
    let mut none = acceptor(2, 7, A, B, 40_000);
    none.side = Side::Acceptor { syn: None };
    assert!(!joins(one, none), "a listener older than the library");
    let mut blind = one;
    let Side::Connector { connecting, .. } = one.side else { unreachable!() };
    blind.side = Side::Connector { connecting, clock: None };
    assert!(!joins(blind, acceptor(2, 7, A, B, 40_000)));
}

#[test]
fn loopback_and_link_local_addresses_mean_nothing_elsewhere() {
    for (a, b) in [
        ("127.0.0.1:5", "127.0.0.1:6"),
        ("169.254.1.1:5", "169.254.1.2:6"),
        ("[::1]:5", "[::1]:6"),
        ("[fe80::1]:5", "[fe80::2]:6"),
    ] {
        assert!(!joins(connector(1, 1, a, b, 40_000), acceptor(2, 2, a, b, 40_000)), "{a}");
        assert!(joins(connector(1, 1, a, b, 40_000), acceptor(1, 2, a, b, 40_000)), "{a}, one namespace");
        let mut elsewhere = acceptor(1, 2, a, b, 40_000);
        elsewhere.identity.namespace = 2;
        assert!(!joins(connector(1, 1, a, b, 40_000), elsewhere), "{a}, two namespaces");
    }
}

#[test]
fn one_namespace_needs_no_proof() {
    let mut none = acceptor(1, 2, A, B, 0);
    none.side = Side::Acceptor { syn: None };
    assert!(joins(connector(1, 1, A, B, 40_000), none));
    let itself = meet(connector(1, 1, A, B, 40_000), acceptor(1, 1, A, B, 40_000));
    assert_eq!(itself, Outcome::Waits { dropped: vec!['a'] }, "a socket is not its own peer");
}

#[test]
fn a_users_namespace_is_joined_with_no_other() {
    let elsewhere = |owner| {
        let mut report = acceptor(1, 2, A, B, 40_000);
        (report.identity.namespace, report.owner) = (2, owner);
        report
    };
    let one = connector(1, 1, A, B, 40_000);
    assert!(joins(one, elsewhere(Owner::System)));
    assert!(!joins(one, elsewhere(Owner::User)));
    let mut same = one;
    (same.identity.namespace, same.owner) = (2, Owner::User);
    assert!(joins(same, elsewhere(Owner::User)), "in itself it is a namespace like others");
    // A user's namespace of another kernel does not matter, because the proof also holds for what comes from that kernel.
    let mut far = elsewhere(Owner::User);
    far.member = 2;
    assert!(joins(one, far));
}

#[test]
fn two_that_would_do_are_joined_with_nobody() {
    let mut reports = Rendezvous::default();
    let waits = Outcome::Waits { dropped: vec![] };
    assert_eq!(reports.report(NOW, acceptor(2, 1, A, B, 40_000), 1), waits);
    assert_eq!(reports.report(NOW, acceptor(3, 1, A, B, 40_000), 2), waits);
    let Outcome::Ambiguous(mut all) = reports.report(NOW, connector(1, 1, A, B, 40_000), 3) else { panic!() };
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3]);
    assert!(reports.is_empty());
}

#[test]
fn a_report_is_replaced_by_a_later_one_of_its_socket() {
    let mut reports = Rendezvous::default();
    let _ = reports.report(NOW, acceptor(2, 1, A, B, 40_000), 1);
    // The same socket now has another connection.
    let again = reports.report(NOW, acceptor(2, 1, "10.0.0.3:1", B, 40_000), 2);
    assert_eq!(again, Outcome::Waits { dropped: vec![1] });
    assert_eq!(reports.report(NOW, connector(1, 1, A, B, 40_000), 3), Outcome::Waits { dropped: vec![] });
    assert_eq!(reports.withdraw((2, 1)), Some(2));
    assert_eq!(reports.withdraw((2, 1)), None);
    assert_eq!(reports.len(), 1);
}

#[test]
fn repeated_wrong_proofs_are_not_believed() {
    let mut reports = Rendezvous::default();
    let _ = reports.report(NOW, acceptor(2, 1, A, B, 40_000), 0);
    for guess in 1..=8 {
        let report = connector(3, guess, A, B, 80_000 + guess * 100);
        assert_eq!(reports.report(NOW, report, 0), Outcome::Waits { dropped: vec![] }, "{guess}");
        reports.withdraw((3, guess));
    }
    // Now the lying user's guess is right by chance.
    let lucky = connector(3, 99, A, B, 40_000);
    assert_eq!(reports.report(NOW, lucky, 0), Outcome::Waits { dropped: vec![] });
    reports.withdraw((3, 99));
    // All other users are trusted, and the lying user is trusted again later.
    let later = NOW + DISTRUST;
    assert_eq!(reports.report(later, lucky, 5), Outcome::Joined(5, 0));
    let _ = reports.report(NOW, acceptor(2, 1, A, B, 40_000), 0);
    assert_eq!(reports.report(NOW, connector(1, 1, A, B, 40_000), 6), Outcome::Joined(6, 0));
}

#[test]
fn a_report_that_was_not_believed_still_makes_a_match_ambiguous() {
    let mut reports = Rendezvous::default();
    let _ = reports.report(NOW, acceptor(2, 1, A, B, 40_000), 1);
    for guess in 1..=8 {
        let _ = reports.report(NOW, connector(3, guess, A, B, 80_000 + guess * 100), 0);
        reports.withdraw((3, guess));
    }
    // This guess is right by chance, but it is not trusted, so the report waits.
    assert_eq!(reports.report(NOW, connector(3, 99, A, B, 40_000), 2), Outcome::Waits { dropped: vec![] });
    let Outcome::Ambiguous(mut all) = reports.report(NOW + DISTRUST, connector(1, 1, A, B, 40_000), 3) else {
        panic!("one of two was chosen");
    };
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3]);
    assert!(reports.is_empty());
}

#[test]
fn a_member_pushes_out_its_own_only() {
    let mut reports = Rendezvous::default();
    let _ = reports.report(NOW, acceptor(2, 1, A, B, 40_000), 0);
    let flood = |n: u64| connector(3, n, &format!("10.1.{}.{}:9", n / 256 % 256, n % 256), B, 40_000);
    for n in 0..REPORTS_PER_MEMBER as u64 {
        assert_eq!(reports.report(NOW, flood(n), n), Outcome::Waits { dropped: vec![] });
    }
    let more = reports.report(NOW, flood(REPORTS_PER_MEMBER as u64), 7);
    assert_eq!(more, Outcome::Waits { dropped: vec![0] }, "its oldest");
    // Of too many reports of one connection, the oldest is pushed out.
    for n in 10_000..10_000 + SAME_ADDRESSES as u64 {
        let _ = reports.report(NOW, connector(3, n, A, B, 90_000), n);
    }
    let one_more = reports.report(NOW, connector(3, 20_000, A, B, 90_000), 1);
    assert_eq!(one_more, Outcome::Waits { dropped: vec![10_000] });
    assert_eq!(reports.report(NOW, connector(1, 1, A, B, 40_000), 8), Outcome::Joined(8, 0), "still there");
    assert_eq!(reports.withdraw_member(3).len(), REPORTS_PER_MEMBER);
    assert!(reports.is_empty() && reports.order.is_empty() && reports.addresses.is_empty());
    assert_eq!(reports.waiting(0).count(), 0);
    assert!(reports.counts.is_empty() && reports.suspicions.is_empty());
}

#[test]
fn a_user_makes_room_at_the_expense_of_who_has_most() {
    let mut reports = Rendezvous::default();
    let of =
        |user: u32, n: u64| Report { user, ..connector(0, n, &format!("10.0.0.3:{}", 1 + n), B, 40_000) };
    let few = 7;
    for n in 0..few {
        let _ = reports.report(NOW, of(1, n), n);
    }
    // The user with the most reports pushes out its own. Other users push out reports of that user too.
    for n in few..3 * REPORTS_PER_MEMBER as u64 {
        let Outcome::Waits { dropped } = reports.report(NOW, of(2, n), n) else { panic!("{n}") };
        assert!(dropped.iter().all(|n| *n >= few), "{dropped:?}");
    }
    let oldest = 2 * REPORTS_PER_MEMBER as u64 + few;
    assert_eq!(reports.report(NOW, of(1, 60_000), 60_000), Outcome::Waits { dropped: vec![oldest] });
    assert_eq!((reports.counts[&(0, 1)], reports.len()), (few as usize + 1, REPORTS_PER_MEMBER));
    // If two users have equally many, the one that adds a report loses one.
    let mut reports = Rendezvous::default();
    for n in 0..REPORTS_PER_MEMBER as u64 {
        let _ = reports.report(NOW, of((n % 2) as u32, n), n);
    }
    assert_eq!(reports.report(NOW, of(0, 60_000), 60_000), Outcome::Waits { dropped: vec![0] });
}

#[test]
fn wrong_proofs_of_a_user_are_not_held_against_others() {
    let mut reports = Rendezvous::default();
    let of = |user: u32, report: Report| Report {
        user,
        identity: Identity { namespace: u64::from(user), ..report.identity },
        ..report
    };
    let waits = Outcome::Waits { dropped: vec![] };
    for n in 0..u64::from(WRONG_PROOFS) {
        assert_eq!(reports.report(NOW, of(1, connector(0, 100 + n, A, B, 40_000)), 'a'), waits);
        assert_eq!(reports.report(NOW, of(2, acceptor(0, 200 + n, A, B, 70_000)), 'b'), waits);
        reports.withdraw((0, 100 + n));
        reports.withdraw((0, 200 + n));
    }
    let mut joins = |one: u32, other: u32| {
        assert_eq!(reports.report(NOW, of(one, connector(0, 1, A, B, 40_000)), 'a'), waits);
        assert_eq!(reports.report(NOW, of(other, acceptor(0, 2, A, B, 40_000)), 'b'), waits);
        let joined = reports.settle(NOW + GRACE);
        reports.withdraw((0, 1));
        reports.withdraw((0, 2));
        joined.is_some()
    };
    assert!(!joins(1, 2) && joins(1, 3) && joins(4, 2));
}

#[test]
fn connections_of_one_kernel_that_are_alike_are_joined_with_nobody() {
    let within =
        |namespace, report: Report| Report { identity: Identity { namespace, ..report.identity }, ..report };
    // In two networks with the same addresses, programs connect at the same time from the same port.
    let all = [
        (within(1, connector(0, 1, A, B, 40_000)), 'a'),
        (within(2, acceptor(0, 2, A, B, 40_000)), 'b'),
        (within(3, connector(0, 3, A, B, 40_001)), 'c'),
        (within(4, acceptor(0, 4, A, B, 40_001)), 'd'),
    ];
    for order in [[0, 1, 2, 3], [0, 3, 1, 2], [2, 1, 0, 3], [0, 2, 1, 3], [1, 3, 2, 0]] {
        let mut reports = Rendezvous::default();
        for (n, i) in order.into_iter().enumerate() {
            let (report, what) = all[i];
            let outcome = reports.report(NOW + ms(10 * n as u64), report, what);
            assert!(!matches!(outcome, Outcome::Joined(..)), "{order:?}: {outcome:?}");
        }
        assert_eq!(reports.settle(NOW + 2 * GRACE), None, "{order:?}");
    }
    // A connection that was made at another time does not prevent the join.
    let mut reports = Rendezvous::default();
    for (report, what) in [all[0], all[1], (within(5, connector(0, 5, A, B, 60_000)), 'e')] {
        assert_eq!(reports.report(NOW, report, what), Outcome::Waits { dropped: vec![] });
    }
    assert_eq!(reports.settle(NOW + GRACE), Some(('b', 'a')));
    // A withdrawn socket is not joined.
    let mut reports = Rendezvous::default();
    for (report, what) in &all[..2] {
        assert_eq!(reports.report(NOW, *report, *what), Outcome::Waits { dropped: vec![] });
    }
    reports.withdraw((0, 1));
    assert_eq!((reports.settle(NOW + GRACE), reports.settles_at()), (None, None));
}

proptest! {
    /// The tables agree, and only sockets that the rules allow are joined, for any order of reports and withdrawals.
    #[test]
    fn the_tables_agree(steps in prop::collection::vec((0..4_u32, 0..6_u64, 0..3_u8, any::<bool>(), 0..3_u64, any::<bool>()), 0..200)) {
        let mut reports: Rendezvous<Report> = Rendezvous::default();
        for (n, (member, cookie, port, connects, time, withdraws)) in steps.into_iter().enumerate() {
            let a = format!("10.0.0.1:{}", 1000 + u16::from(port));
            let at = 40_000 + time * 1_000;
            let report = match connects {
                true => connector(member, cookie, &a, B, at),
                false => acceptor(member, cookie, &a, B, at),
            };
            let identity = Identity { namespace: cookie % 3, ..report.identity };
            let report = Report { identity, ..report };
            if withdraws && n % 3 == 0 {
                reports.withdraw((member, cookie));
                continue;
            }
            let now = NOW + ms(n as u64);
            let at_once = match reports.report(now, report, report) {
                Outcome::Joined(one, other) => Some((one, other)),
                _ => None,
            };
            for (one, other) in at_once.into_iter().chain(reports.settle(now)) {
                prop_assert!(one.identity.mirrors(&other.identity) && one.socket() != other.socket());
                let is_known = (one.member, one.identity.namespace) == (other.member, other.identity.namespace);
                prop_assert!(is_known || one.proves(&other) == Some(true));
            }
            let sockets: usize = reports.addresses.values().map(Vec::len).sum();
            prop_assert_eq!(sockets, reports.len());
            prop_assert_eq!(reports.order.len(), reports.len());
            prop_assert_eq!(reports.counts.values().sum::<usize>(), reports.len());
        }
    }
}
