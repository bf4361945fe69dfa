//! The device's side of a queue, of either kind.

use crate::chain::Chain;
use crate::error::{Corrupt, SetupError};
use crate::inflight::InflightQueue;
use crate::log::DirtyLog;
use crate::memory::{Area, GuestMemory};
use crate::ring::{Ring, each};
use crate::{Kind, packed, split};
use ginnel_layout::virtio::MAX_SIZE;
use ginnel_shmem::SharedMemory;

/// What a device's queue is made from.
pub struct Setup<M> {
    /// Format.
    pub kind: Kind,
    /// Entries.
    pub size: u16,
    /// The descriptor table, or the packed ring.
    pub descriptors: Area<M>,
    /// What the driver writes: the available ring, or its event suppression.
    pub driver: Area<M>,
    /// What the device writes: the used ring, or its event suppression.
    pub device: Area<M>,
    /// Whether `EVENT_IDX` is negotiated.
    pub event_idx: bool,
    /// Where to begin: what [`DeviceQueue::base`] of the predecessor said; 0 for a fresh split queue, 0x8000_8000 for a fresh
    /// packed one. Not used where the in-flight region knows better.
    pub base: u32,
    /// Where to note down what is in flight.
    pub inflight: Option<InflightQueue<M>>,
    /// Most segments of a request: more are [`Corrupt::Segments`].
    pub max_segments: u16,
}

/// A request that has been taken and is to be given back exactly once, to the queue that it came from. Dropped, it is in flight
/// for ever; that is right only where the queue itself is dropped.
#[must_use = "each request is given back by `push`"]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Split: the chain's head. Packed: the buffer's id.
    pub(crate) id: u16,
    /// Packed: descriptors in the ring.
    pub(crate) count: u16,
    /// Packed: the entry in the in-flight region.
    pub(crate) slot: u16,
}

impl Ticket {
    /// By which the driver knows the request.
    pub fn id(&self) -> u16 {
        self.id
    }
}

/// A queue as its device sees it. No method blocks or calls the kernel; none may be called by two threads at once.
pub struct DeviceQueue<M: SharedMemory> {
    ring: Ring<split::Device<M>, packed::Device<M>>,
}

/// Where a queue stands, for a person who looks at a guest that is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Format.
    pub kind: Kind,
    /// Entries.
    pub size: u16,
    /// Next entry to take. Packed: with the wrap counter in bit 15.
    pub available: u16,
    /// The split driver's index, as it is now.
    pub driver_index: Option<u16>,
    /// Next entry to give back. Packed: with the wrap counter in bit 15.
    pub used: u16,
    /// Requests taken and not given back.
    pub outstanding: u16,
    /// Requests of a predecessor that are still to be taken.
    pub resubmit: u16,
    /// Whether the driver has been asked to kick.
    pub armed: bool,
}

impl<M: SharedMemory> DeviceQueue<M> {
    /// Checks the set-up, and takes over what a predecessor has left in the in-flight region. Writes nothing elsewhere.
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

    /// The next request, if there is one: its memory is in `chain`, and stays valid as long as `memory` does. Requests that
    /// a predecessor had in flight come first, in their order. After an error the queue is broken, and so is `chain`.
    #[inline]
    pub fn pop(&mut self, memory: &GuestMemory<M>, chain: &mut Chain) -> Result<Option<Ticket>, Corrupt> {
        each!(&mut self.ring, ring => ring.pop(memory, chain))
    }

    /// Gives a request back, with how many bytes of its writable memory were written. The driver does not see it before
    /// [`DeviceQueue::publish`].
    #[inline]
    pub fn push(&mut self, ticket: Ticket, written: u32) {
        each!(&mut self.ring, ring => ring.push(ticket, written))
    }

    /// Shows the driver all that was pushed. Says whether it wants to be called; the first time always, because a predecessor
    /// may have died before it called.
    #[inline]
    #[must_use = "the driver may be waiting for its call"]
    pub fn publish(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.publish())
    }

    /// Asks the driver for kicks. `true`: there is something to take already, do not sleep.
    #[inline]
    #[must_use = "who sleeps on `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        each!(&mut self.ring, ring => ring.arm())
    }

    /// Asks the driver for no kicks. Some may still come.
    #[inline]
    pub fn disarm(&mut self) {
        each!(&mut self.ring, ring => ring.disarm())
    }

    /// What GET_VRING_BASE answers once nothing is outstanding. Split: the available index. Packed: the available index
    /// (bits 0-14) and wrap counter (15), the used index (16-30) and wrap counter (31).
    pub fn base(&self) -> u32 {
        each!(&self.ring, ring => ring.base())
    }

    /// Requests taken and not given back.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        each!(&self.ring, ring => ring.outstanding())
    }

    /// How much has been taken since this queue was made, in entries of the ring (packed: descriptors). A request of a
    /// predecessor's counts as one.
    #[inline]
    pub fn taken(&self) -> u64 {
        each!(&self.ring, ring => ring.taken())
    }

    /// How much there is to take, in the same units: what the driver has made available by now, and a predecessor's requests.
    /// Never more than the queue's size, whatever the driver says. Once [`taken`](Self::taken) has grown by that, all of it
    /// has been taken. Of a packed queue, which has no index, each descriptor is looked at.
    pub fn visible(&self) -> u64 {
        each!(&self.ring, ring => ring.visible())
    }

    /// Whether there is nothing to take now.
    pub fn is_empty(&self) -> bool {
        each!(&self.ring, ring => ring.is_empty())
    }

    /// From now on marks what it writes to the ring in this log; `None`: no more. What the device writes into the requests'
    /// buffers is for the device to mark ([`DirtyLog::mark_buffers`]).
    pub fn set_log(&mut self, log: Option<DirtyLog<M>>) {
        each!(&mut self.ring, ring => ring.set_log(log));
    }

    /// Where the queue stands.
    pub fn state(&self) -> DeviceState {
        each!(&self.ring, ring => ring.state())
    }
}

/// Checks an area of a queue.
pub(crate) fn check_area<M: SharedMemory>(
    name: &'static str,
    area: &Area<M>,
    needed: usize,
    align: usize,
) -> Result<(), SetupError> {
    let inside = area.at.checked_add(area.len).is_some_and(|end| end <= area.memory.len());
    if !inside || area.len < needed || !area.at.is_multiple_of(align) {
        let (address, len) = (area.guest, area.len);
        return Err(SetupError::Area { area: name, address, len, align, needed });
    }
    Ok(())
}
