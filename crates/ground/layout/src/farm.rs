//! The messages that a farm's manager and its workers exchange over a channel.
//!
//! Each message is a [`Header`] followed by its content.
//!
//! | kind | direction | content |
//! |---|---|---|
//! | `JOB` | to worker | the job's name, UTF-8. All following pieces belong to it |
//! | `PIECE` | to worker | the input bytes of the piece |
//! | `RESULT` | to manager | the result of the piece |
//! | `FAILED` | to manager | why the worker could not process the piece, UTF-8 |
//!
//! A worker answers each piece once, in the order in which it received them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of these messages.
pub const VERSION: u32 = 1;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Kind(pub u32);

#[expect(missing_docs, reason = "the table at the head of the module describes each")]
impl Kind {
    pub const JOB: Self = Self(1);
    pub const PIECE: Self = Self(2);
    pub const RESULT: Self = Self(3);
    pub const FAILED: Self = Self(4);
}

/// Header of each message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// Kind of the message.
    pub kind: Kind,
    /// [`VERSION`] that the sender uses.
    pub version: u32,
    /// Number of the piece, which the manager never uses again. 0 in `JOB`.
    pub piece: u64,
    /// Offset in the input at which the piece begins. 0 in `JOB`.
    pub offset: u64,
}
layout!(Header, 24 { kind: 0, version: 4, piece: 8, offset: 16 });
// The bytes of a piece are aligned like the ring's messages.
const _: () = assert!(size_of::<Header>().is_multiple_of(8));
