//! Random requests of random clients: whatever they do, the books stay consistent, and the journal makes the same books.

use super::*;
use crate::endings::TURN;

/// One step of a random history. Clients and channels are chosen by index among the existing ones.
#[derive(Clone, Debug)]
enum Step {
    Attach(bool),
    Return(usize, Option<usize>),
    HangUp(usize),
    Lose(usize),
    Detach(usize),
    Join(usize, usize),
    JoinInGuest(usize, usize),
    ProcessEnds(usize, usize),
    Unwatched(usize, usize),
    VmEnds,
    Hold(usize, u8, u32),
    Adopt(usize, u8, Option<usize>),
    TimeIsOver(usize),
    Resume(usize, usize, bool),
    Listen(usize, u8),
    Unlisten(usize),
    Connect(usize, u8, (u64, u64), u8),
    Accept(usize, usize),
    Close(usize, usize),
    Board(usize, u8),
    SyncOpen { client: usize, name: u8, kind: u32, flags: u32, nonce: u8 },
    SyncClose(usize, usize),
    SyncUnlink(usize, u8),
    BlockCreate { client: usize, name: u8, size: u64, rights: u32, others: u32, persistent: bool, nonce: u8 },
    BlockOpen { client: usize, name: u8, rights: u32, nonce: u8 },
    BlockClose(usize, usize),
    BlockAck(usize, usize),
    BlockResize(usize, usize, u64),
    BlockGrant { client: usize, block: usize, whom: usize, all: bool, rights: u32 },
    BlockName(usize, usize, u8),
    Garbage(usize, u16, Vec<u8>),
}

fn step() -> impl Strategy<Value = Step> {
    let n = || 0..8usize;
    prop_oneof![
        3 => any::<bool>().prop_map(Step::Attach),
        2 => (n(), prop::option::of(n())).prop_map(|(e, p)| Step::Return(e, p)),
        1 => n().prop_map(Step::HangUp),
        1 => n().prop_map(Step::Lose),
        1 => n().prop_map(Step::Detach),
        2 => (n(), n()).prop_map(|(c, p)| Step::Join(c, p)),
        1 => (n(), n()).prop_map(|(e, p)| Step::JoinInGuest(e, p)),
        1 => (n(), n()).prop_map(|(e, p)| Step::ProcessEnds(e, p)),
        1 => (n(), n()).prop_map(|(e, p)| Step::Unwatched(e, p)),
        1 => Just(Step::VmEnds),
        3 => (n(), 0..4u8, 0..6000u32).prop_map(|(c, token, millis)| Step::Hold(c, token, millis)),
        3 => (n(), 0..4u8, prop::option::of(n())).prop_map(|(e, token, p)| Step::Adopt(e, token, p)),
        1 => n().prop_map(Step::TimeIsOver),
        2 => (n(), n(), any::<bool>()).prop_map(|(c, h, initiator)| Step::Resume(c, h, initiator)),
        3 => (n(), 0..3u8).prop_map(|(c, l)| Step::Listen(c, l)),
        1 => n().prop_map(Step::Unlisten),
        6 => (n(), 0..3u8, (0..300_000u64, 0..300_000u64), 0..6u8)
            .prop_map(|(c, l, s, nonce)| Step::Connect(c, l, s, nonce)),
        3 => (n(), n()).prop_map(|(c, h)| Step::Accept(c, h)),
        5 => (n(), n()).prop_map(|(c, h)| Step::Close(c, h)),
        3 => (n(), 0..10u8).prop_map(|(c, nonce)| Step::Board(c, nonce)),
        5 => (n(), 0..3u8, 1..5u32, 0..8u32, 0..9u8).prop_map(|(client, name, kind, flags, nonce)| {
            Step::SyncOpen { client, name, kind, flags, nonce }
        }),
        3 => (n(), n()).prop_map(|(c, h)| Step::SyncClose(c, h)),
        1 => (n(), 0..3u8).prop_map(|(c, name)| Step::SyncUnlink(c, name)),
        4 => (n(), 0..4u8, 0..90_000u64, 1..4u32, 0..4u32, any::<bool>(), 10..19u8).prop_map(
            |(client, name, size, rights, others, persistent, nonce)| {
                Step::BlockCreate { client, name, size, rights, others, persistent, nonce }
            }
        ),
        5 => (n(), 0..3u8, 0..4u32, 10..19u8)
            .prop_map(|(client, name, rights, nonce)| Step::BlockOpen { client, name, rights, nonce }),
        3 => (n(), n()).prop_map(|(c, h)| Step::BlockClose(c, h)),
        3 => (n(), n()).prop_map(|(c, h)| Step::BlockAck(c, h)),
        2 => (n(), n(), 0..200_000u64).prop_map(|(c, h, size)| Step::BlockResize(c, h, size)),
        4 => (n(), n(), n(), any::<bool>(), 0..4u32).prop_map(|(client, block, whom, all, rights)| {
            Step::BlockGrant { client, block, whom, all, rights }
        }),
        2 => (n(), n(), 0..3u8).prop_map(|(c, block, name)| Step::BlockName(c, block, name)),
        1 => (n(), 0..30u16, prop::collection::vec(any::<u8>(), 0..160)).prop_map(|(c, k, b)| Step::Garbage(c, k, b)),
    ]
}

fn owners(bench: &Bench, attached: &wire::Attached) -> Vec<Process> {
    let endpoint = bench.broker.books.endpoints.get(&attached.endpoint).filter(|e| e.epoch == attached.epoch);
    endpoint.map(|e| e.owners.iter().copied().collect()).unwrap_or_default()
}

fn pick<T: Copy>(all: &[T], index: usize) -> Option<T> {
    (!all.is_empty()).then(|| all[index % all.len()])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_requests_leave_the_books_consistent_and_reproducible(
        steps in prop::collection::vec(step(), 1..120),
        cut in any::<prop::sample::Index>(),
        turn in prop_oneof![1..6usize, Just(TURN)],
    ) {
        let limits = Limits { backlog: 3, ..Limits::default() };
        let mut bench = Bench::new(limits);
        bench.broker.endings.set_turn(turn);
        let mut clients: Vec<ClientId> = Vec::new();
        // The books after each line of the journal, to compare them at every point where the journal may be cut.
        let mut known: Vec<wire::Attached> = Vec::new();
        for step in steps {
            match step {
                Step::Attach(vm) => {
                    let (id, attached) = bench.attach(if vm { VM } else { 0 }, "web");
                    clients.push(id);
                    known.push(attached);
                }
                Step::Return(n, owner) => {
                    let Some(old) = pick(&known, n) else { continue };
                    // The connection comes from one of the owners, or from another process.
                    let owner = owner.and_then(|n| pick(&owners(&bench, &old), n));
                    let id = match owner {
                        Some(process) => bench.client_as(process, old.member),
                        None => bench.client(old.member, 0),
                    };
                    let there = bench.is_there(&old);
                    let kind = bench.ask(id, Kind::ATTACH, back(&old).as_bytes());
                    prop_assert_eq!(kind, if there { Kind::ATTACHED } else { Kind::ERROR });
                    clients.push(id);
                }
                Step::HangUp(n) => {
                    if let Some(id) = pick(&clients, n) {
                        bench.broker.hung_up(id);
                        clients.retain(|c| *c != id);
                    }
                }
                Step::Lose(n) => {
                    if let Some(id) = pick(&clients, n) {
                        bench.broker.lost(id);
                        clients.retain(|c| *c != id);
                    }
                }
                Step::Detach(n) => {
                    let Some(id) = pick(&clients, n) else { continue };
                    let (sender, number) = (bench.process_of(id), bench.broker.clients[&id].endpoint);
                    let last = number.is_some_and(|n| bench.broker.books.endpoints[&n].owners.iter().eq([&sender]));
                    let kind = bench.ask(id, Kind::DETACH, &[]);
                    prop_assert_eq!(kind == Kind::OK, number.is_some());
                    let there = number.and_then(|n| bench.broker.books.endpoints.get(&n));
                    prop_assert!(there.is_none_or(|e| e.is_ending || ((!last || e.is_held()) && !e.owners.contains(&sender))));
                }
                Step::Join(c, p) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let child = Process { pid: 5000 + p as u32, started: 2 };
                    let packet = reply::packet(Kind::JOIN, 9, &[]);
                    bench.broker.packet_from(&mut bench.world, id, child, &packet);
                    let number = bench.broker.clients[&id].endpoint;
                    prop_assert!(number.is_none_or(|n| bench.broker.books.endpoints[&n].owners.contains(&child)));
                }
                Step::JoinInGuest(e, p) => {
                    let Some(old) = pick(&known, e) else { continue };
                    let child = Process { pid: 5000 + p as u32, started: 2 };
                    bench.broker.owner_joined(old.endpoint, old.epoch, child);
                    prop_assert_eq!(bench.is_there(&old), owners(&bench, &old).contains(&child));
                }
                Step::ProcessEnds(e, p) => {
                    let Some(old) = pick(&known, e) else { continue };
                    let Some(process) = pick(&owners(&bench, &old), p) else { continue };
                    bench.process_ends(process);
                    clients.retain(|id| bench.broker.clients.contains_key(id));
                    prop_assert!(bench.broker.books.endpoints.values().all(|e| !e.owners.contains(&process)));
                }
                Step::Unwatched(e, p) => {
                    let Some(old) = pick(&known, e) else { continue };
                    let Some(process) = pick(&owners(&bench, &old), p) else { continue };
                    bench.broker.owner_unwatched(old.endpoint, old.epoch, process);
                }
                Step::VmEnds => {
                    bench.broker.member_died(VM);
                    prop_assert!(bench.broker.books.endpoints.values().all(|e| e.member != VM || e.is_ending));
                }
                Step::Hold(c, token, millis) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let number = bench.broker.clients[&id].endpoint;
                    let used = number.and_then(|n| bench.broker.books.endpoints[&n].holds.get(&Hex16([token; 16])));
                    let used = used.is_some_and(|hold| hold.adopter.is_some());
                    let good = millis == 0 || (token != 0 && millis <= 5000 && !used);
                    let body = wire::Hold { token: [token; 16], millis, reserved: 0 };
                    let kind = bench.ask(id, Kind::HOLD, body.as_bytes());
                    prop_assert_eq!(kind == Kind::OK, number.is_some() && good);
                }
                Step::Adopt(e, token, p) => {
                    let Some(old) = pick(&known, e) else { continue };
                    let process = Process { pid: 5000 + p.unwrap_or(9) as u32, started: 2 };
                    let process = p.and_then(|p| pick(&owners(&bench, &old), p)).unwrap_or(process);
                    let id = bench.client_as(process, old.member);
                    let there = bench.broker.books.endpoints.get(&old.endpoint).filter(|e| e.epoch == old.epoch);
                    let hold = there.and_then(|e| e.holds.get(&Hex16([token; 16])));
                    let free = hold.is_some_and(|hold| hold.adopter.is_none_or(|adopter| adopter == process));
                    let body = wire::Attach { token: [token; 16], ..back(&old) };
                    let kind = bench.ask(id, Kind::ATTACH, body.as_bytes());
                    prop_assert_eq!(kind, if free { Kind::ATTACHED } else { Kind::ERROR });
                    prop_assert!(!free || owners(&bench, &old).contains(&process));
                    clients.push(id);
                }
                Step::TimeIsOver(n) => {
                    let timers: Vec<(u32, Hex16)> = bench.timers.keys().copied().collect();
                    if let Some(key) = pick(&timers, n) {
                        bench.time_is_over(key);
                    }
                }
                Step::Resume(c, h, initiator) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let channels: Vec<u64> = bench.broker.books.channels.keys().copied().collect();
                    let Some(channel) = pick(&channels, h) else { continue };
                    let side = *bench.broker.books.channels[&channel].side(initiator);
                    let own = bench.broker.clients[&id].endpoint == Some(side.endpoint) && !side.closed;
                    let body = wire::ChannelSide { channel, initiator: initiator.into(), reserved: 0 };
                    let kind = bench.ask(id, Kind::RESUME, body.as_bytes());
                    prop_assert_eq!(kind == Kind::CHANNEL, own);
                }
                Step::Listen(c, l) => {
                    if let Some(id) = pick(&clients, c) {
                        bench.ask(id, Kind::LISTEN, listen(["a", "b", "c@vm-a"][l as usize]).as_bytes());
                    }
                }
                Step::Unlisten(c) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let endpoint = bench.broker.clients.get(&id).and_then(|c| c.endpoint);
                    let own = endpoint.and_then(|e| bench.broker.books.endpoints.get(&e)?.listeners.first().copied());
                    let body = wire::Listening { listener: own.unwrap_or(999), reserved: 0 };
                    let kind = bench.ask(id, Kind::UNLISTEN, body.as_bytes());
                    prop_assert_eq!(kind == Kind::OK, own.is_some());
                }
                Step::Connect(c, l, (capacity, input_capacity), nonce) => {
                    if let Some(id) = pick(&clients, c) {
                        let to = ["a", "b", "c@vm-a"][l as usize];
                        let body = wire::Connect { input_capacity, ..connect(to, capacity, nonce.into()) };
                        bench.ask(id, Kind::CONNECT, body.as_bytes());
                    }
                }
                Step::Accept(c, h) | Step::Close(c, h) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let channels: Vec<u64> = bench.broker.books.channels.keys().copied().collect();
                    let kind = if matches!(step, Step::Accept(..)) { Kind::ACCEPTED } else { Kind::CLOSE };
                    bench.ask(id, kind, reference(pick(&channels, h).unwrap_or(77)).as_bytes());
                }
                Step::Board(c, nonce) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    bench.ask(id, Kind::BOARD_OPEN, wire::BoardOpen { nonce: nonce.into() }.as_bytes());
                }
                Step::SyncOpen { client, name, kind, flags, nonce } => {
                    let Some(id) = pick(&clients, client) else { continue };
                    let limit = if kind == 4 { 3 } else { 0 };
                    let body = wire::SyncOpen { flags, ..sync_open(["a", "b", "c"][name as usize], kind, limit, nonce.into()) };
                    bench.ask(id, Kind::SYNC_OPEN, body.as_bytes());
                }
                Step::SyncClose(c, h) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let all: Vec<(u64, u32, u16, u32)> = bench.broker.books.syncs.values()
                        .flat_map(|s| s.users.iter().map(|u| (s.number, u.slot, u.epoch, u.endpoint))).collect();
                    let Some((object, slot, epoch, owner)) = pick(&all, h) else { continue };
                    let own = bench.broker.clients.get(&id).and_then(|c| c.endpoint) == Some(owner);
                    let body = wire::SyncRef { object, slot, epoch: epoch.into() };
                    let kind = bench.ask(id, Kind::SYNC_CLOSE, body.as_bytes());
                    prop_assert_eq!(kind == Kind::OK, own);
                    if own {
                        let attached = bench.broker.clients.get(&id).and_then(|c| c.endpoint);
                        prop_assert!(attached.is_none() || bench.code(id, Kind::SYNC_CLOSE, body.as_bytes()) == Some(ErrorCode::CLOSED));
                    }
                }
                Step::SyncUnlink(c, name) => {
                    if let Some(id) = pick(&clients, c) {
                        bench.ask(id, Kind::SYNC_UNLINK, by_name(["a", "b", "c"][name as usize]).as_bytes());
                    }
                }
                Step::BlockCreate { client, name: n, size, rights, others, persistent, nonce } => {
                    let Some(id) = pick(&clients, client) else { continue };
                    let name = if n == 3 { Name::NONE } else { name(["a", "b", "c"][n as usize]) };
                    let body = wire::BlockCreate {
                        name,
                        size,
                        rights: Rights(rights),
                        others: Rights(others),
                        flags: persistent.into(),
                        nonce: nonce.into(),
                        ..wire::BlockCreate::new_zeroed()
                    };
                    bench.ask(id, Kind::BLOCK_CREATE, body.as_bytes());
                }
                Step::BlockOpen { client, name, rights, nonce } => {
                    let Some(id) = pick(&clients, client) else { continue };
                    let body = block_open(["a", "b", "c"][name as usize], Rights(rights), nonce.into());
                    bench.ask(id, Kind::BLOCK_OPEN, body.as_bytes());
                }
                Step::BlockClose(c, h) | Step::BlockAck(c, h) | Step::BlockResize(c, h, _) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let handles: Vec<u64> = bench.broker.books.handles.keys().copied().collect();
                    let handle = pick(&handles, h).unwrap_or(99_999);
                    let held = bench.broker.books.handles.get(&handle).and_then(|block| {
                        bench.broker.books.blocks[block].handles.get(handle)
                    });
                    let (left, owner) = held.map_or((None, 0), |h| (h.left, h.endpoint));
                    let own = bench.broker.clients.get(&id).and_then(|c| c.endpoint) == Some(owner);
                    let rights = Rights(left.unwrap_or(0));
                    let body = wire::BlockRights { handle, rights, reserved: 0 };
                    let kind = match step {
                        Step::BlockClose(..) => bench.ask(id, Kind::BLOCK_CLOSE, body.as_bytes()),
                        Step::BlockAck(..) => bench.ask(id, Kind::BLOCK_ACK, body.as_bytes()),
                        Step::BlockResize(_, _, size) => {
                            let body = wire::BlockResize { handle, size };
                            bench.ask(id, Kind::BLOCK_RESIZE, body.as_bytes());
                            continue;
                        }
                        _ => continue,
                    };
                    prop_assert_eq!(kind == Kind::OK, own);
                }
                Step::BlockGrant { client, block, whom, all, rights } => {
                    let Some(id) = pick(&clients, client) else { continue };
                    let blocks: Vec<u64> = bench.broker.books.blocks.keys().copied().collect();
                    let Some(whom) = pick(&known, whom) else { continue };
                    let body = wire::BlockGrant {
                        block: pick(&blocks, block).unwrap_or(0),
                        member: whom.member,
                        endpoint: if all { 0 } else { whom.endpoint },
                        rights: Rights(rights),
                        reserved: 0,
                    };
                    bench.ask(id, Kind::BLOCK_GRANT, body.as_bytes());
                }
                Step::BlockName(c, block, n) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let blocks: Vec<u64> = bench.broker.books.blocks.keys().copied().collect();
                    let at = ["a", "b", "c"][n as usize];
                    match pick(&blocks, block) {
                        Some(block) if block % 2 == 0 => {
                            let body = wire::BlockLink { block, name: name(at) };
                            bench.ask(id, Kind::BLOCK_LINK, body.as_bytes());
                        }
                        _ => drop(bench.ask(id, Kind::BLOCK_UNLINK, by_name(at).as_bytes())),
                    }
                }
                Step::Garbage(c, kind, body) => {
                    if let Some(id) = pick(&clients, c) {
                        bench.broker.packet(&mut bench.world, id, &reply::packet(Kind(kind), 9, &body));
                    }
                }
            }
            bench.effects();
            bench.check();
        }
        // Cut anywhere, the journal makes the books of some earlier moment: those of its whole lines.
        let cut = cut.index(bench.journal.len() + 1);
        let whole = bench.journal[..cut].iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let (torn, clean) = (lines::replay(&bench.journal[..cut]), lines::replay(&bench.journal[..whole]));
        prop_assert_eq!(torn.invalid_records, 0);
        prop_assert_eq!(torn.dropped, cut - whole);
        prop_assert_eq!(&torn.books, &clean.books);
        // A journal that is rewritten at any moment, and appended to since, makes the same books as the whole journal.
        let mut rewritten: Vec<u8> = lines::snapshot(&clean.books, Hex16::default(), 0).flatten().collect();
        rewritten.extend_from_slice(&bench.journal[whole..]);
        let rewritten = lines::replay(&rewritten);
        prop_assert_eq!((&rewritten.books, rewritten.dropped, rewritten.invalid_records), (bench.broker.books(), 0, 0));
        // In the end nothing leaks.
        for id in clients {
            bench.broker.hung_up(id);
        }
        for old in known {
            for process in owners(&bench, &old) {
                prop_assert!(bench.is_there(&old), "the end of a connection is not the end of a process");
                bench.process_ends(process);
            }
        }
        bench.effects();
        for key in bench.timers.keys().copied().collect::<Vec<_>>() {
            bench.time_is_over(key);
        }
        bench.broker.end_all();
        bench.effects();
        bench.check();
        let books = bench.broker.books();
        prop_assert!(books.endpoints.is_empty() && books.channels.is_empty() && books.listeners.is_empty());
        prop_assert!(books.syncs.values().all(|s| (s.persistent || s.bereaved) && s.users.is_empty()));
        prop_assert!(books.blocks.values().all(|b| b.persistent && b.handles.is_empty() && !b.name.0.is_none()));
        let stay = books.syncs.len() as u64 * PAGE as u64 + books.blocks.values().map(|b| b.span).sum::<u64>();
        prop_assert_eq!(books.segments.values().map(|s| s.arena.used()).sum::<u64>(), stay);
    }

    #[test]
    fn any_packet_is_answered_or_ends_the_connection(packet in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut bench = Bench::new(Limits::default());
        for id in [bench.client(HOST_MEMBER, 0), bench.client(VM, 0), bench.attach(0, "web").0] {
            bench.broker.packet(&mut bench.world, id, &packet);
            let answered = bench.effects().iter().any(|effect| match effect {
                Effect::Send { client, .. } | Effect::Inspect { client, .. } | Effect::Admin { client, .. } => *client == id,
                _ => false,
            });
            let silent = wire::split(&packet).is_some_and(|(header, body)| header.kind == Kind::JOIN && body.is_empty());
            prop_assert!(answered != silent);
        }
        bench.check();
    }

    #[test]
    fn any_damage_to_a_journal_is_survived(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bench = Bench::new(Limits::default());
        let (a, _) = bench.attach(0, "web");
        let (b, _) = bench.attach(VM, "web");
        bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
        bench.connect(b, "x", 1).unwrap();
        for (at, byte) in damage {
            let at = at.index(bench.journal.len());
            bench.journal[at] = byte;
        }
        let replayed = lines::replay(&bench.journal);
        let dumped: Vec<u8> = lines::snapshot(&replayed.books, Hex16::default(), 0).flatten().collect();
        prop_assert_eq!(lines::replay(&dumped).books, replayed.books);
    }
}
