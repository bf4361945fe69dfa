//! Models of the guarantees of shared memory itself, on the same memory that the models of rings and locks use.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release -p ginnel-shmem --test loom        (or: scripts/loom)
#![cfg(loom)]

use ginnel_shmem::{LoomMemory, Order, SharedMemory};
use loom::thread;

const WORDS: [usize; 3] = [0, 8, 16];

fn bytes(word: u64) -> Vec<u8> {
    word.to_ne_bytes().repeat(WORDS.len())
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
}

/// One thread writes all words; another polls the last one, and then reads the others.
fn last_word_is_polled(forgets: Option<Order>) {
    loom::model(move || {
        let memory = LoomMemory::new(24, WORDS);
        let writer = forgets.map_or(memory.clone(), |order| memory.without(order));
        let writes = thread::spawn(move || writer.write_release(0, &bytes(7)));
        if memory.load_acquire_u64(16) == 7 {
            assert_eq!((memory.load_relaxed_u64(0), memory.load_relaxed_u64(8)), (7, 7));
        }
        writes.join().unwrap();
    });
}

#[test]
fn a_reader_that_sees_the_last_word_sees_all_words() {
    last_word_is_polled(None);
}

#[test]
#[should_panic]
fn without_release_the_last_word_says_nothing() {
    last_word_is_polled(Some(Order::Release));
}

/// One thread writes all words twice; another copies them out at any time.
fn copy_meets_copy(forgets: Option<Order>) {
    loom::model(move || {
        let memory = LoomMemory::new(24, WORDS);
        let writer = memory.clone();
        let writes = thread::spawn(move || {
            writer.write_release(0, &bytes(1));
            writer.write_release(0, &bytes(2));
        });
        let mut into = bytes(9);
        forgets.map_or(memory.clone(), |order| memory.without(order)).read_acquire(0, &mut into);
        let seen = words(&into);
        assert!(seen.iter().all(|word| *word >= seen[2] && *word <= 2), "{seen:?}");
        writes.join().unwrap();
    });
}

#[test]
fn a_copy_with_the_last_word_is_whole() {
    copy_meets_copy(None);
}

#[test]
#[should_panic]
fn without_acquire_a_copy_says_nothing() {
    copy_meets_copy(Some(Order::Acquire));
}

/// Two threads add, and each has written a word of its own before. The thread that adds second must see the word of the
/// first.
fn adders(forgets: Option<Order>) {
    loom::model(move || {
        let memory = LoomMemory::new(24, WORDS);
        let run = |memory: LoomMemory, own: usize, other: usize| {
            memory.store_relaxed_u64(own, 1);
            let before = memory.fetch_add_u32(16, 1);
            if before == 1 {
                assert_eq!(memory.load_relaxed_u64(other), 1);
            }
            before
        };
        let second = forgets.map_or(memory.clone(), |order| memory.without(order));
        let adds = thread::spawn(move || run(second, 0, 8));
        let mut before = [run(memory.clone(), 8, 0), adds.join().unwrap()];
        before.sort_unstable();
        assert_eq!(before, [0, 1]);
        assert_eq!(memory.load_relaxed_u32(16), 2);
    });
}

#[test]
fn additions_order_what_was_done_before() {
    adders(None);
}

#[test]
#[should_panic]
fn an_addition_without_release_does_not() {
    adders(Some(Order::Release));
}

#[test]
#[should_panic]
fn an_addition_without_acquire_does_not() {
    adders(Some(Order::Acquire));
}
