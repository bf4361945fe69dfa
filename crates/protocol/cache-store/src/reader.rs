//! The readers' side of a cache.

use crate::item::{Hasher, Look, look, slots};
use crate::store::{Meta, NotACache, meta, shape_of};
use crate::survey::{Survey, survey};
use ginnel_layout::cache::{
    CLOCK, CONTACT, CONTACT_LEN, FLUSHED, ID, MAGIC, MOST_CONTACT, PRESSURE, READY, SLOTS, Shape, Slot,
    buckets_of, item, log,
};
use ginnel_shmem::SharedMemory;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often a reader retries an item that the server changes meanwhile.
const TRIES: u32 = if cfg!(loom) { 1 } else { 8 };

/// The cache lines that are prefetched before an item is read: enough for an item with a key and a value of about 100
/// bytes. The processor prefetches the following lines by itself.
const USUAL_LINES: usize = 3;

/// A server whose clock has stopped for this long no longer expires items, so readers do not take items with an
/// expiry time from memory.
const PATIENCE: Duration = Duration::from_secs(2);

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// An item.
    Hit(Meta),
    /// There is no item with this key.
    Miss,
    /// Only the server can tell: it changes the item all the time, or was killed while it did so; its clock has
    /// stopped and the item has an expiry time; or the memory has another cache now.
    Unknown,
}

/// A destination for the value of an item.
pub trait Place {
    /// Provides room for this many bytes of a value, or for as many of them as fit.
    fn room(&mut self, len: usize) -> &mut [u8];
    /// Discards what was written, because it is not the value.
    fn undo(&mut self);
}

/// Appends the value to the bytes that are there.
pub struct Append<'a> {
    to: &'a mut Vec<u8>,
    begin: usize,
}

impl<'a> Append<'a> {
    /// The length of the bytes before the value.
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

/// Writes the value to the beginning of these bytes, as far as it fits.
impl Place for &mut [u8] {
    #[inline]
    fn room(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.len());
        &mut self[..len]
    }

    #[inline]
    fn undo(&mut self) {}
}

/// Looks items up in memory, which may be mapped read-only. Several threads may use one reader.
pub struct Reader<M> {
    memory: M,
    shape: Shape,
    hasher: Hasher,
    id: [u64; 2],
    began: Instant,
    /// The clock when it was last read, and when it was last seen to change, in milliseconds since this reader began.
    clock: AtomicU64,
    changed: AtomicU64,
}

impl<M: SharedMemory> Reader<M> {
    /// Makes a reader of the cache in this block.
    pub fn new(memory: M) -> Result<Self, NotACache> {
        let (shape, hasher) = (shape_of(&memory)?, Hasher::of(&memory));
        let id = [0, 8].map(|word| memory.load_relaxed_u64(ID + word));
        let clock = AtomicU64::new(memory.load_relaxed_u64(CLOCK));
        Ok(Self { memory, shape, hasher, id, began: Instant::now(), clock, changed: AtomicU64::new(0) })
    }

    /// Returns the identifier of this cache, which no other cache has.
    pub fn id(&self) -> [u64; 2] {
        self.id
    }

    /// Returns whether the memory still has the cache that it had when this reader began. If not, lookups find
    /// nothing in it any more.
    pub fn is_current(&self) -> bool {
        self.memory.load_relaxed_u64(MAGIC) == READY && self.memory.load_relaxed_u64(ID) == self.id[0]
    }

    /// Returns whether the server asks for reports of the items that readers find.
    pub fn wants_hits(&self) -> bool {
        self.memory.load_relaxed_u64(PRESSURE) != 0
    }

    /// Returns the places where the server says that it can be reached, one on each line; see [`CONTACT`]. The text
    /// is not checked. It is empty while the server changes it.
    pub fn contact(&self) -> String {
        // ORDER cache.contact: the length before the text. Pairs with: `Store::set_contact`.
        let len = self.memory.load_acquire_u64(CONTACT_LEN);
        let mut text = vec![0; len.min(MOST_CONTACT as u64) as usize];
        self.memory.read_acquire(CONTACT, &mut text);
        self.memory.acquire_fence();
        let is_same = self.memory.load_relaxed_u64(CONTACT_LEN) == len;
        if is_same { String::from_utf8_lossy(&text).into_owned() } else { String::new() }
    }

    /// Returns the hash of a key, by which the server identifies the item in a report of hits
    /// ([`Store::used_by_reader`](crate::store::Store::used_by_reader)).
    pub fn hash(&self, key: &[u8]) -> u64 {
        self.hasher.hash(key)
    }

    /// Looks a key up, and appends the value to `value` if the item exists.
    pub fn get(&self, key: &[u8], value: &mut Vec<u8>) -> Found {
        self.get_hashed(self.hasher.hash(key), key, value)
    }

    /// Does the same for a key whose hash the caller has already computed.
    pub fn get_hashed(&self, hash: u64, key: &[u8], value: &mut Vec<u8>) -> Found {
        self.get_to(hash, key, &mut Append::to(value))
    }

    /// Does the same, and writes the value to any destination.
    #[inline]
    pub fn get_to(&self, hash: u64, key: &[u8], value: &mut impl Place) -> Found {
        // Half of all items are in the second bucket.
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

    /// Prefetches the memory of a hash's slots. This is the first of two steps that make looking up many keys nearly
    /// as fast as a few, because the memory of several keys is fetched at the same time.
    #[inline]
    pub fn prefetch_slots(&self, hash: u64) {
        for bucket in buckets_of(hash, self.shape.buckets) {
            self.memory.prefetch(self.shape.bucket(bucket));
        }
    }

    /// Prefetches the memory of the item, if a slot names one. This is the second step.
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

    /// Prefetches the lines of an item of usual size. An offset outside the memory is ignored.
    #[inline]
    fn prefetch_item_at(&self, slot: Slot) {
        for line in 0..USUAL_LINES {
            self.memory.prefetch(slot.at() as usize + line * ginnel_layout::CACHE_LINE);
        }
    }

    /// Looks a key up once. Returns `None` if the server has changed meanwhile what was read.
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

    /// Returns whether the server's clock has not moved for some time, because the server hangs or there is none.
    pub fn is_server_late(&self) -> bool {
        self.does_clock_stand(self.memory.load_relaxed_u64(CLOCK))
    }

    /// Returns statistics of the cache. This takes some milliseconds for a million items.
    pub fn survey(&self) -> Survey {
        survey(&self.memory, self.shape)
    }

    /// Returns the memory in which the reader looks.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    fn does_clock_stand(&self, clock: u64) -> bool {
        let now = self.began.elapsed().as_millis() as u64;
        // The value is read first, so that threads that only read do not take the cache line from each other.
        if self.clock.load(Ordering::Relaxed) != clock {
            self.clock.store(clock, Ordering::Relaxed);
            self.changed.store(now, Ordering::Relaxed);
            return false;
        }
        now.saturating_sub(self.changed.load(Ordering::Relaxed)) > PATIENCE.as_millis() as u64
    }
}
