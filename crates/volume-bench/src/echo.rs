//! A device that is not there: answers all requests of a split ring at once, in the client's own thread, with OK and nothing.
//! What a workload then costs is the client itself.

use crate::queue::{ANSWER, HEAD};
use ginnel_layout::virtio::split;
use ginnel_shmem::{Mapping, SharedMemory};

pub(crate) struct Echo {
    pub size: u16,
    /// The memory, and where the two rings lie in it.
    pub memory: Mapping,
    pub available: usize,
    pub used: usize,
    /// The next to answer.
    pub next: u16,
}

impl Echo {
    /// Answers what was published. `slot_of` tells whose status is whose.
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
