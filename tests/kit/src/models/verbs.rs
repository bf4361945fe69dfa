//! Two correct endpoints with all kinds of queue pairs, in plain memory. Between their operations, a third member scribbles into the
//! memory. Some regions lie in the arenas, and some are shadow regions.
//!
//! The model checks that every call returns, that nothing outside the tables and arenas is touched (the memory checks each offset), that
//! the program's memory is accessed only at the addresses of its own requests, and that each completion belongs to a request that has
//! not completed yet, and fits it.

use super::Op;
use ginnel_layout::verbs::{
    Access, CHUNK, CHUNK_TABLE, COPY, COPY_TABLE, Chunk, Claimer, Completion, Executing, GRH, Key, Kind,
    MEMBER, OFFERS, Place, QpNumber, QpState, REGION, REGION_TABLE, TABLES, completion, copy, qp,
};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::peer::{Arenas, Peer};
use ginnel_verbs::program::ProgramMemory;
use ginnel_verbs::queue_pair::{
    Adapter, Capacity, Change, Location, QueuePair, QueuePairOptions, Rings, lid,
};
use ginnel_verbs::range_allocator::RangeAllocator;
use ginnel_verbs::receive::Shape;
use ginnel_verbs::regions::{Region, Regions};
use ginnel_verbs::shadow::{self, Bounce};
use ginnel_verbs::shared_copy;
use ginnel_verbs::shared_receive_queue::SharedReceiveQueue;
use ginnel_verbs::work::{Completed, Datagram, Element, Opcode, Operation, Status, Work, total};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

const BASE: u64 = 7 * CHUNK as u64;
/// Length of the program's memory, in bytes.
const PROGRAM: usize = 320 << 10;
/// Offset in the arena of the memory that is allocated later.
const SPARE: std::ops::Range<usize> = 1 << 20..(1 << 20) + (300 << 10);
/// Length of a copy that is shared with a peer that polls, in bytes.
const LONG: u32 = shared_copy::LEAST as u32 + 9;
const SHAPE: Shape = Shape { entries: 4, elements: 3 };
const CAPACITY: Capacity = Capacity { sends: 4, elements: 3, inline: 64, receives: SHAPE };
const ALL: u32 = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
const QKEY: u32 = 5;
/// Indices of the queue pairs and of the shared receive queue.
const KINDS: [(usize, Kind); 4] = [(1, Kind::RC), (2, Kind::UC), (3, Kind::UD), (4, Kind::RC)];
const SHARED: usize = 5;
/// The index of the queue pair that uses the shared receive queue.
const SHARES: usize = 3;

struct One(Mapping);

impl Arenas<Mapping> for One {
    fn arena(&self, number: u16) -> Option<Mapping> {
        (number == 0).then(|| self.0.clone())
    }
    fn ring(&self) {}
}

struct Device {
    number: u32,
    arena: Mapping,
    spare: Mutex<RangeAllocator>,
    regions: Mutex<Regions<Mapping>>,
    removals: AtomicU64,
    incarnations: AtomicU32,
    own: OnceLock<Arc<Peer<Mapping>>>,
    other: OnceLock<Arc<Peer<Mapping>>>,
}

impl Adapter<Mapping> for Device {
    fn peer(&self, endpoint: u32) -> Option<Arc<Peer<Mapping>>> {
        if endpoint == self.number { self.own.get().cloned() } else { self.other.get().cloned() }
    }
    fn region(&self, key: Key) -> Option<Region> {
        self.regions.lock().unwrap().region(key)
    }
    fn with_region(&self, key: Key, then: &mut dyn FnMut(&Region)) {
        self.regions.lock().unwrap().region(key).iter().for_each(then);
    }
    fn take(&self, len: usize) -> Option<Bounce<Mapping>> {
        let at = self.spare.lock().unwrap().take((len as u64).next_multiple_of(64), 64)?;
        Some(Bounce { place: Place::new(0, at), memory: self.arena.clone(), at: at as usize, len })
    }
    fn give(&self, bounce: Bounce<Mapping>) {
        self.spare.lock().unwrap().give(bounce.at as u64, (bounce.len as u64).next_multiple_of(64));
    }
    fn removals(&self) -> &AtomicU64 {
        &self.removals
    }
    fn attend(&self) {}
    fn claimer(&self) -> Claimer {
        Claimer::new(self.number, 7)
    }
    fn member(&self) -> u32 {
        self.number
    }
    fn has_died(&self, claimer: Claimer) -> bool {
        claimer.endpoint() > 2
    }
    fn has_to_wait(&self) {}
    fn patience(&self) -> Duration {
        Duration::from_micros(100)
    }
    fn next_incarnation(&self) -> u32 {
        self.incarnations.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// The program's memory: the first bytes of the second chunk. While a piece of a long copy is copied, the queue pairs of the other side
/// look whether they can help, and the third member may scribble into the claims.
struct Pages<'a> {
    memory: Mapping,
    other: Option<&'a Side>,
    claims: Option<u64>,
}

impl Pages<'_> {
    fn help(&self, len: usize) {
        let Some(other) = self.other.filter(|_| len >= 4096) else { return };
        for pair in &other.pairs {
            pair.help(&mut (1 << 20));
            if let (Some(claims), Some(at)) = (self.claims, pair.number().copy_at()) {
                other.tables.store_relaxed_u64(at + copy::CLAIMS, claims);
            }
        }
    }

    fn at(address: u64, len: usize) -> usize {
        let at = address.checked_sub(BASE).expect("no address of the program") as usize;
        assert!(at + len <= PROGRAM, "{len} bytes at {address:#x} are none of the program");
        CHUNK + at
    }
}

impl ProgramMemory<Mapping> for Pages<'_> {
    fn copy_in(&self, from: u64, to: &Mapping, at: usize, len: usize, is_last: bool) {
        self.help(len);
        let mut bytes = vec![0; len];
        self.get(from, &mut bytes);
        if is_last { to.write_release(at, &bytes) } else { to.write(at, &bytes) }
    }
    fn copy_out(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        self.help(len);
        let mut bytes = vec![0; len];
        from.read(at, &mut bytes);
        self.put(to, &bytes);
    }
    fn get(&self, from: u64, into: &mut [u8]) {
        if !into.is_empty() {
            self.memory.read(Self::at(from, into.len()), into);
        }
    }
    fn put(&self, to: u64, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.memory.write(Self::at(to, bytes.len()), bytes);
        }
    }
    fn deliver(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        self.copy_out(from, at, to, len);
    }
    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64 {
        self.memory.compare_exchange_u64(Self::at(at, 8), old, new).map_or_else(|found| found, |()| old)
    }
    fn fetch_add(&self, at: u64, value: u64) -> u64 {
        self.memory.fetch_add_u64(Self::at(at, 8), value)
    }
    fn is_there(&self, at: u64, len: usize, _: bool) -> bool {
        Self::at(at, len);
        true
    }
}

/// A request that has not completed yet.
struct Outstanding {
    /// The index of the queue pair, unless it is a shared receive.
    of: Option<QpNumber>,
    /// The expected completion of a send request.
    opcode: Option<Opcode>,
    /// Length of a receive, in bytes.
    length: u32,
}

struct Side {
    number: u32,
    tables: Mapping,
    arena: Mapping,
    device: Arc<Device>,
    own: Arc<Peer<Mapping>>,
    queue: Arc<CompletionQueue<Mapping>>,
    pairs: Vec<Arc<QueuePair<Mapping>>>,
    shared: Arc<SharedReceiveQueue<Mapping>>,
    /// Keys of the same memory, as a region in the arena and as a shadow region.
    keys: [Key; 2],
    outstanding: HashMap<u64, Outstanding>,
    last: u64,
}

fn area() -> Region {
    let access = Access(Access::LOCAL_WRITE | ALL);
    Region { address: BASE, length: PROGRAM as u64, access, domain: 1 }
}

fn register(regions: &mut Regions<Mapping>) -> [Key; 2] {
    [regions.add(area(), &[Chunk::new(0, 1)]).unwrap(), regions.add_shadow(area()).unwrap()]
}

impl Side {
    fn new(number: u32) -> Self {
        let (tables, arena) = (Mapping::anonymous(TABLES).unwrap(), Mapping::anonymous(2 * CHUNK).unwrap());
        tables.store_relaxed_u32(MEMBER, number);
        let own = Arc::new(Peer::new(tables.clone(), Box::new(One(arena.clone()))));
        let mut regions = Regions::new(tables.clone());
        let keys = register(&mut regions);
        let mut spare = RangeAllocator::default();
        // Less memory than all possible receives need.
        spare.give(SPARE.start as u64, SPARE.len() as u64);
        let device = Arc::new(Device {
            number,
            arena: arena.clone(),
            spare: Mutex::new(spare),
            regions: Mutex::new(regions),
            removals: AtomicU64::new(0),
            incarnations: AtomicU32::new(0),
            own: OnceLock::from(own.clone()),
            other: OnceLock::new(),
        });
        let rings = |index: usize| {
            let place = |at: usize| (Place::new(0, at as u64), (arena.clone(), at));
            let behind = index * 4096 + SHAPE.entries * SHAPE.stride();
            Some(Rings { receives: place(index * 4096), completions: place(behind) })
        };
        let location = |index, rings| Location { number: QpNumber::new(number, index).unwrap(), rings };
        let shared = SharedReceiveQueue::new(
            tables.clone(),
            location(SHARED, rings(SHARED)),
            1,
            SHAPE,
            device.clone(),
            Box::new(|_| {}),
        )
        .unwrap();
        let queue = Arc::new(CompletionQueue::with_events(8, Box::new(|| {})));
        let pairs = KINDS.iter().enumerate().map(|(i, &(index, kind))| {
            let shared = (i == SHARES).then(|| shared.clone());
            let own = if shared.is_some() { None } else { rings(index) };
            let completes = (queue.clone(), queue.clone());
            let tell = Box::new(|_| {});
            let wanted = QueuePairOptions { kind, domain: 1, capacity: CAPACITY, shared, completes, tell };
            QueuePair::new(tables.clone(), location(index, own), wanted, device.clone()).unwrap()
        });
        let pairs: Vec<_> = pairs.collect();
        assert!(pairs.iter().all(|pair| pair.offer_errands(shadow::MOST)));
        let (outstanding, last) = (HashMap::new(), 0);
        Self { number, tables, arena, device, own, queue, pairs, shared, keys, outstanding, last }
    }

    fn pages(&self) -> Pages<'static> {
        Pages { memory: self.arena.clone(), other: None, claims: None }
    }

    /// Brings a queue pair as far towards RTS as possible.
    fn connect(&self, i: usize) {
        let (pair, kind) = (&self.pairs[i], KINDS[i].1);
        let peer = QpNumber::new(3 - self.number, KINDS[i].0).filter(|_| kind != Kind::UD);
        let (timeout, patience) = (Some(Some(Duration::ZERO)), Some(None));
        let change = Change { access: Some(Access(ALL)), qkey: Some(QKEY), ..Change::default() };
        let _ = pair.modify(QpState::INIT, change);
        let _ = pair.modify(QpState::RTR, Change { peer, timeout, patience, ..Change::default() });
        let _ = pair.modify(QpState::RTS, Change::default());
    }

    fn elements(&self, a: u16, b: u16) -> Vec<Element> {
        let count = usize::from(a >> 2 & 3).max(1);
        let length = [0, 1, 8, 31, 32, 33, 5000, LONG][usize::from(a >> 4 & 7)];
        let one = |i: usize| {
            // Some elements cross the end of the region.
            let address = BASE + (u64::from(b) * 8 + 100 * i as u64) % (PROGRAM as u64 + 64);
            let key = self.keys[(usize::from(a >> 13) + i) & 1].0;
            Element { address, length, key: if b == 0xffff { !key } else { key } }
        };
        (0..count).map(one).collect()
    }

    fn post_receive(&mut self, a: u16, b: u16) {
        let i = usize::from(a & 3);
        // The buffers that a program posts are within its memory.
        let end = BASE + PROGRAM as u64;
        let mut elements = self.elements(a, b);
        elements.retain(|one| one.address + u64::from(one.length) <= end);
        self.last += 1;
        let posted = match i {
            SHARES => self.shared.post_receive(self.last, &elements),
            _ => self.pairs[i].post_receive(self.last, &elements),
        };
        if posted.is_ok() {
            let of = (i != SHARES).then(|| self.pairs[i].number());
            let length = total(&elements).unwrap();
            self.outstanding.insert(self.last, Outstanding { of, opcode: None, length });
        }
    }

    fn send(&mut self, code: u8, a: u16, b: u16, other: &Side) {
        let remote = other.keys[usize::from(a >> 14 & 1)];
        let pair = self.pairs[usize::from(a & 3)].clone();
        let address = BASE + u64::from(b) * 8 % (PROGRAM as u64 + 64);
        let key = if a & 0x800 != 0 { Key(u32::from(b)) } else { remote };
        let (immediate, solicited) = ((a & 0x100 != 0).then_some(7), a & 0x200 != 0);
        let operation = match code % 5 {
            0 => Operation::Send { immediate, solicited },
            1 => Operation::Write { address, key, immediate, solicited },
            2 => Operation::Read { address, key },
            3 => Operation::CompareAndSwap { address, key, compare: 0, swap: 1 },
            _ => Operation::FetchAndAdd { address, key, add: 1 },
        };
        let number = QpNumber::new(3 - self.number, KINDS[2].0).unwrap();
        let datagram =
            (pair.kind() == Kind::UD).then_some(Datagram { number, lid: lid(3 - self.number), qkey: QKEY });
        let mut elements = self.elements(a, b);
        let is_inline = a & 0x400 != 0;
        if is_inline {
            let end = BASE + PROGRAM as u64;
            elements.retain(|one| one.address + u64::from(one.length) <= end);
        }
        self.last += 1;
        let id = self.last;
        let of = Some(pair.number());
        self.outstanding.insert(id, Outstanding { of, opcode: Some(operation.done()), length: 0 });
        let is_signaled = a & 0x1000 == 0;
        let work = Work { id, operation, datagram, elements: &elements, is_inline, is_signaled };
        // The part of a long copy that others have claimed, or that a scribble claims for them.
        let claims =
            (a & 0x80 != 0).then_some(u64::from(b & 7) << 13 | u64::from(b >> 3 & 7) << 26 | 1 << 39);
        let pages = Pages { other: Some(other), claims, ..self.pages() };
        if pair.post(&pages, &work).is_err() {
            self.outstanding.remove(&id);
        }
    }

    fn poll(&mut self) {
        let (queue, pages) = (self.queue.clone(), self.pages());
        queue.poll(&pages, 8, |one| self.check(one));
    }

    fn check(&mut self, one: Completed) {
        let Some(found) = self.outstanding.remove(&one.id) else {
            panic!("a completion of nothing: {one:?}");
        };
        let of = found.of.unwrap_or(self.pairs[SHARES].number());
        assert_eq!(one.queue_pair, of, "{one:?}");
        if one.status != Status::SUCCESS {
            return;
        }
        match found.opcode {
            Some(opcode) => assert_eq!(one.opcode, opcode, "{one:?}"),
            None if one.opcode == Opcode::RECV => assert!(one.length <= found.length, "{one:?}"),
            None => assert!(one.opcode == Opcode::RECV_RDMA_WITH_IMM && one.immediate.is_some(), "{one:?}"),
        }
        let is_datagram = found.opcode.is_none() && of == self.pairs[2].number();
        assert!(!is_datagram || one.length as usize >= GRH, "{one:?}");
    }

    fn modify(&self, a: u16, b: u16) {
        let i = usize::from(a & 3);
        let at = self.pairs[i].number().at().unwrap();
        match b % 4 {
            0 => {
                // Waiting for a peer that has stopped in the middle of an access would take a second.
                self.tables.store_relaxed_u64(at + qp::EXECUTING, 0);
                self.tables.store_relaxed_u64(at + qp::SENDERS, 0);
                self.pairs[i].modify(QpState::RESET, Change::default()).unwrap();
                self.connect(i);
            }
            1 => self.pairs[i].modify(QpState::ERR, Change::default()).unwrap(),
            2 => drop(self.pairs[i].modify(QpState::SQD, Change::default())),
            _ => self.connect(i),
        }
    }

    /// Removes the region, and registers it again.
    fn register(&mut self) {
        let mut regions = self.device.regions.lock().unwrap();
        assert!(self.keys.iter().all(|key| regions.remove(*key)));
        self.device.removals.fetch_add(1, Ordering::Release);
        for pair in &self.pairs {
            pair.is_region_accessed(self.keys[0]);
        }
        self.keys = register(&mut regions);
    }

    /// Overwrites a word of the tables or of the rings.
    fn scribble(&self, code: u8, a: u16, b: u16) {
        let index = usize::from(a & 7);
        let pick = usize::from(a >> 3 & 31);
        let small = u64::from(b);
        let value = match a >> 8 & 15 {
            0 => u64::MAX,
            1 => small << 48,
            2 => small << 32,
            3 => small << 16 | small,
            4 => u64::MAX - small,
            5 => Executing::region_and_rings(1, Key(b.into())).0,
            6 => 1 << 32 | small & 7,
            7 => 1 << (b & 63),
            8..=11 => {
                let kind = (b & 7) as u8;
                Completion::new(u64::from(b >> 6), kind, (b >> 3 & 7) as u8).0
            }
            12 => Completion::claim(u64::from(b >> 6), Claimer::new(u32::from(b & 7), 7)).0,
            _ => small,
        };
        let ring = index * 4096;
        match code % 8 {
            0 => self.tables.store_relaxed_u64(pair_at(index) + pick * 8, value),
            1 => self.tables.store_relaxed_u32(pair_at(index) + pick * 4, value as u32),
            2 => {
                let at = REGION_TABLE + (index & 1) * REGION + pick % 8 * 8;
                self.tables.store_relaxed_u64(at, value);
            }
            3 => self.tables.store_relaxed_u32(CHUNK_TABLE + pick * 4, value as u32),
            4 => self.arena.store_relaxed_u64(ring + pick * 8, value),
            // An errand, with a number for this incarnation.
            5 => {
                let state = self.tables.load_relaxed_u64(pair_at(index) + qp::STATE);
                self.tables.store_relaxed_u64(pair_at(index) + qp::ASKED, state >> 32 << 32 | small);
            }
            // An offer, with a number for this incarnation.
            6 => {
                let at = COPY_TABLE + index * COPY;
                self.tables.store_relaxed_u64(at + pick % 8 * 8, value);
                let state = self.tables.load_relaxed_u64(pair_at(index) + qp::STATE);
                self.tables.store_relaxed_u64(at + copy::OFFER, state >> 32 << 32 | small & 7);
                self.tables.fetch_add_u64(OFFERS, 1);
            }
            _ => {
                let at = ring + SHAPE.entries * SHAPE.stride();
                let entry = pick / 8 * completion::ENTRY;
                self.arena.store_relaxed_u64(at + entry + pick % 8 * 8, value);
            }
        }
    }
}

fn pair_at(index: usize) -> usize {
    QpNumber::new(1, index).and_then(QpNumber::at).unwrap()
}

/// Executes all operations.
pub fn run(ops: &[Op]) {
    let mut sides = [Side::new(1), Side::new(2)];
    assert!(sides[0].device.other.set(sides[1].own.clone()).is_ok());
    assert!(sides[1].device.other.set(sides[0].own.clone()).is_ok());
    for side in &sides {
        (0..KINDS.len()).for_each(|i| side.connect(i));
    }
    for &Op { code, a, b } in ops {
        let [one, two] = &mut sides;
        let (side, other) = if code & 1 == 0 { (one, &*two) } else { (two, &*one) };
        let what = code >> 1 & 0x3f;
        if code & 0x80 != 0 {
            side.scribble(what, a, b);
            continue;
        }
        match what % 16 {
            0..=4 => side.send(what, a, b, other),
            5..=7 => side.post_receive(a, b),
            8..=10 => side.poll(),
            11 => {
                side.pairs[usize::from(a & 3)].look();
                side.shared.set_limit(u32::from(b));
            }
            12 => drop(side.queue.attend(&side.pages())),
            13 => side.queue.arm(a & 1 != 0),
            14 => side.modify(a, b),
            _ => side.register(),
        }
    }
    for side in &mut sides {
        (0..8).for_each(|_| side.poll());
        for pair in &side.pairs {
            pair.end();
        }
    }
}
