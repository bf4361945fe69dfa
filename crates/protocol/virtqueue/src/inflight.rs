//! In-flight regions (vhost-user specification, "Inflight I/O tracking"): the device's record of its requests, from which the
//! next device process learns which requests were in flight, and takes exactly those again.
//!
//! A process that is killed has done all its stores up to some instruction and none after it. So only the order of the stores
//! matters. All stores here are release stores: the compiler keeps them in the order that the specification demands.

mod packed;
mod split;

use crate::Kind;
use crate::error::SetupError;
use ginnel_guest_memory::Area;
use ginnel_layout::inflight::{self as layout, ALIGN};
use ginnel_shmem::SharedMemory;
pub(crate) use packed::{Again, Packed};
pub(crate) use split::Split;

/// The part of one queue in an in-flight region.
pub struct InflightQueue<M> {
    area: Area<M>,
    /// Number of entries.
    size: u16,
    kind: Kind,
}

impl<M: SharedMemory> InflightQueue<M> {
    /// Returns the bytes of the part of a queue of this size, a multiple of 64. The parts of a region follow one another.
    pub const fn len(kind: Kind, size: u16) -> usize {
        match kind {
            Kind::Split => layout::split::len(size),
            Kind::Packed => layout::packed::len(size),
        }
    }

    /// Returns the part of queue number `queue`. The region begins at offset `at` of `memory` (a multiple of 8), and its
    /// queues have at most `size` entries. A part of zeros has not been in use yet.
    pub fn new(memory: M, at: usize, queue: u16, kind: Kind, size: u16) -> Result<Self, SetupError> {
        let len = Self::len(kind, size);
        let at = len.checked_mul(queue.into()).and_then(|offset| at.checked_add(offset));
        let Some(at) = at.filter(|at| at.checked_add(len).is_some_and(|end| end <= memory.len())) else {
            return Err(SetupError::Inflight("it is too short for the number of queues and their size"));
        };
        if !at.is_multiple_of(8) {
            return Err(SetupError::Inflight("it does not begin at a multiple of 8"));
        }
        const { assert!(ALIGN.is_multiple_of(8)) };
        Ok(Self { area: Area { memory, at, len, guest: 0 }, size, kind })
    }
}
