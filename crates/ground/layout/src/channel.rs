//! A channel: two rings between two endpoints, in one block of a segment's arena.
//!
//! ```text
//! 0                                   ring A, the initiator's output: header + data
//! round_up(footprint, PAGE)           ring B, the acceptor's output: header + data
//! ```
//!
//! Private messages ([`crate::wire::Channel`]) tell the two endpoints where the block lies and how large its rings are, so
//! nothing in shared memory is needed to find it. The daemon zeroes both ring headers and the first data word of each ring
//! before it hands out a block.

use crate::{PAGE, ring};

/// Kind of the rings of a channel. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelKind(pub u32);

impl ChannelKind {
    /// Messages with boundaries.
    pub const MESSAGE: Self = Self(1);
    /// A stream of bytes in each direction.
    pub const STREAM: Self = Self(2);
    /// A stream of bytes in each direction that continues a TCP connection. Its rings use [`ring::BASE`] and [`ring::READY`].
    pub const SOCKET: Self = Self(3);
}

/// Returns the distance in bytes from the start of a ring of `capacity` data bytes to what follows it.
pub const fn ring_stride(capacity: usize) -> usize {
    ring::footprint(capacity).next_multiple_of(PAGE)
}

/// Data bytes of the two rings of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    /// Ring A, which the initiator writes.
    pub initiator: u64,
    /// Ring B, which the acceptor writes.
    pub acceptor: u64,
}

impl Capacities {
    /// Returns the capacities of a channel in which one side sends into `output` bytes and receives from `input` bytes.
    pub const fn seen(output: u64, input: u64, initiator: bool) -> Self {
        if initiator {
            Self { initiator: output, acceptor: input }
        } else {
            Self { initiator: input, acceptor: output }
        }
    }

    /// Returns the capacities as one side sees them: (own output, own input).
    pub const fn of(self, initiator: bool) -> (u64, u64) {
        if initiator { (self.initiator, self.acceptor) } else { (self.acceptor, self.initiator) }
    }

    /// Returns whether rings can have these capacities (see [`ring::valid_capacity`]). The functions below require it.
    pub const fn are_valid(self) -> bool {
        ring::valid_capacity(self.initiator) && ring::valid_capacity(self.acceptor)
    }

    /// Returns the bytes of the channel's block.
    pub const fn footprint(self) -> usize {
        ring_stride(self.initiator as usize) + ring_stride(self.acceptor as usize)
    }

    /// Returns the offsets of (own output, own input) from the start of the block.
    pub const fn rings(self, initiator: bool) -> (usize, usize) {
        let second = ring_stride(self.initiator as usize);
        if initiator { (0, second) } else { (second, 0) }
    }
}

const _: () = assert!(Capacities { initiator: 4096, acceptor: 4096 }.footprint() == 16384);
const _: () = assert!(Capacities { initiator: 4096, acceptor: 8192 }.footprint() == 8192 + 12288);
const _: () = assert!(Capacities { initiator: 4096, acceptor: 8192 }.rings(true).1 >= ring::footprint(4096));
