//! Readiness boards.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for a readiness board ([`crate::board`]). The endpoint keeps the board until it has ended and its peers have closed
/// their channels with it, because a peer may be about to write to the board.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BoardOpen {
    /// A number of the client's choice, as in [`SyncOpen::nonce`](super::SyncOpen::nonce): the same request sent again yields
    /// the same board.
    pub nonce: u64,
}
layout!(BoardOpen, 8 { nonce: 0 });

/// Answer to [`BoardOpen`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Board {
    /// Offset of the board from the start of the segment.
    pub offset: u64,
}
layout!(Board, 8 { offset: 0 });
