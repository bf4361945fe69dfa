//! A channel: two rings between two endpoints, in one block of a segment's arena.
//!
//! ```text
//! 0                                   ring A, the initiator's output: header + data
//! round_up(footprint, PAGE)           ring B, the acceptor's output: header + data
//! ```
//!
//! Where a block lies and how large its rings are is told in private messages ([`crate::wire::Channel`]); nothing
//! in shared memory is needed to find it. The daemon zeroes both ring headers and the first data word of each ring
//! before it hands out a block.

use crate::{PAGE, ring};

/// What kind of rings a channel has. Open: unknown values are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelKind(pub u32);

impl ChannelKind {
    /// Messages with boundaries.
    pub const MESSAGE: Self = Self(1);
    /// A stream of bytes in each direction.
    pub const STREAM: Self = Self(2);
}

/// Bytes from one ring to the next.
pub const fn ring_stride(capacity: usize) -> usize {
    ring::footprint(capacity).next_multiple_of(PAGE)
}

/// Bytes of a channel block. `capacity` must be valid (see [`ring::valid_capacity`]).
pub const fn footprint(capacity: usize) -> usize {
    2 * ring_stride(capacity)
}

/// Offsets of (own output, own input) from the start of the block.
pub const fn rings(capacity: usize, initiator: bool) -> (usize, usize) {
    if initiator { (0, ring_stride(capacity)) } else { (ring_stride(capacity), 0) }
}

const _: () = assert!(footprint(4096) == 16384);
const _: () = assert!(rings(4096, true).1 >= ring::footprint(4096));
