//! Processes that own an endpoint: how they come and go, and when the endpoint ends.

use super::*;

fn process(pid: u32) -> Process {
    Process { pid, started: 7 }
}

/// Returns two endpoints with a channel: one sees the death of the other.
fn pair(bench: &mut Bench) -> (ClientId, wire::Attached, ClientId) {
    let (a, attached) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    bench.connect(b, "x", 1).unwrap();
    (a, attached, b)
}

fn join(bench: &mut Bench, over: ClientId, child: Process) {
    let packet = reply::packet(Kind::JOIN, 9, &[]);
    bench.broker.packet_from(&mut bench.world, over, child, &packet);
    let answers = bench.effects();
    assert!(
        !answers.iter().any(|e| matches!(e, Effect::Send { .. })),
        "the parent would read it: {answers:?}"
    );
}

#[test]
fn the_end_of_a_connection_is_not_the_end_of_a_process() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached, b) = pair(&mut bench);
    let parent = bench.process_of(a);
    bench.broker.hung_up(a);
    assert_eq!(bench.effects(), [], "nobody is told anything");
    assert!(bench.is_there(&attached));
    // Its peers continue, and it learns of their requests when it is back.
    assert_eq!(bench.connect(b, "x", 2).unwrap().channel, 2);
    let again = bench.client_as(parent, 0);
    let (kind, _, effects) = bench.ask_all(again, Kind::ATTACH, back(&attached).as_bytes());
    assert_eq!(kind, Kind::ATTACHED);
    let announced = effects.iter().filter(|e| matches!(e, Effect::Send { client, .. } if *client == again));
    assert_eq!(announced.count(), 3, "the answer, and two channels");
    bench.process_ends(parent);
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
}

#[test]
fn a_process_that_comes_back_replaces_its_own_connection_and_no_other() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached, b) = pair(&mut bench);
    let parent = bench.process_of(a);
    let other = bench.client_as(process(50), 0);
    let (kind, _, effects) = bench.ask_all(other, Kind::ATTACH, back(&attached).as_bytes());
    assert_eq!(kind, Kind::ATTACHED);
    assert!(!effects.iter().any(|e| matches!(e, Effect::Disconnect(_))));
    let watch = Effect::Watch { endpoint: attached.endpoint, epoch: attached.epoch, process: process(50) };
    assert!(effects.contains(&watch));
    // Events go to all of them.
    let (_, _, effects) = bench.ask_all(b, Kind::CONNECT, connect("x", 4096, 2).as_bytes());
    for id in [a, other] {
        assert!(effects.iter().any(|e| matches!(e, Effect::Send { client, .. } if *client == id)));
    }
    let again = bench.client_as(parent, 0);
    let (_, _, effects) = bench.ask_all(again, Kind::ATTACH, back(&attached).as_bytes());
    assert!(effects.contains(&Effect::Disconnect(a)) && !effects.contains(&Effect::Disconnect(other)));
    bench.process_ends(parent);
    assert!(bench.is_there(&attached));
    bench.process_ends(process(50));
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
}

#[test]
fn an_inherited_connection_keeps_an_endpoint_without_owners() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached, _) = pair(&mut bench);
    let (number, epoch, parent) = (attached.endpoint, attached.epoch, bench.process_of(a));
    bench.broker.owner_ended(number, epoch, parent);
    assert!(bench.is_there(&attached), "a child may have it");
    bench.effects();
    bench.check();
    // The child joins, and stays an owner when the connection ends after it has one of its own.
    join(&mut bench, a, process(50));
    let own = bench.client_as(process(50), 0);
    assert_eq!(bench.ask(own, Kind::ATTACH, back(&attached).as_bytes()), Kind::ATTACHED);
    bench.broker.hung_up(a);
    bench.broker.hung_up(own);
    assert!(bench.is_there(&attached));
    bench.broker.owner_ended(number, epoch, process(50));
    assert!(!bench.is_there(&attached));

    // A child that never joins keeps the endpoint alive until it closes the connection.
    let (a, attached, _) = {
        bench.effects();
        let (a, attached) = bench.attach(0, "web");
        (a, attached, ())
    };
    let parent = bench.process_of(a);
    bench.broker.owner_ended(attached.endpoint, attached.epoch, parent);
    assert!(bench.is_there(&attached));
    bench.broker.hung_up(a);
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
}

#[test]
fn a_child_that_has_only_joined_is_an_owner_until_the_connection_ends() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached, _) = pair(&mut bench);
    let parent = bench.process_of(a);
    join(&mut bench, a, process(50));
    join(&mut bench, a, process(50));
    bench.broker.owner_ended(attached.endpoint, attached.epoch, parent);
    assert!(bench.is_there(&attached));
    // The copy was closed too, because the child runs another program.
    bench.broker.hung_up(a);
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
}

#[test]
fn detaching_ends_the_ownership_of_the_sender() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached, b) = pair(&mut bench);
    join(&mut bench, a, process(50));
    // The parent leaves; the connection belongs to the child now.
    assert_eq!(bench.ask(a, Kind::DETACH, &[]), Kind::OK);
    assert!(bench.is_there(&attached));
    bench.check();
    // A process that has inherited the connection without joining owns nothing.
    let packet = reply::packet(Kind::DETACH, 9, &[]);
    bench.broker.packet_from(&mut bench.world, a, process(51), &packet);
    assert!(bench.is_there(&attached));
    // When the last owner leaves, the endpoint dies at once, whatever connections are open.
    bench.broker.packet_from(&mut bench.world, a, process(50), &packet);
    assert!(!bench.is_there(&attached));
    let effects = bench.effects();
    assert!(effects.iter().any(|e| matches!(e, Effect::Mark { state: SideState::DEAD, .. })));
    assert_eq!(bench.ask(b, Kind::DETACH, &[]), Kind::OK);
    assert_eq!(bench.code(b, Kind::DETACH, &[]), Some(ErrorCode::PROTOCOL), "it is not an endpoint any more");
    assert!(bench.broker.books.endpoints.is_empty());
    bench.check();
}

#[test]
fn an_owner_that_cannot_be_watched_ends_with_its_last_connection() {
    let mut bench = Bench::new(Limits::default());
    // This process belongs to another process namespace.
    let unseen = Process { pid: 0, started: 0 };
    let first = bench.client_as(unseen, 0);
    let (_, body, _) = bench.ask_all(first, Kind::ATTACH, attach("web").as_bytes());
    let attached: wire::Attached = wire::body(&body).unwrap();
    let second = bench.client_as(unseen, 0);
    assert_eq!(bench.ask(second, Kind::ATTACH, back(&attached).as_bytes()), Kind::ATTACHED);
    bench.broker.hung_up(first);
    assert!(bench.is_there(&attached), "they may be two processes");
    bench.broker.hung_up(second);
    assert!(!bench.is_there(&attached));
    // No descriptor was left for the watch of this process.
    let (a, attached) = bench.attach(0, "web");
    let process = bench.process_of(a);
    bench.broker.owner_unwatched(attached.endpoint, attached.epoch, process);
    bench.broker.hung_up(a);
    assert!(!bench.is_there(&attached));
    bench.effects();
    bench.check();
}

#[test]
fn a_replaced_program_is_noticed_when_its_connection_ends() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let image = Image { code: 0x1000, stack: 0x2000 };
    let owner = bench.process_of(a);
    bench.broker.clients.get_mut(&a).unwrap().who.image = Some(image);
    bench.broker.hung_up(a);
    let (endpoint, epoch) = (attached.endpoint, attached.epoch);
    assert_eq!(bench.effects(), [Effect::Examine { endpoint, epoch, process: owner, image }]);
    assert!(bench.is_there(&attached));
    bench.broker.owner_ended(endpoint, epoch, owner);
    assert!(!bench.is_there(&attached));
}

#[test]
fn a_needless_body_is_refused() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    for kind in [Kind::JOIN, Kind::DETACH] {
        let (answer, body, _) = bench.ask_all(a, kind, b"abc");
        let text = std::str::from_utf8(&body[8..]).unwrap();
        assert_eq!(
            (answer, wire::body::<wire::Error>(&body[..8]).unwrap().code),
            (Kind::ERROR, ErrorCode::PROTOCOL)
        );
        assert!(text.contains("takes no body"), "{text}");
    }
    bench.check();
}

#[test]
fn owners_of_an_endpoint_are_limited() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (vm, in_vm) = bench.attach(VM, "web");
    for n in 1..MAX_OWNERS as u32 + 5 {
        join(&mut bench, a, process(1000 + n));
        bench.broker.owner_joined(in_vm.endpoint, in_vm.epoch, process(1000 + n));
    }
    for endpoint in [attached.endpoint, in_vm.endpoint] {
        assert_eq!(bench.broker.books.endpoints[&endpoint].owners.len(), MAX_OWNERS);
    }
    let other = bench.client_as(process(5), 0);
    assert_eq!(bench.code(other, Kind::ATTACH, back(&attached).as_bytes()), Some(ErrorCode::LIMIT));
    // An earlier epoch matches no endpoint.
    bench.broker.owner_joined(in_vm.endpoint, in_vm.epoch + 1, process(1));
    bench.broker.owner_ended(in_vm.endpoint, in_vm.epoch + 1, process(1001));
    assert!(bench.broker.books.endpoints[&in_vm.endpoint].owners.contains(&process(1001)));
    bench.broker.lost(vm);
    assert!(bench.is_there(&in_vm));
    bench.effects();
    bench.check();
}

#[test]
fn an_endpoint_without_known_owners_ends_after_a_restart() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (_, other) = bench.attach(0, "web");
    let parent = bench.process_of(a);
    bench.broker.owner_ended(attached.endpoint, attached.epoch, parent);
    bench.effects();
    bench.check();
    bench.broker = Broker::new(lines::replay(&bench.journal).books, Limits::default(), 4, 0);
    bench.broker.end_abandoned();
    assert!(!bench.is_there(&attached) && bench.is_there(&other));
}

#[test]
fn a_connection_forgets_the_children_that_have_ended() {
    let mut bench = Bench::new(Limits::default());
    let (parent, attached) = bench.attach(HOST_MEMBER, "web");
    for pid in 500..600 {
        let child = Process { pid, started: 2 };
        bench.broker.packet_from(&mut bench.world, parent, child, &reply::packet(Kind::JOIN, 9, &[]));
        bench.effects();
        assert!(bench.broker.clients[&parent].joined.contains(&child));
        bench.process_ends(child);
    }
    assert!(bench.broker.clients[&parent].joined.is_empty(), "each child that has ended would cost memory");
    // No child needs the connection any more, so it ends when the parent comes back over another.
    let process = bench.process_of(parent);
    let again = bench.client_as(process, HOST_MEMBER);
    let (kind, _, effects) = bench.ask_all(again, Kind::ATTACH, back(&attached).as_bytes());
    assert_eq!(kind, Kind::ATTACHED);
    assert!(effects.contains(&Effect::Disconnect(parent)));
    bench.check();
}
