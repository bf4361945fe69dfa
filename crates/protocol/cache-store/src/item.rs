//! One item, as it is read from memory and checked.

use ginnel_layout::cache::{self, KEY, Lengths, MOST_KEY, Shape, Slot, item};
use ginnel_shmem::SharedMemory;
use siphasher::sip::SipHasher13;

/// Hashes keys. SipHash, with a key that the server has chosen at random: a client cannot choose keys that fall into one bucket, unless it
/// may read the segment.
#[derive(Clone, Copy, Debug)]
pub struct Hasher(SipHasher13);

impl Hasher {
    /// Makes a hasher with this key.
    pub fn new(key: [u64; 2]) -> Self {
        Self(SipHasher13::new_with_keys(key[0], key[1]))
    }

    /// Makes a hasher with the key of a cache.
    pub(crate) fn of(memory: &impl SharedMemory) -> Self {
        Self::new([0, 8].map(|word| memory.load_relaxed_u64(KEY + word)))
    }

    /// Returns an identifier of the cache, which does not reveal the key.
    pub(crate) fn id(&self) -> [u64; 2] {
        [self.hash(b"this cache, first half"), self.hash(b"this cache, second half")]
    }

    /// Returns the hash of an item's key.
    #[inline]
    pub fn hash(&self, key: &[u8]) -> u64 {
        self.0.hash(key)
    }
}

/// An item, as far as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// The offset of the item.
    pub at: usize,
    pub version: u64,
    pub lengths: Lengths,
    pub expiry: u32,
    pub flags: u32,
}

impl Item {
    /// The offset of the value.
    pub fn value_at(&self) -> usize {
        self.at + item::BYTES + self.lengths.key()
    }

    /// Returns whether the item has expired at this time of the cache's clock (in milliseconds).
    pub fn has_ended(&self, flushed: u64, clock: u64) -> bool {
        self.version <= flushed || self.expiry != 0 && u64::from(self.expiry) <= clock / 1000
    }
}

/// The result of reading the place that a slot names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// An item with this key.
    Item(Item),
    /// Not an item with this key.
    Other,
    /// The server is changing it.
    Changing,
}

/// Reads what a slot names. The memory may change meanwhile, so the caller checks the version again after it has
/// copied.
#[inline]
pub(crate) fn look(memory: &impl SharedMemory, shape: &Shape, slot: Slot, hash: u64, key: &[u8]) -> Look {
    let Some((_, end)) = shape.place(slot.at()) else { return Look::Other };
    let at = slot.at() as usize;
    // ORDER cache.version: the version before the rest. Pairs with: `Store::write`.
    let version = memory.load_acquire_u64(at + item::VERSION);
    if version == 0 {
        return Look::Changing;
    }
    let lengths = Lengths(memory.load_relaxed_u64(at + item::LENGTHS));
    let is_inside = lengths.key() + lengths.value() <= end - at - item::BYTES;
    if memory.load_relaxed_u64(at + item::HASH) != hash || lengths.key() != key.len() || !is_inside {
        return Look::Other;
    }
    if !has_key(memory, at + item::BYTES, key) {
        return Look::Other;
    }
    let expiry = memory.load_relaxed_u64(at + item::EXPIRY);
    Look::Item(Item { at, version, lengths, expiry: expiry as u32, flags: (expiry >> 32) as u32 })
}

#[inline]
fn has_key(memory: &impl SharedMemory, at: usize, key: &[u8]) -> bool {
    let mut bytes = [0; MOST_KEY];
    let Some(bytes) = bytes.get_mut(..key.len()) else { return false };
    memory.read_acquire(at, bytes);
    bytes == key
}

/// Returns the offsets of a hash's slots: those of its first bucket, then those of its second.
#[inline]
pub(crate) fn slots(shape: &Shape, hash: u64) -> impl Iterator<Item = usize> + use<> {
    let buckets = cache::buckets_of(hash, shape.buckets).map(|bucket| shape.bucket(bucket));
    let count = if buckets[0] == buckets[1] { 1 } else { 2 };
    buckets.into_iter().take(count).flat_map(|at| (0..cache::SLOTS).map(move |slot| at + slot * 8))
}
