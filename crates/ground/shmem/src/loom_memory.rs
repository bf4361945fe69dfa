//! Memory for the loom model checker.

use crate::SharedMemory;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A range of words that loom explores. A word is identified by its offset, and may be used with one size only; words must
/// not overlap, which is not checked. Bulk copies, of 64-bit words, are done word by word without ordering, so that a missing
/// release or acquire shows as an old value. They are also watched for data races: loom never lets a load see a store that
/// its execution has not done yet, and so would not notice if a copy out did not come before the next copy in. Copies whose
/// last word is ordered ([`SharedMemory::write_release`], [`SharedMemory::read_acquire`]) are not watched, since they are
/// meant for memory that others access at the same time.
///
/// Each word costs time in every execution, so a model lists the words that it uses. An access to another word panics.
///
/// A clone can be made to leave out one kind of ordering ([`LoomMemory::without`]). A model that still passes then proves
/// nothing.
#[derive(Clone)]
pub struct LoomMemory {
    len: usize,
    words: Arc<BTreeMap<usize, Word>>,
    /// An ordering that is left out, and the words where it is.
    forgets: Option<(Order, Range<usize>)>,
}

struct Word {
    value: AtomicU64,
    /// Contains nothing. It records which threads have copied to or from the word, and in which order.
    copies: UnsafeCell<()>,
}

// SAFETY: the cell contains nothing; loom is asked to report threads that access it at the same time.
unsafe impl Sync for Word {}
// SAFETY: it consists of an atomic word and of a cell that contains nothing, so any thread may use and drop it.
unsafe impl Send for Word {}

/// An ordering that [`LoomMemory::without`] leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Acquire loads become relaxed, and a read-modify-write only releases.
    Acquire,
    /// Release stores become relaxed, and a read-modify-write only acquires.
    Release,
    /// Full fences do nothing.
    Fence,
}

impl Word {
    fn new() -> Self {
        Self { value: AtomicU64::new(0), copies: UnsafeCell::new(()) }
    }
}

impl LoomMemory {
    /// Returns `len` zero bytes, of which only the words at the given offsets exist. To be called inside the model.
    pub fn new(len: usize, words: impl IntoIterator<Item = usize>) -> Self {
        let words = words.into_iter().inspect(|at| assert!(at % 2 == 0 && at + 2 <= len, "no word at {at}"));
        Self { len, words: Arc::new(words.map(|at| (at, Word::new())).collect()), forgets: None }
    }

    /// Returns the same memory, for a party whose code lacks an ordering.
    pub fn without(&self, order: Order) -> Self {
        self.without_at(order, 0..self.len)
    }

    /// Returns the same memory, for a party whose code lacks an ordering of these words.
    pub fn without_at(&self, order: Order, words: Range<usize>) -> Self {
        Self { forgets: Some((order, words)), ..self.clone() }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.at(at).value
    }

    fn at(&self, at: usize) -> &Word {
        match self.words.get(&at) {
            Some(word) => word,
            None => panic!("the model accesses the word at {at:#x}, which it does not have"),
        }
    }

    fn lacks(&self, at: usize) -> Option<Order> {
        self.forgets.as_ref().filter(|(_, words)| words.contains(&at)).map(|(order, _)| *order)
    }

    fn unless(&self, at: usize, order: Order, strong: Ordering) -> Ordering {
        if self.lacks(at) == Some(order) { Ordering::Relaxed } else { strong }
    }

    /// Returns the order of a read-modify-write.
    fn both(&self, at: usize) -> Ordering {
        match self.lacks(at) {
            Some(Order::Acquire) => Ordering::Release,
            Some(Order::Release) => Ordering::Acquire,
            _ => Ordering::AcqRel,
        }
    }

    fn has_fences(&self) -> bool {
        self.forgets.as_ref().is_none_or(|(order, _)| *order != Order::Fence)
    }
}

impl SharedMemory for LoomMemory {
    fn len(&self) -> usize {
        self.len
    }
    fn load_relaxed_u16(&self, at: usize) -> u16 {
        self.load_relaxed_u64(at) as u16
    }
    fn load_acquire_u16(&self, at: usize) -> u16 {
        self.load_acquire_u64(at) as u16
    }
    fn store_relaxed_u16(&self, at: usize, value: u16) {
        self.store_relaxed_u64(at, value.into());
    }
    fn store_release_u16(&self, at: usize, value: u16) {
        self.store_release_u64(at, value.into());
    }
    fn load_relaxed_u32(&self, at: usize) -> u32 {
        self.load_relaxed_u64(at) as u32
    }
    fn load_acquire_u32(&self, at: usize) -> u32 {
        self.load_acquire_u64(at) as u32
    }
    fn store_relaxed_u32(&self, at: usize, value: u32) {
        self.store_relaxed_u64(at, value.into());
    }
    fn store_release_u32(&self, at: usize, value: u32) {
        self.store_release_u64(at, value.into());
    }
    fn load_relaxed_u64(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn load_acquire_u64(&self, at: usize) -> u64 {
        self.word(at).load(self.unless(at, Order::Acquire, Ordering::Acquire))
    }
    fn store_relaxed_u64(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn store_release_u64(&self, at: usize, value: u64) {
        self.word(at).store(value, self.unless(at, Order::Release, Ordering::Release));
    }
    fn compare_exchange_u64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        let failure = self.unless(at, Order::Acquire, Ordering::Acquire);
        self.word(at).compare_exchange(old, new, self.both(at), failure).map(|_| ())
    }
    fn swap_u64(&self, at: usize, value: u64) -> u64 {
        self.word(at).swap(value, self.both(at))
    }
    fn fetch_or_u64(&self, at: usize, bits: u64) -> u64 {
        self.word(at).fetch_or(bits, self.both(at))
    }
    fn fetch_and_u64(&self, at: usize, bits: u64) -> u64 {
        self.word(at).fetch_and(bits, self.both(at))
    }
    fn fetch_add_u32(&self, at: usize, value: u32) -> u32 {
        // A load of the word drops what is carried out of the 32 bits.
        self.fetch_add_u64(at, value.into()) as u32
    }
    fn fetch_add_u64(&self, at: usize, value: u64) -> u64 {
        self.word(at).fetch_add(value, self.both(at))
    }
    fn full_fence(&self) {
        if self.has_fences() {
            fence(Ordering::SeqCst);
        }
    }
    fn acquire_fence(&self) {
        if self.has_fences() {
            fence(Ordering::Acquire);
        }
    }
    fn read(&self, at: usize, into: &mut [u8]) {
        for (i, chunk) in into.chunks_mut(8).enumerate() {
            self.at(at + 8 * i).copies.with(|_| ());
            let word = self.load_relaxed_u64(at + 8 * i).to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
    fn write(&self, at: usize, from: &[u8]) {
        for (i, chunk) in from.chunks(8).enumerate() {
            self.at(at + 8 * i).copies.with_mut(|_| ());
            self.store_relaxed_u64(at + 8 * i, word_of(chunk));
        }
    }
    fn write_release(&self, at: usize, from: &[u8]) {
        let Some(before) = before_last(from.len()) else { return };
        for n in (0..before).step_by(8) {
            self.store_relaxed_u64(at + n, word_of(&from[n..n + 8]));
        }
        self.store_release_u64(at + before, word_of(&from[before..]));
    }
    fn read_acquire(&self, at: usize, into: &mut [u8]) {
        let Some(before) = before_last(into.len()) else { return };
        let last = self.load_acquire_u64(at + before).to_ne_bytes();
        let (start, end) = into.split_at_mut(before);
        end.copy_from_slice(&last[..end.len()]);
        for (i, chunk) in start.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&self.load_relaxed_u64(at + 8 * i).to_ne_bytes());
        }
    }
}

/// Returns how many of `len` bytes lie before the last word, if there is one.
fn before_last(len: usize) -> Option<usize> {
    Some(len.checked_sub(1)? / 8 * 8)
}

/// Returns the word that begins with these bytes.
fn word_of(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}
