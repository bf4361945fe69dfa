//! Refused requests.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Body of `ERROR`: a request was refused. A text for people follows, which says what failed, where, and how to fix it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Error {
    /// Reason of the refusal.
    pub code: ErrorCode,
    /// Zero.
    pub reserved: u32,
}
layout!(Error, 8 { code: 0, reserved: 4 });

/// Reason of a refusal. The meaning of a released code never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// The daemon did not understand the message: its length, kind, order or name is wrong.
    pub const PROTOCOL: Self = Self(1);
    /// The client and the daemon have no protocol version in common.
    pub const VERSION: Self = Self(2);
    /// No segment has this name, or this member does not belong to it.
    pub const NO_SEGMENT: Self = Self(3);
    /// The caller does not have the right.
    pub const DENIED: Self = Self(4);
    /// No listener has this name.
    pub const REFUSED: Self = Self(5);
    /// The name is already taken.
    pub const IN_USE: Self = Self(6);
    /// A limit is reached: of endpoints, channels, bytes, or waiting connections.
    pub const LIMIT: Self = Self(7);
    /// The segment has no room.
    pub const NO_MEMORY: Self = Self(8);
    /// The endpoint (number, epoch, token) is unknown, perhaps because it has ended.
    pub const STALE: Self = Self(9);
    /// The listener has channels of another kind, or the synchronisation object is of another kind.
    pub const KIND: Self = Self(10);
    /// The segment's memory is broken (its file was truncated).
    pub const BROKEN: Self = Self(11);
    /// No channel, listener, object, block, VM or segment matches the request.
    pub const NOT_FOUND: Self = Self(12);
    /// The host's daemon, which decides about requests, cannot be reached now. The client should try again.
    pub const UNAVAILABLE: Self = Self(13);
    /// An argument is outside its range.
    pub const INVALID: Self = Self(14);
    /// This member may only read the segment.
    pub const READ_ONLY: Self = Self(15);
    /// A quota is used up: bytes, number of blocks, or open handles.
    pub const QUOTA: Self = Self(16);
    /// All places are taken: a synchronisation object has at most [`crate::sync::SLOTS`] users; or another handle excludes
    /// the requested rights to a block. The client should try again.
    pub const BUSY: Self = Self(17);
    /// The handle is not open, or no longer: it was closed or freed twice.
    pub const CLOSED: Self = Self(18);
    /// The daemon cannot write the request to its journal, because the host's disk is full or fails. Nothing was changed.
    pub const UNRECORDED: Self = Self(19);
}
