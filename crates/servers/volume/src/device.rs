//! What the guest sees. A device turns the bytes of a request into an operation on a disk, and the operation's result
//! into the bytes of the answer.

pub mod blk;
pub mod nvme;
pub mod scsi;
#[cfg(test)]
mod seed;

use crate::backend::{Failure, Op};
use crate::disk::Disk;
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_layout::virtio_scsi::Event;
use ginnel_shmem::Mapping;
use ginnel_virtqueue::Chain;
use std::sync::Arc;

/// A device of one kind. All workers call its methods at the same time.
pub trait Device: Send + Sync {
    /// Returns the number of queues, including those for control and events.
    fn queues(&self) -> u16;

    /// Returns the feature bits of the device itself, without those of its queues.
    fn features(&self) -> u64;

    /// Tells the device which feature bits the driver has accepted. Called when a driver starts, and not when the same
    /// driver continues.
    fn set_features(&self, features: u64);

    /// Returns the disks of the device.
    fn disks(&self) -> Vec<Arc<Disk>>;

    /// Returns the contents of the configuration space.
    fn config(&self) -> Vec<u8>;

    /// Executes a write of the driver to the configuration space. An error says why the write is not allowed.
    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String>;

    /// Reads the request in a chain. Overwrites all of `request`.
    fn begin(&self, queue: u16, memory: &GuestMemory<Mapping>, chain: &Chain, request: &mut Request)
    -> Begin;

    /// Writes the answer to a request for which [`Begin::Done`] was not returned. Returns how many bytes of the chain's
    /// writable memory were written, including those of the operation.
    fn finish(&self, memory: &GuestMemory<Mapping>, request: &Request, result: Result<(), Failure>) -> u32;

    /// Returns the queue whose requests wait for those of all other queues ([`Begin::Barrier`]).
    fn control_queue(&self) -> Option<u16> {
        None
    }

    /// Returns the queue whose buffers are kept for events.
    fn event_queue(&self) -> Option<u16> {
        None
    }

    /// Notes that the size of a disk has changed. Returns the event for the event queue, if there is one.
    fn resized(&self, _disk: usize) -> Option<Event> {
        None
    }
}

/// The first result of a request. `A` is the answer's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin<A = u32> {
    /// The request has ended. Virtio: this many bytes of the chain's writable memory were written.
    Done(A),
    /// The operation to execute with the request's data.
    Do {
        /// Index of the disk.
        disk: u16,
        /// The operation.
        op: Op,
    },
    /// The request is finished when all earlier operations, on any queue of the device, have ended.
    Barrier,
}

/// The state of a request between its beginning and its end. The worker keeps it and uses it again.
#[derive(Debug, Default)]
pub struct Request {
    /// The buffers that the operation reads into or writes from.
    pub data: Vec<Buffer>,
    /// Total length of `data`, in bytes.
    pub bytes: u64,
    /// The buffers for the answer.
    pub reply: Vec<Buffer>,
    /// A value that the device keeps for itself.
    pub note: u64,
}

impl Request {
    /// Removes the previous request.
    pub fn clear(&mut self) {
        self.data.clear();
        self.reply.clear();
        self.bytes = 0;
        self.note = 0;
    }
}

/// Appends to `to` the `len` bytes of `from` that begin at byte `at`, or fewer if `from` ends before.
#[inline]
pub fn part(from: &[Buffer], mut at: u64, mut len: u64, to: &mut Vec<Buffer>) {
    for buffer in from {
        let here = u64::from(buffer.len);
        if at >= here {
            at -= here;
            continue;
        }
        if len == 0 {
            return;
        }
        let n = len.min(here - at);
        to.push(Buffer { region: buffer.region, at: buffer.at + at as usize, len: n as u32 });
        len -= n;
        at = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_cut_at_both_ends() {
        let buffer = |at, len| Buffer { region: 0, at, len };
        let all = [buffer(0, 16), buffer(100, 10), buffer(200, 10)];
        let cut = |at, len| {
            let mut to = Vec::new();
            part(&all, at, len, &mut to);
            to
        };
        assert_eq!(cut(0, 36), all);
        assert_eq!(cut(16, 20), all[1..]);
        assert_eq!(cut(17, 10), [buffer(101, 9), buffer(200, 1)]);
        assert_eq!(cut(35, 1), [buffer(209, 1)]);
        assert_eq!(cut(35, 100), [buffer(209, 1)]);
        assert_eq!(cut(36, 1), []);
        assert_eq!(cut(3, 0), []);
    }
}
