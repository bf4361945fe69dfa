//! The server: it performs the broker's effects as the real one does, on segments, a journal and sockets in private memory.

use super::invariants::{Asked, Given, is_answer};
use crate::books::Books;
use crate::broker::{Broker, ClientId, Effect, FdRef, Recording, Who, World};
use crate::declared::Access;
use crate::limits::{Limits, MemberLimits};
use crate::lines::{self, Replayed};
use crate::memory::{MemoryFile, MemoryKind};
use crate::process::Process;
use crate::programs::{Message, NotOpen, Programs};
use crate::recipients::Recipients;
use crate::record::{FORMAT, Record};
use crate::reply;
use crate::text::{Hex16, Text};
use crate::vectors::Told;
use ginnel_layout::relay::RelayKind;
use ginnel_layout::segment::ARENA;
use ginnel_layout::wire::{self, Kind};
use ginnel_layout::{HOST_MEMBER, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The doorbells of a member.
const VECTORS: u32 = 4;
/// The VMs.
pub const VMS: [u32; 3] = [1, 2, 3];
/// A segment: its name, its members, those that may only read, the pages of its arena, and the unit of the mapping.
type Declaration = (&'static str, &'static [u32], &'static [u32], u64, u32);
/// The segments.
pub const SEGMENTS: [Declaration; 3] = [
    ("web", &[0, 1, 2], &[], 48, 4096),
    ("annex", &[0, 1], &[1], 16, 4096),
    ("vault", &[2, 3], &[], 64, 65536),
];

/// The facts from outside.
#[derive(Default)]
pub struct Facts {
    pub broken: BTreeSet<Name>,
    random: u128,
}

impl World for Facts {
    fn is_broken(&mut self, segment: &Name) -> bool {
        self.broken.contains(segment)
    }

    fn random(&mut self) -> [u8; 16] {
        self.random += 1;
        // Unlike the tokens that clients choose here.
        (self.random << 32).to_be_bytes()
    }

    fn now(&mut self) -> u64 {
        1
    }

    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
}

/// The disk on which the journal is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    Good,
    /// The journal knows that it has no room.
    Full,
    /// The journal does not know yet that it cannot write.
    Fails,
}

/// An endpoint that somebody was told of.
#[derive(Clone, Copy)]
pub struct Known {
    pub segment: Name,
    pub attached: wire::Attached,
}

pub struct Server {
    pub broker: Broker,
    pub programs: Programs,
    pub facts: Facts,
    /// The books that the records make so far: those of a successor if the daemon ended between two effects.
    pub shadow: Books,
    journal: Vec<u8>,
    /// The records that the disk has not accepted.
    unwritten: Vec<u8>,
    disk: Disk,
    recorded: bool,
    withheld: Vec<Effect>,
    /// The connections of programs of the host.
    pub connections: BTreeSet<ClientId>,
    last_client: u64,
    /// The living processes of the host.
    pub processes: Vec<Process>,
    last_process: u32,
    pub can_watch: bool,
    pub watches: BTreeMap<(u32, Process), u32>,
    pub timers: BTreeMap<(u32, Hex16), u32>,
    /// The effects that make memory ready, until the record for which they did.
    pub prepared: Vec<Effect>,
    pub given: Given,
    pub known: Vec<Known>,
    /// The segments that programs have named.
    pub named: BTreeSet<(ClientId, Name)>,
    /// The kinds of all packets that programs were sent.
    pub told: BTreeSet<u16>,
    last_request: u32,
    /// How the next packet is changed.
    pub change: Option<(u8, u8, u32)>,
    /// The number of things that a turn of the background work gives back.
    turn: usize,
    /// The background work waits for its own steps.
    is_lazy: bool,
    boots: u8,
}

fn limits() -> Limits {
    let member = MemberLimits {
        endpoints_per_member: 4,
        holds_per_member: 2,
        listeners_per_endpoint: 2,
        channels_per_endpoint: 4,
        channels_per_member: 5,
        bytes_per_endpoint: 64 << 10,
        bytes_per_member: 80 << 10,
        handles_per_endpoint: 6,
        handles_per_member: 9,
        blocks_per_endpoint: 3,
        blocks_per_member: 5,
        grants_per_block: 3,
        block_bytes_per_endpoint: 128 << 10,
        block_bytes_per_member: 160 << 10,
    };
    let small =
        Limits { default_ring: 4096, max_ring: 16384, backlog: 2, max_hold: 5000, ..Limits::default() };
    Limits { member, ..small }
}

pub fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

impl Server {
    /// Starts a daemon. The byte says how it works.
    pub fn new(first: u8) -> Self {
        let mut server = Self {
            broker: Broker::new(Books::default(), limits(), VECTORS, 0),
            programs: Programs::default(),
            facts: Facts::default(),
            shadow: Books::default(),
            journal: Vec::new(),
            unwritten: Vec::new(),
            disk: Disk::Good,
            recorded: true,
            withheld: Vec::new(),
            connections: BTreeSet::new(),
            last_client: 0,
            processes: Vec::new(),
            last_process: 100,
            can_watch: true,
            watches: BTreeMap::new(),
            timers: BTreeMap::new(),
            prepared: Vec::new(),
            given: Given::default(),
            known: Vec::new(),
            named: BTreeSet::new(),
            told: BTreeSet::new(),
            last_request: 0,
            change: None,
            turn: if first & 1 == 0 { 512 } else { 1 + usize::from(first >> 4) },
            is_lazy: first & 2 != 0,
            boots: 0,
        };
        server.configure();
        server.note(Record::Start {
            boot_id: Hex16([0; 16]),
            generation: 1,
            next_epoch: 1,
            next_listener: 1,
            next_channel: 1,
            next_object: 1,
            epochs: Vec::new(),
            format: FORMAT,
        });
        for (number, member) in [(HOST_MEMBER, "host"), (1, "vm-a"), (2, "vm-b"), (3, "vm-c")] {
            server.note(Record::Member { number, name: Text(name(member)), runtime: None, retired: false });
        }
        for (segment, members, readers, pages, page) in SEGMENTS {
            server.declare(segment, members, readers, pages, page);
        }
        server
    }

    /// Sets in a new broker what the configuration says.
    fn configure(&mut self) {
        self.broker.endings.set_turn(self.turn);
        let own = MemberLimits { endpoints_per_member: 2, handles_per_endpoint: 3, ..limits().member };
        self.broker.set_limits(2, own);
        let access = Access { users: [1000].into(), groups: [77].into(), ..Access::default() };
        self.broker.set_access(name("web"), access);
    }

    /// Declares a segment, or changes its members.
    pub fn declare(&mut self, segment: &str, members: &[u32], readers: &[u32], pages: u64, page: u32) {
        let segment = name(segment);
        self.note(Record::Segment {
            name: Text(segment),
            uuid: Hex16([7; 16]),
            size: ARENA + pages * 4096,
            members: members.iter().copied().collect(),
            readers: readers.iter().copied().collect(),
            memory: MemoryKind::Dax,
            page,
            part: None,
            own_folder: true,
            file: MemoryFile::Unrecorded,
            recipients: Some(Recipients::default()),
            runtime: None,
        });
        for &member in members {
            if self.broker.books().vectors_of(&segment, member).is_empty() {
                let vectors = self.broker.books().allot(&segment, member, VECTORS);
                self.note(Record::Vectors { segment: Text(segment), member, vectors });
            }
        }
    }

    pub fn note(&mut self, record: Record) {
        assert!(self.broker.note(record), "the books refuse what the daemon itself notes");
        self.run_effects(None);
    }

    pub fn new_client(&mut self) -> ClientId {
        self.last_client += 1;
        ClientId(self.last_client)
    }

    pub fn new_process(&mut self) -> Process {
        self.last_process += 1;
        let process = Process { pid: self.last_process, started: 1 };
        self.processes.push(process);
        process
    }

    pub fn new_request(&mut self) -> u32 {
        self.last_request += 1;
        self.last_request
    }

    /// A program of the host connects.
    pub fn accept(&mut self, process: Process, uid: u32, groups: Vec<u32>) {
        let id = self.new_client();
        self.broker.connected(id, Who { member: HOST_MEMBER, process, image: None, uid, groups });
        self.connections.insert(id);
    }

    /// Tells the broker what the journal accepts.
    fn ask_journal(&mut self) {
        let takes = self.disk != Disk::Full && self.unwritten.is_empty();
        self.broker.set_recording(match takes {
            true => Recording::Open,
            false if self.withheld.is_empty() => Recording::Closed,
            false => Recording::Owing,
        });
    }

    /// A packet comes over a connection, from the process that has opened it or from another.
    pub fn hear(&mut self, client: ClientId, sender: Option<Process>, packet: &[u8]) {
        if let Some((member, number)) = self.programs.place(client) {
            return self.hear_relayed(member, RelayKind::DATA, number, packet);
        }
        let Some(opener) = self.broker.who(client).map(|who| who.process) else { return };
        let asked = self.says(client, packet);
        let others = self.endpoints_of_others(HOST_MEMBER);
        self.ask_journal();
        self.broker.packet_from(&mut self.facts, client, sender.unwrap_or(opener), packet);
        self.run_effects(Some(&asked));
        assert_eq!(self.endpoints_of_others(HOST_MEMBER), others);
    }

    /// A message comes from a VM's daemon.
    pub fn hear_relayed(&mut self, member: u32, kind: RelayKind, number: u32, body: &[u8]) {
        let client = self.programs.client(member, number).filter(|_| kind == RelayKind::DATA);
        let asked = client.map(|client| self.says(client, body));
        let others = self.endpoints_of_others(member);
        self.ask_journal();
        let new = self.new_client();
        let message = Message { member, kind, number, body };
        let heard = self.programs.hear(&mut self.broker, &mut self.facts, new, message);
        assert!(kind != RelayKind::DATA || heard == client.map(drop).ok_or(NotOpen));
        self.run_effects(asked.as_ref());
        assert_eq!(self.endpoints_of_others(member), others, "a VM is trusted only about itself");
    }

    /// Performs the broker's effects in their order. The first of them answer a request, and no others answer any.
    pub fn run_effects(&mut self, mut asked: Option<&Asked>) {
        loop {
            let effects = self.broker.take_effects();
            match asked.take() {
                Some(asked) => asked.is_answered_once(&effects),
                None => assert!(!effects.iter().any(is_answer), "an answer to nobody's request: {effects:?}"),
            }
            self.recorded = true;
            if effects.is_empty() {
                if self.withheld.is_empty() || !self.unwritten.is_empty() {
                    break;
                }
                for effect in std::mem::take(&mut self.withheld) {
                    self.perform(effect, true);
                }
                continue;
            }
            effects.into_iter().for_each(|effect| self.perform(effect, false));
        }
        assert!(self.prepared.is_empty(), "memory was made ready for nobody: {:?}", self.prepared);
    }

    fn perform(&mut self, effect: Effect, is_late: bool) {
        self.writes_into_what_is_there(&effect);
        match effect {
            Effect::Zero { .. } | Effect::NewSync { .. } | Effect::NewBoard { .. } | Effect::Seat { .. } => {
                self.prepared.push(effect);
            }
            Effect::Record(record) => {
                self.was_made_ready(&record);
                self.shadow.apply(&record).expect("a successor refuses a record");
                self.append(&record);
            }
            Effect::Send { .. } if !self.recorded => self.withheld.push(effect),
            Effect::Send { client, packet, fds } => self.deliver(client, &packet, &fds, is_late),
            Effect::Inspect { client, request, .. } => {
                for packet in reply::page(request, &wire::Inspect::FIRST, "{}") {
                    self.deliver(client, &packet, &[], is_late);
                }
            }
            Effect::Admin { client, request, .. } => {
                self.deliver(client, &reply::packet(Kind::OK, request, &[]), &[], is_late);
            }
            Effect::Disconnect(client) => self.hang_up(client),
            Effect::Watch { endpoint, epoch, process } => self.watch(endpoint, epoch, process),
            Effect::Unwatch { endpoint, process, .. } => drop(self.watches.remove(&(endpoint, process))),
            Effect::TimeHold { endpoint, epoch, token, .. } => {
                self.timers.insert((endpoint, token), epoch);
            }
            Effect::ForgetHold { endpoint, token } => drop(self.timers.remove(&(endpoint, token))),
            Effect::Mark { .. }
            | Effect::Post { .. }
            | Effect::PostAll { .. }
            | Effect::Reclaim { .. }
            | Effect::Ring { .. }
            | Effect::Examine { .. }
            | Effect::Recognize { .. } => {}
        }
    }

    fn append(&mut self, record: &Record) {
        let line = lines::line(0, record);
        if self.disk == Disk::Fails || !self.unwritten.is_empty() {
            self.unwritten.extend(line);
            self.recorded &= !record.gives();
        } else {
            // Even a full disk has the reserve for records that end something.
            self.journal.extend(line);
        }
    }

    /// The disk works, has no room, or fails.
    pub fn set_disk(&mut self, disk: Disk) {
        self.disk = disk;
        if disk == Disk::Good {
            self.journal.append(&mut self.unwritten);
        }
        self.run_effects(None);
    }

    fn deliver(&mut self, client: ClientId, packet: &[u8], fds: &[FdRef], is_late: bool) {
        if self.broker.who(client).is_some() {
            self.told.extend(wire::split(packet).map(|(header, _)| header.kind.0));
            self.may_see(client, packet, fds);
            self.learn(client, packet, is_late);
        }
    }

    /// A connection ends.
    pub fn hang_up(&mut self, client: ClientId) {
        self.connections.remove(&client);
        self.programs.remove(client);
        self.broker.hung_up(client);
    }

    fn watch(&mut self, endpoint: u32, epoch: u32, process: Process) {
        if process.pid == 0 {
            return;
        }
        if !self.processes.contains(&process) {
            self.broker.owner_ended(endpoint, epoch, process);
        } else if self.can_watch {
            self.watches.insert((endpoint, process), epoch);
        } else {
            self.broker.owner_unwatched(endpoint, epoch, process);
        }
    }

    /// A process of the host ends: the kernel closes its connections, and its watches report it.
    pub fn process_ends(&mut self, process: Process) {
        self.processes.retain(|living| *living != process);
        let own = |id: &ClientId| self.broker.who(*id).is_some_and(|who| who.process == process);
        for id in self.connections.iter().copied().filter(own).collect::<Vec<_>>() {
            self.hang_up(id);
        }
        for (key, epoch) in self.watches.clone() {
            if key.1 == process && self.watches.remove(&key).is_some() {
                self.broker.owner_ended(key.0, epoch, process);
            }
        }
        self.run_effects(None);
    }

    /// The end of a VM's QEMU.
    pub fn vm_ends(&mut self, member: u32) {
        self.programs.guest_ended(&mut self.broker, member);
        self.run_effects(None);
        if self.broker.books().members[&member].qemu.is_some()
            || self.broker.books().members[&member].session.is_some()
        {
            self.note(Record::Left { member });
        }
    }

    /// A VM's QEMU starts, and is told of doorbells if there is room.
    pub fn vm_starts(&mut self, member: u32, is_told: bool) {
        self.vm_ends(member);
        let told = match is_told {
            true => self.broker.books().untold(member, &Told::new(), VECTORS),
            false => Told::new(),
        };
        self.note(Record::joined(member, Process { pid: 7, started: 1 }, told));
    }

    /// A session with a VM's daemon begins, after the end of the last one.
    pub fn session(&mut self, member: u32, boot: u8, interrupts: bool) {
        self.programs.daemon_ended(&mut self.broker, member);
        self.run_effects(None);
        self.broker.session_begins(member, Hex16([boot; 16]), interrupts);
        self.run_effects(None);
    }

    pub fn time_is_over(&mut self, key: (u32, Hex16)) {
        if let Some(epoch) = self.timers.remove(&key) {
            self.broker.hold_over(key.0, epoch, key.1);
        }
        self.run_effects(None);
    }

    /// A segment is removed.
    pub fn remove_segment(&mut self, segment: &Name) {
        if !self.broker.books().segments.contains_key(segment) {
            return;
        }
        self.broker.segment_ends(segment);
        self.run_effects(None);
        self.note(Record::SegmentRemoved { name: Text(*segment) });
    }

    /// Does a part of what the daemon does in the background.
    pub fn work(&mut self) {
        self.broker.tell_revoked(|_| true);
        self.broker.end_some();
        self.broker.settle_sockets(&mut self.facts);
        self.run_effects(None);
    }

    /// Does it after each step, unless it waits for steps of its own.
    pub fn work_at_once(&mut self) {
        if !self.is_lazy {
            self.work();
        }
    }

    /// Reads the journal as a successor does.
    fn replayed(bytes: &[u8]) -> Books {
        let Replayed { books, dropped, damaged, invalid_records, .. } = lines::replay(bytes);
        assert_eq!((dropped, damaged, invalid_records), (0, 0, 0), "a journal with damage");
        books
    }

    /// The whole journal makes the books.
    pub fn journal_makes_the_books(&self) {
        let whole = [self.journal.as_slice(), &self.unwritten].concat();
        assert!(Self::replayed(&whole) == *self.broker.books(), "the journal makes other books");
        let dumped: Vec<u8> = lines::snapshot(self.broker.books(), Hex16::default(), 0).flatten().collect();
        assert!(Self::replayed(&dumped) == *self.broker.books(), "a dump makes other books");
    }

    /// The daemon is killed, and its successor starts. What the disk has not accepted is lost.
    pub fn restart(&mut self, is_rebooted: bool) {
        self.journal_makes_the_books();
        let mut books = Self::replayed(&self.journal);
        self.withheld.clear();
        self.unwritten.clear();
        self.connections.clear();
        self.watches.clear();
        self.timers.clear();
        self.programs = Programs::default();
        if is_rebooted {
            self.processes.clear();
            self.boots += 1;
            self.given = Given::default();
        }
        books.begin(Hex16([self.boots; 16]));
        self.journal = lines::snapshot(&books, Hex16::default(), 0).flatten().collect();
        self.shadow = books.clone();
        self.broker = Broker::new(books, limits(), VECTORS, 0);
        self.configure();
        self.given.forget_unheard(self.broker.books());
        self.broker.close_unheard();
        let endpoints = self.broker.books().endpoints.values().filter(|e| e.member == HOST_MEMBER);
        let owners = endpoints.flat_map(|e| e.owners.iter().map(|process| (e.number, e.epoch, *process)));
        for (endpoint, epoch, process) in owners.collect::<Vec<_>>() {
            self.watch(endpoint, epoch, process);
        }
        self.broker.time_holds();
        self.broker.end_abandoned();
        self.run_effects(None);
    }
}
