//! Locks and blocks: users, rights, quotas, and what a dead owner leaves.

use super::*;

#[test]
fn a_slot_is_written_before_the_answer_and_taken_back_when_its_user_dies() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (b, other) = bench.attach(VM, "web");
    let open = sync_open("m", SyncKind::MUTEX.0, 0, 1);
    let (kind, body, effects) = bench.ask_all(a, Kind::SYNC_OPEN, open.as_bytes());
    let first: wire::Sync = wire::body(&body).unwrap();
    assert_eq!(
        (kind, first.slot, first.epoch, first.created, first.bell),
        (Kind::SYNC, 0, 1, 1, attached.vector)
    );
    assert!(matches!(
        &effects[..],
        [Effect::NewSync { .. }, Effect::Seat { bell, .. }, Effect::Send { .. }] if *bell == attached.vector
    ));
    // A repeated request gets the same slot; a new one, of any endpoint, gets another slot.
    let (_, body, _) = bench.ask_all(a, Kind::SYNC_OPEN, open.as_bytes());
    assert_eq!(wire::body::<wire::Sync>(&body).unwrap().slot, 0);
    let (_, body, _) = bench.ask_all(b, Kind::SYNC_OPEN, sync_open("m", 1, 0, 1).as_bytes());
    let second: wire::Sync = wire::body(&body).unwrap();
    assert_eq!((second.object, second.slot, second.epoch, second.created), (first.object, 1, 2, 0));
    assert_eq!(second.bell, VM << 16 | other.vector);
    assert_eq!(bench.broker.books.sync_bell(first.object, 1), Some((VM, other.vector)));
    // Each of these is refused, for a different reason.
    let requests = [
        (sync_open("m", 2, 0, 9), ErrorCode::KIND),
        (sync_open("m", 9, 0, 9), ErrorCode::INVALID),
        (wire::SyncOpen { flags: 3, ..sync_open("m", 1, 0, 9) }, ErrorCode::IN_USE),
        (wire::SyncOpen { flags: 0, ..sync_open("n", 1, 0, 9) }, ErrorCode::NOT_FOUND),
        (sync_open("n", 5, 64, 9), ErrorCode::INVALID),
        (sync_open("n", 1, 1, 9), ErrorCode::INVALID),
    ];
    for (body, code) in requests {
        assert_eq!(bench.code(a, Kind::SYNC_OPEN, body.as_bytes()), Some(code), "{body:?}");
    }
    assert_eq!(bench.code(b, Kind::SYNC_UNLINK, by_name("m").as_bytes()), Some(ErrorCode::DENIED));
    bench.check();
    bench.ends(a);
    let effects = bench.effects();
    assert!(
        effects.iter().any(|e| matches!(e, Effect::Reclaim { slot: 0, left: Left::Died, .. })),
        "{effects:?}"
    );
    bench.check();
    bench.broker.member_died(VM);
    bench.effects();
    bench.check();
    let left: Vec<_> = bench.broker.books.syncs.values().collect();
    assert!(left.len() == 1 && left[0].bereaved, "it waits for somebody to tell of the death: {left:?}");
    let (c, _) = bench.attach(0, "web");
    assert_eq!(bench.code(c, Kind::SYNC_OPEN, sync_open("m", 1, 0, 7).as_bytes()), None);
    assert!(!bench.broker.books.syncs.values().any(|s| s.bereaved));
}

#[test]
fn users_of_an_object_and_handles_of_an_endpoint_are_limited() {
    let mut limits = Limits::default();
    limits.member.handles_per_endpoint = 64;
    limits.member.blocks_per_member = 2;
    let mut bench = Bench::new(limits);
    let (a, _) = bench.attach(0, "web");
    for nonce in 0..63 {
        assert_eq!(bench.ask(a, Kind::SYNC_OPEN, sync_open("m", 1, 0, nonce).as_bytes()), Kind::SYNC);
    }
    let mut code = |name, nonce| bench.code(a, Kind::SYNC_OPEN, sync_open(name, 1, 0, nonce).as_bytes());
    assert_eq!(code("m", 63), Some(ErrorCode::BUSY));
    assert_eq!(code("n", 64), None);
    assert_eq!(code("m", 65), Some(ErrorCode::QUOTA), "handles");
    let (b, _) = bench.attach(0, "web");
    assert_eq!(
        bench.code(b, Kind::SYNC_OPEN, sync_open("o", 1, 0, 1).as_bytes()),
        Some(ErrorCode::QUOTA),
        "objects"
    );
    bench.check();
}

#[test]
fn only_doorbells_of_the_segments_members_are_rung() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (own, _) = bench.attach(0, "own");
    let bell = |member: u32, vector: u32| wire::BellOf { bell: member << 16 | vector, reserved: 0 };
    let (kind, body, effects) = bench.ask_all(a, Kind::BELL, bell(VM, 1).as_bytes());
    assert!(effects.contains(&Effect::Ring { member: VM, vector: 1 }), "the caller need not wait");
    let answer: wire::BellOk = wire::body(&body).unwrap();
    assert_eq!((kind, answer.kind, answer.fds), (Kind::BELL_OK, BellKind::EVENT, Fds(Fds::PEER_EVENT)));
    let theirs = bench.broker.books.vectors_of(&name("own"), 0)[0];
    let others =
        [(a, bell(VM, 0)), (a, bell(VM, 4)), (a, bell(7, 1)), (own, bell(VM, 1)), (a, bell(0, theirs))];
    for (client, body) in others {
        let (kind, _, effects) = bench.ask_all(client, Kind::BELL, body.as_bytes());
        assert_eq!(kind, Kind::ERROR, "{body:?}");
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::Ring { .. })), "{body:?}");
        assert_eq!(bench.code(client, Kind::BELL, body.as_bytes()), Some(ErrorCode::NOT_FOUND), "{body:?}");
    }
}

#[test]
fn a_block_is_opened_with_the_rights_that_its_owner_grants() {
    use Rights as R;
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, other) = bench.attach(VM, "web");
    let made = bench.block(a, &block_create("x", 5000, R::READ, 1)).unwrap();
    assert_eq!((made.size, made.span, made.rights, made.owner_member), (5000, 8192, R::READ_WRITE, 0));
    assert_eq!(bench.block(a, &block_create("x", 5000, R::READ, 1)).unwrap().handle, made.handle, "again");
    assert_eq!(bench.block(a, &block_create("x", 1, R::READ, 2)).unwrap_err(), ErrorCode::IN_USE);
    assert_eq!(bench.block(a, &block_create("y", 0, R::READ, 2)).unwrap_err(), ErrorCode::INVALID);
    assert_eq!(bench.block(a, &block_create("y", 1 << 30, R::READ, 2)).unwrap_err(), ErrorCode::NO_MEMORY);
    assert_eq!(bench.block(b, &block_open("z", R::READ, 1)).unwrap_err(), ErrorCode::NOT_FOUND);
    assert_eq!(bench.block(b, &block_open("x", R::READ_WRITE, 1)).unwrap_err(), ErrorCode::DENIED);
    let read = bench.block(b, &block_open("x", R::READ, 1)).unwrap();
    assert_eq!((read.offset, read.rights), (made.offset, R::READ));
    // A right is granted to one endpoint, then to its member, and then revoked.
    let grant =
        |endpoint, rights| wire::BlockGrant { block: made.block, member: VM, endpoint, rights, reserved: 0 };
    assert_eq!(bench.code(b, Kind::BLOCK_GRANT, grant(0, R::READ_WRITE).as_bytes()), Some(ErrorCode::DENIED));
    assert_eq!(
        bench.code(a, Kind::BLOCK_GRANT, grant(77, R::READ_WRITE).as_bytes()),
        Some(ErrorCode::NOT_FOUND)
    );
    assert_eq!(bench.code(a, Kind::BLOCK_GRANT, grant(other.endpoint, R::READ_WRITE).as_bytes()), None);
    let write = bench.block(b, &block_open("x", R::READ_WRITE, 2)).unwrap();
    assert_eq!(bench.block(b, &block_open("x", R::WRITE_EXCLUSIVE, 3)).unwrap_err(), ErrorCode::DENIED);
    assert_eq!(bench.block(a, &block_open("x", R::WRITE_EXCLUSIVE, 3)).unwrap_err(), ErrorCode::BUSY);
    let (_, _, effects) = bench.ask_all(a, Kind::BLOCK_GRANT, grant(other.endpoint, R::READ).as_bytes());
    let told = effects.iter().find_map(|effect| match effect {
        Effect::Send { client, packet, .. } if *client == b => wire::split(packet),
        _ => None,
    });
    let (header, body) = told.expect("the holder is told");
    let left: wire::BlockRights = wire::body(body).unwrap();
    assert_eq!((header.kind, left.handle, left.rights), (Kind::BLOCK_REVOKED, write.handle, R::READ));
    bench.check();
    // Nobody gets exclusive access before the holder has acknowledged the revocation.
    let close = wire::BlockRights { handle: made.handle, rights: R::NONE, reserved: 0 };
    assert_eq!(bench.code(b, Kind::BLOCK_CLOSE, close.as_bytes()), Some(ErrorCode::CLOSED), "another's");
    assert_eq!(bench.code(a, Kind::BLOCK_CLOSE, close.as_bytes()), None);
    assert_eq!(bench.code(a, Kind::BLOCK_CLOSE, close.as_bytes()), Some(ErrorCode::CLOSED), "freed twice");
    assert_eq!(bench.block(a, &block_open("x", R::WRITE_EXCLUSIVE, 4)).unwrap_err(), ErrorCode::BUSY);
    assert_eq!(bench.code(b, Kind::BLOCK_ACK, left.as_bytes()), None);
    let alone = bench.block(a, &block_open("x", R::WRITE_EXCLUSIVE, 4)).unwrap();
    assert_eq!(bench.block(a, &block_open("x", R::READ_WRITE, 5)).unwrap_err(), ErrorCode::BUSY);
    // A block can grow where there is room, and can shrink when nobody else has it open.
    assert_eq!(bench.block(a, &wire::BlockResize { handle: alone.handle, size: 9000 }).unwrap().span, 12288);
    assert_eq!(
        bench.block(a, &wire::BlockResize { handle: alone.handle, size: 1 }).unwrap_err(),
        ErrorCode::BUSY
    );
    assert_eq!(
        bench.block(b, &wire::BlockResize { handle: read.handle, size: 1 }).unwrap_err(),
        ErrorCode::DENIED
    );
    bench.block(a, &block_create("behind", 1, R::NONE, 6)).unwrap();
    let more = wire::BlockResize { handle: alone.handle, size: 20000 };
    assert_eq!(bench.block(a, &more).unwrap_err(), ErrorCode::NO_MEMORY);
    bench.check();
    // The owner's end removes the names, and the memory stays for those who have it open.
    bench.ends(a);
    bench.effects();
    bench.check();
    assert_eq!(bench.block(b, &block_open("x", R::READ, 9)).unwrap_err(), ErrorCode::NOT_FOUND);
    assert_eq!(bench.broker.books.segments[&name("web")].arena.used(), 12288);
    bench.ends(b);
    bench.effects();
    assert_eq!(bench.broker.books.segments[&name("web")].arena.used(), 0);
}

#[test]
fn a_persistent_block_stays_and_its_user_owns_it_again() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let keep = wire::BlockCreate { flags: 1, ..block_create("keep", 4096, Rights::NONE, 1) };
    bench.block(a, &keep).unwrap();
    bench.block(a, &block_create("go", 4096, Rights::NONE, 2)).unwrap();
    bench.ends(a);
    bench.effects();
    bench.check();
    let (b, _) = bench.attach(0, "web");
    let (vm, _) = bench.attach(VM, "web");
    assert_eq!(bench.block(b, &block_open("go", Rights::READ, 1)).unwrap_err(), ErrorCode::NOT_FOUND);
    assert_eq!(bench.block(vm, &block_open("keep", Rights::READ, 1)).unwrap_err(), ErrorCode::DENIED);
    let open = bench.block(b, &block_open("keep", Rights::WRITE_EXCLUSIVE, 1)).unwrap();
    assert_eq!(open.owner, 0);
    assert_eq!(bench.code(vm, Kind::BLOCK_UNLINK, by_name("keep").as_bytes()), Some(ErrorCode::DENIED));
    assert_eq!(bench.code(b, Kind::BLOCK_UNLINK, by_name("keep").as_bytes()), None);
    bench.ends(b);
    bench.effects();
    bench.check();
    assert!(bench.broker.books.blocks.is_empty());
}

#[test]
fn each_quota_of_blocks_is_enforced() {
    let mut limits = Limits::default();
    limits.member.blocks_per_endpoint = 2;
    limits.member.blocks_per_member = 3;
    limits.member.block_bytes_per_endpoint = 5 * 4096;
    limits.member.block_bytes_per_member = 7 * 4096;
    let mut bench = Bench::new(limits);
    let (a, _) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    let anonymous = |pages: u64, nonce| block_create("", pages * 4096, Rights::NONE, nonce);
    assert_eq!(bench.block(a, &anonymous(6, 1)).unwrap_err(), ErrorCode::QUOTA, "bytes of the endpoint");
    let four = bench.block(a, &anonymous(4, 1)).unwrap();
    assert_eq!(
        bench.block(a, &wire::BlockResize { handle: four.handle, size: 6 * 4096 }).unwrap_err(),
        ErrorCode::QUOTA
    );
    assert_eq!(bench.block(b, &anonymous(4, 1)).unwrap_err(), ErrorCode::QUOTA, "bytes of the member");
    bench.block(a, &anonymous(1, 2)).unwrap();
    assert_eq!(bench.block(a, &anonymous(1, 3)).unwrap_err(), ErrorCode::QUOTA, "blocks of the endpoint");
    bench.block(b, &anonymous(1, 1)).unwrap();
    assert_eq!(bench.block(b, &anonymous(1, 2)).unwrap_err(), ErrorCode::QUOTA, "blocks of the member");
    bench.check();
}

#[test]
fn the_grants_of_a_block_are_limited() {
    let mut limits = Limits::default();
    limits.member.grants_per_block = 2;
    let mut bench = Bench::new(limits);
    let (a, _) = bench.attach(0, "web");
    let made = bench.block(a, &block_create("x", 1, Rights::NONE, 1)).unwrap();
    let (b, first) = bench.attach(VM, "web");
    let (_, second) = bench.attach(VM, "web");
    let grant = |bench: &mut Bench, endpoint, rights| {
        let body = wire::BlockGrant { block: made.block, member: VM, endpoint, rights, reserved: 0 };
        bench.code(a, Kind::BLOCK_GRANT, body.as_bytes())
    };
    assert_eq!(grant(&mut bench, 0, Rights::READ), None);
    assert_eq!(grant(&mut bench, first.endpoint, Rights::READ), None);
    assert_eq!(grant(&mut bench, second.endpoint, Rights::READ), Some(ErrorCode::QUOTA));
    // A right that replaces a granted one does not count as another grant.
    assert_eq!(grant(&mut bench, first.endpoint, Rights::NONE), None);
    assert_eq!(grant(&mut bench, 0, Rights::READ_WRITE), None);
    // A grant ends with its endpoint.
    bench.ends(b);
    bench.effects();
    assert_eq!(grant(&mut bench, second.endpoint, Rights::READ), None);
    bench.check();
}

#[test]
fn an_endpoint_that_returns_is_told_again_of_its_revocations() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, attached) = bench.attach(0, "web");
    let made = bench.block(a, &block_create("x", 1, Rights::READ_WRITE, 1)).unwrap();
    let open = bench.block(b, &block_open("x", Rights::READ_WRITE, 1)).unwrap();
    let process = bench.broker.clients[&b].who.process;
    bench.broker.lost(b);
    let none = wire::BlockGrant {
        block: made.block,
        member: 0,
        endpoint: attached.endpoint,
        rights: Rights::NONE,
        reserved: 0,
    };
    assert_eq!(bench.code(a, Kind::BLOCK_GRANT, none.as_bytes()), None);
    let b = bench.client(0, 0);
    bench.broker.clients.get_mut(&b).unwrap().who.process = process;
    let back = wire::Attach {
        endpoint: attached.endpoint,
        epoch: attached.epoch,
        token: attached.token,
        ..attach("web")
    };
    let (_, _, effects) = bench.ask_all(b, Kind::ATTACH, back.as_bytes());
    let Some(Effect::Send { packet, .. }) = effects.last() else { panic!("{effects:?}") };
    let (header, body) = wire::split(packet).unwrap();
    let left: wire::BlockRights = wire::body(body).unwrap();
    assert_eq!((header.kind, left.handle, left.rights), (Kind::BLOCK_REVOKED, open.handle, Rights::NONE));
    assert_eq!(bench.code(b, Kind::BLOCK_ACK, left.as_bytes()), None);
    assert!(!bench.broker.books.handles.contains_key(&open.handle), "nothing left is closed");
    bench.check();
}

#[test]
fn a_silent_holder_gets_few_revocations_and_each_only_once() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, attached) = bench.attach(VM, "web");
    let (c, _) = bench.attach(VM, "web");
    let made = bench.block(a, &block_create("x", 1, Rights::READ_WRITE, 0)).unwrap();
    for nonce in 0..500 {
        bench.block(b, &block_open("x", Rights::READ_WRITE, nonce)).unwrap();
    }
    bench.block(c, &block_open("x", Rights::READ_WRITE, 1)).unwrap();
    let told = |bench: &mut Bench, endpoint, rights| {
        let grant = wire::BlockGrant { block: made.block, member: VM, endpoint, rights, reserved: 0 };
        let (kind, _, effects) = bench.ask_all(a, Kind::BLOCK_GRANT, grant.as_bytes());
        assert_eq!(kind, Kind::OK);
        let sent = effects.iter().filter_map(|effect| match effect {
            Effect::Send { client, packet, .. } if *client != a => Some((*client, packet)),
            _ => None,
        });
        let revoked = sent.map(|(client, packet)| {
            let (header, body) = wire::split(packet).unwrap();
            assert_eq!(header.kind, Kind::BLOCK_REVOKED);
            (client, wire::body::<wire::BlockRights>(body).unwrap())
        });
        revoked.collect::<Vec<_>>()
    };
    let first = told(&mut bench, 0, Rights::READ);
    assert_eq!(first.iter().filter(|(client, _)| *client == c).count(), 1);
    let first: Vec<_> = first.into_iter().filter(|(client, _)| *client == b).map(|(_, left)| left).collect();
    assert!(first.len() < 100, "{} revocations for a holder that has answered none", first.len());
    // The same grant again revokes nothing, and neither does a grant of more.
    assert!(told(&mut bench, 0, Rights::READ).is_empty());
    assert!(told(&mut bench, attached.endpoint, Rights::READ_WRITE).is_empty());
    bench.check();
    // With each answer comes another, until there are none left.
    let mut open = first;
    let mut seen = BTreeSet::new();
    while let Some(left) = open.pop() {
        assert!(seen.insert(left.handle), "told twice");
        let (kind, _, effects) = bench.ask_all(b, Kind::BLOCK_ACK, left.as_bytes());
        assert_eq!(kind, Kind::OK);
        open.extend(effects.iter().filter_map(|effect| match effect {
            Effect::Send { packet, .. } => wire::body::<wire::BlockRights>(wire::split(packet)?.1),
            _ => None,
        }));
    }
    assert_eq!(seen.len(), 500);
    bench.check();
}

/// A revocation that an endpoint did not learn of before it ended is not sent to the next endpoint with its number.
#[test]
fn revocations_of_an_ending_endpoint_do_not_reach_its_successor() {
    const HANDLES: u64 = 600;
    let mut bench = Bench::new(Limits::default());
    let (owner, _) = bench.attach(0, "web");
    let made = bench.block(owner, &block_create("x", 1, Rights::READ, 0)).unwrap();
    let grant =
        |endpoint, rights| wire::BlockGrant { block: made.block, member: 0, endpoint, rights, reserved: 0 };
    let ending = |bench: &mut Bench| {
        let (holder, attached) = bench.attach(0, "web");
        for nonce in 0..HANDLES {
            bench.block(holder, &block_open("x", Rights::READ, nonce)).unwrap();
        }
        (holder, attached.endpoint)
    };
    for whole_member in [false, true] {
        let (holder, number) = ending(&mut bench);
        bench.ends(holder);
        assert!(bench.broker.books.endpoints[&number].is_ending);
        let (whom, refused) = if whole_member { (0, None) } else { (number, Some(ErrorCode::NOT_FOUND)) };
        assert_eq!(bench.code(owner, Kind::BLOCK_GRANT, grant(whom, Rights::NONE).as_bytes()), refused);
        bench.broker.end_all();
        bench.effects();
        assert_eq!(bench.broker.revocations.all(), BTreeSet::new());
        bench.check();
        if whole_member {
            assert_eq!(bench.code(owner, Kind::BLOCK_GRANT, grant(0, Rights::READ).as_bytes()), None);
        }
        // The next endpoint with the number is told of its own revocations.
        let (heir, attached) = bench.attach(0, "web");
        assert_eq!(attached.endpoint, number);
        let open = bench.block(heir, &block_open("x", Rights::READ, 0)).unwrap();
        assert_eq!(bench.code(owner, Kind::BLOCK_GRANT, grant(number, Rights::NONE).as_bytes()), None);
        assert_eq!(bench.broker.revocations.all(), [(number, open.handle)].into());
        bench.ends(heir);
        bench.effects();
        bench.check();
    }
    // The same holds for a daemon that is started in the middle of this.
    let (holder, number) = ending(&mut bench);
    assert_eq!(bench.code(owner, Kind::BLOCK_GRANT, grant(number, Rights::NONE).as_bytes()), None);
    assert_eq!(bench.broker.revocations.all().len() as u64, HANDLES);
    bench.ends(holder);
    bench.effects();
    assert!(bench.broker.books.endpoints[&number].is_ending);
    let mut successor = Broker::new(lines::replay(&bench.journal).books, Limits::default(), 4, 0);
    assert_eq!(successor.revocations.all(), BTreeSet::new());
    successor.end_all();
    assert!(!successor.books.endpoints.contains_key(&number));
    assert_eq!(successor.revocations.all(), BTreeSet::new());
}

#[test]
fn the_handles_of_a_member_are_limited() {
    let mut limits = Limits::default();
    limits.member.handles_per_member = 3;
    let mut bench = Bench::new(limits);
    let (a, _) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    let (vm, _) = bench.attach(VM, "web");
    let made = bench.block(a, &block_create("x", 1, Rights::READ, 1)).unwrap();
    bench.block(b, &block_open("x", Rights::READ, 1)).unwrap();
    assert_eq!(bench.code(b, Kind::SYNC_OPEN, sync_open("m", 1, 0, 2).as_bytes()), None);
    for id in [a, b] {
        assert_eq!(bench.block(id, &block_open("x", Rights::READ, 9)).unwrap_err(), ErrorCode::QUOTA);
        assert_eq!(
            bench.code(id, Kind::SYNC_OPEN, sync_open("m", 1, 0, 9).as_bytes()),
            Some(ErrorCode::QUOTA)
        );
    }
    bench.block(vm, &block_open("x", Rights::READ, 1)).unwrap();
    let close = wire::BlockRights { handle: made.handle, rights: Rights::NONE, reserved: 0 };
    assert_eq!(bench.code(a, Kind::BLOCK_CLOSE, close.as_bytes()), None);
    bench.block(b, &block_open("x", Rights::READ, 9)).unwrap();
    bench.ends(b);
    bench.effects();
    bench.check();
    assert_eq!(bench.broker.books.tally_of(0).handles, 0);
}

#[test]
fn rings_between_users_of_an_object_are_relayed_by_the_next_daemon_too() {
    let mut bench = Bench::new(Limits::default());
    let (vm, _) = bench.attach(VM, "web");
    let (host, _) = bench.attach(0, "web");
    // QEMU has not been told of any doorbells, so the VM cannot ring anybody directly.
    assert_eq!(bench.ask(vm, Kind::SYNC_OPEN, sync_open("lock", 1, 0, 1).as_bytes()), Kind::SYNC);
    let relayed = |bench: &Bench| bench.broker.relayed_bells.reasons().len();
    assert_eq!(relayed(&bench), 0, "a VM rings its own programs by itself");
    assert_eq!(bench.ask(host, Kind::SYNC_OPEN, sync_open("lock", 1, 0, 2).as_bytes()), Kind::SYNC);
    assert_eq!(relayed(&bench), 1, "the VM rings the host through the daemon");
    // These are a channel of which one side is closed, and one between programs that need no relaying.
    assert_eq!(bench.ask(host, Kind::LISTEN, listen("x").as_bytes()), Kind::LISTENING);
    let channels: Vec<u64> = (1..3).map(|nonce| bench.connect(vm, "x", nonce).unwrap().channel).collect();
    bench.connect(host, "x", 3).unwrap();
    assert_eq!(relayed(&bench), 1 + 2 * 2);
    assert_eq!(bench.ask(host, Kind::CLOSE, reference(channels[0]).as_bytes()), Kind::OK);
    assert_eq!(relayed(&bench), 1 + 2 + 1);
    bench.check();
    let again = Broker::new(bench.broker.books.clone(), Limits::default(), 4, 0);
    assert_eq!(again.relayed_bells, bench.broker.relayed_bells, "the next daemon relays the same");
}
