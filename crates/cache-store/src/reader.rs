//! The readers' side of a cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ginnel_layout::cache::{
    CLOCK, CONTACT, CONTACT_LEN, FLUSHED, ID, MAGIC, MOST_CONTACT, PRESSURE, READY, Shape, Slot, item,
};
use ginnel_shmem::Memory;

use crate::item::{Hasher, Look, look, slots};
use crate::store::{Meta, NotACache, meta, shape_of};

/// How often an item is looked at that the server changes meanwhile.
const TRIES: u32 = 8;

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

impl<M: Memory> Reader<M> {
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
        let begin = value.len();
        for _ in 0..TRIES {
            match self.try_get(hash, key, value) {
                Some(found) if self.is_current() => return found,
                Some(_) => {
                    value.truncate(begin);
                    return Found::Unknown;
                }
                None => value.truncate(begin),
            }
            std::hint::spin_loop();
        }
        Found::Unknown
    }

    /// `None` if the server has changed meanwhile what was looked at.
    fn try_get(&self, hash: u64, key: &[u8], value: &mut Vec<u8>) -> Option<Found> {
        let begin = value.len();
        for slot_at in slots(&self.shape, hash) {
            // ORDER cache.slot: the slot before the item. Pairs with: `Store::name`.
            let slot = Slot(self.memory.load_acquire_u64(slot_at));
            if !slot.may_be(hash) {
                continue;
            }
            let item = match look(&self.memory, &self.shape, slot, hash, key) {
                Look::Item(item) => item,
                // It may have become that just now.
                Look::Other if self.memory.load_acquire_u64(slot_at) == slot.0 => continue,
                Look::Other | Look::Changing => return None,
            };
            value.resize(begin + item.lengths.value(), 0);
            self.memory.read_acquire(item.value_at(), &mut value[begin..]);
            // ORDER cache.changing: the copy before the second look at version and slot. Pairs with: `Store::write`.
            self.memory.acquire_fence();
            let is_same = self.memory.load_relaxed_u64(item.at + item::VERSION) == item.version
                && self.memory.load_relaxed_u64(slot_at) == slot.0;
            if !is_same {
                return None;
            }
            let clock = self.memory.load_relaxed_u64(CLOCK);
            if item.has_ended(self.memory.load_relaxed_u64(FLUSHED), clock) {
                value.truncate(begin);
                return Some(Found::Miss);
            }
            if item.expiry != 0 && self.does_clock_stand(clock) {
                value.truncate(begin);
                return Some(Found::Unknown);
            }
            return Some(Found::Hit(meta(&item)));
        }
        Some(Found::Miss)
    }

    fn does_clock_stand(&self, clock: u64) -> bool {
        let now = self.began.elapsed().as_millis() as u64;
        if self.clock.swap(clock, Ordering::Relaxed) != clock {
            self.changed.store(now, Ordering::Relaxed);
            return false;
        }
        now.saturating_sub(self.changed.load(Ordering::Relaxed)) > PATIENCE.as_millis() as u64
    }
}
