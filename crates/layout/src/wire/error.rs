//! Refusals.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request was refused. Text for people follows: what, where, and the fix.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Error {
    /// Why.
    pub code: ErrorCode,
    /// Zero.
    pub reserved: u32,
}
layout!(Error, 8 { code: 0, reserved: 4 });

/// Why a request was refused. Released codes never change their meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// The message was not understood: wrong length, kind, order or name.
    pub const PROTOCOL: Self = Self(1);
    /// No common protocol version.
    pub const VERSION: Self = Self(2);
    /// No segment of that name, or this member has no share in it.
    pub const NO_SEGMENT: Self = Self(3);
    /// The caller may not.
    pub const DENIED: Self = Self(4);
    /// Nobody listens at that name.
    pub const REFUSED: Self = Self(5);
    /// The name is taken already.
    pub const IN_USE: Self = Self(6);
    /// A limit is reached: endpoints, channels, bytes, backlog.
    pub const LIMIT: Self = Self(7);
    /// The segment has no room.
    pub const NO_MEMORY: Self = Self(8);
    /// The endpoint (number, epoch, token) is not or no longer known.
    pub const STALE: Self = Self(9);
    /// The listener has channels of another kind, or the synchronisation object is of another kind.
    pub const KIND: Self = Self(10);
    /// The segment's memory is broken (its file was truncated).
    pub const BROKEN: Self = Self(11);
    /// No such channel, listener, object, block, VM or segment.
    pub const NOT_FOUND: Self = Self(12);
    /// The daemon that decides cannot be reached just now. Try again.
    pub const UNAVAILABLE: Self = Self(13);
    /// An argument is outside its range.
    pub const INVALID: Self = Self(14);
    /// This member may only read the segment.
    pub const READ_ONLY: Self = Self(15);
    /// A quota of memory is used up: bytes or number of blocks, open handles.
    pub const QUOTA: Self = Self(16);
    /// All places are taken: a synchronisation object has [`crate::sync::SLOTS`] users at most; or somebody has a block for
    /// itself that is wished for writing. Try again.
    pub const BUSY: Self = Self(17);
    /// The handle is not open (any more): closed or freed twice.
    pub const CLOSED: Self = Self(18);
    /// The daemon's journal does not take it, because the host's disk is full or fails. Nothing was changed.
    pub const UNRECORDED: Self = Self(19);
}
