//! Messages between the two processes of an NVMe volume: the *holder*, which has QEMU's socket, and the *engine*, which serves the
//! commands.
//!
//! Each message is one packet of a `SOCK_SEQPACKET` socket: a structure of this module, and the descriptors that belong to it. Its
//! first word says which one. A packet of another length, or with another number of descriptors, is refused.
//!
//! ```text
//! engine                                holder
//!   HELLO + lock, eventfds ---------->          what the engine is, and how it is woken
//!          <---------- WELCOME + state, doorbells   (or REFUSED, and the end)
//!          <---------- MAP + file                   each range that QEMU has mapped
//!          <---------- VECTOR + eventfd             each interrupt that QEMU has set
//!          <---------- CONTROL                      the list is complete; look at the state
//!
//!          <---------- MAP, UNMAP, VECTOR, CONTROL  each change, in QEMU's order
//!   DONE               ---------->              everything up to that `id` is in force
//! ```
//!
//! The state and the doorbells are files in memory; other modules describe what lies in them. The connection
//! ends with either process. An engine that attaches later gets the whole list again.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The version of the messages and of everything that they refer to. [`Hello`] and [`Refused`] keep their form in every version.
pub const VERSION: u32 = 1;

/// The largest number of I/O queues. The descriptors of a [`Hello`] fit into one packet.
pub const MAX_QUEUES: u32 = crate::nvme_state::MAX_QUEUES as u32;

/// The length of the longest message.
pub const MAX_LEN: usize = 40;

/// The first word of each message. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Kind(pub u32);

impl Kind {
    /// [`Hello`], from the engine.
    pub const HELLO: Self = Self(1);
    /// [`Done`], from the engine.
    pub const DONE: Self = Self(2);
    /// [`Welcome`], from the holder.
    pub const WELCOME: Self = Self(16);
    /// [`Refused`], from the holder.
    pub const REFUSED: Self = Self(17);
    /// [`Map`], from the holder.
    pub const MAP: Self = Self(18);
    /// [`Unmap`], from the holder.
    pub const UNMAP: Self = Self(19);
    /// [`Vector`], from the holder.
    pub const VECTOR: Self = Self(20);
    /// [`Control`], from the holder.
    pub const CONTROL: Self = Self(21);
}

/// The engine's first message. With it come the lock of the engine's turn, and `queues` + 1 eventfds.
///
/// The lock is the engine's lock file, opened a second time. When the engine is gone, the holder tries the lock (`flock(2)`): while it
/// is not free, the kernel has not finished the requests of the engine, and they may still use the guest's memory.
///
/// The holder writes the eventfd with the number of a queue (0 is the admin queue) when the guest has written one of that queue's
/// doorbells and the holder saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Hello {
    /// [`Kind::HELLO`].
    pub kind: Kind,
    /// The engine's [`VERSION`].
    pub version: u32,
    /// The number of I/O queues in the engine's configuration.
    pub queues: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Hello, 16 { kind: 0, version: 4, queues: 8, reserved: 12 });

/// The engine has done everything that the holder's messages up to this one ask for. In particular no thread of it and no request at
/// the kernel uses the memory of an [`Unmap`] any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Done {
    /// [`Kind::DONE`].
    pub kind: Kind,
    /// Zero.
    pub reserved: u32,
    /// The `id` of the [`Unmap`] or [`Control`], not zero.
    pub id: u64,
}
layout!(Done, 16 { kind: 0, reserved: 4, id: 8 });

/// The answer to [`Hello`]. With it come two files: the state, and the doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Welcome {
    /// [`Kind::WELCOME`].
    pub kind: Kind,
    /// The holder's [`VERSION`].
    pub version: u32,
    /// The number of I/O queues, which is the engine's.
    pub queues: u32,
    /// The slots of each queue in the state: a power of two, and the length of the longest queue.
    pub slots: u32,
    /// 1 if the guest writes its doorbells in the file itself, 0 if the holder does so for it.
    pub mapped: u32,
    /// The number of interrupt vectors.
    pub vectors: u32,
}
layout!(Welcome, 24 { kind: 0, version: 4, queues: 8, slots: 12, mapped: 16, vectors: 20 });

/// The other answer to [`Hello`]. The holder closes the connection after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Refused {
    /// [`Kind::REFUSED`].
    pub kind: Kind,
    /// Why.
    pub reason: Reason,
    /// What the holder has instead: its version, or its number of queues; otherwise zero.
    pub have: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Refused, 16 { kind: 0, reason: 4, have: 8, reserved: 12 });

/// Why an engine is refused. Unknown values are only shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Reason(pub u32);

impl Reason {
    /// The holder has another [`VERSION`].
    pub const VERSION: Self = Self(1);
    /// The holder has another number of queues.
    pub const QUEUES: Self = Self(2);
    /// Another engine is attached.
    pub const BUSY: Self = Self(3);
}

/// A range of guest memory, with its file. It does not overlap an earlier range that is still mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Map {
    /// [`Kind::MAP`].
    pub kind: Kind,
    /// Zero or [`Map::WRITABLE`].
    pub flags: u32,
    /// The first address, as the device uses it.
    pub iova: u64,
    /// Bytes of the range; not zero. The range ends at 2^64 - 1 or before.
    pub len: u64,
    /// The offset of the range in its file.
    pub offset: u64,
    /// Zero.
    pub reserved: u64,
}
layout!(Map, 40 { kind: 0, flags: 4, iova: 8, len: 16, offset: 24, reserved: 32 });

impl Map {
    /// The device may write the range.
    pub const WRITABLE: u32 = 1;
}

/// A range of guest memory is not to be used any more. `iova` and `len` are those of one earlier [`Map`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Unmap {
    /// [`Kind::UNMAP`].
    pub kind: Kind,
    /// Zero.
    pub reserved: u32,
    /// Answered by [`Done`] with this number; zero if no answer is wanted.
    pub id: u64,
    /// The first address.
    pub iova: u64,
    /// Bytes of the range.
    pub len: u64,
}
layout!(Unmap, 32 { kind: 0, reserved: 4, id: 8, iova: 16, len: 24 });

/// An interrupt vector has a new eventfd, or none if no descriptor comes with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Vector {
    /// [`Kind::VECTOR`].
    pub kind: Kind,
    /// The number of the vector.
    pub number: u32,
}
layout!(Vector, 8 { kind: 0, number: 4 });

/// The holder has changed words of the state; the engine looks at them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Control {
    /// [`Kind::CONTROL`].
    pub kind: Kind,
    /// Zero.
    pub reserved: u32,
    /// Answered by [`Done`] with this number; zero if no answer is wanted.
    pub id: u64,
}
layout!(Control, 16 { kind: 0, reserved: 4, id: 8 });

const _: () = {
    let all =
        [size_of::<Hello>(), size_of::<Welcome>(), size_of::<Map>(), size_of::<Unmap>(), size_of::<Done>()];
    let mut at = 0;
    while at < all.len() {
        assert!(all[at] <= MAX_LEN);
        at += 1;
    }
};
