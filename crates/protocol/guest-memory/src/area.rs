//! A part of the guest's memory that a queue uses for as long as it exists.

use ginnel_shmem::SharedMemory;

/// A part of a region that contains an area of a queue.
#[derive(Clone)]
pub struct Area<M> {
    /// The bytes of the region.
    pub memory: M,
    /// Offset of the area in the region.
    pub at: usize,
    /// Bytes of the area. Bytes beyond the needed ones are ignored.
    pub len: usize,
    /// Guest physical address of the area (for the log of dirty pages, and for messages).
    pub guest: u64,
}

/// Access to the words of an area, by their offset in it. As in [`SharedMemory`], an offset that is outside or misaligned
/// panics; the queues check sizes and alignment when they are made, and mask or check every index.
impl<M: SharedMemory> Area<M> {
    /// Returns whether the area lies inside its memory, begins at a multiple of `align`, and has the `needed` bytes. Whoever gets an area
    /// for a queue checks this first.
    pub fn fits(&self, needed: usize, align: usize) -> bool {
        let inside = self.at.checked_add(self.len).is_some_and(|end| end <= self.memory.len());
        inside && self.len >= needed && self.at.is_multiple_of(align)
    }

    /// Prefetches the cache line at an offset (see [`SharedMemory::prefetch`]).
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        self.memory.prefetch(self.at + offset);
    }
    /// Loads without ordering.
    #[inline]
    pub fn load_relaxed_u16(&self, offset: usize) -> u16 {
        self.memory.load_relaxed_u16(self.at + offset)
    }
    /// Loads with acquire ordering.
    #[inline]
    pub fn load_acquire_u16(&self, offset: usize) -> u16 {
        self.memory.load_acquire_u16(self.at + offset)
    }
    /// Stores without ordering.
    #[inline]
    pub fn store_relaxed_u16(&self, offset: usize, value: u16) {
        self.memory.store_relaxed_u16(self.at + offset, value);
    }
    /// Stores with release ordering.
    #[inline]
    pub fn store_release_u16(&self, offset: usize, value: u16) {
        self.memory.store_release_u16(self.at + offset, value);
    }
    /// Loads without ordering.
    #[inline]
    pub fn load_relaxed_u32(&self, offset: usize) -> u32 {
        self.memory.load_relaxed_u32(self.at + offset)
    }
    /// Stores without ordering.
    #[inline]
    pub fn store_relaxed_u32(&self, offset: usize, value: u32) {
        self.memory.store_relaxed_u32(self.at + offset, value);
    }
    /// Loads without ordering.
    #[inline]
    pub fn load_relaxed_u64(&self, offset: usize) -> u64 {
        self.memory.load_relaxed_u64(self.at + offset)
    }
    /// Loads with acquire ordering.
    #[inline]
    pub fn load_acquire_u64(&self, offset: usize) -> u64 {
        self.memory.load_acquire_u64(self.at + offset)
    }
    /// Stores without ordering.
    #[inline]
    pub fn store_relaxed_u64(&self, offset: usize, value: u64) {
        self.memory.store_relaxed_u64(self.at + offset, value);
    }
    /// Stores with release ordering.
    #[inline]
    pub fn store_release_u64(&self, offset: usize, value: u64) {
        self.memory.store_release_u64(self.at + offset, value);
    }
    /// Loads with acquire ordering.
    #[inline]
    pub fn load_acquire_u32(&self, offset: usize) -> u32 {
        self.memory.load_acquire_u32(self.at + offset)
    }
    /// Stores with release ordering.
    #[inline]
    pub fn store_release_u32(&self, offset: usize, value: u32) {
        self.memory.store_release_u32(self.at + offset, value);
    }
}
