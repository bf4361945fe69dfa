//! Two endpoints whose tables and arenas are plain memory: everything except the daemon and the program's pages.

mod events;
mod inspect;
mod lifetimes;
mod shadow;
mod shared;
mod shared_copy;
mod unreliable;

use ginnel_layout::verbs::{
    self, Access, CHUNK, Chunk, Claimer, Completion, Key, Kind, Place, QpNumber, QpState, TABLES, completion,
    qp, region,
};
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::peer::{Arenas, Peer};
use ginnel_verbs::program::ProgramMemory;
use ginnel_verbs::queue_pair::{
    Adapter, Capacity, Change, Event, EventCallback, Location, QueuePair, QueuePairOptions, Refused, Rings,
};
use ginnel_verbs::range_allocator::RangeAllocator;
use ginnel_verbs::receive::Shape;
use ginnel_verbs::regions::{Region, Regions, chunks_of};
use ginnel_verbs::shadow::Bounce;
use ginnel_verbs::work::{Completed, Element, Opcode, Operation, Status, Work};
use kit::wait::Watchdog;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The first address of the program's memory. Its pages are those of the arena, from the second chunk on.
const BASE: u64 = 7 * CHUNK as u64;
const ARENA: usize = 4 * CHUNK;
/// The first address of memory outside the arena, and the length of that memory.
const OUTSIDE: u64 = 100 * CHUNK as u64;
const OUTSIDE_BYTES: usize = 1 << 20;
/// Offset in the arena of the memory that is allocated later.
const SPARE: std::ops::Range<usize> = 1 << 20..2 << 20;

/// An endpoint with one arena: the rings are in the first chunk, pages of the program in the others.
struct Side {
    number: u32,
    tables: Mapping,
    arena: Mapping,
    outside: Mapping,
    /// Whether the memory that a request names no longer exists.
    is_unmapped: Arc<AtomicBool>,
    spare: Mutex<RangeAllocator>,
    asked: AtomicU64,
    regions: Mutex<Regions<Mapping>>,
    removals: AtomicU64,
    /// Whether the other side counts as dead if it has claimed a receive.
    other_has_died: AtomicBool,
    own: Arc<Peer<Mapping>>,
    /// How often this side's doorbell was rung, and how often it had waiting requests.
    rings: Arc<AtomicU64>,
    waits: AtomicU64,
    incarnations: AtomicU32,
    events: Mutex<Vec<Event>>,
    other: OnceLock<Arc<Peer<Mapping>>>,
}

/// The arena, and how often the doorbell was rung.
struct One(Mapping, Arc<AtomicU64>);

impl Arenas<Mapping> for One {
    fn arena(&self, number: u16) -> Option<Mapping> {
        (number == 0).then(|| self.0.clone())
    }

    fn ring(&self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

impl Adapter<Mapping> for Side {
    fn peer(&self, endpoint: u32) -> Option<Arc<Peer<Mapping>>> {
        if endpoint == self.number { Some(self.own.clone()) } else { self.other.get().cloned() }
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

    fn has_asked(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
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
        claimer.endpoint() != self.number && self.other_has_died.load(Ordering::Relaxed)
    }

    fn next_incarnation(&self) -> u32 {
        self.incarnations.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn has_to_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }
}

/// The program's memory, as if its pages had been moved into the arena, and memory outside the arena.
struct Pages {
    arena: Mapping,
    outside: Mapping,
    is_unmapped: Arc<AtomicBool>,
}

impl Pages {
    fn at(&self, address: u64) -> (&Mapping, usize) {
        match address.checked_sub(OUTSIDE) {
            Some(at) => (&self.outside, at as usize),
            None => (&self.arena, CHUNK + (address - BASE) as usize),
        }
    }
}

impl ProgramMemory<Mapping> for Pages {
    fn copy_in(&self, from: u64, to: &Mapping, at: usize, len: usize, is_last: bool) {
        let mut bytes = vec![0; len];
        self.get(from, &mut bytes);
        if is_last { to.write_release(at, &bytes) } else { to.write(at, &bytes) }
    }

    fn copy_out(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        let mut bytes = vec![0; len];
        from.read(at, &mut bytes);
        self.put(to, &bytes);
    }

    fn get(&self, from: u64, into: &mut [u8]) {
        if !into.is_empty() {
            let (memory, at) = self.at(from);
            memory.read(at, into);
        }
    }

    fn put(&self, to: u64, bytes: &[u8]) {
        if !bytes.is_empty() {
            let (memory, at) = self.at(to);
            memory.write(at, bytes);
        }
    }

    fn deliver(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        self.copy_out(from, at, to, len);
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64 {
        let (memory, at) = self.at(at);
        memory.compare_exchange_u64(at, old, new).map_or_else(|found| found, |()| old)
    }

    fn fetch_add(&self, at: u64, value: u64) -> u64 {
        let (memory, at) = self.at(at);
        memory.fetch_add_u64(at, value)
    }

    fn is_there(&self, _: u64, _: usize, _: bool) -> bool {
        !self.is_unmapped.load(Ordering::Relaxed)
    }
}

const CAPACITY: Capacity =
    Capacity { sends: 4, elements: 3, inline: 64, receives: Shape { entries: 4, elements: 3 } };

/// Offset of the rings of the second side's queue pair.
const RING: usize = 3 * 8192;

type Pair = Arc<QueuePair<Mapping>>;

impl Side {
    fn new(number: u32) -> Arc<Self> {
        let (tables, arena) = (Mapping::anonymous(TABLES).unwrap(), Mapping::anonymous(ARENA).unwrap());
        tables.store_relaxed_u32(verbs::MEMBER, number);
        let rings = Arc::<AtomicU64>::default();
        let own = Arc::new(Peer::new(tables.clone(), Box::new(One(arena.clone(), rings.clone()))));
        let regions = Mutex::new(Regions::new(tables.clone()));
        let (removals, other) = (AtomicU64::new(0), OnceLock::new());
        let other_has_died = AtomicBool::new(false);
        let (waits, events) = (AtomicU64::new(0), Mutex::default());
        let incarnations = AtomicU32::new(0);
        let mut spare = RangeAllocator::default();
        spare.give(SPARE.start as u64, SPARE.len() as u64);
        Arc::new(Self {
            number,
            tables,
            arena,
            outside: Mapping::anonymous(OUTSIDE_BYTES).unwrap(),
            is_unmapped: Arc::default(),
            spare: Mutex::new(spare),
            asked: AtomicU64::new(0),
            regions,
            removals,
            other_has_died,
            own,
            rings,
            waits,
            incarnations,
            events,
            other,
        })
    }

    fn pages(&self) -> Pages {
        let (arena, outside) = (self.arena.clone(), self.outside.clone());
        Pages { arena, outside, is_unmapped: self.is_unmapped.clone() }
    }

    /// Registers a part of the program's memory that begins at an offset.
    fn register(&self, at: u64, length: u64, access: u32) -> Key {
        let address = BASE + at;
        let chunk = |chunk| Chunk::new(0, 1 + ((chunk - BASE) / CHUNK as u64) as u32);
        let chunks: Vec<_> = chunks_of(address, length).map(chunk).collect();
        let region = Region { address, length, access: Access(access), domain: 1 };
        self.regions.lock().unwrap().add(region, &chunks).unwrap()
    }

    fn remove(&self, key: Key) {
        assert!(self.regions.lock().unwrap().remove(key));
        self.removals.fetch_add(1, Ordering::Release);
    }

    fn location(&self, index: usize) -> Location<Mapping> {
        let shape = CAPACITY.receives;
        let ring = index * 8192;
        let behind = ring + shape.entries * shape.stride();
        let place = |at| (Place::new(0, at as u64), (self.arena.clone(), at));
        let rings = Some(Rings { receives: place(ring), completions: place(behind) });
        Location { number: QpNumber::new(self.number, index).unwrap(), rings }
    }

    fn tell(self: &Arc<Self>) -> EventCallback {
        let side = Arc::downgrade(self);
        Box::new(move |event| side.upgrade().unwrap().events.lock().unwrap().push(event))
    }

    fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap())
    }

    fn adapter(self: &Arc<Self>) -> Arc<dyn Adapter<Mapping>> {
        self.clone()
    }

    fn queue_pair(
        self: &Arc<Self>,
        kind: Kind,
        index: usize,
        completes: &Arc<CompletionQueue<Mapping>>,
    ) -> Pair {
        let completes = (completes.clone(), completes.clone());
        let tell = self.tell();
        let wanted = QueuePairOptions { kind, domain: 1, capacity: CAPACITY, shared: None, completes, tell };
        QueuePair::new(self.tables.clone(), self.location(index), wanted, self.adapter()).unwrap()
    }
}

/// Two queue pairs, each connected to the other.
struct Both {
    sides: [Arc<Side>; 2],
    pairs: [Pair; 2],
    queues: [Arc<CompletionQueue<Mapping>>; 2],
}

const ALL: u32 = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;

fn sides() -> [Arc<Side>; 2] {
    let sides = [Side::new(1), Side::new(2)];
    assert!(sides[0].other.set(sides[1].own.clone()).is_ok());
    assert!(sides[1].other.set(sides[0].own.clone()).is_ok());
    sides
}

impl Both {
    fn unconnected() -> Self {
        Self::of_kind(Kind::RC)
    }

    fn of_kind(kind: Kind) -> Self {
        Self::completing(kind, [Arc::new(CompletionQueue::new(16)), Arc::new(CompletionQueue::new(16))])
    }

    fn completing(kind: Kind, queues: [Arc<CompletionQueue<Mapping>>; 2]) -> Self {
        let sides = sides();
        let pairs = [sides[0].queue_pair(kind, 1, &queues[0]), sides[1].queue_pair(kind, 3, &queues[1])];
        for pair in &pairs {
            let change = Change { access: Some(Access(ALL)), ..Change::default() };
            pair.modify(QpState::INIT, change).unwrap();
        }
        Self { sides, pairs, queues }
    }

    fn new() -> Self {
        let both = Self::unconnected();
        both.connect(0);
        both.connect(1);
        both
    }

    fn connect(&self, i: usize) {
        let change = Change { peer: Some(self.pairs[1 - i].number()), ..Change::default() };
        self.pairs[i].modify(QpState::RTR, change).unwrap();
        self.pairs[i].modify(QpState::RTS, Change::default()).unwrap();
    }

    fn post(&self, i: usize, id: u64, operation: Operation, elements: &[Element]) {
        let work = Work { id, operation, datagram: None, elements, is_inline: false, is_signaled: true };
        self.pairs[i].post(&self.sides[i].pages(), &work).unwrap();
    }

    fn poll(&self, i: usize) -> Vec<Completed> {
        let mut all = Vec::new();
        self.queues[i].poll(&self.sides[i].pages(), 16, |completed| all.push(completed));
        all
    }

    /// Returns the work request identifiers and statuses of the completions that are there.
    fn said(&self, i: usize) -> Vec<(u64, Status)> {
        self.poll(i).iter().map(|completed| (completed.id, completed.status)).collect()
    }

    /// The same as `said`, but waits until there are this many completions.
    fn comes(&self, i: usize, count: usize) -> Vec<(u64, Status)> {
        let (mut all, mut watchdog) = (Vec::new(), Watchdog::new("completions"));
        while all.len() < count {
            watchdog.look(all.len());
            std::thread::yield_now();
            self.pairs[i].look();
            all.extend(self.said(i));
        }
        all
    }

    fn fill(&self, i: usize, at: u64, bytes: &[u8]) {
        self.sides[i].pages().put(BASE + at, bytes);
    }

    fn bytes(&self, i: usize, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.sides[i].pages().get(BASE + at, &mut bytes);
        bytes
    }

    fn word(&self, i: usize, at: u64) -> u64 {
        u64::from_ne_bytes(self.bytes(i, at, 8).try_into().unwrap())
    }
}

fn element(at: u64, length: u32, key: Key) -> Element {
    Element { address: BASE + at, length, key: key.0 }
}

const SEND: Operation = Operation::Send { immediate: None, solicited: false };

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

#[test]
fn messages_of_all_lengths_reach_receives_of_all_shapes() {
    let both = Both::new();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 2 * CHUNK as u64, 1)).collect();
    // The message crosses the end of a chunk. A completion has room for 32 bytes.
    let near = CHUNK as u64 - 100;
    for len in [0usize, 1, 31, 32, 33, 64, 199, 1000] {
        for split in [0, 1, len / 2, len].into_iter().filter(|split| *split <= len) {
            both.fill(0, near, &pattern(len));
            both.fill(1, 0, &[0xee; 4096]);
            let rest = (len - split) as u32;
            let into =
                [element(5, split as u32, keys[1]), element(2000, rest, keys[1]), element(9, 1, keys[1])];
            both.pairs[1].post_receive(7, &into).unwrap();
            let first = (len / 3) as u32;
            let second = element(near + u64::from(first), len as u32 - first, keys[0]);
            let send = Operation::Send { immediate: Some(len as u32), solicited: true };
            both.post(0, 8, send, &[element(near, first, keys[0]), second]);
            assert_eq!(both.said(0), [(8, Status::SUCCESS)], "{len} bytes");
            let got = both.poll(1);
            assert_eq!(got.len(), 1);
            assert_eq!((got[0].id, got[0].status, got[0].length), (7, Status::SUCCESS, len as u32));
            assert_eq!((got[0].opcode, got[0].immediate), (Opcode::RECV, Some(len as u32)));
            let mut bytes = both.bytes(1, 5, split);
            bytes.extend(both.bytes(1, 2000, len - split));
            assert_eq!(bytes, pattern(len), "{len} bytes split at {split}");
            assert_eq!(both.bytes(1, 2000 + u64::from(rest), 1), [0xee]);
        }
    }
}

#[test]
fn reads_writes_and_atomics_reach_the_peers_memory() {
    let both = Both::new();
    let own = both.sides[0].register(0, 2 * CHUNK as u64, 1);
    // The region spans two chunks.
    let at = CHUNK as u64 - 1000;
    let key = both.sides[1].register(at, 3000, 1 | ALL);
    let address = BASE + at;
    both.fill(0, 10, &pattern(3000));
    let write = |immediate| Operation::Write { address, key, immediate, solicited: false };
    both.post(0, 1, write(None), &[element(10, 1500, own), element(1510, 1500, own)]);
    assert_eq!(both.bytes(1, at, 3000), pattern(3000));
    both.post(0, 2, Operation::Read { address: address + 900, key }, &[element(5000, 300, own)]);
    assert_eq!(both.bytes(0, 5000, 300), pattern(3000)[900..1200]);

    both.fill(1, at, &5u64.to_ne_bytes());
    both.post(0, 3, Operation::FetchAndAdd { address, key, add: 2 }, &[element(0, 8, own)]);
    assert_eq!((both.word(0, 0), both.word(1, at)), (5, 7));
    let swap = |compare| Operation::CompareAndSwap { address, key, compare, swap: 100 };
    both.post(0, 4, swap(5), &[element(0, 8, own)]);
    assert_eq!((both.word(0, 0), both.word(1, at)), (7, 7));
    both.post(0, 5, swap(7), &[element(0, 8, own)]);
    assert_eq!((both.word(0, 0), both.word(1, at)), (7, 100));
    let done = both.said(0);
    assert!(done.iter().map(|(id, _)| *id).eq(1..=5) && done.iter().all(|(_, s)| *s == Status::SUCCESS));

    // A write with immediate data consumes a receive.
    both.pairs[1].post_receive(9, &[]).unwrap();
    both.post(0, 6, write(Some(77)), &[element(10, 20, own)]);
    let got = both.poll(1);
    assert_eq!((got[0].id, got[0].opcode), (9, Opcode::RECV_RDMA_WITH_IMM));
    assert_eq!((got[0].length, got[0].immediate), (20, Some(77)));
}

#[test]
fn accesses_that_a_peer_does_not_allow_fail_without_effect() {
    // The tests: the request, the access rights of the region and of the queue pair, and the address.
    let wrongs = [
        ("the region", 1, ALL, 0),
        ("the end", 1 | ALL, ALL, 93),
        ("the begin", 1 | ALL, ALL, -1),
        ("the queue pair", 1 | ALL, 0, 0),
    ];
    for (what, of_region, of_pair, offset) in wrongs {
        for kind in 0..3 {
            let both = Both::new();
            let change = Change { access: Some(Access(of_pair)), ..Change::default() };
            both.pairs[1].modify(QpState::RTS, change).unwrap();
            let own = both.sides[0].register(0, 4096, 1);
            let key = both.sides[1].register(64, 100, of_region);
            both.fill(1, 0, &[0xee; 4096]);
            let address = (BASE + 64).wrapping_add_signed(offset);
            let operation = match kind {
                0 => Operation::Write { address, key, immediate: None, solicited: false },
                1 => Operation::Read { address, key },
                // The address of an atomic operation must be aligned.
                _ => Operation::FetchAndAdd {
                    address: address.next_multiple_of(8) - if offset < 0 { 8 } else { 0 },
                    key,
                    add: 1,
                },
            };
            both.post(0, 1, operation, &[element(0, 8, own)]);
            both.post(0, 2, operation, &[element(0, 8, own)]);
            let wanted = [(1, Status::REM_ACCESS_ERR), (2, Status::WR_FLUSH_ERR)];
            assert_eq!(both.said(0), wanted, "{what} {kind}");
            assert_eq!(both.bytes(1, 0, 4096), [0xee; 4096], "{what} {kind}");
            assert_eq!(both.pairs[0].state(), QpState::ERR);
            // The peer is told, and flushes its receives.
            both.pairs[1].post_receive(3, &[]).unwrap();
            both.pairs[1].look();
            assert_eq!(both.said(1), [(3, Status::WR_FLUSH_ERR)], "{what} {kind}");
            assert_eq!(both.sides[1].events(), [Event::QP_ACCESS_ERR]);
        }
    }
}

#[test]
fn keys_are_invalid_after_deregistration() {
    let both = Both::new();
    let own = both.sides[0].register(0, 4096, 1);
    let key = both.sides[1].register(0, 4096, 1 | ALL);
    let write = Operation::Write { address: BASE, key, immediate: None, solicited: false };
    both.post(0, 1, write, &[element(0, 8, own)]);
    both.sides[1].remove(key);
    let again = both.sides[1].register(0, 4096, 1 | ALL);
    assert_eq!(again.index(), key.index());
    both.post(0, 2, write, &[element(0, 8, own)]);
    assert_eq!(both.said(0), [(1, Status::SUCCESS), (2, Status::REM_ACCESS_ERR)]);

    // The same holds for the poster's own keys.
    let both = Both::new();
    let own = both.sides[0].register(0, 4096, 1);
    both.pairs[1].post_receive(1, &[]).unwrap();
    both.post(0, 1, SEND, &[element(0, 0, own)]);
    both.sides[0].remove(own);
    both.post(0, 2, SEND, &[element(0, 8, own)]);
    assert_eq!(both.said(0), [(1, Status::SUCCESS), (2, Status::LOC_PROT_ERR)]);
}

#[test]
fn a_message_waits_for_its_receive_in_order() {
    let both = Both::unconnected();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1)).collect();
    both.connect(0);
    // The peer is not ready yet, and has posted nothing.
    for id in 1..=3 {
        both.fill(0, 0, &[id as u8; 40]);
        let elements = [element(0, 40, keys[0])];
        let work = Work {
            id,
            operation: SEND,
            datagram: None,
            elements: &elements,
            is_inline: true,
            is_signaled: true,
        };
        both.pairs[0].post(&both.sides[0].pages(), &work).unwrap();
    }
    assert!(both.said(0).is_empty() && both.pairs[0].is_waiting());
    both.connect(1);
    let post_receives = |ids: std::ops::RangeInclusive<u64>| {
        for id in ids {
            both.pairs[1].post_receive(id, &[element(100 * id, 40, keys[1])]).unwrap();
        }
    };
    post_receives(1..=2);
    assert_eq!(both.said(0), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    both.fill(0, 0, &[4; 40]);
    both.post(0, 4, SEND, &[element(0, 40, keys[0])]);
    assert!(both.said(0).is_empty());
    assert_eq!(both.said(1), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    post_receives(3..=4);
    assert_eq!(both.said(0), [(3, Status::SUCCESS), (4, Status::SUCCESS)]);
    assert_eq!(both.said(1), [(3, Status::SUCCESS), (4, Status::SUCCESS)]);
    for id in 1..=4 {
        assert_eq!(both.bytes(1, 100 * id, 40), [id as u8; 40]);
    }
}

#[test]
fn queues_refuse_more_than_their_size() {
    let both = Both::new();
    let key = both.sides[0].register(0, 4096, 1);
    for id in 0..CAPACITY.sends as u64 {
        both.post(0, id, SEND, &[element(0, 8, key)]);
    }
    let post = |elements: &[Element], is_inline| {
        let work = Work { id: 9, operation: SEND, datagram: None, elements, is_inline, is_signaled: true };
        both.pairs[0].post(&both.sides[0].pages(), &work)
    };
    assert_eq!(post(&[element(0, 8, key)], false), Err(Refused::Full));
    assert_eq!(post(&[element(0, 8, key); 4], false), Err(Refused::Invalid));
    assert_eq!(post(&[element(0, 65, key)], true), Err(Refused::Invalid));
    for id in 0..CAPACITY.receives.entries as u64 {
        both.pairs[1].post_receive(id, &[]).unwrap();
    }
    assert_eq!(both.pairs[1].post_receive(9, &[]), Err(Refused::Full));
    assert_eq!(both.pairs[1].post_receive(9, &[Element::default(); 4]), Err(Refused::Invalid));
}

#[test]
fn a_queue_reports_how_many_requests_fit() {
    let both = Both::new();
    for left in (0..CAPACITY.sends).rev() {
        both.post(0, 1, SEND, &[]);
        assert_eq!(both.pairs[0].room(), left);
    }
    both.pairs[1].post_receive(1, &[]).unwrap();
    both.poll(0);
    assert_eq!(both.pairs[0].room(), 1);
}

#[test]
fn completions_put_back_are_returned_again_in_order() {
    let both = Both::new();
    for id in 0..4 {
        both.pairs[1].post_receive(id, &[]).unwrap();
        both.post(0, id, SEND, &[]);
    }
    for i in 0..2 {
        let mut taken = Vec::new();
        both.queues[i].poll(&both.sides[i].pages(), 3, |completed| taken.push(completed));
        both.queues[i].put_back(taken.drain(1..));
        assert!(!both.queues[i].resize(1));
        assert_eq!(both.said(i), [1, 2, 3].map(|id| (id, Status::SUCCESS)), "side {i}");
        assert_eq!(taken[0].id, 0);
        // When a queue pair is destroyed, its completions are dropped, including these.
        both.queues[i].put_back(taken.drain(..));
        both.pairs[i].end();
        assert!(both.said(i).is_empty());
    }
}

#[test]
fn a_message_that_is_too_long_fails_at_both_ends() {
    for len in [9u32, 100] {
        let both = Both::new();
        let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1)).collect();
        both.fill(1, 0, &[0xee; 100]);
        both.pairs[1].post_receive(1, &[element(0, 8, keys[1])]).unwrap();
        both.post(0, 2, SEND, &[element(0, len, keys[0])]);
        assert_eq!(both.said(0), [(2, Status::REM_INV_REQ_ERR)]);
        assert_eq!(both.said(1), [(1, Status::LOC_LEN_ERR)]);
        assert_eq!(both.bytes(1, 0, 100), [0xee; 100]);
        assert!(both.pairs.iter().all(|pair| pair.state() == QpState::ERR));
    }
}

#[test]
fn the_end_of_a_peer_fails_the_requests_that_wait_for_it() {
    let both = Both::new();
    let key = both.sides[0].register(0, 4096, 1);
    both.pairs[0].post_receive(1, &[]).unwrap();
    both.post(0, 2, SEND, &[element(0, 8, key)]);
    both.post(0, 3, SEND, &[element(0, 8, key)]);
    assert!(both.said(0).is_empty());
    both.sides[1].own.set_dead();
    both.pairs[0].look();
    assert!(both.said(0).is_empty(), "as a real adapter does, it goes on trying for a while");
    let wanted = [(2, Status::RETRY_EXC_ERR), (3, Status::WR_FLUSH_ERR), (1, Status::WR_FLUSH_ERR)];
    assert_eq!(both.comes(0, 3), wanted);

    // A program that only writes, and so never waits, is told too.
    let both = Both::new();
    let [own, key] = [0, 1].map(|i| both.sides[i].register(0, 4096, 1 | ALL));
    let write = Operation::Write { address: BASE, key, immediate: None, solicited: false };
    both.post(0, 1, write, &[element(0, 8, own)]);
    both.sides[1].own.set_dead();
    both.post(0, 2, write, &[element(0, 8, own)]);
    assert_eq!(both.comes(0, 2), [(1, Status::SUCCESS), (2, Status::RETRY_EXC_ERR)]);
}

/// Programs count their messages. A program that has received all of its messages ends, while its peer has posted more requests than
/// necessary. An immediate error would reach the peer before its last messages.
#[test]
fn the_end_of_a_peer_is_reported_after_its_messages() {
    let both = Both::new();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1)).collect();
    for id in 1..=2 {
        both.pairs[0].post_receive(id, &[element(0, 8, keys[0])]).unwrap();
    }
    both.post(1, 1, SEND, &[element(0, 8, keys[1])]);
    both.sides[1].own.set_dead();
    both.pairs[1].end();
    both.post(0, 3, SEND, &[element(0, 8, keys[0])]);
    both.pairs[0].look();
    assert_eq!(both.said(0), [(1, Status::SUCCESS)]);
    assert_eq!(both.comes(0, 2), [(3, Status::RETRY_EXC_ERR), (2, Status::WR_FLUSH_ERR)]);
}

#[test]
fn a_queue_pair_can_be_used_again_after_a_reset() {
    let both = Both::new();
    let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1)).collect();
    for round in 0..3u64 {
        for id in 0..6 {
            both.pairs[1].post_receive(id, &[element(0, 8, keys[1])]).unwrap();
            both.fill(0, 0, &(round * 10 + id).to_ne_bytes());
            both.post(0, id, SEND, &[element(0, 8, keys[0])]);
            assert_eq!(both.said(1), [(id, Status::SUCCESS)]);
            assert_eq!(both.word(1, 0), round * 10 + id);
        }
        assert_eq!(both.said(0).len(), 6);
        both.pairs[1].post_receive(9, &[]).unwrap();
        for pair in &both.pairs {
            pair.modify(QpState::RESET, Change::default()).unwrap();
            let change = Change { access: Some(Access(ALL)), ..Change::default() };
            pair.modify(QpState::INIT, change).unwrap();
        }
        assert!(both.said(1).is_empty(), "a reset forgets what was posted");
        both.connect(0);
        both.connect(1);
    }
}

#[test]
fn states_change_as_the_specification_says() {
    let side = Side::new(1);
    let queue = Arc::new(CompletionQueue::new(1));
    let pair = side.queue_pair(Kind::RC, 1, &queue);
    let go = |to, peer| pair.modify(to, Change { peer, ..Change::default() });
    let peer = QpNumber::new(2, 1);
    for (to, with) in
        [(QpState::RTR, peer), (QpState::RTS, None), (QpState::SQD, None), (QpState::INIT, peer)]
    {
        assert_eq!(go(to, with), Err(Refused::Invalid), "from RESET to {to:?}");
    }
    assert_eq!(pair.post_receive(1, &[]), Err(Refused::Invalid));
    go(QpState::INIT, None).unwrap();
    assert_eq!(go(QpState::RTR, None), Err(Refused::Invalid));
    assert_eq!(go(QpState::RTS, None), Err(Refused::Invalid));
    go(QpState::RTR, peer).unwrap();
    let work =
        Work { id: 1, operation: SEND, datagram: None, elements: &[], is_inline: false, is_signaled: true };
    assert_eq!(pair.post(&side.pages(), &work), Err(Refused::Invalid));
    go(QpState::RTS, None).unwrap();
    go(QpState::ERR, None).unwrap();
    assert_eq!(go(QpState::RTS, None), Err(Refused::Invalid));
    pair.post(&side.pages(), &work).unwrap();
    go(QpState::RESET, None).unwrap();
}

/// False values that a hostile owner writes where its peer looks: the peer gets an error, and accesses nothing outside the owner's
/// arenas.
#[test]
fn lies_in_the_tables_are_rejected() {
    type Lie = fn(&Mapping, usize);
    let lies: [(&str, Lie); 12] = [
        ("entries", |m, at| m.store_relaxed_u32(at + qp::ENTRIES, 3)),
        ("many entries", |m, at| m.store_relaxed_u32(at + qp::ENTRIES, 1 << 31)),
        ("stride", |m, at| m.store_relaxed_u32(at + qp::STRIDE, 65)),
        ("no stride", |m, at| m.store_relaxed_u32(at + qp::STRIDE, 0)),
        ("executor", |m, at| m.store_relaxed_u32(at + qp::EXECUTOR, 9)),
        ("receives used", |m, at| m.store_relaxed_u64(at + qp::HEAD, u64::MAX)),
        ("ring", |m, at| m.store_relaxed_u64(at + qp::RING, u64::MAX)),
        ("ring at the end", |m, at| m.store_relaxed_u64(at + qp::RING, ARENA as u64 - 64)),
        ("crooked ring", |m, at| m.store_relaxed_u64(at + qp::RING, 4)),
        ("other arena", |m, at| m.store_relaxed_u64(at + qp::COMPLETIONS, Place::new(1, 0).0)),
        ("another state", |m, at| m.store_relaxed_u64(at + qp::STATE, 1 << 32 | 99)),
        ("another incarnation", |m, at| m.store_relaxed_u64(at + qp::STATE, 2 << 32 | 0xffff)),
    ];
    for (what, lie) in lies {
        let both = Both::new();
        let key = both.sides[0].register(0, 4096, 1);
        both.pairs[1].post_receive(1, &[]).unwrap();
        let timeout = Some(Some(Duration::ZERO));
        both.pairs[0].modify(QpState::RTS, Change { timeout, ..Change::default() }).unwrap();
        lie(&both.sides[1].tables, both.pairs[1].number().at().unwrap());
        both.post(0, 1, SEND, &[element(0, 0, key)]);
        assert_eq!(both.said(0), [(1, Status::RETRY_EXC_ERR)], "{what}");
    }

    let lies: [(&str, Lie); 4] = [
        ("a chunk beyond the arena", |m, _| m.store_relaxed_u32(verbs::CHUNK_TABLE, Chunk::new(0, 4).0)),
        ("a chunk of no arena", |m, _| m.store_relaxed_u32(verbs::CHUNK_TABLE, u32::MAX)),
        ("chunks beyond the table", |m, at| m.store_relaxed_u32(at + region::CHUNK, u32::MAX)),
        ("a region of all addresses", |m, at| m.store_relaxed_u64(at + region::LENGTH, u64::MAX)),
    ];
    for (what, lie) in lies {
        let both = Both::new();
        let own = both.sides[0].register(0, 4096, 1);
        let key = both.sides[1].register(0, 4096, 1 | ALL);
        lie(&both.sides[1].tables, key.at().unwrap());
        both.fill(1, 0, &[0xee; 64]);
        let write = Operation::Write { address: BASE, key, immediate: None, solicited: false };
        both.post(0, 1, write, &[element(0, 8, own)]);
        assert_eq!(both.said(0), [(1, Status::REM_ACCESS_ERR)], "{what}");
        assert_eq!(both.bytes(1, 0, 64), [0xee; 64], "{what}");
    }
}

#[test]
fn lies_in_completions_are_refused() {
    let ring = RING + CAPACITY.receives.entries * CAPACITY.receives.stride();
    let header = |kind, flags| Completion::new(0, kind, flags).0;
    let lies = [
        ("an unknown kind", header(99, 0), 8),
        ("more than was posted", header(Completion::RECEIVE, 0), 9),
        ("more than a completion has room for", header(Completion::RECEIVE, Completion::IN_ENTRY), 33),
        ("more in the completion than was posted", header(Completion::RECEIVE, Completion::IN_ENTRY), 9),
        ("no immediate value", header(Completion::WRITE_WITH_IMMEDIATE, 0), 8),
    ];
    for (what, header, length) in lies {
        let both = Both::new();
        let key = both.sides[1].register(0, 4096, 1);
        both.fill(1, 0, &[0xee; 64]);
        both.pairs[1].post_receive(1, &[element(0, 8, key)]).unwrap();
        let arena = &both.sides[1].arena;
        arena.store_relaxed_u32(ring + completion::LENGTH, length);
        arena.store_release_u64(ring + completion::HEADER, header);
        assert_eq!(both.said(1), [(1, Status::BAD_RESP_ERR)], "{what}");
        assert_eq!(both.bytes(1, 0, 64), [0xee; 64], "{what}");
        assert_eq!(both.pairs[1].state(), QpState::ERR);
    }
    // Without a posted receive, a completion is ignored.
    let both = Both::new();
    both.sides[1].arena.store_release_u64(ring, header(Completion::RECEIVE, 0));
    assert!(both.said(1).is_empty());
}

#[test]
fn lies_in_receive_entries_are_refused() {
    let lies: [(&str, usize, u64); 4] = [
        ("many elements", 0, 16 << 32 | 100),
        ("more elements than the entry has room for", 0, 4 << 32 | 100),
        ("a key of no region", 0x18, 0xffff_ff00 << 32 | 100),
        ("an address of no region", 0x10, 4096),
    ];
    for (what, at, value) in lies {
        let both = Both::new();
        let keys: Vec<_> = both.sides.iter().map(|side| side.register(0, 4096, 1)).collect();
        both.fill(1, 0, &[0xee; 4096]);
        both.pairs[1].post_receive(1, &[element(0, 100, keys[1])]).unwrap();
        both.sides[1].arena.store_relaxed_u64(RING + at, value);
        both.post(0, 2, SEND, &[element(0, 100, keys[0])]);
        assert_eq!(both.said(0), [(2, Status::REM_OP_ERR)], "{what}");
        assert_eq!(both.said(1), [(1, Status::LOC_PROT_ERR)], "{what}");
        assert_eq!(both.bytes(1, 0, 4096), [0xee; 4096], "{what}");
    }
}
