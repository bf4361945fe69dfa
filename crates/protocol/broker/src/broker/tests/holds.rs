//! Holds: an endpoint outlives its processes for a while, and is adopted.

use super::*;

const OTHER: u32 = 1001;
const TOKEN: [u8; 16] = [9; 16];

fn hold(token: [u8; 16], millis: u32) -> wire::Hold {
    wire::Hold { token, millis, reserved: 0 }
}

/// Returns the request that adopts an endpoint.
fn adopt(attached: &wire::Attached, token: [u8; 16]) -> wire::Attach {
    wire::Attach { token, ..back(attached) }
}

fn side(channel: u64, initiator: u32) -> wire::ChannelSide {
    wire::ChannelSide { channel, initiator, reserved: 0 }
}

/// Returns an endpoint that is held, and whose only process has ended.
fn orphan(bench: &mut Bench, member: u32, uid: u32) -> wire::Attached {
    let id = bench.client(member, uid);
    let (kind, body, _) = bench.ask_all(id, Kind::ATTACH, attach("web").as_bytes());
    assert_eq!(kind, Kind::ATTACHED);
    let attached = wire::body(&body).unwrap();
    assert_eq!(bench.ask(id, Kind::HOLD, hold(TOKEN, 5000).as_bytes()), Kind::OK);
    bench.ends(id);
    bench.effects();
    assert!(bench.is_there(&attached));
    attached
}

/// Replaces a daemon that was killed by its successor.
fn restart(bench: &mut Bench) {
    bench.broker = Broker::new(lines::replay(&bench.journal).books, Limits::default(), 4, 0);
    bench.timers.clear();
    bench.broker.time_holds();
    bench.broker.end_abandoned();
    bench.effects();
}

#[test]
fn a_held_endpoint_waits_for_another_process() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    let channel = bench.connect(b, "x", 1).unwrap().channel;
    assert_eq!(bench.ask(a, Kind::HOLD, hold(TOKEN, 5000).as_bytes()), Kind::OK);
    // The endpoint's process leaves, with `DETACH` or without it, and nobody is told.
    assert_eq!(bench.ask(a, Kind::DETACH, &[]), Kind::OK);
    bench.broker.hung_up(a);
    assert_eq!(bench.effects(), []);
    assert!(bench.is_there(&attached));
    bench.check();
    let heir = bench.client(0, 0);
    let (kind, body, effects) = bench.ask_all(heir, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes());
    assert_eq!(kind, Kind::ATTACHED);
    let again: wire::Attached = wire::body(&body).unwrap();
    assert_eq!(again.token, attached.token, "it is an owner like others");
    let process = bench.process_of(heir);
    let &wire::Attached { endpoint, epoch, .. } = &attached;
    assert!(effects.contains(&Effect::Watch { endpoint, epoch, process }));
    bench.check();
    // The channel continues where the first process stopped. As far as the daemon knows, it was never accepted.
    let (kind, body, _) = bench.ask_all(heir, Kind::RESUME, side(channel, 0).as_bytes());
    let resumed: wire::Channel = wire::body(&body).unwrap();
    assert_eq!((kind, resumed.channel, resumed.initiator), (Kind::CHANNEL, channel, 0));
    assert!(bench.broker.books.channels[&channel].accepted);
    assert_eq!(bench.code(heir, Kind::RESUME, side(channel, 1).as_bytes()), Some(ErrorCode::NOT_FOUND));
    assert_eq!(bench.code(b, Kind::RESUME, side(channel, 0).as_bytes()), Some(ErrorCode::NOT_FOUND));
    assert_eq!(bench.ask(b, Kind::RESUME, side(channel, 1).as_bytes()), Kind::CHANNEL);
    // The endpoint was adopted, so only its owners keep it now.
    bench.ends(heir);
    assert!(!bench.is_there(&attached));
    let effects = bench.effects();
    assert!(effects.iter().any(|e| matches!(e, Effect::Mark { state: SideState::DEAD, .. })));
    bench.check();
}

#[test]
fn a_hold_ends_with_its_time_or_when_it_is_released() {
    let mut bench = Bench::new(Limits::default());
    let attached = orphan(&mut bench, 0, 0);
    bench.check();
    // This is the timer of an earlier endpoint.
    bench.broker.hold_over(attached.endpoint, attached.epoch + 1, Hex16(TOKEN));
    assert!(bench.is_there(&attached));
    bench.time_is_over((attached.endpoint, Hex16(TOKEN)));
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
    let late = bench.client(0, 0);
    let code = bench.code(late, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes());
    assert_eq!(code, Some(ErrorCode::STALE));

    let (a, attached) = bench.attach(0, "web");
    for millis in [5000, 10, 10, 0, 0] {
        assert_eq!(bench.ask(a, Kind::HOLD, hold(TOKEN, millis).as_bytes()), Kind::OK);
        bench.check();
    }
    assert!(bench.timers.is_empty());
    let code = bench.code(late, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes());
    assert_eq!(code, Some(ErrorCode::STALE));
    bench.ends(a);
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
}

#[test]
fn a_token_is_good_for_one_process() {
    let mut bench = Bench::new(Limits::default());
    let attached = orphan(&mut bench, 0, 0);
    let wrong = bench.client(0, 0);
    for token in [[0; 16], [8; 16]] {
        let code = bench.code(wrong, Kind::ATTACH, adopt(&attached, token).as_bytes());
        assert_eq!(code, Some(ErrorCode::STALE));
    }
    let elsewhere = wire::Attach { segment: name("own"), ..adopt(&attached, TOKEN) };
    assert_eq!(bench.code(wrong, Kind::ATTACH, elsewhere.as_bytes()), Some(ErrorCode::STALE));
    let earlier = wire::Attach { epoch: attached.epoch + 1, ..adopt(&attached, TOKEN) };
    assert_eq!(bench.code(wrong, Kind::ATTACH, earlier.as_bytes()), Some(ErrorCode::STALE));
    // A program in a VM knows the token.
    let vm = bench.client(VM, 0);
    assert_eq!(bench.code(vm, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Some(ErrorCode::STALE));
    let heir = bench.client(0, 0);
    let process = bench.process_of(heir);
    assert_eq!(bench.ask(heir, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Kind::ATTACHED);
    assert_eq!(bench.code(wrong, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Some(ErrorCode::STALE));
    // The answer was lost, so the process asks again, and asks the next daemon, too.
    for _ in 0..2 {
        let again = bench.client_as(process, 0);
        assert_eq!(bench.ask(again, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Kind::ATTACHED);
        bench.check();
        assert_eq!(bench.code(again, Kind::HOLD, hold(TOKEN, 10).as_bytes()), Some(ErrorCode::INVALID));
        restart(&mut bench);
        bench.check();
    }
    let wrong = bench.client(0, 0);
    assert_eq!(bench.code(wrong, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Some(ErrorCode::STALE));
    // When its time is over only the token is forgotten.
    bench.time_is_over((attached.endpoint, Hex16(TOKEN)));
    assert!(bench.is_there(&attached));
    let again = bench.client_as(process, 0);
    assert_eq!(bench.code(again, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Some(ErrorCode::STALE));
    bench.effects();
    bench.check();
}

#[test]
fn an_adopter_of_another_user_needs_access_to_the_segment() {
    let mut bench = Bench::new(Limits::default());
    bench.broker.set_access(
        name("web"),
        Access { users: [1000].into(), groups: [].into(), sockets: None, verbs: false },
    );
    let attached = orphan(&mut bench, 0, 1000);
    let other = bench.client(0, OTHER);
    for token in [TOKEN, attached.token] {
        let (kind, body, _) = bench.ask_all(other, Kind::ATTACH, adopt(&attached, token).as_bytes());
        let code = wire::body::<wire::Error>(&body[..8]).unwrap().code;
        assert_eq!((kind, code), (Kind::ERROR, ErrorCode::DENIED));
        let text = String::from_utf8(body[8..].into()).unwrap();
        assert!(text.contains("user 1001") && text.contains("allow_users"), "{text}");
    }
    bench.broker.set_access(
        name("web"),
        Access { users: [1000].into(), groups: [OTHER].into(), sockets: None, verbs: false },
    );
    assert_eq!(bench.ask(other, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Kind::ATTACHED);
    // What the adopter makes is charged to the endpoint's user.
    assert_eq!(bench.broker.books.endpoints[&attached.endpoint].uid, 1000);
    // He was given the memory too.
    let excluded = |access: &Access| {
        let excluded = bench.broker.excluded(&name("web"), access);
        excluded.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(excluded(&Access::default()), ["user 1000", "user 1001"]);
    assert_eq!(excluded(&Access { users: [OTHER].into(), ..Access::default() }), ["user 1000"]);
    bench.check();
    // The endpoint's own user needs no further rights.
    bench
        .broker
        .set_access(name("web"), Access { users: [].into(), groups: [].into(), sockets: None, verbs: false });
    let own = bench.client(0, 1000);
    assert_eq!(bench.ask(own, Kind::ATTACH, back(&attached).as_bytes()), Kind::ATTACHED);
    bench.check();
}

#[test]
fn an_executed_program_can_adopt_its_own_endpoint() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (image, owner) = (Image { code: 0x1000, stack: 0x2000 }, bench.process_of(a));
    bench.broker.clients.get_mut(&a).unwrap().who.image = Some(image);
    let child = reply::packet(Kind::JOIN, 9, &[]);
    bench.broker.packet_from(&mut bench.world, a, Process { pid: 50, started: 7 }, &child);
    assert_eq!(bench.ask(a, Kind::HOLD, hold(TOKEN, 5000).as_bytes()), Kind::OK);
    // The new program attaches before the end of the old one's connection was handled; a child has that connection open, too.
    let again = bench.client_as(owner, 0);
    let (kind, _, effects) = bench.ask_all(again, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes());
    assert_eq!(kind, Kind::ATTACHED);
    assert!(effects.contains(&Effect::Recognize { endpoint: attached.endpoint, process: owner }));
    bench.broker.hung_up(a);
    let effects = bench.effects();
    assert!(!effects.iter().any(|e| matches!(e, Effect::Examine { .. })), "{effects:?}");
    assert!(bench.broker.books.endpoints[&attached.endpoint].owners.contains(&owner));
    bench.check();
}

#[test]
fn holds_are_limited() {
    let mut limits = Limits::default();
    limits.member.holds_per_member = 100;
    let mut bench = Bench::new(limits);
    let (a, attached) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    let (vm, _) = bench.attach(VM, "web");
    for (token, millis, code) in [
        ([0; 16], 10, ErrorCode::INVALID),
        (TOKEN, 5001, ErrorCode::LIMIT),
        (TOKEN, u32::MAX, ErrorCode::LIMIT),
    ] {
        let (kind, body, _) = bench.ask_all(a, Kind::HOLD, hold(token, millis).as_bytes());
        assert_eq!((kind, wire::body::<wire::Error>(&body[..8]).unwrap().code), (Kind::ERROR, code));
        let text = String::from_utf8(body[8..].into()).unwrap();
        assert!(code != ErrorCode::LIMIT || (text.contains("5s") && text.contains("max_hold")), "{text}");
    }
    let token = |n: usize| [n as u8 + 1; 16];
    for n in 0..MAX_HOLDS {
        assert_eq!(bench.ask(a, Kind::HOLD, hold(token(n), 10).as_bytes()), Kind::OK);
    }
    let one_more = hold(token(MAX_HOLDS), 10);
    assert_eq!(bench.code(a, Kind::HOLD, one_more.as_bytes()), Some(ErrorCode::LIMIT));
    assert_eq!(bench.ask(a, Kind::HOLD, hold(token(0), 20).as_bytes()), Kind::OK, "it is there");
    for n in 0..100 - MAX_HOLDS {
        assert_eq!(bench.ask(b, Kind::HOLD, hold(token(n), 10).as_bytes()), Kind::OK);
    }
    let (kind, body, _) = bench.ask_all(b, Kind::HOLD, one_more.as_bytes());
    assert_eq!(kind, Kind::ERROR);
    assert!(String::from_utf8_lossy(&body[8..]).contains("holds_per_member"));
    // The VM has an account of its own, and the end of an endpoint makes room.
    assert_eq!(bench.ask(vm, Kind::HOLD, one_more.as_bytes()), Kind::OK);
    bench.check();
    bench.broker.endpoint_ends(attached.endpoint, attached.epoch);
    bench.effects();
    bench.check();
    assert_eq!(bench.ask(b, Kind::HOLD, one_more.as_bytes()), Kind::OK);
    bench.broker.member_died(VM);
    bench.effects();
    bench.check();
}

#[test]
fn the_next_daemon_restarts_the_time_of_holds() {
    let mut bench = Bench::new(Limits::default());
    let attached = orphan(&mut bench, 0, 0);
    restart(&mut bench);
    assert!(bench.is_there(&attached));
    bench.check();
    let heir = bench.client(0, 0);
    assert_eq!(bench.ask(heir, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Kind::ATTACHED);
    bench.check();
    // This ending takes several turns; nobody can adopt an endpoint that is ending.
    let attached = orphan(&mut bench, 0, 0);
    bench.broker.endings.set_turn(0);
    bench.broker.endpoint_ends(attached.endpoint, attached.epoch);
    let heir = bench.client(0, 0);
    let code = bench.code(heir, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes());
    assert_eq!(code, Some(ErrorCode::STALE));
    bench.check();
}

#[test]
fn a_hold_that_the_journal_does_not_accept_is_refused() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    assert_eq!(bench.ask(a, Kind::HOLD, hold(TOKEN, 5000).as_bytes()), Kind::OK);
    bench.broker.set_recording(Recording::Closed);
    let code = bench.code(a, Kind::HOLD, hold([1; 16], 5000).as_bytes());
    assert_eq!(code, Some(ErrorCode::UNRECORDED));
    // A hold that was promised is kept.
    bench.ends(a);
    let heir = bench.client(0, 0);
    assert_eq!(bench.ask(heir, Kind::ATTACH, adopt(&attached, TOKEN).as_bytes()), Kind::ATTACHED);
    bench.check();
}
