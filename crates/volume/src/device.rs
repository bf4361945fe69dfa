//! What the guest sees: the bytes of a request become an operation on a disk, and its result the bytes of an answer.

pub mod blk;
pub mod scsi;
#[cfg(test)]
mod seed;

use std::sync::Arc;

use ginnel_layout::virtio_scsi::Event;
use ginnel_shmem::Mapping;
use ginnel_virtqueue::{Buffer, Chain, GuestMemory};

use crate::backend::{Failure, Op};
use crate::disk::Disk;

/// A device of one kind. Its methods are called by all workers at once.
pub trait Device: Send + Sync {
    /// Queues, those for control and events included.
    fn queues(&self) -> u16;

    /// Feature bits of the device itself, not those of its queues.
    fn features(&self) -> u64;

    /// What the driver has taken of all feature bits offered. Called when a driver begins, and not when the same one goes on.
    fn set_features(&self, features: u64);

    /// Its disks.
    fn disks(&self) -> Vec<Arc<Disk>>;

    /// The configuration space.
    fn config(&self) -> Vec<u8>;

    /// The driver writes to the configuration space. An error says why it may not.
    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String>;

    /// Reads what a chain asks for. Fills `request` anew.
    fn begin(&self, queue: u16, memory: &GuestMemory<Mapping>, chain: &Chain, request: &mut Request)
    -> Begin;

    /// Writes the answer to a request that did not end at its beginning. Returns how many bytes of the chain's writable memory
    /// are written, those of the operation included.
    fn finish(&self, memory: &GuestMemory<Mapping>, request: &Request, result: Result<(), Failure>) -> u32;

    /// The queue whose requests wait for those of all others ([`Begin::Settle`]).
    fn control_queue(&self) -> Option<u16> {
        None
    }

    /// The queue whose buffers are kept for events.
    fn event_queue(&self) -> Option<u16> {
        None
    }

    /// A disk has got another size. Says what the event queue tells of it.
    fn resized(&self, _disk: usize) -> Option<Event> {
        None
    }
}

/// How a request begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// It has been answered; so many bytes of the chain's writable memory are written.
    Done(u32),
    /// This is to be done with the request's data.
    Do {
        /// Which of the disks.
        disk: u16,
        /// What.
        op: Op,
    },
    /// It is finished when all operations that began before, on any queue of the device, have ended.
    Settle,
}

/// A request between its beginning and its end. Kept by the worker, and used again.
#[derive(Debug, Default)]
pub struct Request {
    /// What the operation reads into or writes from.
    pub data: Vec<Buffer>,
    /// Bytes of `data`.
    pub bytes: u64,
    /// Where the answer goes.
    pub reply: Vec<Buffer>,
    /// The device's own note.
    pub note: u64,
}

impl Request {
    /// Forgets what was there.
    pub fn clear(&mut self) {
        self.data.clear();
        self.reply.clear();
        self.bytes = 0;
        self.note = 0;
    }
}

/// Adds the `len` bytes from byte `at` of `from` to `to`. There may be fewer.
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
