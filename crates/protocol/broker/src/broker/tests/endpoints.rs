//! Endpoints, listeners, channels and doorbells: rights, limits, and what an endpoint gets when it returns.

use super::*;

#[test]
fn effects_come_in_the_order_that_survives_a_crash() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    bench.broker.packet(
        &mut bench.world,
        b,
        &reply::packet(Kind::CONNECT, 1, connect("x", 4096, 1).as_bytes()),
    );
    let kinds = |effects: &[Effect]| -> String {
        let letter = |e: &Effect| match e {
            Effect::Zero { .. } => 'z',
            Effect::Mark { .. } => 'm',
            Effect::Ring { .. } => 'r',
            Effect::Record(_) => 'J',
            Effect::Send { .. } => 's',
            _ => '-',
        };
        effects.iter().map(letter).collect()
    };
    assert_eq!(kinds(&bench.broker.take_effects()), "zJss");
    bench.broker.packet(&mut bench.world, b, &reply::packet(Kind::CLOSE, 2, reference(1).as_bytes()));
    assert_eq!(kinds(&bench.broker.take_effects()), "mmrJs");
    bench.ends(a);
    assert_eq!(kinds(&bench.broker.take_effects()), "mm-J", "the other side has closed: nobody is woken");
}

#[test]
fn a_refusal_says_why() {
    let mut bench = Bench::new(Limits::default());
    bench.broker.set_access(
        name("own"),
        Access { users: [5].into(), groups: [6].into(), sockets: None, verbs: false },
    );
    let mut code = |member, uid, segment: &str| {
        let id = bench.client(member, uid);
        bench.code(id, Kind::ATTACH, attach(segment).as_bytes())
    };
    assert_eq!(code(0, 4, "own"), Some(ErrorCode::DENIED));
    assert_eq!(code(0, 5, "own"), None);
    assert_eq!(code(0, 6, "own"), None, "by its group");
    assert_eq!(code(0, 0, "own"), None);
    assert_eq!(code(VM, 0, "own"), Some(ErrorCode::NO_SEGMENT), "no member");
    assert_eq!(code(VM, 4, "web"), None, "a member's own affair");
    assert_eq!(code(0, 0, "nothing"), Some(ErrorCode::NO_SEGMENT));
    assert_eq!(code(0, 0, "broken"), Some(ErrorCode::BROKEN));
}

#[test]
fn each_limit_is_enforced() {
    let mut limits = Limits { backlog: 2, ..Limits::default() };
    limits.member.endpoints_per_member = 3;
    limits.member.listeners_per_endpoint = 2;
    limits.member.channels_per_endpoint = 4;
    limits.member.channels_per_member = 6;
    limits.member.bytes_per_endpoint = 5 * 16384;
    let mut bench = Bench::new(limits);
    let (a, _) = bench.attach(0, "web");
    let (b, _) = bench.attach(0, "web");
    let (c, _) = bench.attach(0, "web");
    let d = bench.client(0, 0);
    assert_eq!(bench.code(d, Kind::ATTACH, attach("web").as_bytes()), Some(ErrorCode::LIMIT));
    for (at, expected) in
        [("x", None), ("y", None), ("z", Some(ErrorCode::LIMIT)), ("y", Some(ErrorCode::IN_USE))]
    {
        assert_eq!(bench.code(a, Kind::LISTEN, listen(at).as_bytes()), expected);
    }
    let big = connect("x", 1 << 30, 50);
    assert_eq!(bench.code(b, Kind::CONNECT, big.as_bytes()), Some(ErrorCode::INVALID));
    let large = connect("x", 65536, 51);
    assert_eq!(bench.code(b, Kind::CONNECT, large.as_bytes()), Some(ErrorCode::LIMIT), "bytes");
    let first = bench.connect(b, "x", 1).unwrap();
    bench.connect(b, "x", 2).unwrap();
    assert_eq!(bench.connect(b, "x", 3).unwrap_err(), ErrorCode::LIMIT, "backlog");
    assert_eq!(bench.connect(b, "x", 2).unwrap().channel, 2, "the same request is no new channel");
    assert_eq!(bench.ask(a, Kind::ACCEPTED, reference(first.channel).as_bytes()), Kind::OK);
    bench.connect(b, "x", 3).unwrap();
    bench.connect(b, "y", 4).unwrap();
    assert_eq!(bench.connect(c, "y", 1).unwrap_err(), ErrorCode::LIMIT, "channels of the acceptor");
    bench.check();
}

#[test]
fn a_name_at_a_member_belongs_to_that_member() {
    let mut bench = Bench::new(Limits::default());
    let (host, _) = bench.attach(0, "web");
    let (vm, _) = bench.attach(VM, "web");
    assert_eq!(bench.code(host, Kind::LISTEN, listen("cp@vm-a").as_bytes()), Some(ErrorCode::DENIED));
    assert_eq!(bench.code(vm, Kind::LISTEN, listen("cp@vm-a").as_bytes()), None);
    assert_eq!(bench.code(host, Kind::LISTEN, listen("cp@host").as_bytes()), None);
}

#[test]
fn doorbells_are_named_in_the_form_that_the_caller_can_use() {
    let mut bench = Bench::new(Limits::default());
    let qemu = Process { pid: 1, started: 1 };
    let told = bench.broker.books.untold(VM, &BTreeMap::new(), 4);
    assert_eq!(told.keys().copied().collect::<Vec<_>>(), [0]);
    assert!(bench.broker.note(Record::joined(VM, qemu, told)));
    assert!(bench.broker.note(Record::Session { member: VM, boot_id: Hex16([1; 16]), interrupts: true }));
    assert!(bench.broker.note(Record::Member {
        number: 2,
        name: Text(name("vm-b")),
        runtime: None,
        retired: false
    }));
    assert!(bench.broker.note(Record::Segment {
        name: Text(name("web")),
        uuid: Hex16([7; 16]),
        size: SIZE,
        members: [0, 1, 2].into(),
        readers: BTreeSet::new(),
        memory: MemoryKind::Dax,
        page: 2 << 20,
        part: None,
        own_folder: true,
        file: MemoryFile::Unrecorded,
        recipients: Some(Recipients::default()),
        runtime: None,
    }));
    let vectors = bench.broker.books.allot(&name("web"), 2, 4);
    assert!(bench.broker.note(Record::Vectors { segment: Text(name("web")), member: 2, vectors }));
    let (host, h) = bench.attach(0, "web");
    let (vm, v) = bench.attach(VM, "web");
    let (late, l) = bench.attach(2, "web");
    assert_eq!((h.fds.0, v.fds.0), (Fds::MEMORY | Fds::EVENT, 0));
    for (id, at) in [(host, "h"), (vm, "v"), (late, "l")] {
        assert_eq!(bench.code(id, Kind::LISTEN, listen(at).as_bytes()), None);
    }
    let channel = bench.connect(vm, "h", 1).unwrap();
    assert_eq!((channel.bell_kind, channel.bell, channel.fds.0), (BellKind::REGISTER, h.vector, 0));
    let channel = bench.connect(host, "v", 1).unwrap();
    assert_eq!((channel.bell_kind, channel.fds.0), (BellKind::EVENT, Fds::PEER_EVENT));
    assert_eq!(bench.connect(vm, "v", 2).unwrap().bell, VM << 16 | v.vector, "its own VM");
    let by_daemon = bench.connect(vm, "l", 3).unwrap();
    assert_eq!((by_daemon.bell_kind, by_daemon.bell), (BellKind::REGISTER, 0), "its QEMU does not know vm-b");
    bench.broker.relay_rings();
    let rung: BTreeSet<(u32, u32)> = bench
        .effects()
        .into_iter()
        .filter_map(|e| match e {
            Effect::Ring { member, vector } => Some((member, vector)),
            _ => None,
        })
        .collect();
    assert_eq!(rung, [(VM, v.vector), (2, l.vector)].into());
    // A guest that only polls needs no doorbell.
    assert!(bench.broker.note(Record::Session { member: 2, boot_id: Hex16([2; 16]), interrupts: false }));
    assert_eq!(bench.connect(host, "l", 2).unwrap().bell_kind, BellKind::NONE);
    bench.effects();
    bench.check();
}

#[test]
fn only_a_process_with_the_token_comes_back() {
    let mut bench = Bench::new(Limits::default());
    let (id, attached) = bench.attach(0, "web");
    let process = bench.broker.clients[&id].who.process;
    bench.broker.lost(id);
    let back = wire::Attach {
        endpoint: attached.endpoint,
        epoch: attached.epoch,
        token: attached.token,
        ..attach("web")
    };
    let mut try_as = |body: wire::Attach, process: Option<Process>, member: u32| {
        let id = bench.client(member, 0);
        if let Some(process) = process {
            bench.broker.clients.get_mut(&id).unwrap().who.process = process;
        }
        bench.code(id, Kind::ATTACH, body.as_bytes())
    };
    let stale = Some(ErrorCode::STALE);
    assert_eq!(try_as(back, Some(process), VM), stale, "another member");
    assert_eq!(try_as(wire::Attach { token: [9; 16], ..back }, Some(process), 0), stale);
    assert_eq!(try_as(wire::Attach { epoch: back.epoch + 1, ..back }, Some(process), 0), stale);
    assert_eq!(try_as(wire::Attach { endpoint: 77, ..back }, Some(process), 0), stale);
    assert_eq!(try_as(wire::Attach { segment: name("own"), ..back }, Some(process), 0), stale);
    assert_eq!(try_as(back, Some(process), 0), None);
    assert_eq!(try_as(back, None, 0), None, "another process");
}

#[test]
fn an_endpoint_with_a_reused_number_is_not_confused_with_its_predecessor() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (b, old) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    bench.connect(b, "x", 1).unwrap();
    let process = bench.broker.clients[&a].who.process;
    bench.broker.lost(a);
    bench.ends(b);
    let (_, new) = bench.attach(0, "web");
    assert_eq!(new.endpoint, old.endpoint);
    // When the channel is announced again, it still belongs to the dead endpoint, and there is nobody to ring.
    let a = bench.client(0, 0);
    bench.broker.clients.get_mut(&a).unwrap().who.process = process;
    let back = wire::Attach {
        endpoint: attached.endpoint,
        epoch: attached.epoch,
        token: attached.token,
        ..attach("web")
    };
    let (_, _, effects) = bench.ask_all(a, Kind::ATTACH, back.as_bytes());
    let Some(Effect::Send { packet, fds, .. }) = effects.last() else { panic!("{effects:?}") };
    let channel: wire::Channel = wire::body(wire::split(packet).unwrap().1).unwrap();
    assert_eq!((channel.peer_endpoint, channel.peer_epoch), (old.endpoint, old.epoch));
    assert_eq!((channel.bell_kind, fds.len()), (BellKind::NONE, 0));
}

#[test]
fn unlistening_refuses_waiting_channels() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, attached) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    bench.connect(b, "x", 1).unwrap();
    let body = wire::Listening { listener: 1, reserved: 0 };
    let (_, _, effects) = bench.ask_all(a, Kind::UNLISTEN, body.as_bytes());
    let marks =
        effects.iter().filter(|e| matches!(e, Effect::Mark { state: SideState::FINISHED, .. })).count();
    assert_eq!(marks, 2);
    assert!(effects.contains(&Effect::Ring { member: 0, vector: attached.vector }));
    assert_eq!(bench.connect(b, "x", 2).unwrap_err(), ErrorCode::REFUSED);
    bench.check();
}

#[test]
fn a_request_that_the_journal_does_not_accept_is_refused_and_changes_nothing() {
    let mut bench = Bench::new(Limits::default());
    let ((a, own), (b, _)) = (bench.attach(0, "web"), bench.attach(VM, "web"));
    assert_eq!(bench.ask(a, Kind::LISTEN, listen("x").as_bytes()), Kind::LISTENING);
    let channel = bench.connect(b, "x", 1).unwrap();
    let sync = wire::SyncOpen {
        name: name("lock"),
        kind: 1,
        limit: 0,
        initial: 0,
        flags: wire::SyncOpen::CREATE,
        nonce: 1,
    };
    assert_eq!(bench.ask(a, Kind::SYNC_OPEN, sync.as_bytes()), Kind::SYNC);
    bench.broker.set_recording(Recording::Closed);
    let before = bench.journal.len();
    let newcomer = bench.client(0, 0);
    let refused = [
        (newcomer, Kind::ATTACH, attach("web").as_bytes().to_vec()),
        (a, Kind::LISTEN, listen("y").as_bytes().to_vec()),
        (b, Kind::CONNECT, connect("x", 4096, 2).as_bytes().to_vec()),
        (b, Kind::SYNC_OPEN, sync.as_bytes().to_vec()),
    ];
    for (client, kind, body) in refused {
        let (answer, body, effects) = bench.ask_all(client, kind, &body);
        assert_eq!(answer, Kind::ERROR);
        assert_eq!(wire::body::<wire::Error>(&body[..8]).unwrap().code, ErrorCode::UNRECORDED, "{kind:?}");
        assert_eq!(effects.len(), 1, "only the answer: {effects:?}");
    }
    assert_eq!(bench.journal.len(), before);
    bench.check();
    // Known objects can be asked for again, and an endpoint that was away returns.
    assert_eq!(bench.connect(b, "x", 1).unwrap().channel, channel.channel);
    let back = wire::Attach { endpoint: own.endpoint, epoch: own.epoch, token: own.token, ..attach("web") };
    let id = ClientId(1000);
    let who = bench.broker.who(a).unwrap().clone();
    bench.broker.connected(id, who);
    let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
    assert_eq!(bench.ask(id, Kind::HELLO, hello.as_bytes()), Kind::HELLO_OK);
    bench.broker.set_recording(Recording::Owing);
    assert_eq!(bench.code(id, Kind::ATTACH, back.as_bytes()), Some(ErrorCode::UNRECORDED));
    assert_eq!(
        bench.connect(b, "x", 1).unwrap_err(),
        ErrorCode::UNRECORDED,
        "not even when it is asked for again"
    );
    bench.broker.set_recording(Recording::Closed);
    assert_eq!(bench.ask(id, Kind::ATTACH, back.as_bytes()), Kind::ATTACHED);
    // What ends something is done, and is recorded later.
    let end = wire::ChannelRef { channel: channel.channel };
    assert_eq!(bench.ask(b, Kind::CLOSE, end.as_bytes()), Kind::OK);
    bench.broker.hung_up(b);
    bench.effects();
    assert!(bench.journal.len() > before);
    bench.check();
}
