//! Guest memory that the kernel has pinned (registered buffers), so that it need not look up pages for each request.

use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::{Mapping, SharedSlice};
use std::sync::Arc;

/// The largest size of one buffer for the kernel, in bytes.
const BUFFER: usize = 1 << 30;

/// The largest number of buffers for the kernel.
const BUFFERS: usize = 1 << 14;

pub(super) struct Pinned {
    memory: Arc<GuestMemory<Mapping>>,
    /// For each region, the number of its first buffer.
    first: Vec<u16>,
}

impl Pinned {
    /// Returns the memory with the buffers of which it consists; `None` if there are too many.
    pub fn new(memory: Arc<GuestMemory<Mapping>>) -> Option<(Self, Vec<libc::iovec>)> {
        use ginnel_shmem::SharedMemory;
        let (mut first, mut buffers) = (Vec::new(), Vec::new());
        for region in memory.regions() {
            first.push(u16::try_from(buffers.len()).ok()?);
            let bytes = region.memory.len();
            for at in (0..bytes).step_by(BUFFER) {
                let slice = SharedSlice::new(&region.memory, at, BUFFER.min(bytes - at));
                buffers.push(libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: slice.len() });
            }
        }
        (buffers.len() <= BUFFERS).then_some((Self { memory, first }, buffers))
    }

    /// Returns whether this memory is the pinned one.
    pub fn is(&self, memory: &GuestMemory<Mapping>) -> bool {
        std::ptr::eq(&*self.memory, memory)
    }

    /// Returns the number of the buffer that contains all of the data, if one does.
    #[inline]
    pub fn buffer(&self, memory: &GuestMemory<Mapping>, data: &[Buffer]) -> Option<u16> {
        let [one] = data else { return None };
        let last = one.at + (one.len as usize).checked_sub(1)?;
        let here = one.at / BUFFER;
        (self.is(memory) && last / BUFFER == here)
            .then(|| self.first.get(usize::from(one.region)).map(|first| first + here as u16))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_guest_memory::Region;

    #[test]
    fn buffers_are_numbered_through_all_regions() {
        // The memory is mapped but never touched.
        let region =
            |guest: u64, len| Region { guest, user: guest, memory: Mapping::anonymous(len).unwrap() };
        let regions = || vec![region(0, BUFFER + 8192), region(1 << 40, 4096), region(2 << 40, 2 * BUFFER)];
        let memory = Arc::new(GuestMemory::new(regions()).unwrap());
        let (pinned, buffers) = Pinned::new(memory.clone()).unwrap();
        let lengths: Vec<_> = buffers.iter().map(|buffer| buffer.iov_len).collect();
        assert_eq!(lengths, [BUFFER, 8192, 4096, BUFFER, BUFFER]);
        let find = |region, at, len| {
            let data = [Buffer { region, at, len }];
            let found = pinned.buffer(&memory, &data);
            if let Some(n) = found {
                let slice = memory.slice(&data[0]);
                let (start, buffer) = (slice.as_ptr() as usize, &buffers[usize::from(n)]);
                let from = buffer.iov_base as usize;
                assert!(
                    start >= from && start + slice.len() <= from + buffer.iov_len,
                    "{data:?} is not in {n}"
                );
            }
            found
        };
        assert_eq!(find(0, 0, 4096), Some(0));
        assert_eq!(find(0, BUFFER - 4096, 4096), Some(0));
        assert_eq!(find(0, BUFFER - 4096, 4097), None, "over a border");
        assert_eq!(find(0, BUFFER, 8192), Some(1));
        assert_eq!(find(1, 0, 4096), Some(2));
        assert_eq!(find(2, BUFFER + 512, 4096), Some(4));
        assert_eq!(find(2, 0, 0), None);
        let two = [Buffer { region: 0, at: 0, len: 512 }, Buffer { region: 0, at: 512, len: 512 }];
        assert_eq!(pinned.buffer(&memory, &two), None);
        assert_eq!(pinned.buffer(&GuestMemory::new(regions()).unwrap(), &two[..1]), None, "other memory");
    }
}
