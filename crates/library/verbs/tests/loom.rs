//! Models of the handshakes between a poster and the owner of a queue pair. Loom runs the real code in every order of threads, and with
//! every old value that the stated orderings allow a load to return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-verbs --test loom        (or: scripts/loom)
//!
//! Once an owner has been told that nobody accesses something, it overwrites that memory. A poster that is still accessing it, or comes
//! later, conflicts with the owner's write without an order between the two, and the memory reports that as a race. A lost wake-up is a
//! deadlock. All queues have one entry.
//!
//! The last part shows that the models can fail: it runs the same models with a memory in which one side lacks one ordering.
#![cfg(loom)]

use ginnel_layout::verbs::{
    Access, CHUNK, CHUNK_TABLE, Chunk, Claimer, Completion, GRH, Key, Kind, MEMBER, Place, QpNumber, QpState,
    REGION_TABLE, TABLES, completion, qp, receive, region,
};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use ginnel_verbs::completion_queue::CompletionQueue;
use ginnel_verbs::peer::{Arenas, Peer};
use ginnel_verbs::program::ProgramMemory;
use ginnel_verbs::queue_pair::{Adapter, Capacity, Change, Location, QueuePair, QueuePairOptions, Rings};
use ginnel_verbs::receive::Shape;
use ginnel_verbs::regions::{Region, Regions};
use ginnel_verbs::remote::{Failure, Remote, Sender};
use ginnel_verbs::shadow::{self, Bounce};
use ginnel_verbs::work::{Completed, Element, Operation, Status};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Explores `model` with at most this many preemptions, or as many as LOOM_MAX_PREEMPTIONS says.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

/// A flag and a condition variable, by which the thread of the owner sleeps and is woken.
type Parker = Arc<(Mutex<bool>, Condvar)>;

struct One(LoomMemory, Parker);

impl Arenas<LoomMemory> for One {
    fn arena(&self, number: u16) -> Option<LoomMemory> {
        (number == 0).then(|| self.0.clone())
    }

    fn ring(&self) {
        *self.1.0.lock().unwrap() = true;
        self.1.1.notify_one();
    }
}

/// The owner's device, with one shadow region, and memory for errands.
struct Device {
    removals: AtomicU64,
    arena: LoomMemory,
}

impl Adapter<LoomMemory> for Device {
    fn peer(&self, _: u32) -> Option<Arc<Peer<LoomMemory>>> {
        None
    }
    fn region(&self, _: Key) -> Option<Region> {
        None
    }
    fn with_region(&self, _: Key, then: &mut dyn FnMut(&Region)) {
        then(&Region { address: ADDRESS, length: 4096, access: Access(RIGHTS), domain: 1 });
    }
    fn take(&self, len: usize) -> Option<Bounce<LoomMemory>> {
        Some(Bounce { place: Place::new(0, BOUNCE as u64), memory: self.arena.clone(), at: BOUNCE, len })
    }
    fn give(&self, _: Bounce<LoomMemory>) {}
    fn removals(&self) -> &AtomicU64 {
        &self.removals
    }
    fn attend(&self) {}
    fn claimer(&self) -> Claimer {
        Claimer::new(OWNER, 7)
    }
    fn member(&self) -> u32 {
        OWNER
    }
    fn has_died(&self, _: Claimer) -> bool {
        false
    }
    fn has_to_wait(&self) {}

    fn next_incarnation(&self) -> u32 {
        1
    }
}

/// The memory of a program, which contains the same number at every address. Of a long message, it copies the first word.
struct Number(u64);

impl ProgramMemory<LoomMemory> for Number {
    fn copy_in(&self, _: u64, to: &LoomMemory, at: usize, _: usize, _: bool) {
        to.write(at, &self.0.to_ne_bytes());
    }
    fn copy_out(&self, _: &LoomMemory, _: usize, _: u64, _: usize) {}
    fn get(&self, _: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0.to_ne_bytes()[..into.len()]);
    }
    fn put(&self, _: u64, bytes: &[u8]) {
        assert!((1..=2).any(|number: u64| bytes == number.to_ne_bytes()), "{bytes:?}");
    }
    fn deliver(&self, _: &LoomMemory, _: usize, _: u64, _: usize) {}
    fn compare_exchange(&self, _: u64, _: u64, _: u64) -> u64 {
        0
    }
    fn fetch_add(&self, _: u64, _: u64) -> u64 {
        0
    }
    fn is_there(&self, _: u64, _: usize, _: bool) -> bool {
        true
    }
}

/// The memory of a program, which contains the same number at every address, and records what is stored to it.
struct Remembers(u64, std::sync::Mutex<Vec<u64>>);

impl Remembers {
    fn new(number: u64) -> Self {
        Self(number, std::sync::Mutex::default())
    }

    fn got(&self) -> Vec<u64> {
        self.1.lock().unwrap().clone()
    }
}

impl ProgramMemory<LoomMemory> for Remembers {
    fn copy_in(&self, _: u64, to: &LoomMemory, at: usize, _: usize, _: bool) {
        to.write(at, &self.0.to_ne_bytes());
    }
    fn copy_out(&self, from: &LoomMemory, at: usize, _: u64, _: usize) {
        let mut bytes = [0; 8];
        from.read(at, &mut bytes);
        self.1.lock().unwrap().push(u64::from_ne_bytes(bytes));
    }
    fn get(&self, _: u64, _: &mut [u8]) {}
    fn put(&self, _: u64, _: &[u8]) {}
    fn deliver(&self, from: &LoomMemory, at: usize, to: u64, len: usize) {
        self.copy_out(from, at, to, len);
    }
    fn compare_exchange(&self, _: u64, _: u64, _: u64) -> u64 {
        0
    }
    fn fetch_add(&self, _: u64, _: u64) -> u64 {
        0
    }
    fn is_there(&self, _: u64, _: usize, _: bool) -> bool {
        true
    }
}

const OWNER: u32 = 2;
const SHAPE: Shape = Shape { entries: 1, elements: 1 };
/// Offsets in the arena: the completion, which follows the receive, and the page.
const COMPLETION: usize = receive::stride(1);
const PAGE: usize = CHUNK;
/// Offset of the bounce area, behind the rings.
const BOUNCE: usize = CHUNK / 2;
const RIGHTS: u32 = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
const ADDRESS: u64 = 3 * CHUNK as u64;
/// Longer than the data that fits into a completion.
const LONG: u32 = 40;

fn number() -> QpNumber {
    QpNumber::new(OWNER, 1).unwrap()
}

/// An owner with a queue pair that is ready to receive, and a region of one page.
struct Owner {
    tables: LoomMemory,
    arena: LoomMemory,
    regions: Regions<LoomMemory>,
    key: Key,
    queue: Arc<CompletionQueue<LoomMemory>>,
    pair: Arc<QueuePair<LoomMemory>>,
    parker: Parker,
    told: Arc<std::sync::atomic::AtomicBool>,
}

impl Owner {
    /// Creates an owner. With `lacks`, its code runs without this ordering.
    fn new(kind: Kind, lacks: Option<Order>, has_events: bool) -> Self {
        let at = number().at().unwrap();
        let of_pair = [
            qp::STATE,
            qp::PEER,
            qp::DOMAIN,
            qp::RING,
            qp::COMPLETIONS,
            qp::ENTRIES,
            qp::STRIDE,
            qp::ACCESS,
            qp::EXECUTOR,
            qp::KIND,
            qp::QUEUE,
            qp::QKEY,
            qp::ARMED,
            qp::TAIL,
            qp::SHORTEST,
            qp::HEAD,
            qp::EXECUTING,
            qp::ERROR,
            qp::SENDERS,
            qp::ANSWER,
            qp::BOUNCE,
            qp::ROOM,
            qp::ASKED,
            qp::ASKED_ADDRESS,
            qp::ASKED_KEY,
            qp::ASKED_LENGTH,
            qp::ASKED_FIRST,
            qp::ASKED_SECOND,
        ];
        let of_region = [region::WORD, region::ADDRESS, region::LENGTH, region::DOMAIN, region::CHUNK];
        let words = of_pair.map(|word| at + word).into_iter();
        let words = words.chain(of_region.map(|word| REGION_TABLE + word)).chain([MEMBER, CHUNK_TABLE]);
        let tables = LoomMemory::new(TABLES, words);
        let of_completion = [
            completion::HEADER,
            completion::LENGTH,
            completion::IMMEDIATE,
            completion::SOURCE,
            completion::TARGET,
            completion::LID,
        ];
        let entry = (0..receive::stride(1)).step_by(8);
        let payload = (completion::PAYLOAD..completion::ENTRY).step_by(8).map(|at| COMPLETION + at);
        let words = entry.chain(of_completion.map(|at| COMPLETION + at)).chain(payload).chain([
            PAGE,
            PAGE + GRH,
            BOUNCE,
        ]);
        let arena = LoomMemory::new(2 * CHUNK, words);
        let own = |memory: &LoomMemory| lacks.map_or(memory.clone(), |order| memory.without(order));

        let mut regions = Regions::new(own(&tables));
        let access = Access(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let area = Region { address: ADDRESS, length: 4096, access, domain: 1 };
        let key = regions.add(area, &[Chunk::new(0, 1)]).unwrap();
        let told = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let queue = Arc::new(match has_events {
            true => {
                let told = told.clone();
                let tell = move || told.store(true, std::sync::atomic::Ordering::Relaxed);
                CompletionQueue::with_events(4, Box::new(tell))
            }
            false => CompletionQueue::new(4),
        });
        let place = |at: usize| (Place::new(0, at as u64), (own(&arena), at));
        let rings = Some(Rings { receives: place(0), completions: place(COMPLETION) });
        let location = Location { number: number(), rings };
        let capacity = Capacity { sends: 1, elements: 1, inline: 0, receives: SHAPE };
        let completes = (queue.clone(), queue.clone());
        let wanted =
            QueuePairOptions { kind, domain: 1, capacity, shared: None, completes, tell: Box::new(|_| {}) };
        let device = Arc::new(Device { removals: AtomicU64::new(0), arena: own(&arena) });
        let pair = QueuePair::new(own(&tables), location, wanted, device).unwrap();
        let access = Some(Access(RIGHTS));
        pair.modify(QpState::INIT, Change { access, qkey: Some(5), ..Change::default() }).unwrap();
        let peer = (kind != Kind::UD).then(|| poster(1));
        pair.modify(QpState::RTR, Change { peer, ..Change::default() }).unwrap();
        Self {
            tables,
            arena,
            regions,
            key,
            queue,
            pair,
            parker: Arc::new((Mutex::new(false), Condvar::new())),
            told,
        }
    }

    fn post(&self) {
        let element = Element { address: ADDRESS, length: 100, key: self.key.0 };
        self.pair.post_receive(1, &[element]).unwrap();
    }

    /// Connects a poster to the owner. With `lacks`, the poster's code runs without this ordering.
    fn remote(&self, kind: Kind, n: u32, lacks: Option<Order>) -> Remote<LoomMemory> {
        let seen = |memory: &LoomMemory| lacks.map_or(memory.clone(), |order| memory.without(order));
        let arenas = One(seen(&self.arena), self.parker.clone());
        let peer = Arc::new(Peer::new(seen(&self.tables), Box::new(arenas)));
        let from = Sender { number: poster(n), kind, claimer: Claimer::new(n, 7), lid: 2 };
        Remote::connect(peer, number(), from).unwrap_or_else(|error| panic!("{error:?}"))
    }

    fn poll(&self) -> Vec<Completed> {
        let mut all = Vec::new();
        self.queue.poll(&Number(0), 4, |completed| all.push(completed));
        all
    }

    /// Overwrites the page.
    fn reuse_page(&self) {
        for at in [PAGE, PAGE + GRH] {
            self.arena.write(at, &[9; 8]);
        }
    }

    /// Uses the memory of the completion for something else.
    fn reuse_rings(&self) {
        self.arena.write(COMPLETION + completion::PAYLOAD, &[9; completion::INLINE]);
        self.arena.store_relaxed_u64(COMPLETION + completion::HEADER, MARK);
    }

    fn are_rings_as_left(&self) -> bool {
        self.arena.load_relaxed_u64(COMPLETION + completion::HEADER) == MARK
    }
}

const MARK: u64 = 0x9999;

fn poster(n: u32) -> QpNumber {
    QpNumber::new(n + 10, 1).unwrap()
}

fn element(length: u32) -> [Element; 1] {
    [Element { address: 0, length, key: 0 }]
}

const SEND: Operation = Operation::Send { immediate: None, solicited: false };

/// The ordering that the owner lacks, and the one that the poster lacks.
type Lacks = (Option<Order>, Option<Order>);

/// Sends a message or a datagram.
fn send(remote: &mut Remote<LoomMemory>, kind: Kind, value: u64, len: u32) -> Result<(), Failure> {
    match kind {
        Kind::UD => remote.send_datagram(&Number(value), &element(len), None, false, 5),
        _ => remote.execute(&Number(value), &SEND, &element(len)),
    }
}

/// A region is removed while a peer writes to it, or while a message for it arrives.
fn removal(kind: Kind, is_write: bool, (owners, posters): Lacks) {
    let mut owner = Owner::new(kind, owners, false);
    owner.post();
    let mut remote = owner.remote(kind, 1, posters);
    let key = owner.key;
    let poster = thread::spawn(move || {
        if is_write {
            let write = Operation::Write { address: ADDRESS, key, immediate: None, solicited: false };
            let _ = remote.execute(&Number(1), &write, &element(8));
        } else {
            let _ = send(&mut remote, kind, 1, LONG);
        }
    });
    assert!(owner.regions.remove(key));
    if !owner.pair.is_region_accessed(key) {
        owner.reuse_page();
    }
    poster.join().unwrap();
    owner.pair.end();
}

/// A queue pair is destroyed while a message for it arrives.
fn end(kind: Kind, (owners, posters): Lacks) {
    let owner = Owner::new(kind, owners, false);
    owner.post();
    let mut remote = owner.remote(kind, 1, posters);
    let poster = thread::spawn(move || {
        let _ = send(&mut remote, kind, 1, 8);
    });
    owner.pair.end();
    let is_reused = !owner.pair.are_rings_accessed();
    if is_reused {
        owner.reuse_rings();
    }
    poster.join().unwrap();
    assert!(!owner.pair.are_rings_accessed());
    assert!(!is_reused || owner.are_rings_as_left());
}

/// An owner arms, polls and sleeps while a message arrives.
fn wake((owners, posters): Lacks) {
    let owner = Owner::new(Kind::RC, owners, true);
    owner.post();
    let mut remote = owner.remote(Kind::RC, 1, posters);
    let poster = thread::spawn(move || send(&mut remote, Kind::RC, 1, 8).unwrap());
    owner.queue.arm(false);
    if owner.poll().is_empty() {
        let mut is_rung = owner.parker.0.lock().unwrap();
        while !*is_rung {
            is_rung = owner.parker.1.wait(is_rung).unwrap();
        }
        drop(is_rung);
        owner.queue.attend(&Number(0));
        assert!(owner.told.load(std::sync::atomic::Ordering::Relaxed), "nobody tells the program");
        assert_eq!(owner.poll().len(), 1);
    }
    poster.join().unwrap();
    owner.pair.end();
}

/// Two messages in a row for a queue with room for one. The receive is posted again as soon as the first message has been taken.
fn two_laps(kind: Kind, (owners, posters): Lacks) {
    let owner = Owner::new(kind, owners, false);
    owner.post();
    let mut remote = owner.remote(kind, 1, posters);
    let poster = thread::spawn(move || {
        send(&mut remote, kind, 1, 8).unwrap();
        send(&mut remote, kind, 2, 8).is_ok()
    });
    let mut got = owner.poll();
    if !got.is_empty() {
        owner.post();
    }
    let is_sent = poster.join().unwrap();
    got.extend(owner.poll());
    assert_eq!(got.len(), 1 + usize::from(is_sent));
    assert!(got.iter().all(|one| (one.id, one.status) == (1, Status::SUCCESS)));
    owner.pair.end();
}

/// Two senders compete for the same receive.
fn rivals((owners, posters): Lacks) {
    let owner = Owner::new(Kind::UD, owners, false);
    owner.post();
    let [mut a, mut b] = [1, 2].map(|n| owner.remote(Kind::UD, n, posters));
    let other = thread::spawn(move || send(&mut a, Kind::UD, 1, 8));
    let results = [send(&mut b, Kind::UD, 2, 8), other.join().unwrap()];
    let winner = match results {
        [Ok(()), Err(Failure::NotReady)] => 2,
        [Err(Failure::NotReady), Ok(())] => 1,
        results => panic!("{results:?}"),
    };
    let got = owner.poll();
    assert_eq!((got.len(), got[0].status, got[0].source), (1, Status::SUCCESS, poster(winner)));
    owner.pair.end();
}

/// A queue pair enters the error state and takes back its receives while a datagram arrives. The receive completes once: with the
/// message if it was sent, and otherwise flushed.
fn flush((owners, posters): Lacks) {
    let owner = Owner::new(Kind::UD, owners, false);
    owner.post();
    let mut remote = owner.remote(Kind::UD, 1, posters);
    let poster = thread::spawn(move || send(&mut remote, Kind::UD, 1, 8).is_ok());
    owner.pair.modify(QpState::ERR, Change::default()).unwrap();
    let mut got = owner.poll();
    let is_sent = poster.join().unwrap();
    got.extend(owner.poll());
    let status = if is_sent { Status::SUCCESS } else { Status::WR_FLUSH_ERR };
    assert_eq!(got.iter().map(|one| (one.id, one.status)).collect::<Vec<_>>(), [(1, status)]);
    let header = Completion(owner.arena.load_relaxed_u64(COMPLETION + completion::HEADER));
    assert!(header.claimer().is_none());
    owner.pair.end();
}

/// A number is read from a shadow region, and one is written there. The owner looks for errands while the peer requests them, and the
/// peer looks for answers while the owner answers.
fn errands((owners, posters): Lacks) {
    let owner = Owner::new(Kind::RC, owners, false);
    assert!(owner.pair.offer_errands(shadow::MOST));
    let mut remote = owner.remote(Kind::RC, 1, posters);
    let key = Key::shadow(0, 1);
    let operations = [
        Operation::Read { address: ADDRESS, key },
        Operation::Write { address: ADDRESS, key, immediate: None, solicited: false },
    ];
    let go_on = move |remote: &mut Remote<LoomMemory>, program: &Remembers, done: &mut usize| {
        let Some(operation) = operations.get(*done) else { return };
        match remote.execute(program, operation, &element(8)) {
            Ok(()) => *done += 1,
            Err(Failure::Asked) => {}
            Err(failure) => panic!("assertion: {failure:?}"),
        }
    };
    // The poster's thread is the first to run. If two threads load a word before one of them stores to it, loom remembers only the last
    // load, so that thread must see a store before the other thread loads.
    let (pair, program) = (owner.pair.clone(), Arc::new(Remembers::new(2)));
    let errand_server = {
        let program = program.clone();
        thread::spawn(move || (0..2).for_each(|_| pair.progress(&*program)))
    };
    let (posters, mut done) = (Remembers::new(1), 0);
    (0..3).for_each(|_| go_on(&mut remote, &posters, &mut done));
    errand_server.join().unwrap();
    // Completes what is left.
    for _ in 0..2 {
        owner.pair.progress(&*program);
        go_on(&mut remote, &posters, &mut done);
        go_on(&mut remote, &posters, &mut done);
    }
    assert_eq!((done, program.got(), posters.got()), (2, vec![1], vec![2]), "what was written, and read");
    owner.pair.end();
}

/// The unchanged code.
const WHOLE: Lacks = (None, None);

#[test]
fn a_region_reported_as_unused_is_not_written_to() {
    explore(3, || removal(Kind::RC, true, WHOLE));
}

#[test]
fn a_message_is_not_written_to_a_region_reported_as_unused() {
    explore(3, || removal(Kind::RC, false, WHOLE));
}

#[test]
fn a_datagram_is_not_written_to_a_region_reported_as_unused() {
    explore(3, || removal(Kind::UD, false, WHOLE));
}

#[test]
fn rings_reported_as_unused_are_not_written_to() {
    explore(3, || end(Kind::RC, WHOLE));
    explore(3, || end(Kind::UD, WHOLE));
}

#[test]
fn no_wake_is_lost() {
    explore(3, || wake(WHOLE));
}

#[test]
fn a_receive_is_used_again_after_its_message_was_taken() {
    explore(3, || two_laps(Kind::RC, WHOLE));
    explore(3, || two_laps(Kind::UD, WHOLE));
}

#[test]
fn only_one_of_two_senders_gets_a_receive() {
    explore(3, || rivals(WHOLE));
}

#[test]
fn a_receive_is_either_flushed_or_used() {
    explore(3, || flush(WHOLE));
}

#[test]
fn errands_are_executed_once_and_as_requested() {
    explore(3, || errands(WHOLE));
}

/// How a failed model panics: with a race or a wrong value, or with a lost wake-up.
const RACE: &[&str] = &["Causality violation", "assertion"];
const LOST: &[&str] = &["deadlock"];

/// Runs `model`, which must fail with a panic whose message contains one of `how`.
fn must_fail(how: &[&str], what: (&str, Lacks), model: impl Fn(Lacks) + Sync + Send + 'static) {
    let failure =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(3, move || model(what.1))));
    let Err(panic) = failure else { panic!("the model passes although an ordering is missing: {what:?}") };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
    assert!(how.iter().any(|how| text.contains(how)), "{what:?}: expected {how:?}, failed with {text:?}");
}

/// Each side without its fence, then the poster without the release at the end of an access, and the owner without the acquire of its
/// look.
const EACH: [Lacks; 4] = [
    (Some(Order::Fence), None),
    (None, Some(Order::Fence)),
    (None, Some(Order::Release)),
    (Some(Order::Acquire), None),
];

#[test]
fn without_an_order_a_region_is_accessed_after_its_removal() {
    for lacks in EACH {
        must_fail(RACE, ("write", lacks), |lacks| removal(Kind::RC, true, lacks));
        must_fail(RACE, ("receive", lacks), |lacks| removal(Kind::RC, false, lacks));
        must_fail(RACE, ("datagram", lacks), |lacks| removal(Kind::UD, false, lacks));
    }
}

#[test]
fn without_an_order_rings_are_accessed_after_their_end() {
    for lacks in EACH {
        must_fail(RACE, ("connection", lacks), |lacks| end(Kind::RC, lacks));
        must_fail(RACE, ("datagram", lacks), |lacks| end(Kind::UD, lacks));
    }
}

#[test]
fn without_a_fence_a_wake_is_lost() {
    for lacks in &EACH[..2] {
        must_fail(LOST, ("wake", *lacks), wake);
    }
}

#[test]
fn without_an_order_a_message_is_overwritten() {
    // The orderings of the completion's header, and of the tail, on both sides.
    let each = [
        (None, Some(Order::Release)),
        (Some(Order::Acquire), None),
        (Some(Order::Release), None),
        (None, Some(Order::Acquire)),
    ];
    for lacks in each {
        must_fail(RACE, ("connection", lacks), |lacks| two_laps(Kind::RC, lacks));
    }
}

#[test]
fn without_an_order_a_wrong_errand_is_executed() {
    // The orderings of the errand's number, and of the answer, on both sides.
    let each = [
        (None, Some(Order::Release)),
        (Some(Order::Acquire), None),
        (Some(Order::Release), None),
        (None, Some(Order::Acquire)),
    ];
    for lacks in each {
        must_fail(RACE, ("errand", lacks), errands);
    }
}
