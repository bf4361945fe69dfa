//! A reader that is paused in the middle of a lookup while the server performs whole operations.
#![cfg(not(loom))]

mod common;

use common::{create, key, memory, value, which};
use ginnel_cache_store::reader::{Found, Reader};
use ginnel_cache_store::store::Store;
use ginnel_shmem::{Mapping, SharedMemory};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const LEN: usize = 32 << 10;

/// The memory of a reader. It counts the words that are read, and calls a function before each read.
#[derive(Clone)]
struct Interrupted {
    memory: Mapping,
    reads: Rc<Cell<u64>>,
    before: Rc<RefCell<dyn FnMut(u64)>>,
}

impl Interrupted {
    fn new(memory: Mapping, before: impl FnMut(u64) + 'static) -> Self {
        Self { memory, reads: Rc::default(), before: Rc::new(RefCell::new(before)) }
    }

    fn read_next(&self) {
        let next = self.reads.get() + 1;
        self.reads.set(next);
        (self.before.borrow_mut())(next);
    }
}

macro_rules! words {
    ($($type:ty: $load_relaxed:ident $load_acquire:ident $store_relaxed:ident $store_release:ident)*) => {$(
        fn $load_relaxed(&self, at: usize) -> $type { self.read_next(); self.memory.$load_relaxed(at) }
        fn $load_acquire(&self, at: usize) -> $type { self.read_next(); self.memory.$load_acquire(at) }
        fn $store_relaxed(&self, _: usize, _: $type) { panic!("a reader writes") }
        fn $store_release(&self, _: usize, _: $type) { panic!("a reader writes") }
    )*};
}

impl SharedMemory for Interrupted {
    fn len(&self) -> usize {
        self.memory.len()
    }
    words! {
        u16: load_relaxed_u16 load_acquire_u16 store_relaxed_u16 store_release_u16
        u32: load_relaxed_u32 load_acquire_u32 store_relaxed_u32 store_release_u32
        u64: load_relaxed_u64 load_acquire_u64 store_relaxed_u64 store_release_u64
    }
    fn compare_exchange_u64(&self, _: usize, _: u64, _: u64) -> Result<(), u64> {
        panic!("a reader writes")
    }
    fn swap_u64(&self, _: usize, _: u64) -> u64 {
        panic!("a reader writes")
    }
    fn fetch_or_u64(&self, _: usize, _: u64) -> u64 {
        panic!("a reader writes")
    }
    fn fetch_and_u64(&self, _: usize, _: u64) -> u64 {
        panic!("a reader writes")
    }
    fn fetch_add_u32(&self, _: usize, _: u32) -> u32 {
        panic!("a reader writes")
    }
    fn fetch_add_u64(&self, _: usize, _: u64) -> u64 {
        panic!("a reader writes")
    }
    fn full_fence(&self) {
        self.memory.full_fence();
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        for (word, bytes) in into.chunks_mut(8).enumerate() {
            self.read_next();
            self.memory.read(at + 8 * word, bytes);
        }
    }
    fn write(&self, _: usize, _: &[u8]) {
        panic!("a reader writes");
    }
    fn read_acquire(&self, at: usize, into: &mut [u8]) {
        self.read(at, into);
    }
    fn write_release(&self, _: usize, _: &[u8]) {
        panic!("a reader writes");
    }
}

/// An operation of the server at a moment in which the reader is paused.
type Moment = fn(&mut Store<Mapping>, &Mapping);

/// Pauses the reader at each pair of its reads, or at each single one of them, and checks that the values it finds are not
/// torn. Returns the numbers of hits, misses and unknown results.
fn stand(pairs: bool, moments: [Moment; 2]) -> [u64; 3] {
    let mut seen = [0; 3];
    let (mut first, mut second) = (1, 1);
    loop {
        let memory = memory(LEN);
        let mut store = create(memory.clone(), LEN);
        store.set(&key(1), &[&value(1, 1, 60)], 0, 0).unwrap();
        let reads = {
            let servers = memory.clone();
            let interrupted = Interrupted::new(memory, move |read| {
                for (at, moment) in [first, second].iter().zip(moments) {
                    if read == *at {
                        moment(&mut store, &servers);
                    }
                }
            });
            let reader = Reader::new(interrupted.clone()).unwrap();
            interrupted.reads.set(0);
            let mut bytes = Vec::new();
            match reader.get(&key(1), &mut bytes) {
                Found::Hit(meta) => {
                    let which = which(1, &bytes);
                    assert!(which == 1 || meta.version > 1, "another version");
                    seen[0] += 1;
                }
                Found::Miss => seen[1] += 1,
                Found::Unknown => seen[2] += 1,
            }
            interrupted.reads.get()
        };
        // Continue until the first pause has been at each read.
        second += 1;
        if second > reads || !pairs {
            first += 1;
            second = first;
        }
        if first > reads {
            return seen;
        }
    }
}

fn nothing(_: &mut Store<Mapping>, _: &Mapping) {}

#[test]
fn a_reader_finds_whole_values_whatever_happens_while_it_stands() {
    let changes: [Moment; 5] = [
        |store, _| assert!(store.set(&key(1), &[&value(1, 2, 60)], 0, 0).is_ok()),
        |store, _| assert!(store.set(&key(1), &[&value(1, 2, 300)], 0, 0).is_ok()),
        |store, _| assert!(store.delete(&key(1)) || store.is_empty()),
        |store, _| assert!(store.renew(&key(1), 4, None).is_some() || store.peek(&key(1)).is_none()),
        // All items are evicted, and other items of the same length are stored.
        |store, _| {
            (2..250)
                .for_each(|number| assert!(store.set(&key(number), &[&value(number, 9, 60)], 0, 0).is_ok()))
        },
    ];
    for change in changes {
        let [found, ..] = stand(false, [change, nothing]);
        assert!(found > 0);
        stand(true, [change, changes[0]]);
    }
    stand(true, [changes[1], changes[4]]);
}

/// Returns the bytes of a cache at three times: with the item, with other items at the item's place, and after the item
/// has moved back to its place with the same version.
fn away_and_back() -> [Vec<u8>; 3] {
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(&key(1), &[&value(1, 1, 60)], 0, 0).unwrap();
    let first = store.shape().segment(0);
    let mut places: Vec<(usize, Vec<u8>)> = Vec::new();
    for number in 0..1_000_000_u32 {
        let mut bytes = vec![0; LEN];
        memory.read(0, &mut bytes);
        // No other item has the item's version.
        let place = (first..LEN).step_by(8).find(|at| memory.load_relaxed_u64(*at) == 1).unwrap();
        if let Some(before) = places.iter().position(|(at, _)| *at == place) {
            let value = place + 48..place + 104;
            let other = places[before..].iter().find(|(_, now)| now[value.clone()] != bytes[value.clone()]);
            if let Some((_, other)) = other {
                return [places[before].1.clone(), other.clone(), bytes];
            }
        }
        places.push((place, bytes));
        let other = format!("key{number:06}");
        store.set(other.as_bytes(), &[&[number as u8; 59]], 0, 0).unwrap();
        store.get(&key(1), &mut Vec::new()).unwrap();
        if number.wrapping_mul(0x9e37_79b9) < 1 << 31 {
            store.get(other.as_bytes(), &mut Vec::new());
        }
    }
    panic!("it never comes back");
}

/// The item moves away, other items take its place, and the item returns to the same place with the same version.
#[test]
fn a_reader_notices_that_an_item_was_away() {
    let [first, away, back] = away_and_back();
    let (mut left, mut came, mut found) = (1, 1, 0);
    loop {
        let memory = memory(LEN);
        memory.write(0, &first);
        let (servers, moments) = (memory.clone(), [(left, away.clone()), (came, back.clone())]);
        let interrupted = Interrupted::new(memory, move |read| {
            moments.iter().filter(|(at, _)| *at == read).for_each(|(_, bytes)| servers.write(0, bytes));
        });
        let reader = Reader::new(interrupted.clone()).unwrap();
        interrupted.reads.set(0);
        let mut bytes = Vec::new();
        if let Found::Hit(_) = reader.get(&key(1), &mut bytes) {
            assert_eq!(which(1, &bytes), 1);
            found += 1;
        }
        came += 1;
        if came > interrupted.reads.get() {
            (left, came) = (left + 1, left + 1);
        }
        if left > interrupted.reads.get() {
            break;
        }
    }
    assert!(found > 0);
}
