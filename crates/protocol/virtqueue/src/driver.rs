//! The driver's side of a queue of either format.

use crate::error::{AddError, Corrupt, SetupError};
use crate::ring::{Ring, each};
use crate::{Kind, packed, split};
use ginnel_guest_memory::Area;
use ginnel_layout::virtio::{DESCRIPTOR, Descriptor, DescriptorFlags, MAX_SIZE};
use ginnel_shmem::SharedMemory;

/// Parameters of a driver's queue.
pub struct DriverSetup<M> {
    /// Format of the queue.
    pub kind: Kind,
    /// Number of entries.
    pub size: u16,
    /// The descriptor table, or the packed ring.
    pub descriptors: Area<M>,
    /// The area that the driver writes.
    pub driver: Area<M>,
    /// The area that the device writes.
    pub device: Area<M>,
    /// Whether `EVENT_IDX` is negotiated.
    pub event_idx: bool,
    /// Memory for indirect tables. `None` if `INDIRECT_DESC` is not negotiated or not wanted.
    pub tables: Option<IndirectTables<M>>,
}

/// Memory for the indirect tables: one for each entry of the queue.
pub struct IndirectTables<M> {
    /// The tables, one after the other.
    area: Area<M>,
    /// Number of descriptors in each table.
    pub(crate) entries: u16,
}

impl<M: SharedMemory> IndirectTables<M> {
    /// Returns tables of `entries` descriptors each for a queue of size `size`. `None` if the area is too short, or not
    /// aligned to 8.
    pub fn new(area: Area<M>, size: u16, entries: u16) -> Option<Self> {
        let len = DESCRIPTOR * usize::from(size) * usize::from(entries);
        let inside = area.at.checked_add(area.len).is_some_and(|end| end <= area.memory.len());
        (inside && area.len >= len && area.at.is_multiple_of(8) && entries > 0)
            .then_some(Self { area, entries })
    }

    #[inline]
    fn offset(&self, table: u16) -> usize {
        DESCRIPTOR * usize::from(self.entries) * usize::from(table)
    }

    /// Returns the guest physical address of a table.
    #[inline]
    pub(crate) fn address(&self, table: u16) -> u64 {
        self.area.guest + self.offset(table) as u64
    }

    #[inline]
    pub(crate) fn store(&self, table: u16, entry: usize, [address, rest]: [u64; 2]) {
        let at = self.offset(table) + DESCRIPTOR * entry;
        self.area.store_relaxed_u64(at, address);
        self.area.store_relaxed_u64(at + 8, rest);
    }
}

/// One buffer of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest physical address of the buffer.
    pub address: u64,
    /// Bytes of the buffer.
    pub len: u32,
    /// Whether the device writes the buffer; otherwise it reads it. The buffers that it reads come first.
    pub writable: bool,
}

impl Segment {
    /// Bytes that the device may write.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        if self.writable { self.len } else { 0 }
    }

    #[inline]
    pub(crate) fn flags(&self) -> DescriptorFlags {
        if self.writable { DescriptorFlags::WRITE } else { DescriptorFlags(0) }
    }

    #[inline]
    pub(crate) fn split(&self, next: Option<u16>) -> Descriptor {
        let link = if next.is_some() { DescriptorFlags::NEXT } else { DescriptorFlags(0) };
        let flags = self.flags().with(link);
        Descriptor { address: self.address, len: self.len, flags, next: next.unwrap_or(0) }
    }
}

/// A queue as its driver sees it. No method blocks or calls the kernel. Two threads must not use it at the same time.
///
/// The driver does not trust the device either, and checks what it writes against the driver's own records.
pub struct DriverQueue<M: SharedMemory> {
    ring: Ring<split::Driver<M>, packed::Driver<M>>,
}

impl<M: SharedMemory> DriverQueue<M> {
    /// Checks the parameters and resets the ring, which no device may use at that time.
    pub fn new(setup: DriverSetup<M>) -> Result<Self, SetupError> {
        if setup.size == 0 || setup.size > MAX_SIZE {
            return Err(SetupError::Size(setup.size));
        }
        let ring = match setup.kind {
            Kind::Split => Ring::Split(split::Driver::new(setup)?),
            Kind::Packed => Ring::Packed(packed::Driver::new(setup)?),
        };
        Ok(Self { ring })
    }

    /// Makes a request of these buffers, those to read from first. Returns its id, with which [`DriverQueue::poll`] reports
    /// its end. The id is below the queue's size, and no other request has it until then. If `indirect`, the descriptors go
    /// into an indirect table, if the queue has tables, and the request takes one descriptor of the ring. The device does not
    /// see the request before [`DriverQueue::publish`].
    #[inline]
    pub fn add(&mut self, segments: &[Segment], indirect: bool) -> Result<u16, AddError> {
        each!(&mut self.ring, ring => ring.add(segments, indirect))
    }

    /// Shows the device everything that was added. Returns whether the device must be kicked.
    #[inline]
    #[must_use = "the device may be waiting for its kick"]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// Returns the next request that the device has given back, if there is one: its id, and how many bytes were written.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<(u16, u32)>, Corrupt> {
        each!(&mut self.ring, ring => ring.poll())
    }

    /// Asks the device for calls. Returns `true` if there is something to poll already; then the driver must not sleep.
    #[inline]
    #[must_use = "a caller that sleeps although it got `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.arm())
    }

    /// Tells the device that no calls are needed. Some may still come.
    #[inline]
    pub fn disarm(&mut self) {
        each!(&mut self.ring, ring => ring.disarm())
    }

    /// Returns how many requests are added and not given back yet.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        each!(&self.ring, ring => ring.outstanding())
    }

    /// Returns the base that a front end sends with SET_VRING_BASE to a device process that takes over from one that has
    /// died: it says which requests have been given back so far. (The new device finds the requests in flight in the
    /// in-flight region. Without such a region, it takes all requests since the base again.) Split: the used index as polled.
    /// Packed: the used index and wrap counter in both halves.
    pub fn base(&self) -> u32 {
        each!(&self.ring, ring => ring.base())
    }
}
