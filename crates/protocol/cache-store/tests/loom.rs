//! Models of a reader that runs concurrently with the server. loom runs the real code in every order of the two threads,
//! and with every old value that the stated orderings let a load return.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-cache-store --test loom        (or: scripts/loom)
//!
//! A value consists of two or three words, which contain the same number. Each log segment of the cache has one item and
//! counts as full, so the next item needs another segment.
//!
//! The last part shows that the models can fail: it runs the same models without one ordering of one side.
#![cfg(loom)]

use ginnel_cache_store::reader::{Found, Reader};
use ginnel_cache_store::store::Store;
use ginnel_layout::cache::{
    BOOT_TIME, BUCKETS, CLOCK, CONTACT, CONTACT_LEN, FLUSH_AT, FLUSHED, ID, KEY, LIMIT, MAGIC, PRESSURE,
    READY, Room, SEGMENT, SEGMENTS, SERVER, SLOTS, Shape, VERSIONS, item, log,
};
use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use loom::thread;
use std::ops::Range;

const SHAPE: Shape = Shape { segments: 4, segment: 4096, buckets: 1 };
/// The key that the reader looks up. Each key has the length of one word.
const WANTED: &[u8] = b"wanted--";
const OTHER: &[u8] = b"other---";
const THIRD: &[u8] = b"third---";

/// Explores `model` with at most this many preemptions, or as many as LOOM_MAX_PREEMPTIONS says.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 100_000;
    builder.check(model);
}

/// Returns the offsets of the words of the header.
fn header() -> Vec<usize> {
    vec![
        MAGIC,
        SEGMENTS,
        SEGMENT,
        BUCKETS,
        KEY,
        KEY + 8,
        ID,
        ID + 8,
        CLOCK,
        BOOT_TIME,
        FLUSHED,
        FLUSH_AT,
        VERSIONS,
        SERVER,
        LIMIT,
        PRESSURE,
        CONTACT_LEN,
    ]
}

/// Returns memory with a cache without items. There is room for two items in each log segment.
fn memory() -> LoomMemory {
    let mut words = header();
    words.extend((0..3).map(|word| CONTACT + word * 8));
    words.extend((0..SLOTS).map(|slot| SHAPE.bucket(0) + slot * 8));
    for segment in 0..SHAPE.segments {
        words.extend([log::STATE, log::USED, log::SEQUENCE].map(|word| SHAPE.log(segment) + word));
        words.extend((0..18).map(|word| SHAPE.segment(segment) + word * 8));
    }
    let memory = LoomMemory::new(SHAPE.len(), words);
    let words = [
        (SEGMENTS, SHAPE.segments as u64),
        (SEGMENT, SHAPE.segment as u64),
        (BUCKETS, SHAPE.buckets as u64),
        (LIMIT, SHAPE.segments as u64),
        (CLOCK, 1000),
        (MAGIC, READY),
    ];
    words.iter().for_each(|(at, value)| memory.store_relaxed_u64(*at, *value));
    memory
}

/// Returns a value that repeats a number.
fn value(number: u64, words: usize) -> Vec<u8> {
    number.to_ne_bytes().repeat(words)
}

/// Stores an item in a log segment of its own, and makes the segment count as full.
fn fill(memory: &LoomMemory, segment: usize, key: &[u8], number: u64) {
    let mut store = Store::open(memory.clone(), 0).unwrap();
    store.set(key, &[&value(number, 2)], 0, 0).unwrap();
    let at = SHAPE.segment(segment);
    assert_ne!(memory.load_relaxed_u64(at + item::VERSION), 0, "the item lies elsewhere");
    memory.store_relaxed_u64(at + item::ROOM, Room::new(SHAPE.segment, 1).0);
    memory.store_relaxed_u64(SHAPE.log(segment) + log::USED, SHAPE.segment as u64);
}

/// The ordering that one side lacks, and the words for which it lacks it.
type Lack = Option<(Order, Range<usize>)>;
/// The orderings that the server and the reader lack.
type Lacks = (Lack, Lack);
const WHOLE: Lacks = (None, None);

fn lacking(memory: &LoomMemory, lack: &Lack) -> LoomMemory {
    lack.clone().map_or(memory.clone(), |(order, words)| memory.without_at(order, words))
}

/// Returns the bytes of the version of a segment's first item.
fn version(segment: usize) -> Range<usize> {
    let at = SHAPE.segment(segment) + item::VERSION;
    at..at + 8
}

fn slots() -> Range<usize> {
    SHAPE.bucket(0)..SHAPE.bucket(1)
}

/// Runs a reader that looks a key up once, while the server performs `change`. The reader must find a value of one of
/// `numbers`, or `Unknown`, or nothing if it `may_miss`.
fn look_up(
    memory: &LoomMemory,
    lacks: &Lacks,
    numbers: [u64; 2],
    may_miss: bool,
    change: impl FnOnce(&mut Store<LoomMemory>) + 'static,
) {
    let mut store = Store::open(lacking(memory, &lacks.0), 0).unwrap();
    let first = store.peek(WANTED).map_or(0, |meta| meta.version);
    let reader = Reader::new(lacking(memory, &lacks.1)).unwrap();
    // The server is the first to run. If two threads load a word before one of them stores to it, loom remembers only the
    // last of the loads, so loom must see a store before the other thread's load.
    let reader = thread::spawn(move || {
        let mut found = Vec::new();
        match reader.get(WANTED, &mut found) {
            Found::Hit(meta) => {
                assert!(meta.len == found.len() && found.len().is_multiple_of(8), "torn: {found:?}");
                let is_value = |number: &u64| found == value(*number, found.len() / 8);
                assert!(numbers.iter().any(is_value), "torn: {found:?}");
                let is_first = is_value(&numbers[0]) && numbers[0] != numbers[1];
                assert!(!is_first || meta.version == first, "torn: another version");
            }
            Found::Miss => assert!(may_miss, "missed"),
            // A new item is not changed, so the result cannot be unknown.
            Found::Unknown => assert!(first != 0, "unknown"),
        }
    });
    change(&mut store);
    reader.join().unwrap();
}

/// The item is overwritten in place.
fn overwrite(lacks: Lacks) {
    let memory = memory();
    Store::open(memory.clone(), 0).unwrap().set(WANTED, &[&value(1, 2)], 1, 0).unwrap();
    look_up(&memory, &lacks, [1, 2], false, |store| {
        store.set(WANTED, &[&value(2, 2)], 2, 0).unwrap();
        assert_eq!(store.segments().0, 1, "it is in its place");
    });
}

/// The item is new, at a place that another item had before. The reader finds it or not.
fn appear(lacks: Lacks) {
    let memory = memory();
    let at = SHAPE.segment(0);
    let other = [(item::VERSION, 1 << 40), (item::HASH, 7), (item::LENGTHS, 0)];
    other.iter().for_each(|(word, value)| memory.store_relaxed_u64(at + word, *value));
    look_up(&memory, &lacks, [0, 2], true, |store| {
        store.set(WANTED, &[&value(2, 2)], 0, 0).unwrap();
    });
}

/// The item is replaced by a new one at another place.
fn replace(lacks: Lacks) {
    let memory = memory();
    fill(&memory, 0, WANTED, 1);
    look_up(&memory, &lacks, [1, 2], false, |store| {
        store.set(WANTED, &[&value(2, 3)], 0, 0).unwrap();
    });
}

/// The item is evicted with its segment, and another version of it is written at the same place.
fn reuse(lacks: Lacks) {
    let memory = memory();
    fill(&memory, 0, WANTED, 1);
    fill(&memory, 1, OTHER, 3);
    fill(&memory, 2, THIRD, 4);
    look_up(&memory, &lacks, [1, 2], true, |store| {
        store.set(WANTED, &[&value(2, 3)], 0, 0).unwrap();
    });
    assert_eq!(memory.load_relaxed_u64(SHAPE.log(0) + log::SEQUENCE), 4, "the segment was used again");
}

/// The item moves, and another one takes its place. The reader never misses it.
fn move_away(lacks: Lacks) {
    let memory = memory();
    fill(&memory, 0, OTHER, 3);
    fill(&memory, 1, WANTED, 1);
    fill(&memory, 2, THIRD, 4);
    let mut store = Store::open(memory.clone(), 0).unwrap();
    [OTHER, WANTED].iter().for_each(|key| store.used_by_reader(store.hash(key)));
    look_up(&memory, &lacks, [1, 1], false, |store| {
        store.set(b"another-", &[&value(5, 2)], 0, 0).unwrap();
        assert_eq!(store.counters().moves, 2);
    });
    assert_eq!(memory.load_relaxed_u64(SHAPE.log(1) + log::SEQUENCE), 5, "the segment was used again");
}

/// The item is deleted, and stored again.
fn delete(lacks: Lacks) {
    let memory = memory();
    Store::open(memory.clone(), 0).unwrap().set(WANTED, &[&value(1, 2)], 1, 0).unwrap();
    look_up(&memory, &lacks, [1, 2], true, |store| {
        assert!(store.delete(WANTED));
        store.set(WANTED, &[&value(2, 2)], 2, 0).unwrap();
    });
}

/// The marks, the expiry time and the version of the item change, but not its value.
fn meta(lacks: Lacks) {
    let memory = memory();
    Store::open(memory.clone(), 0).unwrap().set(WANTED, &[&value(1, 2)], 1, 0).unwrap();
    look_up(&memory, &lacks, [1, 1], false, |store| {
        assert!(store.mark(WANTED, 4) && store.touch(WANTED, 0));
        store.renew(WANTED, 2, None).unwrap();
    });
}

/// A reader starts while the cache is created.
fn make(lacks: Lacks) {
    let mut words = header();
    words.extend((SHAPE.log(0)..SHAPE.bucket(1)).step_by(8));
    let memory = LoomMemory::new(SHAPE.len(), words);
    let (server, reader) = (lacking(&memory, &lacks.0), lacking(&memory, &lacks.1));
    let reader = thread::spawn(move || Reader::new(reader).map(|reader| (reader.id(), reader.hash(b"key"))));
    let whole = Store::create(server, SHAPE, [1, 2], 0).unwrap();
    let reader = reader.join().unwrap();
    let id = whole.id();
    match reader {
        Ok(found) => assert_eq!(found, (id, whole.hash(b"key"))),
        Err(error) => assert_eq!(error, ginnel_cache_store::store::NotACache::Unknown),
    }
}

/// A reader reads the server's contact text while it changes.
fn contact(lacks: Lacks) {
    let memory = memory();
    let texts = ["tcp 1.1.1.1:111\n", "unix /run/cache/socket\n"];
    let mut store = Store::open(lacking(&memory, &lacks.0), 0).unwrap();
    store.set_contact(texts[0]);
    let reader = Reader::new(lacking(&memory, &lacks.1)).unwrap();
    let reader = thread::spawn(move || {
        let found = reader.contact();
        assert!(found.is_empty() || texts.contains(&&*found), "torn: {found:?}");
    });
    store.set_contact(texts[1]);
    reader.join().unwrap();
}

#[test]
fn an_item_that_is_overwritten_is_found_whole() {
    explore(3, || overwrite(WHOLE));
}

#[test]
fn an_item_that_is_new_is_found_whole_or_not() {
    explore(3, || appear(WHOLE));
}

#[test]
fn an_item_that_is_replaced_is_found() {
    explore(3, || replace(WHOLE));
}

#[test]
fn an_item_whose_segment_is_used_again_is_found_whole_or_not() {
    explore(3, || reuse(WHOLE));
}

#[test]
fn an_item_that_moves_is_found() {
    explore(3, || move_away(WHOLE));
}

#[test]
fn an_item_that_is_deleted_is_found_whole_or_not() {
    explore(3, || delete(WHOLE));
}

#[test]
fn an_item_that_is_marked_is_found() {
    explore(3, || meta(WHOLE));
}

#[test]
fn a_cache_that_is_made_is_found_whole_or_not() {
    explore(2, || make(WHOLE));
}

#[test]
fn a_contact_that_changes_is_found_whole_or_not() {
    explore(3, || contact(WHOLE));
}

/// Runs `model`, which must fail with a panic whose message contains `how`.
fn must_fail(how: &str, lacks: Lacks, model: impl Fn(Lacks) + Sync + Send + 'static) {
    let what = format!("{lacks:?}");
    let model = move || explore(3, move || model(lacks.clone()));
    let failure = std::panic::catch_unwind(std::panic::AssertUnwindSafe(model));
    let Err(panic) = failure else { panic!("the model passes although an ordering is missing: {what}") };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
    assert!(text.contains(how), "{what}: expected {how:?}, failed with {text:?}");
}

/// ORDER cache.changing: one side without its fence.
#[test]
fn without_a_fence_a_value_is_torn() {
    let fence = || Some((Order::Fence, 0..0));
    for lacks in [(fence(), None), (None, fence())] {
        must_fail("torn", lacks.clone(), overwrite);
        must_fail("torn", lacks, contact);
    }
}

/// ORDER cache.version.
#[test]
fn without_an_order_a_version_comes_before_its_value() {
    must_fail("torn", (Some((Order::Release, version(0))), None), overwrite);
    must_fail("torn", (None, Some((Order::Acquire, version(0)))), overwrite);
}

/// ORDER cache.slot.
#[test]
fn without_an_order_a_slot_comes_before_its_item() {
    must_fail("unknown", (Some((Order::Release, slots())), None), appear);
    must_fail("unknown", (None, Some((Order::Acquire, slots()))), appear);
}

/// ORDER cache.ready.
#[test]
fn without_an_order_a_cache_is_found_too_early() {
    must_fail("assertion", (Some((Order::Release, MAGIC..MAGIC + 8)), None), make);
    must_fail("assertion", (None, Some((Order::Acquire, MAGIC..MAGIC + 8))), make);
}

/// ORDER cache.contact.
#[test]
fn without_an_order_a_contact_is_torn() {
    let len = CONTACT_LEN..CONTACT_LEN + 8;
    must_fail("torn", (Some((Order::Release, len.clone())), None), contact);
    must_fail("torn", (None, Some((Order::Acquire, len))), contact);
}
