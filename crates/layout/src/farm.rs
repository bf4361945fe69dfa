//! What a farm's manager and its workers say to each other, as messages of a channel.
//!
//! Each message is a [`Header`] and its content.
//!
//! | kind | direction | content |
//! |---|---|---|
//! | `JOB` | to worker | the job's name, UTF-8. All pieces that follow are of it |
//! | `PIECE` | to worker | the bytes to work on, in place |
//! | `RESULT` | to manager | what the worker made of the piece |
//! | `FAILED` | to manager | why it could make nothing of it, UTF-8 |
//!
//! A worker answers each piece once, in the order in which they came.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of these messages.
pub const VERSION: u32 = 1;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Kind(pub u32);

#[expect(missing_docs, reason = "the table on top of the module says what each is")]
impl Kind {
    pub const JOB: Self = Self(1);
    pub const PIECE: Self = Self(2);
    pub const RESULT: Self = Self(3);
    pub const FAILED: Self = Self(4);
}

/// In front of each message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// What follows.
    pub kind: Kind,
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// Number of the piece; its manager never uses it again. 0 in `JOB`.
    pub piece: u64,
    /// Where in the input the piece begins. 0 in `JOB`.
    pub offset: u64,
}
layout!(Header, 24 { kind: 0, version: 4, piece: 8, offset: 16 });
// The bytes of a piece are aligned like the ring's messages.
const _: () = assert!(size_of::<Header>().is_multiple_of(8));
