//! The driver's side of a queue, of either kind.

use crate::error::{AddError, Corrupt, SetupError};
use crate::memory::Area;
use crate::ring::{Ring, each};
use crate::{Kind, packed, split};
use ginnel_layout::virtio::{DESCRIPTOR, Descriptor, DescriptorFlags, MAX_SIZE};
use ginnel_shmem::SharedMemory;

/// What a driver's queue is made from.
pub struct DriverSetup<M> {
    /// Format.
    pub kind: Kind,
    /// Entries.
    pub size: u16,
    /// The descriptor table, or the packed ring.
    pub descriptors: Area<M>,
    /// What the driver writes.
    pub driver: Area<M>,
    /// What the device writes.
    pub device: Area<M>,
    /// Whether `EVENT_IDX` is negotiated.
    pub event_idx: bool,
    /// Memory for indirect tables, if `INDIRECT_DESC` is negotiated and to be used.
    pub tables: Option<IndirectTables<M>>,
}

/// Memory for one indirect table for each entry of the queue.
pub struct IndirectTables<M> {
    /// The tables, one after the other.
    area: Area<M>,
    /// Descriptors in each.
    pub(crate) entries: u16,
}

impl<M: SharedMemory> IndirectTables<M> {
    /// Tables of `entries` descriptors each for a queue of `size`. `None` if the area is too short, or not aligned to 8.
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

    /// Guest physical address of a table.
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
    /// Guest physical address.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device writes it; otherwise it reads. Those that it reads come first.
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

/// A queue as its driver sees it. No method blocks or calls the kernel; none may be called by two threads at once.
///
/// The device is not trusted either: what it says is checked against the driver's own books.
pub struct DriverQueue<M: SharedMemory> {
    ring: Ring<split::Driver<M>, packed::Driver<M>>,
}

impl<M: SharedMemory> DriverQueue<M> {
    /// Checks the set-up and resets the ring, which no device may be looking at.
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

    /// Makes a request of these buffers, those to read from first, and returns its id, by which [`DriverQueue::poll`] tells of
    /// its end: below the queue's size, and nobody else's until then. `indirect`: in a table, if the queue has any; it takes one
    /// descriptor of the ring then. The device does not see it before [`DriverQueue::publish`].
    #[inline]
    pub fn add(&mut self, segments: &[Segment], indirect: bool) -> Result<u16, AddError> {
        each!(&mut self.ring, ring => ring.add(segments, indirect))
    }

    /// Shows the device all that was added. Says whether it wants a kick.
    #[inline]
    #[must_use = "the device may be waiting for its kick"]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// The next request that the device has given back, if there is one: its id and how many bytes were written.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<(u16, u32)>, Corrupt> {
        each!(&mut self.ring, ring => ring.poll())
    }

    /// Asks the device for calls. `true`: there is something to poll already, do not sleep.
    #[inline]
    #[must_use = "who sleeps on `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.arm())
    }

    /// Asks the device for no calls. Some may still come.
    #[inline]
    pub fn disarm(&mut self) {
        each!(&mut self.ring, ring => ring.disarm())
    }

    /// Requests added and not yet given back.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        each!(&self.ring, ring => ring.outstanding())
    }

    /// What a front end says in SET_VRING_BASE to a device that takes over from one that has died: what has been given back
    /// so far. (The device finds what was in flight in the in-flight region. Without one it takes all of that again.)
    /// Split: the used index as polled. Packed: the used index and wrap counter in both halves.
    pub fn base(&self) -> u32 {
        each!(&self.ring, ring => ring.base())
    }
}
