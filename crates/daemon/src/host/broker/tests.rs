//! The state machine without sockets: any requests of any clients, and what must hold after each.

use super::super::config::{Limits, Memory};
use super::super::journal::{self, Replayed};
use super::super::record::{Record, Text};
use super::*;
use ginnel_layout::PAGE;
use ginnel_layout::segment::ARENA;
use ginnel_layout::wire::Rights;
use proptest::prelude::*;
use std::collections::BTreeSet;
use zerocopy::FromZeros;

/// Segment `broken` is; the others are not. Random numbers count.
struct TestWorld(u128);

impl World for TestWorld {
    fn is_broken(&mut self, segment: &Name) -> bool {
        segment.as_str() == "broken"
    }
    fn random(&mut self) -> [u8; 16] {
        self.0 += 1;
        self.0.to_le_bytes()
    }
    fn now(&mut self) -> u64 {
        1
    }
}

const SIZE: u64 = 4 << 20;
const VM: u32 = 1;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A request that is answered with a block.
trait Wish {
    fn packet(&self) -> (Kind, Vec<u8>);
}

impl Wish for wire::BlockCreate {
    fn packet(&self) -> (Kind, Vec<u8>) {
        (Kind::BLOCK_CREATE, self.as_bytes().to_vec())
    }
}

impl Wish for wire::BlockOpen {
    fn packet(&self) -> (Kind, Vec<u8>) {
        (Kind::BLOCK_OPEN, self.as_bytes().to_vec())
    }
}

impl Wish for wire::BlockResize {
    fn packet(&self) -> (Kind, Vec<u8>) {
        (Kind::BLOCK_RESIZE, self.as_bytes().to_vec())
    }
}

struct Bench {
    broker: Broker,
    world: TestWorld,
    journal: Vec<u8>,
    next: u64,
}

impl Bench {
    fn block(&mut self, id: ClientId, wish: &impl Wish) -> Result<wire::Block, ErrorCode> {
        let (kind, body) = wish.packet();
        match self.ask_all(id, kind, &body) {
            (Kind::BLOCK, body, _) => Ok(wire::body(&body).unwrap()),
            (_, body, _) => Err(wire::body::<wire::Error>(&body[..8]).unwrap().code),
        }
    }

    fn new(limits: Limits) -> Self {
        let mut broker = Broker::new(Books::default(), limits, 4, 0);
        let start = Record::Start {
            boot_id: Hex16([1; 16]),
            generation: 1,
            next_epoch: 1,
            next_listener: 1,
            next_channel: 1,
            next_object: 1,
        };
        assert!(broker.note(start));
        for (number, member) in [(0, "host"), (VM, "vm-a")] {
            assert!(broker.note(Record::Member {
                number,
                name: Text(name(member)),
                runtime: None,
                retired: false
            }));
        }
        for (segment, members) in [("web", vec![0, VM]), ("own", vec![0]), ("broken", vec![0])] {
            assert!(broker.note(Record::Segment {
                name: Text(name(segment)),
                uuid: Hex16([7; 16]),
                size: SIZE,
                members: members.into_iter().collect(),
                readers: BTreeSet::new(),
                memory: Memory::Dax,
                page: 4096,
                part: None,
                runtime: None,
            }));
        }
        let mut bench = Self { broker, world: TestWorld(0), journal: Vec::new(), next: 0 };
        bench.effects();
        bench
    }

    /// Takes the effects, writes the journal, and returns the rest.
    fn effects(&mut self) -> Vec<Effect> {
        let mut rest = Vec::new();
        for effect in self.broker.take_effects() {
            match effect {
                Effect::Record(record) => self.journal.extend(journal::line(&record)),
                other => {
                    check_packet(&other);
                    rest.push(other);
                }
            }
        }
        rest
    }

    fn client(&mut self, member: u32, uid: u32) -> ClientId {
        self.next += 1;
        let id = ClientId(self.next);
        let process = Process { pid: 100 + self.next as u32, started: 1 };
        self.broker.connected(id, Who { member, process, uid, groups: vec![uid] });
        if member == HOST_MEMBER {
            let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
            assert_eq!(self.ask(id, Kind::HELLO, hello.as_bytes()), Kind::HELLO_OK);
        }
        id
    }

    /// Sends a request; returns the kind of the answer.
    fn ask(&mut self, id: ClientId, kind: Kind, body: &[u8]) -> Kind {
        self.ask_all(id, kind, body).0
    }

    fn ask_all(&mut self, id: ClientId, kind: Kind, body: &[u8]) -> (Kind, Vec<u8>, Vec<Effect>) {
        self.broker.packet(&mut self.world, id, &reply::packet(kind, 9, body));
        let effects = self.effects();
        let answer = effects.iter().find_map(|effect| match effect {
            Effect::Send { client, packet, .. } if *client == id => {
                let (header, body) = wire::split(packet)?;
                (header.request == 9).then(|| (header.kind, body.to_vec()))
            }
            _ => None,
        });
        let (kind, body) = answer.expect("every request is answered");
        (kind, body, effects)
    }

    fn code(&mut self, id: ClientId, kind: Kind, body: &[u8]) -> Option<ErrorCode> {
        let (kind, body, _) = self.ask_all(id, kind, body);
        (kind == Kind::ERROR).then(|| wire::body::<wire::Error>(&body[..8]).unwrap().code)
    }

    fn attach(&mut self, member: u32, segment: &str) -> (ClientId, wire::Attached) {
        let id = self.client(member, 0);
        let (kind, body, _) = self.ask_all(id, Kind::ATTACH, attach(segment).as_bytes());
        assert_eq!(kind, Kind::ATTACHED);
        (id, wire::body(&body).unwrap())
    }

    fn connect(&mut self, id: ClientId, to: &str, nonce: u64) -> Result<wire::Channel, ErrorCode> {
        let (kind, body, _) = self.ask_all(id, Kind::CONNECT, connect(to, 4096, nonce).as_bytes());
        match kind {
            Kind::CHANNEL => Ok(wire::body(&body).unwrap()),
            _ => Err(wire::body::<wire::Error>(&body[..8]).unwrap().code),
        }
    }

    /// What must always hold.
    fn check(&self) {
        let books = self.broker.books();
        // Channels lie apart, inside their segment, and nothing else is taken.
        for segment in books.segments.values() {
            let mut blocks: Vec<(u64, u64)> = books
                .channels
                .values()
                .filter(|c| c.segment.0 == segment.name)
                .map(|c| (c.offset, c.offset + c.block_len()))
                .collect();
            let pages = books.syncs.values().filter(|s| s.segment.0 == segment.name);
            blocks.extend(pages.map(|s| (s.offset, s.offset + PAGE as u64)));
            let spans = books.blocks.values().filter(|b| b.segment.0 == segment.name);
            blocks.extend(spans.map(|b| (b.offset, b.offset + b.span)));
            blocks.sort_unstable();
            assert!(blocks.windows(2).all(|w| w[0].1 <= w[1].0), "overlap");
            assert!(blocks.iter().all(|b| b.0 >= ARENA && b.1 <= SIZE && b.0.is_multiple_of(PAGE as u64)));
            assert_eq!(segment.arena.used(), blocks.iter().map(|b| b.1 - b.0).sum::<u64>());
        }
        for channel in books.channels.values() {
            assert!(!channel.initiator.closed || !channel.acceptor.closed);
            for side in [channel.initiator, channel.acceptor] {
                let endpoint = books.endpoints.get(&side.endpoint).filter(|e| e.epoch == side.epoch);
                assert!(side.closed || endpoint.is_some_and(|e| e.channels.contains(&channel.number)));
            }
        }
        for object in books.syncs.values() {
            let stays = object.persistent || object.bereaved;
            assert!(!object.users.is_empty() || (stays && !object.name.0.is_none()));
            assert!(object.users.windows(2).all(|w| w[0].slot < w[1].slot));
            for user in &object.users {
                assert!(books.endpoints[&user.endpoint].syncs.contains(&(object.number, user.slot)));
            }
        }
        let handles: usize = books.endpoints.values().map(|e| e.syncs.len()).sum();
        assert_eq!(handles, books.syncs.values().map(|s| s.users.len()).sum::<usize>());
        for block in books.blocks.values() {
            assert!(!block.handles.is_empty() || !block.name.0.is_none());
            assert!(block.size <= block.span && block.span.is_multiple_of(PAGE as u64));
            let owned = books.owner_of(block).is_some_and(|owner| owner.blocks.contains(&block.number));
            assert!(owned || block.persistent || block.name.0.is_none());
            for handle in &block.handles {
                assert_eq!(books.handles[&handle.number], block.number);
                assert_eq!(books.endpoints[&handle.endpoint].handles[&handle.nonce], handle.number);
                // Who has it for himself is the only one who writes, as far as mappings go.
                if handle.rights == Rights::WRITE_EXCLUSIVE.0 {
                    assert_eq!(block.handles.iter().filter(|h| Rights(h.rights).may_write()).count(), 1);
                }
                assert!(handle.left.is_none_or(|left| left < handle.rights));
            }
        }
        assert_eq!(books.handles.len(), books.blocks.values().map(|b| b.handles.len()).sum::<usize>());
        assert_eq!(books.handles.len(), books.endpoints.values().map(|e| e.handles.len()).sum::<usize>());
        for ((segment, name), block) in &books.block_names {
            assert_eq!((*segment, *name), (books.blocks[block].segment.0, books.blocks[block].name.0));
        }
        for endpoint in books.endpoints.values() {
            let bytes: u64 = endpoint.blocks.iter().map(|block| books.blocks[block].span).sum();
            assert_eq!(endpoint.block_bytes, bytes);
        }
        for ((segment, name), object) in &books.sync_names {
            assert_eq!((*segment, *name), (books.syncs[object].segment.0, books.syncs[object].name.0));
        }
        for endpoint in books.endpoints.values() {
            assert!(endpoint.channels.iter().all(|c| books.channels.contains_key(c)));
            assert!(endpoint.listeners.iter().all(|l| books.listeners[l].endpoint == endpoint.number));
            assert!((1..4).contains(&endpoint.vector));
        }
        for (key, listener) in &books.names {
            let listener = &books.listeners[listener];
            assert_eq!(*key, (listener.segment, listener.name));
            let waiting =
                books.channels.values().filter(|c| c.listener == listener.number && !c.accepted).count();
            assert_eq!(listener.waiting as usize, waiting);
        }
        assert_eq!(books.names.len(), books.listeners.len());
        for member in books.members.values() {
            let endpoints = books.endpoints.values().filter(|e| e.member == member.number).count();
            let channels: Vec<u64> = books
                .channels
                .values()
                .filter(|c| c.initiator.member == member.number)
                .map(|c| c.block_len())
                .collect();
            assert_eq!(member.tally.endpoints as usize, endpoints);
            assert_eq!(
                (member.tally.channels as usize, member.tally.bytes),
                (channels.len(), channels.iter().sum())
            );
            let pages = books.syncs.values().filter(|s| s.member == member.number).map(|_| PAGE as u64);
            let spans = books.blocks.values().filter(|b| b.member == member.number).map(|b| b.span);
            let charged: Vec<u64> = pages.chain(spans).collect();
            assert_eq!(
                (member.tally.blocks as usize, member.tally.block_bytes),
                (charged.len(), charged.iter().sum())
            );
        }
        // The journal makes the same books, and so does a dump of them.
        let Replayed { books: replayed, dropped, misfits, .. } = journal::replay(&self.journal);
        assert_eq!((&replayed, dropped, misfits), (books, 0, 0));
        let dumped: Vec<u8> = books.dump().flat_map(|record| journal::line(&record)).collect();
        assert_eq!(&journal::replay(&dumped).books, books);
    }
}

/// A packet announces the descriptors that come with it, no more and no less.
fn check_packet(effect: &Effect) {
    let Effect::Send { packet, fds, .. } = effect else { return };
    assert!(packet.len() <= wire::MAX_PACKET);
    let (header, body) = wire::split(packet).unwrap();
    let announced = match header.kind {
        Kind::ATTACHED => wire::body::<wire::Attached>(body).unwrap().fds.0,
        Kind::CHANNEL | Kind::INCOMING => {
            let channel = wire::body::<wire::Channel>(body).unwrap();
            assert_eq!(channel.bell_kind == BellKind::EVENT, channel.fds.0 & Fds::PEER_EVENT != 0);
            channel.fds.0
        }
        Kind::BELL_OK => wire::body::<wire::BellOk>(body).unwrap().fds.0,
        _ => 0,
    };
    assert_eq!(announced.count_ones() as usize, fds.len(), "{:?}", header.kind);
}

fn attach(segment: &str) -> wire::Attach {
    wire::Attach { segment: name(segment), name: name("test"), ..wire::Attach::new_zeroed() }
}

fn listen(at: &str) -> wire::Listen {
    wire::Listen { name: name(at), kind: 1, backlog: 0, capacity: 0 }
}

fn connect(to: &str, capacity: u64, nonce: u64) -> wire::Connect {
    wire::Connect { name: name(to), kind: 1, reserved: 0, capacity, nonce }
}

fn sync_open(at: &str, kind: u32, limit: u32, nonce: u64) -> wire::SyncOpen {
    let flags = wire::SyncOpen::CREATE;
    wire::SyncOpen { name: name(at), kind, limit, initial: 0, flags, nonce }
}

fn block_create(at: &str, size: u64, others: Rights, nonce: u64) -> wire::BlockCreate {
    let name = if at.is_empty() { Name::NONE } else { name(at) };
    let rights = Rights::READ_WRITE;
    wire::BlockCreate { name, size, rights, others, nonce, ..wire::BlockCreate::new_zeroed() }
}

fn block_open(at: &str, rights: Rights, nonce: u64) -> wire::BlockOpen {
    wire::BlockOpen { name: name(at), rights, reserved: 0, nonce }
}

fn by_name(at: &str) -> wire::ByName {
    wire::ByName { name: name(at) }
}

fn reference(channel: u64) -> wire::ChannelRef {
    wire::ChannelRef { channel }
}

/// One step of a random history. Clients and channels are chosen by index among those that there are.
#[derive(Clone, Debug)]
enum Step {
    Attach(bool),
    Return(usize),
    HangUp(usize),
    Lose(usize),
    ProcessEnds(usize),
    VmEnds,
    Listen(usize, u8),
    Unlisten(usize),
    Connect(usize, u8, u64, u8),
    Accept(usize, usize),
    Close(usize, usize),
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
        1 => n().prop_map(Step::Return),
        1 => n().prop_map(Step::HangUp),
        1 => n().prop_map(Step::Lose),
        1 => n().prop_map(Step::ProcessEnds),
        1 => Just(Step::VmEnds),
        3 => (n(), 0..3u8).prop_map(|(c, l)| Step::Listen(c, l)),
        1 => n().prop_map(Step::Unlisten),
        6 => (n(), 0..3u8, 0..300_000u64, 0..6u8).prop_map(|(c, l, s, nonce)| Step::Connect(c, l, s, nonce)),
        3 => (n(), n()).prop_map(|(c, h)| Step::Accept(c, h)),
        5 => (n(), n()).prop_map(|(c, h)| Step::Close(c, h)),
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

fn pick<T: Copy>(all: &[T], index: usize) -> Option<T> {
    (!all.is_empty()).then(|| all[index % all.len()])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_clients_do_the_books_hold_and_the_journal_makes_them_again(
        steps in prop::collection::vec(step(), 1..120),
        cut in any::<prop::sample::Index>(),
    ) {
        let limits = Limits { backlog: 3, ..Limits::default() };
        let mut bench = Bench::new(limits);
        let mut clients: Vec<ClientId> = Vec::new();
        // Books after each line of the journal, for looking at every point where it may be cut.
        let mut known: Vec<wire::Attached> = Vec::new();
        for step in steps {
            match step {
                Step::Attach(vm) => {
                    let (id, attached) = bench.attach(if vm { VM } else { 0 }, "web");
                    clients.push(id);
                    known.push(attached);
                }
                Step::Return(n) => {
                    let Some(old) = pick(&known, n) else { continue };
                    let id = bench.client(old.member, 0);
                    // As the same process, if it is known.
                    let process = bench.broker.books.endpoints.get(&old.endpoint).map(|e| e.process);
                    if let (Some(client), Some(process)) = (bench.broker.clients.get_mut(&id), process) {
                        client.who.process = process;
                    }
                    let wish = wire::Attach { endpoint: old.endpoint, epoch: old.epoch, token: old.token, ..attach("web") };
                    let there = bench.broker.books.endpoints.get(&old.endpoint).is_some_and(|e| e.epoch == old.epoch);
                    let kind = bench.ask(id, Kind::ATTACH, wish.as_bytes());
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
                Step::ProcessEnds(n) => {
                    if let Some(old) = pick(&known, n) {
                        bench.broker.endpoint_died(old.endpoint, old.epoch);
                    }
                }
                Step::VmEnds => {
                    bench.broker.member_died(VM);
                    prop_assert!(bench.broker.books.endpoints.values().all(|e| e.member != VM));
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
                    let wish = wire::Listening { listener: own.unwrap_or(999), reserved: 0 };
                    let kind = bench.ask(id, Kind::UNLISTEN, wish.as_bytes());
                    prop_assert_eq!(kind == Kind::OK, own.is_some());
                }
                Step::Connect(c, l, capacity, nonce) => {
                    if let Some(id) = pick(&clients, c) {
                        let wish = connect(["a", "b", "c@vm-a"][l as usize], capacity, nonce.into());
                        bench.ask(id, Kind::CONNECT, wish.as_bytes());
                    }
                }
                Step::Accept(c, h) | Step::Close(c, h) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let channels: Vec<u64> = bench.broker.books.channels.keys().copied().collect();
                    let kind = if matches!(step, Step::Accept(..)) { Kind::ACCEPTED } else { Kind::CLOSE };
                    bench.ask(id, kind, reference(pick(&channels, h).unwrap_or(77)).as_bytes());
                }
                Step::SyncOpen { client, name, kind, flags, nonce } => {
                    let Some(id) = pick(&clients, client) else { continue };
                    let limit = if kind == 4 { 3 } else { 0 };
                    let wish = wire::SyncOpen { flags, ..sync_open(["a", "b", "c"][name as usize], kind, limit, nonce.into()) };
                    bench.ask(id, Kind::SYNC_OPEN, wish.as_bytes());
                }
                Step::SyncClose(c, h) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let all: Vec<(u64, u32, u16, u32)> = bench.broker.books.syncs.values()
                        .flat_map(|s| s.users.iter().map(|u| (s.number, u.slot, u.epoch, u.endpoint))).collect();
                    let Some((object, slot, epoch, owner)) = pick(&all, h) else { continue };
                    let own = bench.broker.clients.get(&id).and_then(|c| c.endpoint) == Some(owner);
                    let wish = wire::SyncRef { object, slot, epoch: epoch.into() };
                    let kind = bench.ask(id, Kind::SYNC_CLOSE, wish.as_bytes());
                    prop_assert_eq!(kind == Kind::OK, own);
                    if own {
                        let attached = bench.broker.clients.get(&id).and_then(|c| c.endpoint);
                        prop_assert!(attached.is_none() || bench.code(id, Kind::SYNC_CLOSE, wish.as_bytes()) == Some(ErrorCode::CLOSED));
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
                    let wish = wire::BlockCreate {
                        name,
                        size,
                        rights: Rights(rights),
                        others: Rights(others),
                        flags: persistent.into(),
                        nonce: nonce.into(),
                        ..wire::BlockCreate::new_zeroed()
                    };
                    bench.ask(id, Kind::BLOCK_CREATE, wish.as_bytes());
                }
                Step::BlockOpen { client, name, rights, nonce } => {
                    let Some(id) = pick(&clients, client) else { continue };
                    let wish = block_open(["a", "b", "c"][name as usize], Rights(rights), nonce.into());
                    bench.ask(id, Kind::BLOCK_OPEN, wish.as_bytes());
                }
                Step::BlockClose(c, h) | Step::BlockAck(c, h) | Step::BlockResize(c, h, _) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let handles: Vec<u64> = bench.broker.books.handles.keys().copied().collect();
                    let handle = pick(&handles, h).unwrap_or(99_999);
                    let held = bench.broker.books.handles.get(&handle).and_then(|block| {
                        bench.broker.books.blocks[block].handles.iter().find(|h| h.number == handle)
                    });
                    let (left, owner) = held.map_or((None, 0), |h| (h.left, h.endpoint));
                    let own = bench.broker.clients.get(&id).and_then(|c| c.endpoint) == Some(owner);
                    let rights = Rights(left.unwrap_or(0));
                    let wish = wire::BlockRights { handle, rights, reserved: 0 };
                    let kind = match step {
                        Step::BlockClose(..) => bench.ask(id, Kind::BLOCK_CLOSE, wish.as_bytes()),
                        Step::BlockAck(..) => bench.ask(id, Kind::BLOCK_ACK, wish.as_bytes()),
                        Step::BlockResize(_, _, size) => {
                            let wish = wire::BlockResize { handle, size };
                            bench.ask(id, Kind::BLOCK_RESIZE, wish.as_bytes());
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
                    let wish = wire::BlockGrant {
                        block: pick(&blocks, block).unwrap_or(0),
                        member: whom.member,
                        endpoint: if all { 0 } else { whom.endpoint },
                        rights: Rights(rights),
                        reserved: 0,
                    };
                    bench.ask(id, Kind::BLOCK_GRANT, wish.as_bytes());
                }
                Step::BlockName(c, block, n) => {
                    let Some(id) = pick(&clients, c) else { continue };
                    let blocks: Vec<u64> = bench.broker.books.blocks.keys().copied().collect();
                    let at = ["a", "b", "c"][n as usize];
                    match pick(&blocks, block) {
                        Some(block) if block % 2 == 0 => {
                            let wish = wire::BlockLink { block, name: name(at) };
                            bench.ask(id, Kind::BLOCK_LINK, wish.as_bytes());
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
        let (torn, clean) = (journal::replay(&bench.journal[..cut]), journal::replay(&bench.journal[..whole]));
        prop_assert_eq!(torn.misfits, 0);
        prop_assert_eq!(torn.dropped, cut - whole);
        prop_assert_eq!(&torn.books, &clean.books);
        // Rewritten at any moment, and appended to since, it makes the same books as all of it.
        let mut rewritten: Vec<u8> = clean.books.dump().flat_map(|record| journal::line(&record)).collect();
        rewritten.extend_from_slice(&bench.journal[whole..]);
        let rewritten = journal::replay(&rewritten);
        prop_assert_eq!((&rewritten.books, rewritten.dropped, rewritten.misfits), (bench.broker.books(), 0, 0));
        // In the end nothing leaks.
        for id in clients {
            bench.broker.hung_up(id);
        }
        for old in known {
            bench.broker.endpoint_died(old.endpoint, old.epoch);
        }
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
            prop_assert!(answered);
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
        let replayed = journal::replay(&bench.journal);
        let dumped: Vec<u8> = replayed.books.dump().flat_map(|record| journal::line(&record)).collect();
        prop_assert_eq!(journal::replay(&dumped).books, replayed.books);
    }
}

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
    bench.broker.hung_up(a);
    assert_eq!(kinds(&bench.broker.take_effects()), "mm-J", "the other side has closed: nobody is woken");
}

#[test]
fn who_may_not_is_told_why() {
    let mut bench = Bench::new(Limits::default());
    bench.broker.set_access(name("own"), Access { users: [5].into(), groups: [6].into() });
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
fn limits_are_limits() {
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
fn a_name_at_a_member_is_that_members() {
    let mut bench = Bench::new(Limits::default());
    let (host, _) = bench.attach(0, "web");
    let (vm, _) = bench.attach(VM, "web");
    assert_eq!(bench.code(host, Kind::LISTEN, listen("cp@vm-a").as_bytes()), Some(ErrorCode::DENIED));
    assert_eq!(bench.code(vm, Kind::LISTEN, listen("cp@vm-a").as_bytes()), None);
    assert_eq!(bench.code(host, Kind::LISTEN, listen("cp@host").as_bytes()), None);
}

#[test]
fn doorbells_are_named_as_the_caller_can_use_them() {
    let mut bench = Bench::new(Limits::default());
    let qemu = Process { pid: 1, started: 1 };
    let knows: BTreeSet<u32> = [0].into();
    assert!(bench.broker.note(Record::Joined { member: VM, qemu, knows }));
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
        memory: Memory::Dax,
        page: 2 << 20,
        part: None,
        runtime: None,
    }));
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
    // A guest that only polls needs no bell.
    assert!(bench.broker.note(Record::Session { member: 2, boot_id: Hex16([2; 16]), interrupts: false }));
    assert_eq!(bench.connect(host, "l", 2).unwrap().bell_kind, BellKind::NONE);
    bench.effects();
    bench.check();
}

#[test]
fn only_the_same_process_with_its_token_comes_back() {
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
    let mut try_as = |wish: wire::Attach, process: Option<Process>, member: u32| {
        let id = bench.client(member, 0);
        if let Some(process) = process {
            bench.broker.clients.get_mut(&id).unwrap().who.process = process;
        }
        bench.code(id, Kind::ATTACH, wish.as_bytes())
    };
    let stale = Some(ErrorCode::STALE);
    assert_eq!(try_as(back, None, 0), stale, "another process");
    assert_eq!(try_as(back, Some(process), VM), stale, "another member");
    assert_eq!(try_as(wire::Attach { token: [9; 16], ..back }, Some(process), 0), stale);
    assert_eq!(try_as(wire::Attach { epoch: back.epoch + 1, ..back }, Some(process), 0), stale);
    assert_eq!(try_as(wire::Attach { endpoint: 77, ..back }, Some(process), 0), stale);
    assert_eq!(try_as(wire::Attach { segment: name("own"), ..back }, Some(process), 0), stale);
    assert_eq!(try_as(back, Some(process), 0), None);
}

#[test]
fn a_reused_number_is_not_taken_for_its_predecessor() {
    let mut bench = Bench::new(Limits::default());
    let (a, attached) = bench.attach(0, "web");
    let (b, old) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    bench.connect(b, "x", 1).unwrap();
    let process = bench.broker.clients[&a].who.process;
    bench.broker.lost(a);
    bench.broker.hung_up(b);
    let (_, new) = bench.attach(0, "web");
    assert_eq!(new.endpoint, old.endpoint);
    // Announced again, the channel is the dead one's, and there is nobody to ring.
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
fn unlistening_refuses_those_who_wait() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (b, attached) = bench.attach(0, "web");
    bench.ask(a, Kind::LISTEN, listen("x").as_bytes());
    bench.connect(b, "x", 1).unwrap();
    let wish = wire::Listening { listener: 1, reserved: 0 };
    let (_, _, effects) = bench.ask_all(a, Kind::UNLISTEN, wish.as_bytes());
    let marks =
        effects.iter().filter(|e| matches!(e, Effect::Mark { state: SideState::FINISHED, .. })).count();
    assert_eq!(marks, 2);
    assert!(effects.contains(&Effect::Ring { member: 0, vector: attached.vector }));
    assert_eq!(bench.connect(b, "x", 2).unwrap_err(), ErrorCode::REFUSED);
    bench.check();
}

#[test]
fn a_slot_is_written_before_it_is_told_and_taken_back_when_its_user_dies() {
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
    // Asked again it is the same; asked anew, by anybody, another slot.
    let (_, body, _) = bench.ask_all(a, Kind::SYNC_OPEN, open.as_bytes());
    assert_eq!(wire::body::<wire::Sync>(&body).unwrap().slot, 0);
    let (_, body, _) = bench.ask_all(b, Kind::SYNC_OPEN, sync_open("m", 1, 0, 1).as_bytes());
    let second: wire::Sync = wire::body(&body).unwrap();
    assert_eq!((second.object, second.slot, second.epoch, second.created), (first.object, 1, 2, 0));
    assert_eq!(second.bell, VM << 16 | other.vector);
    assert_eq!(bench.broker.books.sync_bell(first.object, 1), Some((VM, other.vector)));
    // Refused, and each for a reason of its own.
    let wishes = [
        (sync_open("m", 2, 0, 9), ErrorCode::KIND),
        (sync_open("m", 9, 0, 9), ErrorCode::INVALID),
        (wire::SyncOpen { flags: 3, ..sync_open("m", 1, 0, 9) }, ErrorCode::IN_USE),
        (wire::SyncOpen { flags: 0, ..sync_open("n", 1, 0, 9) }, ErrorCode::NOT_FOUND),
        (sync_open("n", 5, 64, 9), ErrorCode::INVALID),
        (sync_open("n", 1, 1, 9), ErrorCode::INVALID),
    ];
    for (wish, code) in wishes {
        assert_eq!(bench.code(a, Kind::SYNC_OPEN, wish.as_bytes()), Some(code), "{wish:?}");
    }
    assert_eq!(bench.code(b, Kind::SYNC_UNLINK, by_name("m").as_bytes()), Some(ErrorCode::DENIED));
    bench.check();
    bench.broker.hung_up(a);
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
fn an_object_has_sixty_three_users_and_an_endpoint_its_handles() {
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
fn a_doorbell_from_shared_memory_is_rung_only_among_members() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.attach(0, "web");
    let (own, _) = bench.attach(0, "own");
    let bell = |member: u32, vector: u32| wire::BellOf { bell: member << 16 | vector, reserved: 0 };
    let (kind, body, _) = bench.ask_all(a, Kind::BELL, bell(VM, 3).as_bytes());
    let answer: wire::BellOk = wire::body(&body).unwrap();
    assert_eq!((kind, answer.kind, answer.fds), (Kind::BELL_OK, BellKind::EVENT, Fds(Fds::PEER_EVENT)));
    for (client, wish) in [(a, bell(VM, 0)), (a, bell(VM, 4)), (a, bell(7, 1)), (own, bell(VM, 1))] {
        assert_eq!(bench.code(client, Kind::BELL, wish.as_bytes()), Some(ErrorCode::NOT_FOUND), "{wish:?}");
    }
}

#[test]
fn a_block_is_opened_with_what_its_owner_grants() {
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
    // Granted to one endpoint, to its member, and taken back.
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
    // Nobody is alone before the holder has heard of it.
    let close = wire::BlockRights { handle: made.handle, rights: R::NONE, reserved: 0 };
    assert_eq!(bench.code(b, Kind::BLOCK_CLOSE, close.as_bytes()), Some(ErrorCode::CLOSED), "another's");
    assert_eq!(bench.code(a, Kind::BLOCK_CLOSE, close.as_bytes()), None);
    assert_eq!(bench.code(a, Kind::BLOCK_CLOSE, close.as_bytes()), Some(ErrorCode::CLOSED), "freed twice");
    assert_eq!(bench.block(a, &block_open("x", R::WRITE_EXCLUSIVE, 4)).unwrap_err(), ErrorCode::BUSY);
    assert_eq!(bench.code(b, Kind::BLOCK_ACK, left.as_bytes()), None);
    let alone = bench.block(a, &block_open("x", R::WRITE_EXCLUSIVE, 4)).unwrap();
    assert_eq!(bench.block(a, &block_open("x", R::READ_WRITE, 5)).unwrap_err(), ErrorCode::BUSY);
    // Longer where there is room, shorter when nobody else has it.
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
    // The owner's end takes the names along, and the memory stays for who has it open.
    bench.broker.hung_up(a);
    bench.effects();
    bench.check();
    assert_eq!(bench.block(b, &block_open("x", R::READ, 9)).unwrap_err(), ErrorCode::NOT_FOUND);
    assert_eq!(bench.broker.books.segments[&name("web")].arena.used(), 12288);
    bench.broker.hung_up(b);
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
    bench.broker.hung_up(a);
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
    bench.broker.hung_up(b);
    bench.effects();
    bench.check();
    assert!(bench.broker.books.blocks.is_empty());
}

#[test]
fn each_quota_of_blocks_is_one() {
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
fn who_comes_back_is_told_again_what_it_has_lost() {
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
