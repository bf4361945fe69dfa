//! The log of dirty pages (vhost-user specification, "Live migration"): one bit for each page of 4 KiB of the guest.

use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::SharedMemory;

/// The bitmap. Any number of queues may mark pages in it at the same time. Clones refer to the same bitmap.
#[derive(Clone)]
pub struct DirtyLog<M> {
    memory: M,
    at: usize,
    /// Number of pages that have a bit.
    pages: u64,
}

const PAGE: u64 = 4096;

impl<M: SharedMemory> DirtyLog<M> {
    /// Returns the log in the `len` bytes of `memory` from offset `at`. `None` if `at` or `len` is not a multiple of 8, or
    /// the bytes are not inside `memory`.
    pub fn new(memory: M, at: usize, len: usize) -> Option<Self> {
        let end = at.checked_add(len)?;
        if end > memory.len() || !(at | len).is_multiple_of(8) {
            return None;
        }
        Some(Self { memory, at, pages: 8 * len as u64 })
    }

    /// Marks the pages of `len` bytes at a guest's address, after they were written. Pages beyond the log have no bit: the
    /// front end provides a log that covers all memory before it provides the memory.
    pub fn mark(&self, address: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = (address.saturating_add(len - 1) / PAGE).min(self.pages.saturating_sub(1));
        let mut page = address / PAGE;
        if self.pages == 0 {
            return;
        }
        while page <= last {
            let (word, bit) = (page / 64, page % 64);
            let count = (last - page + 1).min(64 - bit);
            let bits = (u64::MAX >> (64 - count)) << bit;
            // This is a release: a process that sees the bit also sees what was written.
            self.memory.fetch_or_u64(self.at + 8 * word as usize, bits);
            page += count;
        }
    }

    /// Marks the pages that contain the first `written` bytes of the buffers.
    pub fn mark_buffers(&self, memory: &GuestMemory<M>, buffers: &[Buffer], mut written: u64) {
        for buffer in buffers {
            let len = written.min(u64::from(buffer.len));
            self.mark(memory.guest_address(buffer), len);
            written -= len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::Mapping;

    #[test]
    fn each_page_that_is_touched_has_its_bit() {
        let cases: [(u64, u64, &[u64]); 8] = [
            (0, 1, &[0]),
            (4095, 2, &[0, 1]),
            (4096, 4096, &[1]),
            (63 * 4096, 8192, &[63, 64]),
            (5, 0, &[]),
            (127 * 4096 + 1, 1 << 40, &[127]),
            (128 * 4096, 1, &[]),
            (u64::MAX - 5, 100, &[]),
        ];
        for (address, len, pages) in cases {
            let memory = Mapping::anonymous(4096).unwrap();
            DirtyLog::new(memory.clone(), 64, 16).unwrap().mark(address, len);
            let words = [56, 64, 72, 80].map(|at| memory.load_relaxed_u64(at));
            let mut wanted = [0u64; 4];
            for page in pages {
                wanted[1 + *page as usize / 64] |= 1 << (page % 64);
            }
            assert_eq!(words, wanted, "{address:#x}+{len}");
        }
        let memory = Mapping::anonymous(4096).unwrap();
        DirtyLog::new(memory.clone(), 0, 4096).unwrap().mark(4096 * 3, 4096 * 130);
        let ones: u32 = (0..4).map(|i| memory.load_relaxed_u64(8 * i).count_ones()).sum();
        assert_eq!((ones, memory.load_relaxed_u64(0).trailing_zeros()), (130, 3));
        assert!(DirtyLog::new(memory.clone(), 4, 8).is_none() && DirtyLog::new(memory, 4096, 8).is_none());
    }
}
