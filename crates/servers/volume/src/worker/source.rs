//! Where the requests of a queue come from, and where their answers go.
//!
//! All queues of a worker are of one kind, that of its device. So the worker is generic over the kind: the choice is made
//! once, when its thread starts, and costs nothing for each request.

mod nvme;
mod virtqueue;

use crate::backend::{Failure, Op};
use crate::device::nvme::Namespace;
use crate::device::{Begin, Device};
use crate::disk::Disk;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::virtio_scsi::Event;
use ginnel_shmem::Mapping;
use ginnel_volume_control::QueueState;
pub use nvme::Nvme;
use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::sync::Arc;
pub use virtqueue::Virtqueue;

/// The device whose requests a worker serves.
#[derive(Clone)]
pub enum Target {
    /// A device whose queues are virtqueues.
    Virtio(Arc<dyn Device>),
    /// The namespace of an NVMe controller.
    Nvme(Arc<Namespace>),
}

/// A queue that is ready to be served.
pub struct Start {
    /// Number of the queue in the device.
    pub index: u16,
    /// The guest's memory, in which the buffers of requests lie.
    pub memory: Arc<GuestMemory<Mapping>>,
    /// Eventfds that are written when the queue has new requests, each of them once in the list. If there is none, the queue
    /// must be polled.
    pub kicks: Vec<Arc<OwnedFd>>,
    /// The worker writes to it when a request is complete.
    pub call: Option<Arc<OwnedFd>>,
    /// The worker writes to it when the queue is broken.
    pub error: Option<Arc<OwnedFd>>,
    /// The queue itself.
    pub requests: Requests,
}

/// A queue of either kind.
#[expect(clippy::large_enum_variant, reason = "it is moved only when a queue starts")]
pub enum Requests {
    /// A virtqueue, for a worker of [`Target::Virtio`].
    Virtqueue(Virtqueue),
    /// NVMe queues, for a worker of [`Target::Nvme`].
    Nvme(Nvme),
}

/// A kind of queues. A request is taken, begun, finished and given back; all methods are called by the worker's thread, and
/// none of them blocks.
pub(super) trait Source: Sized {
    /// What all queues of the kind share.
    type Device;
    /// A request that was taken and must be given back.
    type Ticket;
    /// What [`Source::take`] has found, for [`Source::begin`]. Its memory is used again.
    type Found: Default;
    /// The state of a request from its beginning to its end. Its memory is used again.
    type Request: Default;
    /// The answer to a request.
    type Answer: Copy;
    /// Why a queue must not be used any more.
    type Broken: Display;

    /// Returns the queue if it is of this kind.
    fn of(requests: Requests) -> Option<Self>;

    /// Returns the disks of the device.
    fn disks(device: &Self::Device) -> Vec<Arc<Disk>>;

    /// Returns the number of the queue whose buffers are kept for events, if there is one.
    fn event_queue(_: &Self::Device) -> Option<u16> {
        None
    }

    /// Returns the largest number of requests that can be taken at the same time.
    fn size(&self) -> usize;

    /// Takes the next request, if there is one.
    fn take(
        &mut self,
        memory: &GuestMemory<Mapping>,
        found: &mut Self::Found,
    ) -> Result<Option<Self::Ticket>, Self::Broken>;

    /// Begins the request that was found in the queue of number `index`. Overwrites all of `request`.
    fn begin(
        &self,
        device: &Self::Device,
        index: u16,
        memory: &GuestMemory<Mapping>,
        found: &Self::Found,
        request: &mut Self::Request,
    ) -> Begin<Self::Answer>;

    /// Returns the buffers of a request's data.
    fn data(request: &Self::Request) -> &[Buffer];

    /// Returns the number of bytes that a request moves.
    fn bytes(request: &Self::Request) -> u64;

    /// Returns whether a request may have another operation when the present one has ended.
    fn has_more(_: &Self::Request) -> bool {
        false
    }

    /// Returns the next operation of a request whose operations have succeeded so far. `None` if there is none. The rest of
    /// them are hints: if the queue is stopped, they are not executed.
    fn next(_: &Self::Device, _: &GuestMemory<Mapping>, _: &mut Self::Request) -> Option<Op> {
        None
    }

    /// Makes the answer to a request whose operation has ended.
    fn finish(
        &self,
        device: &Self::Device,
        memory: &GuestMemory<Mapping>,
        request: &Self::Request,
        op: Op,
        result: Result<(), Failure>,
    ) -> Self::Answer;

    /// Gives a request back. The driver sees it after the next [`Source::publish`] at the latest.
    fn give_back(&mut self, ticket: Self::Ticket, answer: Self::Answer);

    /// Shows the driver the requests that were given back. Returns whether it must be called, which is true the first time: a
    /// predecessor may have died before it called.
    fn publish(&mut self) -> bool;

    /// Asks for kicks. Returns true if there are requests already, in which case the caller must not sleep.
    fn arm(&mut self) -> bool;

    /// Says that no kicks are needed.
    fn disarm(&mut self);

    /// Returns how much was taken since the queue was made.
    fn taken(&self) -> u64;

    /// Returns how much there is to take now, in the unit of [`Source::taken`].
    fn visible(&self) -> u64;

    /// Returns whether there is nothing to take now.
    fn is_empty(&self) -> bool;

    /// Returns the number of requests that a predecessor has taken, and that are not taken again yet.
    fn resubmit(&self) -> u64;

    /// Returns the position of the queue, which its successor needs.
    fn base(&self) -> u32 {
        0
    }

    /// Puts an event into the driver's next buffer. Returns whether there was one.
    fn tell(
        &mut self,
        _: &GuestMemory<Mapping>,
        _: Event,
        _: &mut Self::Found,
    ) -> Result<bool, Self::Broken> {
        Ok(false)
    }

    /// Returns the state of the queue of number `index`, for people who look at a guest that hangs. A queue that consists of
    /// several has a state for each of them. While the queue runs, the word `state` says what it waits for, if it does.
    fn states(&self, index: u16) -> Vec<QueueState>;

    /// Returns the number of the queue among the [states](Source::states) that a request belongs to, and the number by which
    /// the driver identifies it.
    fn place(&self, index: u16, ticket: &Self::Ticket) -> (u16, u16);
}
