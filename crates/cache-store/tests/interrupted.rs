//! A reader that is stopped in the middle of a look-up, for as long as the server takes for anything.
#![cfg(not(loom))]

mod common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use common::{create, key, memory, shape, value, which};
use ginnel_cache_store::reader::{Found, Reader};
use ginnel_cache_store::store::Store;
use ginnel_shmem::{Mapping, Memory};

const LEN: usize = 32 << 10;

/// Memory of a reader. Counts what is read, in words, and calls somebody before some of the reads.
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

impl Memory for Interrupted {
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

/// What the server does in the two moments in which the reader stands.
type Moment = fn(&mut Store<Mapping>);

/// The reader stands at each pair of its reads, or at each one of them. What it finds is whole.
fn stand(pairs: bool, moments: [Moment; 2]) -> [u64; 3] {
    let mut seen = [0; 3];
    let (mut first, mut second) = (1, 1);
    loop {
        let memory = memory(LEN);
        let mut store = create(memory.clone(), LEN);
        store.set(&key(1), &[&value(1, 1, 60)], 0, 0).unwrap();
        let reads = {
            let interrupted = Interrupted::new(memory, move |read| {
                for (at, moment) in [first, second].iter().zip(moments) {
                    if read == *at {
                        moment(&mut store);
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
        // From the first read to the last.
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

fn nothing(_: &mut Store<Mapping>) {}

#[test]
fn a_reader_finds_whole_values_whatever_happens_while_it_stands() {
    let changes: [Moment; 5] = [
        |store| drop(store.set(&key(1), &[&value(1, 2, 60)], 0, 0)),
        |store| drop(store.set(&key(1), &[&value(1, 2, 300)], 0, 0)),
        |store| drop(store.delete(&key(1))),
        |store| drop(store.renew(&key(1), 4, None)),
        // Everything goes, and other items of the same length come.
        |store| (2..600).for_each(|number| drop(store.set(&key(number), &[&value(number, 9, 60)], 0, 0))),
    ];
    for change in changes {
        let [found, ..] = stand(false, [change, nothing]);
        assert!(found > 0);
        for next in changes {
            stand(true, [change, next]);
        }
    }
}

/// The item moves away, another one lies there for a moment, and the item comes back to the same place with the same version.
#[test]
fn a_reader_notices_that_an_item_was_away() {
    /// Where the item lies.
    fn place(store: &Store<Mapping>, memory: &Mapping) -> usize {
        let version_of = |at: &usize| memory.load_relaxed_u64(*at);
        let first = store.shape().segment(0);
        (first..memory.len()).step_by(8).find(|at| version_of(at) == 1).unwrap()
    }
    let memory = memory(LEN);
    let mut store = create(memory.clone(), LEN);
    store.set(&key(1), &[&value(1, 1, 60)], 0, 0).unwrap();
    let begin = place(&store, &memory);
    let (mut other, mut stages) = (1_u16, Vec::new());
    // All items have the same room, so it comes back to a place now and then.
    while stages.len() < 2 {
        other += 1;
        assert!(other < 60_000, "it never comes back");
        store.get(&key(1), &mut Vec::new()).unwrap();
        store.set(&key(41), &[&value(41, u64::from(other), 60)], 0, 0).unwrap();
        store.set(&[b"key-1234-", &other.to_le_bytes()[..]].concat(), &[&[7; 60]], 0, 0).unwrap();
        let is_away = memory.load_relaxed_u64(begin) != 1;
        if is_away == stages.is_empty() {
            stages.push(other);
        }
    }
    assert!(shape(LEN).place(begin as u64).is_some());
}
