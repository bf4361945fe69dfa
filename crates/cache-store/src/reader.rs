//! The readers' side of a cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ginnel_layout::cache::{
    CLOCK, CONTACT, CONTACT_LEN, FLUSHED, ID, MAGIC, MOST_CONTACT, PRESSURE, READY, SLOTS, Shape, Slot,
    buckets_of, item, log,
};
use ginnel_shmem::SharedMemory;

use crate::item::{Hasher, Look, look, slots};
use crate::store::{Meta, NotACache, meta, shape_of};
use crate::survey::{Survey, survey};

/// How often an item is looked at that the server changes meanwhile.
const TRIES: u32 = if cfg!(loom) { 1 } else { 8 };

/// Lines of the processor's cache that are asked for before an item is looked at: of one with a key, and a value of about 100 bytes. The
/// processor goes on from there by itself.
const USUAL_LINES: usize = 3;

/// A server whose clock stands for so long does not end items any more, so those that have an end are not taken from memory.
const PATIENCE: Duration = Duration::from_secs(2);

/// What has been found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// An item.
    Hit(Meta),
    /// There is none with this key.
    Miss,
    /// This cannot be told without the server: it changes the item all the time, was killed while it did, its clock stands and the item
    /// has an end, or the memory has another cache now.
    Unknown,
}

/// Where a value goes that is found.
pub trait Place {
    /// Room for so many bytes of a value, or for as many of them as there is room for.
    fn room(&mut self, len: usize) -> &mut [u8];
    /// What was put there is not the value.
    fn undo(&mut self);
}

/// Behind what is there.
pub struct Append<'a> {
    to: &'a mut Vec<u8>,
    begin: usize,
}

impl<'a> Append<'a> {
    /// Behind what is there now.
    pub fn to(to: &'a mut Vec<u8>) -> Self {
        let begin = to.len();
        Self { to, begin }
    }
}

impl Place for Append<'_> {
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        self.to.resize(self.begin + len, 0);
        &mut self.to[self.begin..]
    }

    #[inline]
    fn undo(&mut self) {
        self.to.truncate(self.begin);
    }
}

/// The beginning of these bytes, as far as they go.
impl Place for &mut [u8] {
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.len());
        &mut self[..len]
    }

    #[inline]
    fn undo(&mut self) {}
}

/// Looks items up in memory that it need not be able to write. May be used by several threads.
pub struct Reader<M> {
    memory: M,
    shape: Shape,
    hasher: Hasher,
    id: [u64; 2],
    began: Instant,
    /// The clock when it was looked at, and when it was seen to change: milliseconds since this reader began.
    clock: AtomicU64,
    changed: AtomicU64,
}

impl<M: SharedMemory> Reader<M> {
    /// Of the cache in this block.
    pub fn new(memory: M) -> Result<Self, NotACache> {
        let (shape, hasher) = (shape_of(&memory)?, Hasher::of(&memory));
        let id = [0, 8].map(|word| memory.load_relaxed_u64(ID + word));
        let clock = AtomicU64::new(memory.load_relaxed_u64(CLOCK));
        Ok(Self { memory, shape, hasher, id, began: Instant::now(), clock, changed: AtomicU64::new(0) })
    }

    /// What tells this cache from all others.
    pub fn id(&self) -> [u64; 2] {
        self.id
    }

    /// Whether the memory still has the cache that it had when this reader began. If not, nothing is found in it any more.
    pub fn is_current(&self) -> bool {
        self.memory.load_relaxed_u64(MAGIC) == READY && self.memory.load_relaxed_u64(ID) == self.id[0]
    }

    /// Whether the server wants to be told which items are found here.
    pub fn wants_hits(&self) -> bool {
        self.memory.load_relaxed_u64(PRESSURE) != 0
    }

    /// Where the server says that it can be reached, a line each; see [`CONTACT`]. May be anything. Empty while the server changes it.
    pub fn contact(&self) -> String {
        // ORDER cache.contact: the length before the text. Pairs with: `Store::set_contact`.
        let len = self.memory.load_acquire_u64(CONTACT_LEN);
        let mut text = vec![0; len.min(MOST_CONTACT as u64) as usize];
        self.memory.read_acquire(CONTACT, &mut text);
        self.memory.acquire_fence();
        let is_same = self.memory.load_relaxed_u64(CONTACT_LEN) == len;
        if is_same { String::from_utf8_lossy(&text).into_owned() } else { String::new() }
    }

    /// The hash of a key, by which the server knows what was found ([`Store::used_by_reader`](crate::store::Store::used_by_reader)).
    pub fn hash(&self, key: &[u8]) -> u64 {
        self.hasher.hash(key)
    }

    /// Looks a key up, and appends the value to `value` if it is there.
    pub fn get(&self, key: &[u8], value: &mut Vec<u8>) -> Found {
        self.get_hashed(self.hasher.hash(key), key, value)
    }

    /// The same, of a key whose hash the caller has already.
    pub fn get_hashed(&self, hash: u64, key: &[u8], value: &mut Vec<u8>) -> Found {
        self.get_to(hash, key, &mut Append::to(value))
    }

    /// The same, and puts the value somewhere else.
    #[inline]
    pub fn get_to(&self, hash: u64, key: &[u8], value: &mut impl Place) -> Found {
        // Half of all items are named in the second bucket.
        self.prefetch_slots(hash);
        for _ in 0..TRIES {
            match self.try_get(hash, key, value) {
                Some(found) if self.is_current() => return found,
                Some(_) => {
                    value.undo();
                    return Found::Unknown;
                }
                None => value.undo(),
            }
            std::hint::spin_loop();
        }
        Found::Unknown
    }

    /// Asks for the memory in which the slots of a hash lie, which is looked at soon. The first of two steps by which many keys are looked up
    /// in the time that a few take: the memory of one is waited for while that of others comes.
    #[inline]
    pub fn prefetch_slots(&self, hash: u64) {
        for bucket in buckets_of(hash, self.shape.buckets) {
            self.memory.prefetch(self.shape.bucket(bucket));
        }
    }

    /// The second step: the memory of the item, if a slot names one.
    #[inline]
    pub fn prefetch_item(&self, hash: u64) {
        for bucket in buckets_of(hash, self.shape.buckets) {
            for slot in 0..SLOTS {
                let slot = Slot(self.memory.load_relaxed_u64(self.shape.bucket(bucket) + slot * 8));
                if slot.may_be(hash) {
                    return self.prefetch_item_at(slot);
                }
            }
        }
    }

    /// The lines that a usual item has. A place outside of the memory is ignored.
    #[inline]
    fn prefetch_item_at(&self, slot: Slot) {
        for line in 0..USUAL_LINES {
            self.memory.prefetch(slot.at() as usize + line * ginnel_layout::CACHE_LINE);
        }
    }

    /// `None` if the server has changed meanwhile what was looked at.
    #[inline]
    fn try_get(&self, hash: u64, key: &[u8], value: &mut impl Place) -> Option<Found> {
        for slot_at in slots(&self.shape, hash) {
            // ORDER cache.slot: the slot before the item. Pairs with: `Store::name`.
            let slot = Slot(self.memory.load_acquire_u64(slot_at));
            if !slot.may_be(hash) {
                continue;
            }
            let Some((segment, _)) = self.shape.place(slot.at()) else { continue };
            let sequence_at = self.shape.log(segment) + log::SEQUENCE;
            self.prefetch_item_at(slot);
            let sequence = self.memory.load_relaxed_u64(sequence_at);
            let item = match look(&self.memory, &self.shape, slot, hash, key) {
                Look::Item(item) => item,
                Look::Other => {
                    // It may have become that just now.
                    self.memory.acquire_fence();
                    if self.memory.load_relaxed_u64(slot_at) == slot.0 {
                        continue;
                    }
                    return None;
                }
                Look::Changing => return None,
            };
            self.memory.read_acquire(item.value_at(), value.room(item.lengths.value()));
            // ORDER cache.changing: the copy before the second look at version, slot and segment. Pairs with: `Store::write`.
            self.memory.acquire_fence();
            let is_same = self.memory.load_relaxed_u64(item.at + item::VERSION) == item.version
                && self.memory.load_relaxed_u64(slot_at) == slot.0
                && self.memory.load_relaxed_u64(sequence_at) == sequence;
            if !is_same {
                return None;
            }
            let clock = self.memory.load_relaxed_u64(CLOCK);
            if item.has_ended(self.memory.load_relaxed_u64(FLUSHED), clock) {
                value.undo();
                return Some(Found::Miss);
            }
            if item.expiry != 0 && self.does_clock_stand(clock) {
                value.undo();
                return Some(Found::Unknown);
            }
            return Some(Found::Hit(meta(&item)));
        }
        Some(Found::Miss)
    }

    /// Whether the server's clock has not moved for some time: it hangs, or there is none.
    pub fn is_server_late(&self) -> bool {
        self.does_clock_stand(self.memory.load_relaxed_u64(CLOCK))
    }

    /// How the whole looks. Takes time: some milliseconds for a million of items.
    pub fn survey(&self) -> Survey {
        survey(&self.memory, self.shape)
    }

    /// The memory in which it looks.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    fn does_clock_stand(&self, clock: u64) -> bool {
        let now = self.began.elapsed().as_millis() as u64;
        // Looked at first: threads that only look do not take the line from each other.
        if self.clock.load(Ordering::Relaxed) != clock {
            self.clock.store(clock, Ordering::Relaxed);
            self.changed.store(now, Ordering::Relaxed);
            return false;
        }
        now.saturating_sub(self.changed.load(Ordering::Relaxed)) > PATIENCE.as_millis() as u64
    }
}
