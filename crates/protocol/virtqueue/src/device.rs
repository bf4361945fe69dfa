//! The device's side of a queue of either format.

use crate::chain::Chain;
use crate::error::{Corrupt, SetupError};
use crate::inflight::InflightQueue;
use crate::log::DirtyLog;
use crate::ring::{Ring, each};
use crate::{Kind, packed, split};
use ginnel_guest_memory::{Area, GuestMemory};
use ginnel_layout::virtio::MAX_SIZE;
use ginnel_shmem::SharedMemory;

/// Parameters of a device's queue.
pub struct Setup<M> {
    /// Format of the queue.
    pub kind: Kind,
    /// Number of entries.
    pub size: u16,
    /// The descriptor table, or the packed ring.
    pub descriptors: Area<M>,
    /// The area that the driver writes: the available ring, or its event suppression structure.
    pub driver: Area<M>,
    /// The area that the device writes: the used ring, or its event suppression structure.
    pub device: Area<M>,
    /// Whether `EVENT_IDX` is negotiated.
    pub event_idx: bool,
    /// Position at which to begin: the last [`DeviceQueue::base`] of the previous device process; 0 for a new split queue,
    /// 0x8000_8000 for a new packed one. Ignored if the in-flight region has the position.
    pub base: u32,
    /// In-flight region, in which to record the requests in flight.
    pub inflight: Option<InflightQueue<M>>,
    /// Maximum number of segments of a request. A request with more is [`Corrupt::Segments`].
    pub max_segments: u16,
}

/// A request that the device has taken. The device must give it back exactly once, to the queue that it came from. A request
/// whose ticket is dropped stays in flight for ever, which is right only if the queue itself is dropped.
#[must_use = "each request must be given back with `push`"]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Split: head of the chain. Packed: id of the buffer.
    pub(crate) id: u16,
    /// Packed: number of descriptors in the ring.
    pub(crate) count: u16,
    /// Packed: first entry in the in-flight region.
    pub(crate) slot: u16,
}

impl Ticket {
    /// Returns the number by which the driver identifies the request.
    pub fn id(&self) -> u16 {
        self.id
    }
}

/// A queue as its device sees it. No method blocks or calls the kernel. Two threads must not use it at the same time.
pub struct DeviceQueue<M: SharedMemory> {
    ring: Ring<split::Device<M>, packed::Device<M>>,
}

/// The state of a queue, for people who look at a guest that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Format of the queue.
    pub kind: Kind,
    /// Number of entries.
    pub size: u16,
    /// Next entry to take. Packed: with the wrap counter in bit 15.
    pub available: u16,
    /// Split: present available index of the driver.
    pub driver_index: Option<u16>,
    /// Next entry to give back. Packed: with the wrap counter in bit 15.
    pub used: u16,
    /// Number of requests taken and not given back.
    pub outstanding: u16,
    /// Number of requests that a previous device process had in flight and that are not taken again yet.
    pub resubmit: u16,
    /// Whether the driver has been asked to kick.
    pub armed: bool,
}

impl<M: SharedMemory> DeviceQueue<M> {
    /// Checks the parameters, and takes over what a previous device process has left in the in-flight region. Writes nothing
    /// elsewhere.
    pub fn new(setup: Setup<M>) -> Result<Self, SetupError> {
        if setup.size == 0 || setup.size > MAX_SIZE {
            return Err(SetupError::Size(setup.size));
        }
        let ring = match setup.kind {
            Kind::Split => Ring::Split(split::Device::new(setup)?),
            Kind::Packed => Ring::Packed(packed::Device::new(setup)?),
        };
        Ok(Self { ring })
    }

    /// Takes the next request, if there is one, and stores its memory in `chain`, which stays valid as long as `memory` does.
    /// Requests that a previous device process had in flight come first, in their order. After an error, the queue is broken,
    /// and the content of `chain` is invalid.
    #[inline]
    pub fn pop(&mut self, memory: &GuestMemory<M>, chain: &mut Chain) -> Result<Option<Ticket>, Corrupt> {
        each!(&mut self.ring, ring => ring.pop(memory, chain))
    }

    /// Gives a request back. `written` is the number of bytes of its writable memory that were written. The driver does not
    /// see it before [`DeviceQueue::publish`].
    #[inline]
    pub fn push(&mut self, ticket: Ticket, written: u32) {
        each!(&mut self.ring, ring => ring.push(ticket, written))
    }

    /// Shows the driver everything that was pushed. Returns whether the driver must be called. This is always true the first
    /// time, because a previous device process may have died before it called.
    #[inline]
    #[must_use = "the driver may be waiting for its call"]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// Asks the driver for kicks. Returns `true` if there is something to take already; then the device must not sleep.
    #[inline]
    #[must_use = "a caller that sleeps although it got `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.arm())
    }

    /// Tells the driver that no kicks are needed. Some may still come.
    #[inline]
    pub fn disarm(&mut self) {
        each!(&mut self.ring, ring => ring.disarm())
    }

    /// Returns the answer to GET_VRING_BASE, once no request is outstanding. Split: the available index. Packed: the
    /// available index (bits 0-14) and wrap counter (15), the used index (16-30) and wrap counter (31).
    pub fn base(&self) -> u32 {
        each!(&self.ring, ring => ring.base())
    }

    /// Returns how many requests are taken and not given back.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        each!(&self.ring, ring => ring.outstanding())
    }

    /// Returns how much has been taken since this queue was made, in entries of the ring (packed: descriptors). A request of
    /// a previous device process counts as one.
    #[inline]
    pub fn taken(&self) -> u64 {
        each!(&self.ring, ring => ring.taken())
    }

    /// Returns how much there is to take, in the same units: what the driver has made available by now, and the requests of a
    /// previous device process. It is never more than the queue's size, whatever the driver writes. Once
    /// [`taken`](Self::taken) has grown by this number, all of it has been taken. A packed queue has no index, so each
    /// descriptor is looked at.
    pub fn visible(&self) -> u64 {
        each!(&self.ring, ring => ring.visible())
    }

    /// Returns whether there is nothing to take now.
    pub fn is_empty(&self) -> bool {
        each!(&self.ring, ring => ring.is_empty())
    }

    /// Sets the log in which this queue marks what it writes to the ring from now on; `None` stops that. The device itself
    /// must mark what it writes into the buffers of requests ([`DirtyLog::mark_buffers`]).
    pub fn set_log(&mut self, log: Option<DirtyLog<M>>) {
        each!(&mut self.ring, ring => ring.set_log(log));
    }

    /// Returns the state of the queue.
    pub fn state(&self) -> DeviceState {
        each!(&self.ring, ring => ring.state())
    }
}

/// Checks the size and alignment of an area of a queue.
pub(crate) fn check_area<M: SharedMemory>(
    name: &'static str,
    area: &Area<M>,
    needed: usize,
    align: usize,
) -> Result<(), SetupError> {
    if !area.fits(needed, align) {
        let (address, len) = (area.guest, area.len);
        return Err(SetupError::Area { area: name, address, len, align, needed });
    }
    Ok(())
}
