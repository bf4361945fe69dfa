//! The number of things that one client has does not make requests of others more expensive.

use super::*;
use crate::endings::TURN;
use kit::wait::takes_less_than;
use std::time::{Duration, Instant};

fn with_handles(bench: &mut Bench, count: u64) -> ClientId {
    let (id, _) = bench.attach(0, "web");
    for nonce in 0..count {
        bench.broker.packet(
            &mut bench.world,
            id,
            &reply::packet(Kind::BLOCK_OPEN, 9, block_open("x", Rights::READ, nonce).as_bytes()),
        );
        bench.effects();
    }
    assert_eq!(bench.broker.books.endpoints.values().last().unwrap().handles.len() as u64, count);
    id
}

#[test]
fn a_handle_costs_the_same_beside_many_others() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    bench.block(a, &block_create("x", 1, Rights::READ, 1)).unwrap();
    let best_of = |bench: &mut Bench| {
        let (id, _) = bench.attach(0, "web");
        let pair = |bench: &mut Bench, nonce| {
            let start = Instant::now();
            let open = bench.block(id, &block_open("x", Rights::READ, nonce)).unwrap();
            let close = wire::BlockRights { handle: open.handle, rights: Rights::NONE, reserved: 0 };
            assert_eq!(bench.code(id, Kind::BLOCK_CLOSE, close.as_bytes()), None);
            start.elapsed()
        };
        (0..200).map(|nonce| pair(bench, nonce)).min().unwrap()
    };
    let alone = best_of(&mut bench);
    for _ in 0..2 {
        with_handles(&mut bench, 20_000);
    }
    let beside = best_of(&mut bench);
    assert!(beside < 8 * alone, "{beside:?} beside 40,000 handles, {alone:?} alone");
}

#[test]
fn a_sudden_end_is_worked_through_in_turns() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (listener, _) = bench.attach(0, "web");
    bench.ask(listener, Kind::LISTEN, listen("l").as_bytes());
    bench.block(a, &block_create("x", 1, Rights::READ, 1)).unwrap();
    let many: Vec<ClientId> = (0..2).map(|_| with_handles(&mut bench, 3 * TURN as u64)).collect();
    let channel = bench.connect(many[1], "l", 1 << 40).unwrap();
    let locks = (0..40).filter(|n| {
        bench.ask(many[1], Kind::SYNC_OPEN, sync_open(&format!("m{n}"), 1, 0, 1 << 41 | n).as_bytes())
            == Kind::SYNC
    });
    assert_eq!(locks.count(), 40);
    many.iter().for_each(|id| bench.ends(*id));
    let begun = bench.broker.take_effects();
    assert!(begun.len() < 20, "{} effects before anybody has a turn", begun.len());
    let records = |bench: &mut Bench, effects: Vec<Effect>| {
        for effect in &effects {
            if let Effect::Record(record) = effect {
                bench.journal.extend(lines::line(0, record));
            }
        }
        effects.len()
    };
    records(&mut bench, begun);
    let mut turns = 0;
    while bench.broker.end_some() {
        let effects = bench.broker.take_effects();
        if turns == 0 {
            let marked = effects.iter().any(|e| matches!(e, Effect::Mark { state: SideState::DEAD, .. }));
            assert!(marked, "peers are told in the first turn");
        }
        let count = records(&mut bench, effects);
        assert!(count <= 4 * TURN, "{count} effects in a turn");
        turns += 1;
        // The books and the journal agree in the middle of the ending, and a successor completes it.
        bench.check();
        let replayed = lines::replay(&bench.journal);
        let mut successor = Broker::new(replayed.books, Limits::default(), 4, 0);
        successor.end_all();
        assert_eq!(successor.books.endpoints.len(), 2);
        assert_eq!(successor.books.syncs.values().filter(|s| s.bereaved).count(), 40);
        // Others are served meanwhile.
        assert_eq!(bench.ask(a, Kind::BLOCK_OPEN, block_open("x", Rights::READ, 7).as_bytes()), Kind::BLOCK);
    }
    assert!(turns >= 3, "{turns} turns");
    bench.effects();
    bench.check();
    assert_eq!(bench.broker.books.endpoints.len(), 2);
    assert!(bench.broker.books.channels[&channel.channel].initiator.closed);
}

#[test]
fn a_grant_to_a_member_looks_at_no_endpoint_that_does_not_hold_the_block() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let made = bench.block(a, &block_create("x", 1, Rights::READ, 1)).unwrap();
    let (b, holder) = bench.attach(VM, "web");
    for nonce in 0..3 {
        bench.block(b, &block_open("x", Rights::READ, nonce)).unwrap();
    }
    for _ in 0..50 {
        bench.attach(VM, "web");
    }
    let of_block = |endpoint| BlockGrant { member: VM, endpoint, epoch: 0, rights: Rights::NONE.0 };
    let looks_at = |bench: &Bench, grant| {
        let books = bench.broker.books();
        books.rights_after(&books.blocks[&made.block], &grant)
    };
    assert_eq!(looks_at(&bench, of_block(0)), [(holder.endpoint, Rights::NONE)]);
    assert_eq!(looks_at(&bench, of_block(holder.endpoint)), [(holder.endpoint, Rights::NONE)]);
    let body =
        wire::BlockGrant { block: made.block, member: VM, endpoint: 0, rights: Rights::NONE, reserved: 0 };
    assert_eq!(bench.code(a, Kind::BLOCK_GRANT, body.as_bytes()), None);
    assert_eq!(bench.broker.revocations.all().len(), 3);
    bench.check();
}

#[test]
fn grants_to_an_endpoint_are_given_back_in_turns() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, whom) = bench.attach(VM, "web");
    for nonce in 0..200 {
        let made = bench.block(a, &block_create(&format!("b{nonce}"), 1, Rights::NONE, nonce)).unwrap();
        let (block, endpoint) = (made.block, whom.endpoint);
        let body = wire::BlockGrant { block, member: VM, endpoint, rights: Rights::READ, reserved: 0 };
        assert_eq!(bench.code(a, Kind::BLOCK_GRANT, body.as_bytes()), None);
    }
    // This is the only handle of a block without a name, so the block is removed with its holder, and its grants too.
    let own = bench.block(b, &block_create("", 1, Rights::NONE, 0)).unwrap();
    let body = wire::BlockGrant {
        block: own.block,
        member: VM,
        endpoint: whom.endpoint,
        rights: Rights::READ,
        reserved: 0,
    };
    assert_eq!(bench.code(b, Kind::BLOCK_GRANT, body.as_bytes()), None);
    bench.broker.endings.set_turn(50);
    let granted = |bench: &Bench| bench.broker.books.endpoints.get(&whom.endpoint).map(|e| e.granted.len());
    let mut left = granted(&bench);
    assert_eq!(left, Some(201));
    bench.broker.endpoint_ends(whom.endpoint, whom.epoch);
    while left.is_some() {
        bench.effects();
        bench.check();
        let now = granted(&bench);
        assert!(left.unwrap() <= now.unwrap_or(0) + 50, "{left:?}, then {now:?} in one turn");
        left = now;
    }
    assert!(bench.broker.books.blocks.values().all(|block| block.grants.is_empty()));
    assert_eq!(bench.broker.books.blocks.len(), 200);
}

#[test]
fn relaying_a_ring_does_not_look_at_locks() {
    let mut limits = Limits::default();
    limits.member.handles_per_member = 1 << 20;
    let mut bench = Bench::new(limits);
    let (a, _) = bench.attach(0, "web");
    let (b, _) = bench.attach(VM, "web");
    for lock in 0..200u64 {
        for user in 0..63 {
            let id = if user % 2 == 0 { a } else { b };
            let body = sync_open(&format!("lock{lock}"), 1, 0, lock << 8 | user);
            assert_eq!(bench.ask(id, Kind::SYNC_OPEN, body.as_bytes()), Kind::SYNC);
        }
    }
    let ring = |bench: &mut Bench| {
        let start = Instant::now();
        bench.broker.relay_rings();
        let (rung, took) = (bench.broker.take_effects().len(), start.elapsed());
        assert!(rung <= 2, "each doorbell once: {rung} rings");
        took
    };
    takes_less_than(Duration::from_millis(5), || ring(&mut bench));
}

#[test]
fn returning_and_unlistening_cost_only_what_waits() {
    const CHANNELS: u64 = 10_000;
    let mut limits = Limits::default();
    (limits.member.channels_per_endpoint, limits.member.channels_per_member) = (1 << 20, 1 << 20);
    (limits.member.bytes_per_endpoint, limits.member.bytes_per_member) = (1 << 40, 1 << 40);
    let mut bench = Bench::new(limits);
    let big = name("big");
    assert!(bench.broker.note(Record::Segment {
        name: Text(big),
        uuid: Hex16([9; 16]),
        size: 1 << 30,
        members: [0].into(),
        readers: BTreeSet::new(),
        memory: MemoryKind::Dax,
        page: 4096,
        part: None,
        own_folder: true,
        file: MemoryFile::Unrecorded,
        recipients: Some(Recipients::default()),
        runtime: None,
    }));
    let vectors = bench.broker.books.allot(&big, 0, bench.broker.vectors);
    assert!(bench.broker.note(Record::Vectors { segment: Text(big), member: 0, vectors }));
    bench.effects();
    let (caller, _) = bench.attach(0, "big");
    let best_of = |bench: &mut Bench, channels: u64, at: &str| {
        let (id, attached) = bench.attach(0, "big");
        bench.ask(id, Kind::LISTEN, listen(at).as_bytes());
        for nonce in 0..channels {
            let channel = bench.connect(caller, at, nonce << 1 | 1).unwrap().channel;
            assert_eq!(bench.ask(id, Kind::ACCEPTED, reference(channel).as_bytes()), Kind::OK);
        }
        let waiting = bench.connect(caller, at, 1 << 40 | channels).unwrap().channel;
        let again = wire::Attach { segment: big, ..back(&attached) };
        let round = |bench: &mut Bench| {
            let (_, body, _) = bench.ask_all(id, Kind::LISTEN, listen("once").as_bytes());
            let start = Instant::now();
            assert_eq!(bench.ask(id, Kind::UNLISTEN, &body), Kind::OK);
            let client = bench.client(0, 0);
            assert_eq!(bench.ask(client, Kind::ATTACH, again.as_bytes()), Kind::ATTACHED);
            let took = start.elapsed();
            bench.broker.hung_up(client);
            bench.effects();
            took
        };
        let best = (0..50).map(|_| round(bench)).min().unwrap();
        // When the listener ends, only the waiting channels are touched.
        let number = bench.broker.books.names[&(big, name(at))];
        let body = wire::Listening { listener: number, reserved: 0 };
        assert_eq!(bench.ask(id, Kind::UNLISTEN, body.as_bytes()), Kind::OK);
        assert!(bench.broker.books.channels[&waiting].acceptor.closed);
        let open = bench.broker.books.endpoints[&attached.endpoint].channels.len() as u64;
        assert_eq!(open, channels);
        best
    };
    let alone = best_of(&mut bench, 0, "alone");
    let beside = best_of(&mut bench, CHANNELS, "many");
    assert!(beside < 8 * alone, "{beside:?} with {CHANNELS} channels, {alone:?} alone");
}
