//! A replacement for the device: the client's own thread answers all requests of a split ring at once with OK, and does
//! nothing else. This measures the cost of the client itself.

use crate::slots::{ANSWER, HEAD};
use ginnel_layout::virtio::split;
use ginnel_shmem::{Mapping, SharedMemory};

pub(crate) struct Echo {
    pub size: u16,
    /// The shared memory, and the offsets of the two rings in it.
    pub memory: Mapping,
    pub available: usize,
    pub used: usize,
    /// Index of the next request to answer.
    pub next: u16,
}

impl Echo {
    /// Answers the published requests. `slot_of` has the slot of each descriptor.
    #[inline]
    pub fn answer(&mut self, heads: &Mapping, slot_of: &[u16]) {
        let memory = &self.memory;
        let published = memory.load_acquire_u16(self.available + split::INDEX);
        while self.next != published {
            let entry = self.next & (self.size - 1);
            let id = memory.load_relaxed_u16(self.available + split::available(entry));
            heads.store_relaxed_u32(usize::from(slot_of[usize::from(id)]) * HEAD + ANSWER, 0);
            memory.store_relaxed_u32(self.used + split::used(entry), id.into());
            memory.store_relaxed_u32(self.used + split::used(entry) + 4, 1);
            self.next = self.next.wrapping_add(1);
        }
        memory.store_release_u16(self.used + split::INDEX, self.next);
    }
}
