//! Tests of the state machine without sockets. `Bench` sends requests, and checks what must always hold.

use super::consistency::check_packet;
use super::*;
use crate::account::Account;
use crate::limits::{Limits, MAX_HOLDS, MAX_OWNERS};
use crate::lines::{self, Replayed};
use crate::memory::{MemoryFile, MemoryKind};
use crate::objects::block::BlockGrant;
use crate::objects::channel;
use crate::process::Image;
use crate::recipients::Recipients;
use crate::record::{FORMAT, Record};
use crate::text::{Hex16, Text};
use ginnel_layout::ring::SideState;
use ginnel_layout::sync::SyncKind;
use ginnel_layout::wire::{Fds, Rights};
use ginnel_layout::{PAGE, wire};
use ginnel_sync::authority::Left;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

mod accounts;
mod boards;
mod costs;
mod damage;
mod endpoints;
mod history;
mod holds;
mod hostile;
mod numbers;
mod objects;
mod owners;
mod sockets;

/// A world in which only the segment `broken` is broken. Its random numbers are consecutive.
#[derive(Default)]
struct TestWorld {
    random: u128,
    elapsed: Duration,
}

impl World for TestWorld {
    fn is_broken(&mut self, segment: &Name) -> bool {
        segment.as_str() == "broken"
    }
    fn random(&mut self) -> [u8; 16] {
        self.random += 1;
        self.random.to_le_bytes()
    }
    fn now(&mut self) -> u64 {
        1
    }
    fn elapsed(&self) -> Duration {
        self.elapsed
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
            format: FORMAT,
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
                own_folder: true,
                file: MemoryFile::Unrecorded,
                recipients: Some(Recipients::default()),
                runtime: None,
            }));
            for member in sharers {
                let vectors = broker.books.allot(&name(segment), member, broker.vectors);
                assert!(broker.note(Record::Vectors { segment: Text(name(segment)), member, vectors }));
            }
        }
        let mut bench = Self {
            broker,
            world: TestWorld::default(),
            journal: Vec::new(),
            next: 0,
            timers: BTreeMap::new(),
        };
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
                Effect::Record(record) => self.journal.extend(lines::line(0, &record)),
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
        self.broker.check();
        let books = self.broker.books();
        let holds =
            books.endpoints.values().flat_map(|e| e.holds.keys().map(|&token| ((e.number, token), e.epoch)));
        assert_eq!(self.timers, holds.collect(), "each hold ends at some time");
        // The journal makes the same books, and so does a dump of them.
        let Replayed { books: replayed, dropped, invalid_records, .. } = lines::replay(&self.journal);
        assert_eq!((&replayed, dropped, invalid_records), (books, 0, 0));
        let dumped: Vec<u8> = lines::snapshot(books, Hex16::default(), 0).flatten().collect();
        assert_eq!(&lines::replay(&dumped).books, books);
    }
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
