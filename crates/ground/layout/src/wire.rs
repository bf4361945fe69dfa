//! The attach protocol: the messages that a program and its daemon exchange.
//!
//! The protocol uses a Unix socket of type `SOCK_SEQPACKET`. Each packet is one message: a [`Header`], then a body of fixed
//! layout. In [`Kind::TEXT`] and [`Kind::ERROR`], text follows the body up to the end of the packet. The client numbers its
//! requests as it likes, and each answer repeats the number of its request; events have the number 0. The same packets travel
//! through the control rings of a VM (see [`crate::relay`]), without the file descriptors, which the guest's daemon adds.
//!
//! One connection is one endpoint and attaches once. The endpoint does not end with the connection, but with the last process
//! that owns it. A client that has lost its connection comes back with [`Attach::endpoint`], `epoch` and `token`.
//!
//! | request | answer | fds in the answer, in this order, if their bit is set |
//! |---|---|---|
//! | `HELLO` [`Hello`] | `HELLO_OK` [`HelloOk`] | |
//! | `ATTACH` [`Attach`] | `ATTACHED` [`Attached`] | memory, event, registers ([`Fds`]) |
//! | `LISTEN` [`Listen`] | `LISTENING` [`Listening`] | |
//! | `UNLISTEN` [`Listening`] | `OK` | |
//! | `CONNECT` [`Connect`] | `CHANNEL` [`Channel`] | the peer's event (host only) |
//! | `ACCEPTED` [`ChannelRef`] | `OK` | |
//! | `CLOSE` [`ChannelRef`] | `OK` | |
//! | `SYNC_OPEN` [`SyncOpen`] | `SYNC` [`Sync`] | |
//! | `SYNC_CLOSE` [`SyncRef`] | `OK` | |
//! | `SYNC_UNLINK` [`ByName`] | `OK` | |
//! | `BLOCK_CREATE` [`BlockCreate`] | `BLOCK` [`Block`] | |
//! | `BLOCK_OPEN` [`BlockOpen`] | `BLOCK` [`Block`] | |
//! | `BLOCK_RESIZE` [`BlockResize`] | `BLOCK` [`Block`] | |
//! | `BLOCK_LINK` [`BlockLink`] | `OK` | |
//! | `BLOCK_UNLINK` [`ByName`] | `OK` | |
//! | `BLOCK_CLOSE` [`BlockRights`] | `OK` | |
//! | `BLOCK_GRANT` [`BlockGrant`] | `OK` | |
//! | `BLOCK_ACK` [`BlockRights`] | `OK` | |
//! | `DETACH` | `OK` | |
//! | `JOIN` | none | |
//! | `BELL` [`BellOf`] | `BELL_OK` [`BellOk`] | that doorbell's event (host only) |
//! | `BOARD_OPEN` [`BoardOpen`] | `BOARD` [`Board`] | |
//! | `HOLD` [`Hold`] | `OK` | |
//! | `RESUME` [`ChannelSide`] | `CHANNEL` [`Channel`] | the peer's event (host only) |
//! | `SOCK_REPORT` [`SocketReport`] (and one descriptor), or [`SocketFacts`] | none | |
//! | `SOCK_WITHDRAW` [`SocketKey`] | none | |
//! | `INSPECT` [`Inspect`] | `TEXT`..., `PAGE` [`Inspect`] + text | |
//! | `ADMIN` + JSON text | `OK`, `TEXT`... or `ERROR` | |
//! | any | `ERROR` [`Error`] + text | |
//!
//! The daemon sends these events:
//! - `INCOMING` [`Channel`]: a client has connected to a listener of this endpoint. The daemon repeats it after a reconnect
//!   until the endpoint has sent `ACCEPTED` or `CLOSE`.
//! - `BLOCK_REVOKED` [`BlockRights`]: from now on, this endpoint has fewer rights to a block that it has open. The daemon
//!   repeats it after a reconnect until the endpoint has sent `BLOCK_ACK` or `BLOCK_CLOSE`.
//! - `SEGMENT_CUT`, without a body: the segment's file was truncated and has its old length again. The bytes that were cut
//!   off are lost, although their memory can be read and written. The daemon repeats it after each reconnect.
//! - `SOCK_MATCHED` [`SocketMatched`] and `SOCK_STAYS` [`SocketStays`]: the result of a `SOCK_REPORT`. Any client that was
//!   told [`features::SOCKETS`] may send reports. The daemon does not repeat these events: a client that has lost its
//!   connection reports again.

mod bell;
mod block;
mod board;
mod channel;
mod error;
mod inspect;
mod session;
mod socket;
mod sync;

use crate::Name;
pub use bell::{BellKind, BellOf, BellOk};
pub use block::{Block, BlockCreate, BlockGrant, BlockLink, BlockOpen, BlockResize, BlockRights, Rights};
pub use board::{Board, BoardOpen};
pub use channel::{Channel, ChannelRef, ChannelSide, Connect, Listen, Listening};
pub use error::{Error, ErrorCode};
pub use inspect::Inspect;
pub use session::{Attach, Attached, Hello, HelloOk, Hold};
pub use socket::{
    SECRET, SocketFacts, SocketKey, SocketMatched, SocketReport, SocketRole, SocketStays, StaysReason,
};
pub use sync::{Sync, SyncOpen, SyncRef};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bits of [`Hello::features`] and [`HelloOk::features`].
pub mod features {
    /// The daemon understands `SOCK_REPORT`.
    pub const SOCKETS: u64 = 1;
}

/// Version of the attach protocol.
pub const VERSION: u32 = 1;

/// Maximum bytes of a packet, header included. A longer packet is a protocol error.
pub const MAX_PACKET: usize = 8192;

/// Path of the socket on which a daemon listens, on the host and in a guest.
pub const SOCKET: &str = "/run/ginnel/ginnel.sock";

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Kind(pub u16);

#[expect(missing_docs, reason = "the table at the head of the module describes each")]
impl Kind {
    pub const HELLO: Self = Self(1);
    pub const ATTACH: Self = Self(2);
    pub const LISTEN: Self = Self(3);
    pub const UNLISTEN: Self = Self(4);
    pub const CONNECT: Self = Self(5);
    pub const ACCEPTED: Self = Self(6);
    pub const CLOSE: Self = Self(7);
    pub const INSPECT: Self = Self(8);
    pub const ADMIN: Self = Self(9);
    pub const SYNC_OPEN: Self = Self(10);
    pub const SYNC_CLOSE: Self = Self(11);
    pub const SYNC_UNLINK: Self = Self(12);
    pub const BELL: Self = Self(13);
    pub const BLOCK_CREATE: Self = Self(14);
    pub const BLOCK_OPEN: Self = Self(15);
    pub const BLOCK_RESIZE: Self = Self(16);
    pub const BLOCK_LINK: Self = Self(17);
    pub const BLOCK_UNLINK: Self = Self(18);
    pub const BLOCK_CLOSE: Self = Self(19);
    pub const BLOCK_GRANT: Self = Self(20);
    pub const BLOCK_ACK: Self = Self(21);
    pub const DETACH: Self = Self(22);
    pub const JOIN: Self = Self(23);
    pub const BOARD_OPEN: Self = Self(24);
    pub const HOLD: Self = Self(25);
    pub const RESUME: Self = Self(26);
    pub const SOCK_REPORT: Self = Self(27);
    pub const SOCK_WITHDRAW: Self = Self(28);

    pub const HELLO_OK: Self = Self(101);
    pub const ATTACHED: Self = Self(102);
    pub const LISTENING: Self = Self(103);
    pub const CHANNEL: Self = Self(105);
    pub const INCOMING: Self = Self(106);
    pub const OK: Self = Self(107);
    pub const TEXT: Self = Self(108);
    pub const ERROR: Self = Self(109);
    pub const SYNC: Self = Self(110);
    pub const BELL_OK: Self = Self(111);
    pub const BLOCK: Self = Self(112);
    pub const BLOCK_REVOKED: Self = Self(113);
    pub const PAGE: Self = Self(114);
    pub const BOARD: Self = Self(115);
    pub const SEGMENT_CUT: Self = Self(116);
    pub const SOCK_MATCHED: Self = Self(117);
    pub const SOCK_STAYS: Self = Self(118);
}

/// Header of every message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// Kind of the message.
    pub kind: Kind,
    /// [`Header::MORE`] on every `TEXT` but the last of an answer; else zero.
    pub flags: u16,
    /// Number of the request, repeated in its answer; 0 in events.
    pub request: u32,
}
layout!(Header, 8 { kind: 0, flags: 2, request: 4 });

impl Header {
    /// More packets of the same answer follow.
    pub const MORE: u16 = 1;
}

/// The file descriptors that come with an answer, in the order of their bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Fds(pub u32);

impl Fds {
    /// The segment's memory. The client maps [`Attached::mapped_len`] bytes at [`Attached::map_offset`], shared, and without
    /// `PROT_WRITE` if [`Attached::access`] does not allow stores.
    pub const MEMORY: u32 = 1;
    /// The eventfd of the endpoint's own vector. Other endpoints may share it, so no program may read from it: a client waits
    /// with its own edge-triggered epoll.
    pub const EVENT: u32 = 2;
    /// The ivshmem registers (BAR0) of a guest's control device. The client maps one page, shared. A 32-bit store of
    /// [`Channel::bell`] at offset 12 rings the doorbell.
    pub const REGISTERS: u32 = 4;
    /// The eventfd of the peer's vector. Writing to it rings the doorbell.
    pub const PEER_EVENT: u32 = 8;
}

/// Body of `SYNC_UNLINK` and `BLOCK_UNLINK`: names an object in the segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ByName {
    /// Name of the object.
    pub name: Name,
}
layout!(ByName, 64 { name: 0 });

/// Splits a packet into header and body, without checking the body. `None` if the packet is shorter than a header.
pub fn split(packet: &[u8]) -> Option<(Header, &[u8])> {
    Header::read_from_prefix(packet).ok()
}

/// Returns the body as a `T`. `None` if the body does not have exactly the length of a `T`.
pub fn body<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_bytes(bytes).ok()
}
