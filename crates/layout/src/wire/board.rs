//! Readiness boards.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for a readiness board ([`crate::board`]). It is the endpoint's until that has ended and its peers have closed their
/// channels with it, because they may be about to write to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BoardOpen {
    /// As [`SyncOpen::nonce`](super::SyncOpen::nonce): the same request asked again yields the same board.
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
