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
    /// A stream of bytes in each direction that goes on where a TCP connection stops: with [`ring::BASE`] and [`ring::READY`].
    pub const SOCKET: Self = Self(3);
}

/// Bytes from a ring of `capacity` data bytes to what follows it.
pub const fn ring_stride(capacity: usize) -> usize {
    ring::footprint(capacity).next_multiple_of(PAGE)
}

/// Data bytes of the two rings of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    /// Of ring A, which the initiator writes.
    pub initiator: u64,
    /// Of ring B, which the acceptor writes.
    pub acceptor: u64,
}

impl Capacities {
    /// Those of a channel in which a side sends into `output` bytes and receives from `input` bytes.
    pub const fn seen(output: u64, input: u64, initiator: bool) -> Self {
        if initiator {
            Self { initiator: output, acceptor: input }
        } else {
            Self { initiator: input, acceptor: output }
        }
    }

    /// Those of (own output, own input), as one side sees them.
    pub const fn of(self, initiator: bool) -> (u64, u64) {
        if initiator { (self.initiator, self.acceptor) } else { (self.acceptor, self.initiator) }
    }

    /// Whether rings can have them (see [`ring::valid_capacity`]). All that follows is for those alone.
    pub const fn are_valid(self) -> bool {
        ring::valid_capacity(self.initiator) && ring::valid_capacity(self.acceptor)
    }

    /// Bytes of the channel's block.
    pub const fn footprint(self) -> usize {
        ring_stride(self.initiator as usize) + ring_stride(self.acceptor as usize)
    }

    /// Offsets of (own output, own input) from the start of the block.
    pub const fn rings(self, initiator: bool) -> (usize, usize) {
        let second = ring_stride(self.initiator as usize);
        if initiator { (0, second) } else { (second, 0) }
    }
}

const _: () = assert!(Capacities { initiator: 4096, acceptor: 4096 }.footprint() == 16384);
const _: () = assert!(Capacities { initiator: 4096, acceptor: 8192 }.footprint() == 8192 + 12288);
const _: () = assert!(Capacities { initiator: 4096, acceptor: 8192 }.rings(true).1 >= ring::footprint(4096));
