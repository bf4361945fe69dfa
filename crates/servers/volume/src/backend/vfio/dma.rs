//! The memory that a device can reach.
#![allow(unsafe_code)] // Devices write to memory that is mapped for them.

use super::addresses::Addresses;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::{Mapping, SharedMemory, SharedSlice};
use ginnel_vfio::{Access, Container};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tracing::warn;

/// The unit of what can be mapped.
const PAGE: usize = 4096;

/// The memory of this process that the devices of a container can reach.
pub struct Dma {
    container: Container,
    addresses: Mutex<Addresses>,
    /// The guest memory that is mapped for some worker.
    attached: Mutex<Vec<Weak<Attached>>>,
}

impl Dma {
    /// `container` has its group.
    pub fn new(container: Container) -> anyhow::Result<Arc<Self>> {
        let addresses = Mutex::new(Addresses::new(&container.ranges()?));
        Ok(Arc::new(Self { container, addresses, attached: Mutex::default() }))
    }

    /// Maps a run of memory. Returns its address for the device.
    fn map(&self, memory: &Mapping, len: usize) -> io::Result<u64> {
        let no_room = || io::Error::new(io::ErrorKind::StorageFull, "the IOMMU has no addresses left");
        let iova = lock(&self.addresses).take(len as u64).ok_or_else(no_room)?;
        let access = if memory.is_read_only() { Access::Read } else { Access::ReadWrite };
        let start = SharedSlice::new(memory, 0, len).as_ptr();
        // SAFETY: the memory is of a `Mapping`, to whose bytes no reference ever exists, and which others may write at any time. Its pages
        // are used by nobody else after it was unmapped from this process, since the container keeps them until `unmap`.
        let mapped = unsafe { self.container.map(start, len as u64, iova, access) };
        if mapped.is_err() {
            lock(&self.addresses).give_back(iova, len as u64);
        }
        mapped.map(|()| iova)
    }

    fn unmap(&self, iova: u64, len: usize) {
        match self.container.unmap(iova, len as u64) {
            Ok(()) => lock(&self.addresses).give_back(iova, len as u64),
            // The addresses are not used again, so nobody gets what the device may still write.
            Err(error) => warn!("{len} bytes of memory stay mapped for the device: {error}"),
        }
    }

    /// Lets the devices reach a guest's memory, as long as the result lives. What cannot be mapped is left out, with a warning. Blocks
    /// while the kernel finds or allocates all pages.
    pub fn attach(self: &Arc<Self>, memory: &Arc<GuestMemory<Mapping>>) -> Arc<Attached> {
        let mut known = lock(&self.attached);
        known.retain(|attached| attached.strong_count() > 0);
        if let Some(it) = known.iter().filter_map(Weak::upgrade).find(|attached| attached.is(memory)) {
            return it;
        }
        let (mut missing, mut why) = (0, None);
        let mut map = |memory: &Mapping| {
            let start = SharedSlice::new(memory, 0, memory.len()).as_ptr() as usize;
            let len = memory.len() / PAGE * PAGE;
            let mapped = match start.is_multiple_of(PAGE) {
                true if len == 0 => return NOTHING,
                true => self.map(memory, len),
                false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it does not begin at a page")),
            };
            mapped.map_or_else(
                |error| {
                    missing += memory.len();
                    why = Some(error);
                    NOTHING
                },
                |iova| Part { iova, len },
            )
        };
        let parts = memory.regions().iter().map(|region| map(&region.memory)).collect();
        if let Some(why) = why {
            let fix = locked_too_much(&why);
            warn!(
                "{missing} bytes of the guest's memory cannot be mapped for the NVMe device: {why}{fix}; their data is copied"
            );
        }
        let attached =
            Arc::new(Attached { memory: Arc::downgrade(memory), parts, dma: Arc::downgrade(self) });
        known.push(Arc::downgrade(&attached));
        attached
    }
}

/// Says what to do if the kernel does not let this process lock so much memory.
fn locked_too_much(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => "; raise RLIMIT_MEMLOCK (LimitMEMLOCK= in the unit)",
        _ => "",
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A run of memory as the device sees it; empty if it does not see it.
#[derive(Clone, Copy)]
struct Part {
    iova: u64,
    len: usize,
}

const NOTHING: Part = Part { iova: 0, len: 0 };

/// A guest's memory that the devices can reach. It keeps the pages, and not the mapping of them.
pub struct Attached {
    memory: Weak<GuestMemory<Mapping>>,
    /// For each region, where it lies.
    parts: Vec<Part>,
    dma: Weak<Dma>,
}

impl Attached {
    /// Returns the address of a buffer for the device, if that can reach it.
    #[inline]
    pub fn iova(&self, buffer: &Buffer) -> Option<u64> {
        let part = self.parts.get(usize::from(buffer.region))?;
        let end = buffer.at.checked_add(buffer.len as usize)?;
        (end <= part.len).then_some(part.iova + buffer.at as u64)
    }

    /// Returns whether this is the memory in which these buffers lie.
    #[inline]
    pub fn is(&self, memory: &GuestMemory<Mapping>) -> bool {
        // No other memory gets the address meanwhile, because of the weak reference.
        std::ptr::eq(self.memory.as_ptr(), memory)
    }

    /// Returns the memory, which is there as long as a queue uses it.
    pub fn memory(&self) -> Option<Arc<GuestMemory<Mapping>>> {
        self.memory.upgrade()
    }

    /// Returns whether anybody still uses the memory.
    pub fn is_used(&self) -> bool {
        self.memory.strong_count() > 0
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // With the container, the kernel has taken all memory away.
        let Some(dma) = self.dma.upgrade() else { return };
        self.parts.iter().filter(|part| part.len > 0).for_each(|part| dma.unmap(part.iova, part.len));
    }
}

/// Memory of this process that the device can reach, zeroed.
pub struct Pages {
    /// The memory.
    pub memory: Mapping,
    iova: u64,
    dma: Weak<Dma>,
}

impl Pages {
    /// Allocates at least `len` bytes.
    pub fn new(dma: &Arc<Dma>, len: usize) -> io::Result<Self> {
        let memory = Mapping::anonymous(len.next_multiple_of(PAGE))?;
        // Copies of pages that a child writes would be in place of those that the device has.
        memory.keep_from_children();
        let iova = dma.map(&memory, memory.len()).map_err(|error| {
            let (len, fix) = (memory.len(), locked_too_much(&error));
            io::Error::new(error.kind(), format!("{len} bytes for its queues cannot be mapped: {error}{fix}"))
        })?;
        Ok(Self { memory, iova, dma: Arc::downgrade(dma) })
    }

    /// Returns the device's address of an offset.
    pub fn iova(&self, at: usize) -> u64 {
        self.iova + at as u64
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(dma) = self.dma.upgrade() {
            dma.unmap(self.iova, self.memory.len());
        }
    }
}

/// Memory that a device of a test can reach, which has no container.
#[cfg(test)]
impl Attached {
    /// For each region, its address for the device; `None` if that cannot reach it.
    pub fn without_device(memory: &Arc<GuestMemory<Mapping>>, at: &[Option<u64>]) -> Self {
        let part = |(region, iova): (&ginnel_guest_memory::Region<Mapping>, &Option<u64>)| match *iova {
            Some(iova) => Part { iova, len: region.memory.len() },
            None => NOTHING,
        };
        let parts = memory.regions().iter().zip(at).map(part).collect();
        Self { memory: Arc::downgrade(memory), parts, dma: Weak::new() }
    }
}

#[cfg(test)]
impl Pages {
    pub fn without_device(len: usize, iova: u64) -> Self {
        Self { memory: Mapping::anonymous(len).unwrap(), iova, dma: Weak::new() }
    }
}
