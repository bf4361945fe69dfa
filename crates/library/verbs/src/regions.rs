//! The memory regions of this endpoint: the private records against which it checks its own requests, and the copy for its peers.
//!
//! The records are private, and the tables contain a copy of them for peers. This endpoint reads that copy only to find memory for a
//! copy that a peer shares with it, after the private records have allowed that.

use crate::range_allocator::RangeAllocator;
use crate::work::Element;
use ginnel_layout::verbs::{
    Access, CHUNK, CHUNK_TABLE, CHUNKS, Chunk, Key, REGION_TABLE, REGIONS, SHADOW_BYTES, SHADOWS, region,
};
use ginnel_shmem::SharedMemory;

/// A region, as the program registered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Virtual address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// Access rights.
    pub access: Access,
    /// The protection domain.
    pub domain: u32,
}

impl Region {
    /// Returns whether the region contains this range.
    fn has(&self, address: u64, length: u32) -> bool {
        let end = address.checked_add(u64::from(length));
        address >= self.address && end.is_some_and(|end| end - self.address <= self.length)
    }

    /// Returns whether a request in this protection domain may access this range in this way.
    #[inline]
    pub fn allows(&self, element: &Element, wanted: u32, domain: u32) -> bool {
        self.domain == domain && self.access.allows(wanted) && self.has(element.address, element.length)
    }
}

/// The tables have no room for another region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tables have no room for another memory region")]
pub struct Full;

#[derive(Clone, Copy, Default)]
struct Slot {
    generation: u32,
    region: Option<Region>,
    is_shadow: bool,
    chunks: (u32, u32),
}

impl Slot {
    fn key(&self, index: usize) -> Key {
        match self.is_shadow {
            true => Key::shadow(index, self.generation),
            false => Key::new(index, self.generation),
        }
    }
}

/// The memory regions of an endpoint.
pub struct Regions<M> {
    tables: M,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The free part of the chunk table.
    free_chunks: RangeAllocator,
    /// Number of shadow regions, and their total length in bytes.
    shadows: (u64, u64),
}

impl<M: SharedMemory> Regions<M> {
    /// Returns an empty set of regions, which publishes them in these tables.
    pub fn new(tables: M) -> Self {
        let free_chunks = RangeAllocator::new(CHUNKS as u64);
        Self { tables, slots: Vec::new(), free: Vec::new(), free_chunks, shadows: (0, 0) }
    }

    /// Registers a region. Peers reach its memory through the chunks; without any, they cannot reach it.
    pub fn add(&mut self, region: Region, chunks: &[Chunk]) -> Result<Key, Full> {
        let count = chunks.len() as u32;
        let first = self.take_chunks(count).ok_or(Full)?;
        let Some(index) = self.enter(region, false) else {
            self.give_chunks(first, count);
            return Err(Full);
        };
        let slot = &mut self.slots[index];
        slot.chunks = (first, count);
        if !chunks.is_empty() {
            for (i, chunk) in chunks.iter().enumerate() {
                self.tables.store_relaxed_u32(CHUNK_TABLE + (first as usize + i) * 4, chunk.0);
            }
            let (at, generation) = (REGION_TABLE + index * ginnel_layout::verbs::REGION, slot.generation);
            self.tables.store_relaxed_u64(at + region::ADDRESS, region.address);
            self.tables.store_relaxed_u64(at + region::LENGTH, region.length);
            self.tables.store_relaxed_u32(at + region::DOMAIN, region.domain);
            self.tables.store_relaxed_u32(at + region::CHUNK, first);
            // ORDER verbs.region: the region is visible before its word. Pairs with: `Windows::look_up`.
            let word = u64::from(generation) << 32 | u64::from(region.access.0 | Access::VALID);
            self.tables.store_release_u64(at + region::WORD, word);
        }
        Ok(self.slots[index].key(index))
    }

    /// Registers a shadow region. The tables contain nothing of it except its part of the totals. Its key tells peers to ask the owner.
    pub fn add_shadow(&mut self, region: Region) -> Result<Key, Full> {
        let index = self.enter(region, true).ok_or(Full)?;
        let (count, bytes) = self.shadows;
        self.count_shadows(count + 1, bytes.saturating_add(region.length));
        Ok(self.slots[index].key(index))
    }

    fn count_shadows(&mut self, count: u64, bytes: u64) {
        self.shadows = (count, bytes);
        // Only `inspect` reads these words. They are left out in loom models.
        if !cfg!(loom) {
            self.tables.store_relaxed_u64(SHADOWS, count);
            self.tables.store_relaxed_u64(SHADOW_BYTES, bytes);
        }
    }

    /// Records a region. Returns its index.
    fn enter(&mut self, region: Region, is_shadow: bool) -> Option<usize> {
        let index = match self.free.pop() {
            Some(index) => index as usize,
            None if self.slots.len() < REGIONS => {
                self.slots.push(Slot::default());
                self.slots.len() - 1
            }
            None => return None,
        };
        let generation = self.slots[index].generation.wrapping_add(1);
        self.slots[index] = Slot { generation, region: Some(region), is_shadow, chunks: (0, 0) };
        Some(index)
    }

    /// Removes a region from the records and from the tables. Peers that looked it up before may still be accessing it. They say so in
    /// the `executing` words of this endpoint's queue pairs, which the caller must check afterwards. Returns false if there is no such
    /// region.
    pub fn remove(&mut self, key: Key) -> bool {
        let Some(region) = self.region(key) else { return false };
        if key.is_shadow() {
            let (count, bytes) = self.shadows;
            self.count_shadows(count - 1, bytes.saturating_sub(region.length));
        }
        let (at, slot) = (key.at(), &mut self.slots[key.index()]);
        slot.region = None;
        let (first, count) = std::mem::take(&mut slot.chunks);
        if let Some(at) = at.filter(|_| count > 0) {
            // ORDER verbs.executing: the word is visible before the load of `executing`. A poster, in turn, announces what it
            // executes before it loads the word. Pairs with: `Windows::look_up`.
            self.tables.swap_u64(at + region::WORD, 0);
            self.tables.full_fence();
        }
        self.give_chunks(first, count);
        self.free.push(key.index() as u32);
        true
    }

    /// Returns the region of a key.
    pub fn region(&self, key: Key) -> Option<Region> {
        let slot = self.slots.get(key.index())?;
        slot.region.filter(|_| slot.key(key.index()) == key)
    }

    /// Returns the number of regions.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether there are no regions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Allocates contiguous entries of the chunk table. Returns the first.
    fn take_chunks(&mut self, count: u32) -> Option<u32> {
        if count == 0 {
            return Some(0);
        }
        self.free_chunks.take(count.into(), 1).map(|first| first as u32)
    }

    fn give_chunks(&mut self, first: u32, count: u32) {
        self.free_chunks.give(first.into(), count.into());
    }
}

/// Returns the first address of each chunk that overlaps a range.
pub fn chunks_of(address: u64, length: u64) -> impl Iterator<Item = u64> {
    let first = address / CHUNK as u64;
    let last = if length == 0 { first } else { address.saturating_add(length - 1) / CHUNK as u64 };
    (first..=last).map(|chunk| chunk * CHUNK as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_layout::verbs::TABLES;
    use ginnel_shmem::Mapping;

    fn region(address: u64, length: u64) -> Region {
        Region { address, length, access: Access(Access::LOCAL_WRITE), domain: 1 }
    }

    #[test]
    fn a_key_is_valid_for_one_generation_only() {
        let mut regions = Regions::new(Mapping::anonymous(TABLES).unwrap());
        let key = regions.add(region(4096, 100), &[Chunk::new(0, 1)]).unwrap();
        assert_eq!(regions.region(key), Some(region(4096, 100)));
        assert!(regions.remove(key) && !regions.remove(key));
        let again = regions.add(region(8192, 1), &[]).unwrap();
        assert_eq!((again.index(), regions.len()), (key.index(), 1));
        assert!(again != key && regions.region(key).is_none() && regions.region(again).is_some());
        assert!(regions.region(Key(u32::MAX)).is_none());
    }

    #[test]
    fn a_shadow_region_is_not_in_the_tables() {
        let tables = Mapping::anonymous(TABLES).unwrap();
        let mut regions = Regions::new(tables.clone());
        let key = regions.add_shadow(region(4096, 100)).unwrap();
        assert!(key.is_shadow() && key.at().is_none());
        assert_eq!(regions.region(key), Some(region(4096, 100)));
        let same = Key::new(key.index(), 1);
        assert_eq!((regions.region(same), tables.load_relaxed_u64(same.at().unwrap())), (None, 0));
        let is_told = |count, bytes| {
            // Loom models leave these words out.
            let told = [SHADOWS, SHADOW_BYTES].map(|word| tables.load_relaxed_u64(word));
            assert!(cfg!(loom) || told == [count, bytes], "{told:?}");
        };
        let other = regions.add_shadow(region(0, 50)).unwrap();
        is_told(2, 150);
        assert!(regions.remove(other));
        is_told(1, 100);
        assert!(!regions.remove(same) && regions.remove(key) && !regions.remove(key));
        is_told(0, 0);
        let later = regions.add(region(0, 1), &[Chunk::default()]).unwrap();
        assert!(later.index() == key.index() && !later.is_shadow() && regions.region(key).is_none());
    }

    #[test]
    fn elements_must_lie_within_their_region() {
        let region = region(u64::MAX - 100, 100);
        let element = |address, length| Element { address, length, key: 0 };
        assert!(region.allows(&element(u64::MAX - 100, 100), Access::LOCAL_WRITE, 1));
        assert!(region.allows(&element(u64::MAX - 1, 1), 0, 1));
        assert!(!region.allows(&element(u64::MAX - 100, 101), 0, 1));
        assert!(!region.allows(&element(u64::MAX - 101, 1), 0, 1));
        assert!(!region.allows(&element(u64::MAX - 1, u32::MAX), 0, 1));
        assert!(!region.allows(&element(u64::MAX - 1, 1), Access::REMOTE_READ, 1));
        assert!(!region.allows(&element(u64::MAX - 1, 1), 0, 2));
    }

    #[test]
    fn chunks_and_slots_run_out_and_come_back() {
        let mut regions = Regions::new(Mapping::anonymous(TABLES).unwrap());
        let half = vec![Chunk::default(); CHUNKS / 2];
        let first = regions.add(region(0, 1), &half).unwrap();
        let second = regions.add(region(0, 1), &half).unwrap();
        assert_eq!(regions.add(region(0, 1), &half[..1]), Err(Full));
        assert!(regions.remove(first) && regions.remove(second));
        let all = vec![Chunk::default(); CHUNKS];
        let key = regions.add(region(0, 1), &all).unwrap();
        assert!(regions.remove(key));
        let keys: Vec<_> = (0..REGIONS).map(|_| regions.add(region(0, 1), &[]).unwrap()).collect();
        assert_eq!(regions.add(region(0, 1), &[]), Err(Full));
        assert!(keys.into_iter().all(|key| regions.remove(key)) && regions.is_empty());
    }

    #[test]
    fn the_chunks_of_a_range_are_found() {
        let of = |address, length| chunks_of(address, length).collect::<Vec<_>>();
        let chunk = CHUNK as u64;
        assert_eq!(of(0, 0), [0]);
        assert_eq!(of(chunk - 1, 1), [0]);
        assert_eq!(of(chunk - 1, 2), [0, chunk]);
        assert_eq!(of(chunk, 2 * chunk), [chunk, 2 * chunk]);
    }
}
