//! Tests of the state machine without sockets. `Bench` sends requests, and checks what must always hold.

use super::super::account::{Account, Tally};
use super::super::config::{Limits, MAX_HOLDS, MAX_OWNERS, MemoryKind};
use super::super::index::Index;
use super::super::journal::{self, Replayed};
use super::super::objects::block::{Block, BlockGrant};
use super::super::objects::channel;
use super::super::record::{Record, Text};
use super::super::relayed::Reason;
use super::*;
use ginnel_layout::PAGE;
use ginnel_layout::segment::ARENA;
use ginnel_layout::wire::{Fds, Rights};
use proptest::prelude::*;
use std::collections::BTreeSet;
use zerocopy::{FromZeros, IntoBytes};

mod accounts;
mod boards;
mod costs;
mod endpoints;
mod history;
mod holds;
mod numbers;
mod objects;
mod owners;
mod sockets;

/// A world in which only the segment `broken` is broken. Its random numbers are consecutive.
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
trait BlockRequest {
    fn packet(&self) -> (Kind, Vec<u8>);
}

impl BlockRequest for wire::BlockCreate {
    fn packet(&self) -> (Kind, Vec<u8>) {
        (Kind::BLOCK_CREATE, self.as_bytes().to_vec())
    }
}

impl BlockRequest for wire::BlockOpen {
    fn packet(&self) -> (Kind, Vec<u8>) {
        (Kind::BLOCK_OPEN, self.as_bytes().to_vec())
    }
}

impl BlockRequest for wire::BlockResize {
    fn packet(&self) -> (Kind, Vec<u8>) {
        (Kind::BLOCK_RESIZE, self.as_bytes().to_vec())
    }
}

struct Bench {
    broker: Broker,
    world: TestWorld,
    journal: Vec<u8>,
    next: u64,
    /// The holds whose timers the server runs, with the epochs of their endpoints.
    timers: BTreeMap<(u32, Hex16), u32>,
}

impl Bench {
    fn block(&mut self, id: ClientId, body: &impl BlockRequest) -> Result<wire::Block, ErrorCode> {
        let (kind, body) = body.packet();
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
            epochs: Vec::new(),
            format: journal::FORMAT,
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
            let sharers = members.clone();
            assert!(broker.note(Record::Segment {
                name: Text(name(segment)),
                uuid: Hex16([7; 16]),
                size: SIZE,
                members: members.into_iter().collect(),
                readers: BTreeSet::new(),
                memory: MemoryKind::Dax,
                page: 4096,
                part: None,
                runtime: None,
            }));
            for member in sharers {
                let vectors = broker.books.allot(&name(segment), member, broker.vectors);
                assert!(broker.note(Record::Vectors { segment: Text(name(segment)), member, vectors }));
            }
        }
        let mut bench =
            Self { broker, world: TestWorld(0), journal: Vec::new(), next: 0, timers: BTreeMap::new() };
        bench.effects();
        bench
    }

    /// Takes the effects, writes the journal, and returns the rest.
    fn effects(&mut self) -> Vec<Effect> {
        let mut rest = Vec::new();
        let mut effects = self.broker.take_effects();
        while self.broker.tell_revoked(|_| true) {}
        self.broker.end_some();
        effects.extend(self.broker.take_effects());
        for effect in effects {
            match effect {
                Effect::Record(record) => self.journal.extend(journal::line(&record)),
                Effect::TimeHold { endpoint, epoch, token, .. } => {
                    self.timers.insert((endpoint, token), epoch);
                }
                Effect::ForgetHold { endpoint, token } => drop(self.timers.remove(&(endpoint, token))),
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
        self.client_of(id, process, member, uid)
    }

    /// Connects a particular process.
    fn client_as(&mut self, process: Process, member: u32) -> ClientId {
        self.next += 1;
        self.client_of(ClientId(self.next), process, member, 0)
    }

    fn client_of(&mut self, id: ClientId, process: Process, member: u32, uid: u32) -> ClientId {
        self.broker.connected(id, Who { member, process, image: None, uid, groups: vec![uid] });
        if member == HOST_MEMBER {
            let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
            assert_eq!(self.ask(id, Kind::HELLO, hello.as_bytes()), Kind::HELLO_OK);
        }
        id
    }

    /// Sends a request, and returns the kind of the answer.
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

    /// Ends a process with all of its connections, and reports it as the server does.
    fn process_ends(&mut self, process: Process) {
        let own = self.broker.clients.iter().filter(|(_, client)| client.who.process == process);
        for id in own.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.broker.hung_up(id);
        }
        let owned = self.broker.books.endpoints.values().filter(|e| e.owners.contains(&process));
        for (number, epoch) in owned.map(|e| (e.number, e.epoch)).collect::<Vec<_>>() {
            self.broker.owner_ended(number, epoch, process);
        }
    }

    /// Reports the end of a hold's time as the server does.
    fn time_is_over(&mut self, key: (u32, Hex16)) {
        if let Some(epoch) = self.timers.remove(&key) {
            self.broker.hold_over(key.0, epoch, key.1);
        }
    }

    /// Ends the process that has opened a connection.
    fn ends(&mut self, id: ClientId) {
        let process = self.process_of(id);
        self.process_ends(process);
    }

    fn process_of(&self, id: ClientId) -> Process {
        self.broker.clients[&id].who.process
    }

    fn is_there(&self, attached: &wire::Attached) -> bool {
        self.broker
            .books
            .endpoints
            .get(&attached.endpoint)
            .is_some_and(|e| e.epoch == attached.epoch && !e.is_ending)
    }

    fn connect(&mut self, id: ClientId, to: &str, nonce: u64) -> Result<wire::Channel, ErrorCode> {
        let (kind, body, _) = self.ask_all(id, Kind::CONNECT, connect(to, 4096, nonce).as_bytes());
        match kind {
            Kind::CHANNEL => Ok(wire::body(&body).unwrap()),
            _ => Err(wire::body::<wire::Error>(&body[..8]).unwrap().code),
        }
    }

    /// Checks what must always hold.
    fn check(&self) {
        let books = self.broker.books();
        // Channels do not overlap and lie inside their segment, and nothing else is taken.
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
            let boards = books.boards.all().filter(|b| b.segment.0 == segment.name);
            blocks.extend(boards.map(|b| (b.offset, b.offset + PAGE as u64)));
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
        for board in books.boards.all() {
            let lives = books.endpoints.get(&board.endpoint).is_some_and(|e| e.epoch == board.epoch);
            let mut sides = books.channels.values().flat_map(|c| [c.initiator, c.acceptor]);
            assert!(lives || sides.any(|s| (s.endpoint, s.epoch) == (board.endpoint, board.epoch)));
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
            for handle in block.handles.iter() {
                assert_eq!(books.handles[&handle.number], block.number);
                assert_eq!(books.endpoints[&handle.endpoint].handles[&handle.nonce], handle.number);
                // A holder with exclusive access has the only mapping that can write.
                if handle.rights == Rights::WRITE_EXCLUSIVE.0 {
                    assert_eq!(block.handles.iter().filter(|h| Rights(h.rights).may_write()).count(), 1);
                }
                assert!(handle.left.is_none_or(|left| left < handle.rights));
            }
            for grant in block.grants.iter().filter(|grant| grant.epoch != 0) {
                let whom = books.endpoints.get(&grant.endpoint).filter(|e| e.epoch == grant.epoch);
                assert!(whom.is_some_and(|e| e.granted.contains(&block.number)), "a grant to nobody");
            }
        }
        let left = books.blocks.values().flat_map(|b| b.handles.iter()).filter(|h| h.left.is_some());
        // Nobody is told of a handle that is about to be given back with its endpoint.
        let left = left.filter(|h| !books.endpoints[&h.endpoint].is_ending);
        let left: BTreeSet<(u32, u64)> = left.map(|h| (h.endpoint, h.number)).collect();
        assert_eq!(self.broker.revocations.all(), left, "each revocation is remembered once");
        assert_eq!(books.handles.len(), books.blocks.values().map(|b| b.handles.len()).sum::<usize>());
        assert_eq!(books.handles.len(), books.endpoints.values().map(|e| e.handles.len()).sum::<usize>());
        for ((segment, name), block) in &books.block_names {
            assert_eq!((*segment, *name), (books.blocks[block].segment.0, books.blocks[block].name.0));
        }
        assert_eq!(books.index, Index::of(books.endpoints.values()));
        for endpoint in books.endpoints.values() {
            let opened = books.channels.values().map(|c| (c.nonce, c.number, c.initiator));
            let opened = opened.filter(|(.., side)| side.endpoint == endpoint.number && !side.closed);
            assert_eq!(endpoint.opened, opened.map(|(nonce, number, _)| (nonce, number)).collect());
            let waiting = books.channels.values().filter(|c| !c.accepted && !c.acceptor.closed);
            let waiting = waiting.filter(|c| c.acceptor.endpoint == endpoint.number);
            assert_eq!(endpoint.waiting, waiting.map(|c| (c.listener, c.number)).collect());
            let slots = books.syncs.values().flat_map(|s| s.users.iter().map(|user| (s.number, user)));
            let slots = slots.filter(|(_, user)| user.endpoint == endpoint.number);
            assert_eq!(endpoint.slots, slots.map(|(n, user)| (user.nonce, (n, user.slot))).collect());
            let grants = |block: &&Block| block.grants.iter().any(|g| g.endpoint == endpoint.number);
            assert_eq!(endpoint.granted, books.blocks.values().filter(grants).map(|b| b.number).collect());
            let bytes: u64 = endpoint.blocks.iter().map(|block| books.blocks[block].span).sum();
            assert_eq!(endpoint.block_bytes, bytes);
        }
        for ((segment, name), object) in &books.sync_names {
            assert_eq!((*segment, *name), (books.syncs[object].segment.0, books.syncs[object].name.0));
        }
        let holds =
            books.endpoints.values().flat_map(|e| e.holds.keys().map(|&token| ((e.number, token), e.epoch)));
        assert_eq!(self.timers, holds.collect(), "each hold ends at some time");
        // Connections and endpoints refer to each other, and an endpoint without owners has a connection or is held.
        for (number, connections) in &self.broker.attached {
            assert!(!connections.is_empty() && books.endpoints.contains_key(number));
            assert!(connections.iter().all(|id| self.broker.clients[id].endpoint == Some(*number)));
        }
        for (id, client) in &self.broker.clients {
            assert!(client.endpoint.is_none_or(|number| self.broker.attached[&number].contains(id)));
        }
        for (number, process) in &self.broker.unwatched {
            assert!(books.endpoints[number].owners.contains(process));
        }
        for endpoint in books.endpoints.values() {
            assert!(endpoint.owners.len() <= MAX_OWNERS);
            assert!(
                endpoint.is_ending
                    || !endpoint.owners.is_empty()
                    || self.broker.has_connection(endpoint.number)
                    || endpoint.is_held()
            );
            assert!(endpoint.holds.len() <= MAX_HOLDS && !(endpoint.is_ending && endpoint.is_held()));
            let ending = endpoint.blocks.iter().filter(|b| {
                let block = &books.blocks[b];
                !block.persistent && !block.name.0.is_none()
            });
            assert!(ending.eq(&endpoint.ending_names));
            assert!(endpoint.channels.iter().all(|c| books.channels.contains_key(c)));
            assert!(endpoint.listeners.iter().all(|l| books.listeners[l].endpoint == endpoint.number));
            assert!(books.vectors_of(&endpoint.segment, endpoint.member).contains(&endpoint.vector));
        }
        for (key, listener) in &books.names {
            let listener = &books.listeners[listener];
            assert_eq!(*key, (listener.segment, listener.name));
            let waiting =
                books.channels.values().filter(|c| c.listener == listener.number && !c.accepted).count();
            assert_eq!(listener.waiting as usize, waiting);
        }
        assert_eq!(books.names.len(), books.listeners.len());
        // Each account is charged for what exists, and for nothing else.
        let mut charges: BTreeMap<Account, Tally> = BTreeMap::new();
        for endpoint in books.endpoints.values() {
            charges.entry(endpoint.account()).or_default().endpoints += 1;
            charges.entry(endpoint.account()).or_default().handles +=
                (endpoint.syncs.len() + endpoint.handles.len()) as u32;
            charges.entry(endpoint.account()).or_default().holds += endpoint.holds.len() as u32;
        }
        for channel in books.channels.values() {
            let tally = charges.entry(channel.account()).or_default();
            tally.channels += 1;
            tally.bytes += channel.block_len();
        }
        for board in books.boards.all() {
            charges.entry(board.account()).or_default().bytes += PAGE as u64;
        }
        let syncs = books.syncs.values().map(|s| (Account::new(s.member, s.segment.0, s.uid), PAGE as u64));
        let blocks = books.blocks.values().map(|b| (Account::new(b.member, b.segment.0, b.uid), b.span));
        for (account, bytes) in syncs.chain(blocks) {
            let tally = charges.entry(account).or_default();
            tally.blocks += 1;
            tally.block_bytes += bytes;
        }
        for account in charges.keys() {
            assert_eq!(books.tally(*account), charges[account], "{account}");
        }
        let accounts = books.members.keys().flat_map(|member| books.accounts_of(*member)).count();
        assert_eq!(accounts, charges.len());
        // The daemon listens to every program that must ring through it: those that use an object together with a program that
        // cannot ring them, and the sides of relayed channels.
        let reasons = self.broker.relayed_bells.reasons();
        for object in books.syncs.values() {
            let bells: Vec<_> = object
                .users
                .iter()
                .map(|u| (u.slot, books.sync_bell(object.number, u.slot).unwrap()))
                .collect();
            for (slot, (member, vector)) in &bells {
                let others = bells.iter().filter(|(other, _)| other != slot);
                if others.map(|(_, bell)| bell.0).any(|other| !books.knows(other, *member, *vector)) {
                    assert_eq!(reasons.get(&Reason::Sync(object.number, *slot)), Some(&(*member, *vector)));
                }
            }
        }
        for channel in books.relayed.iter().map(|number| &books.channels[number]) {
            for (initiator, side) in [(true, channel.initiator), (false, channel.acceptor)] {
                assert_eq!(reasons.contains_key(&Reason::Channel(channel.number, initiator)), !side.closed);
            }
        }
        for (reason, bell) in reasons {
            let there = match *reason {
                Reason::Channel(number, _) => books.relayed.contains(&number),
                Reason::Sync(number, slot) => books.sync_bell(number, slot) == Some(*bell),
            };
            assert!(there, "{reason:?} is over");
        }
        let bells: BTreeSet<_> = reasons.values().copied().collect();
        assert_eq!(self.broker.relayed_bells.bells().collect::<BTreeSet<_>>(), bells);
        // The journal makes the same books, and so does a dump of them.
        let Replayed { books: replayed, dropped, invalid_records, .. } = journal::replay(&self.journal);
        assert_eq!((&replayed, dropped, invalid_records), (books, 0, 0));
        let dumped: Vec<u8> = books.dump().flat_map(|record| journal::line(&record)).collect();
        assert_eq!(&journal::replay(&dumped).books, books);
    }
}

/// A packet announces exactly the descriptors that come with it.
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

/// Returns the request with which an endpoint attaches again.
fn back(attached: &wire::Attached) -> wire::Attach {
    let &wire::Attached { endpoint, epoch, token, .. } = attached;
    wire::Attach { endpoint, epoch, token, ..attach("web") }
}

fn attach(segment: &str) -> wire::Attach {
    wire::Attach { segment: name(segment), name: name("test"), ..wire::Attach::new_zeroed() }
}

fn listen(at: &str) -> wire::Listen {
    wire::Listen { name: name(at), kind: 1, backlog: 0, capacity: 0, input_capacity: 0 }
}

fn connect(to: &str, capacity: u64, nonce: u64) -> wire::Connect {
    wire::Connect { name: name(to), kind: 1, reserved: 0, capacity, input_capacity: 0, nonce }
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
