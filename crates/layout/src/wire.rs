//! The attach protocol: what a program and its daemon say to each other.
//!
//! A `SOCK_SEQPACKET` Unix socket; one packet is one message: a [`Header`], then a body of fixed layout (for
//! [`Kind::TEXT`] and [`Kind::ERROR`] followed by text up to the end of the packet). Requests carry a number of the
//! client's choice, the answer repeats it; events carry 0. The same packets travel through the control rings of a VM
//! (see [`crate::relay`]), with the file descriptors left out and filled in by the guest's daemon.
//!
//! One connection is one endpoint: it is attached once, and its end is the endpoint's end, unless the daemon itself
//! has gone, in which case the client comes back with [`Attach::endpoint`], `epoch` and `token`.
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
//! | `BELL` [`BellOf`] | `BELL_OK` [`BellOk`] | that event (host only) |
//! | `BOARD_OPEN` [`BoardOpen`] | `BOARD` [`Board`] | |
//! | `INSPECT` [`Inspect`] | `TEXT`..., `PAGE` [`Inspect`] + text | |
//! | `ADMIN` + JSON text | `OK`, `TEXT`... or `ERROR` | |
//! | any | `ERROR` [`Error`] + text | |
//!
//! The daemon's events are `INCOMING` [`Channel`]: somebody has connected to a listener of this endpoint; and
//! `BLOCK_REVOKED` [`BlockRights`]: rights to a block that this endpoint has open are less from now on. They are
//! repeated after a reconnect until the endpoint has sent `ACCEPTED` or `CLOSE` for the one, `BLOCK_ACK` or
//! `BLOCK_CLOSE` for the other. `SEGMENT_CUT`, without a body, says that the segment's file was truncated and is as long
//! as before: what was cut off is lost, though its memory can be read and written. It comes after each reconnect.

use crate::Name;
use crate::segment::{self, Access, MappingKind};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the attach protocol.
pub const VERSION: u32 = 1;

/// The largest packet, header included. A longer one is a protocol error.
pub const MAX_PACKET: usize = 8192;

/// Where a daemon of either role listens.
pub const SOCKET: &str = "/run/ginnel/ginnel.sock";

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Kind(pub u16);

#[expect(missing_docs, reason = "the table on top of the module says what each is")]
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
}

/// In front of every message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// What follows.
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

/// First message of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// Zero.
    pub reserved: u32,
    /// Bits of optional features that the client understands. None is defined yet.
    pub features: u64,
}
layout!(Hello, 16 { version: 0, reserved: 4, features: 8 });

/// Answer to [`Hello`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct HelloOk {
    /// [`VERSION`].
    pub version: u32,
    /// The member that this daemon serves: [`crate::HOST_MEMBER`] on the host.
    pub member: u32,
    /// Features that both sides understand.
    pub features: u64,
    /// The member's name.
    pub name: Name,
}
layout!(HelloOk, 80 { version: 0, member: 4, features: 8, name: 16 });

/// Makes this connection an endpoint of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Attach {
    /// The segment.
    pub segment: Name,
    /// What the endpoint calls itself, for people; need not be unique.
    pub name: Name,
    /// Zero, or the number of the endpoint that this process already is (its daemon has restarted).
    pub endpoint: u32,
    /// That endpoint's epoch.
    pub epoch: u32,
    /// That endpoint's token.
    pub token: [u8; 16],
}
layout!(Attach, 152 { segment: 0, name: 64, endpoint: 128, epoch: 132, token: 136 });

/// Which file descriptors come with an answer, in the order of their bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Fds(pub u32);

impl Fds {
    /// The segment's memory: map [`Attached::mapped_len`] bytes at [`Attached::map_offset`], shared, and without
    /// `PROT_WRITE` if [`Attached::access`] says so.
    pub const MEMORY: u32 = 1;
    /// The eventfd of the endpoint's own vector. It may be shared with other endpoints, so it is never read: wait with
    /// an edge-triggered epoll of one's own.
    pub const EVENT: u32 = 2;
    /// The ivshmem registers (BAR0) of a guest's control device: map one page, shared. A 32-bit store of
    /// [`Channel::bell`] at offset 12 rings.
    pub const REGISTERS: u32 = 4;
    /// The eventfd of the peer's vector. Writing it rings.
    pub const PEER_EVENT: u32 = 8;
}

/// Answer to [`Attach`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Attached {
    /// The member that the endpoint belongs to.
    pub member: u32,
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Epoch of that number.
    pub epoch: u32,
    /// The endpoint's doorbell vector.
    pub vector: u32,
    /// Proves later that a process is this endpoint.
    pub token: [u8; 16],
    /// The segment's uuid.
    pub uuid: [u8; 16],
    /// Bytes of the whole segment. The first [`segment::RESERVED`] are nobody's to map.
    pub segment_len: u64,
    /// Where in the memory's file the segment's byte [`segment::RESERVED`] lies: the first that is mapped.
    pub map_offset: u64,
    /// File descriptors that come along.
    pub fds: Fds,
    /// Unit in which the memory may be mapped, in bytes: offset and length are multiples of it.
    pub page: u32,
    /// How the bytes come here.
    pub kind: MappingKind,
    /// What may be done with them.
    pub access: Access,
}
layout!(Attached, 80 {
    member: 0, endpoint: 4, epoch: 8, vector: 12, token: 16, uuid: 32, segment_len: 48, map_offset: 56,
    fds: 64, page: 68, kind: 72, access: 76,
});

impl Attached {
    /// Bytes to map. `None` if the segment is shorter than its reserved part, or has nothing behind it.
    pub fn mapped_len(&self) -> Option<u64> {
        self.segment_len.checked_sub(segment::RESERVED).filter(|&len| len > 0)
    }
}

/// Publishes a name at which others may connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Listen {
    /// The name, unique in the segment. `SERVICE@MEMBER` may be taken by that member only.
    pub name: Name,
    /// [`crate::channel::ChannelKind`] that it accepts.
    pub kind: u32,
    /// How many connections may wait to be accepted; 0 means the daemon's default.
    pub backlog: u32,
    /// Data bytes of each ring of an accepted channel; 0 means the daemon's default. The larger of this and
    /// [`Connect::capacity`] counts, up to the daemon's limit.
    pub capacity: u64,
}
layout!(Listen, 80 { name: 0, kind: 64, backlog: 68, capacity: 72 });

/// Answer to [`Listen`], and body of `UNLISTEN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Listening {
    /// Number of the listener.
    pub listener: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Listening, 8 { listener: 0, reserved: 4 });

/// Opens a channel to a listener in the endpoint's segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Connect {
    /// The listener's name.
    pub name: Name,
    /// [`crate::channel::ChannelKind`].
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
    /// Data bytes of each ring; 0 means the default.
    pub capacity: u64,
    /// Chosen by the client, unique for the endpoint. The same request asked again (after the daemon has gone without an
    /// answer) with the same nonce yields the same channel.
    pub nonce: u64,
}
layout!(Connect, 88 { name: 0, kind: 64, reserved: 68, capacity: 72, nonce: 80 });

/// How to wake a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct BellKind(pub u32);

impl BellKind {
    /// It never sleeps on a doorbell (a guest without interrupts).
    pub const NONE: Self = Self(0);
    /// Write to the eventfd that comes along ([`Fds::PEER_EVENT`]).
    pub const EVENT: Self = Self(1);
    /// Store [`Channel::bell`] into the doorbell register ([`Fds::REGISTERS`]).
    pub const REGISTER: Self = Self(2);
}

/// Answer to [`Connect`], and the event `INCOMING`: a channel, seen from one of its two endpoints.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Channel {
    /// Number of the channel. Never used again.
    pub channel: u64,
    /// Offset of the channel's block from the start of the segment.
    pub offset: u64,
    /// Data bytes of each ring.
    pub capacity: u64,
    /// Repeats [`Connect::nonce`] for the initiator; 0 for the acceptor.
    pub nonce: u64,
    /// [`crate::channel::ChannelKind`].
    pub kind: u32,
    /// 1 for the initiator, 0 for the acceptor.
    pub initiator: u32,
    /// Number of the listener.
    pub listener: u32,
    /// How to wake the peer.
    pub bell_kind: BellKind,
    /// What to store in the doorbell register: `peer id << 16 | vector`.
    pub bell: u32,
    /// The peer's member.
    pub peer_member: u32,
    /// The peer's endpoint number.
    pub peer_endpoint: u32,
    /// And its epoch.
    pub peer_epoch: u32,
    /// File descriptors that come along.
    pub fds: Fds,
    /// Zero.
    pub reserved: u32,
    /// What the peer's endpoint calls itself.
    pub peer_name: Name,
    /// The name of the peer's member.
    pub peer_member_name: Name,
}
layout!(Channel, 200 {
    channel: 0, offset: 8, capacity: 16, nonce: 24, kind: 32, initiator: 36, listener: 40, bell_kind: 44,
    bell: 48, peer_member: 52, peer_endpoint: 56, peer_epoch: 60, fds: 64, reserved: 68, peer_name: 72,
    peer_member_name: 136,
});

/// Asks for a page of what the daemon knows, and says in `PAGE` where that page ends. The texts of all pages, one behind the
/// other, are a JSON object. A client begins with [`Inspect::FIRST`], sends what came back for the next page, and is done when
/// [`Inspect::FIRST`] comes back.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Inspect {
    /// The part of the object; 0 at its beginning and end.
    pub section: u32,
    /// Entries of that part that have come.
    pub entries: u32,
    /// The last entry that was looked at: its number, ...
    pub after: u64,
    /// ... or its name.
    pub name: Name,
}
layout!(Inspect, 80 { section: 0, entries: 4, after: 8, name: 16 });

impl Inspect {
    /// The first page.
    pub const FIRST: Self = Self { section: 0, entries: 0, after: 0, name: Name::NONE };

    /// Whether another page follows.
    pub fn is_more(&self) -> bool {
        self.section != 0
    }
}

/// Names a channel in `ACCEPTED` and `CLOSE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChannelRef {
    /// [`Channel::channel`].
    pub channel: u64,
}
layout!(ChannelRef, 8 { channel: 0 });

/// Opens a synchronisation object of the segment by name, as one more user of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SyncOpen {
    /// Its name. Those of synchronisation objects, blocks and listeners are apart.
    pub name: Name,
    /// [`crate::sync::SyncKind`].
    pub kind: u32,
    /// Semaphore: most permits. Barrier: parties. Else 0. For an object that is there: 0, or what it has.
    pub limit: u32,
    /// Semaphore: the permits that a new one has. Else 0.
    pub initial: u32,
    /// [`SyncOpen::CREATE`] and others.
    pub flags: u32,
    /// Chosen by the client, unique for the endpoint. The same request asked again (after the daemon has gone without an
    /// answer) with the same nonce yields the same slot.
    pub nonce: u64,
}
layout!(SyncOpen, 88 { name: 0, kind: 64, limit: 68, initial: 72, flags: 76, nonce: 80 });

impl SyncOpen {
    /// Make the object if it is not there.
    pub const CREATE: u32 = 1;
    /// With [`SyncOpen::CREATE`]: it must not be there ([`ErrorCode::IN_USE`]).
    pub const EXCLUSIVE: u32 = 2;
    /// With [`SyncOpen::CREATE`]: a new object stays until it is unlinked; else it goes with its last user.
    pub const PERSISTENT: u32 = 4;
}

/// Answer to [`SyncOpen`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sync {
    /// Number of the object. Never used again.
    pub object: u64,
    /// Offset of its page from the start of the segment.
    pub offset: u64,
    /// [`crate::sync::SyncKind`].
    pub kind: u32,
    /// Its limit.
    pub limit: u32,
    /// The slot that is now this user's.
    pub slot: u32,
    /// The slot's epoch.
    pub epoch: u32,
    /// The endpoint's own doorbell as it stands in the slot: member << 16 | vector.
    pub bell: u32,
    /// 1 if the object was made by this request.
    pub created: u32,
}
layout!(Sync, 40 {
    object: 0, offset: 8, kind: 16, limit: 20, slot: 24, epoch: 28, bell: 32, created: 36,
});

/// Names a slot in `SYNC_CLOSE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SyncRef {
    /// [`Sync::object`].
    pub object: u64,
    /// [`Sync::slot`].
    pub slot: u32,
    /// [`Sync::epoch`].
    pub epoch: u32,
}
layout!(SyncRef, 16 { object: 0, slot: 8, epoch: 12 });

/// Names something in the segment: in `SYNC_UNLINK` and `BLOCK_UNLINK`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ByName {
    /// The name.
    pub name: Name,
}
layout!(ByName, 64 { name: 0 });

/// Rings a doorbell of a member of the endpoint's segment, as it stands in the slots of synchronisation objects, and asks
/// how to ring it without the daemon. The slots are in shared memory, so the daemon checks that the doorbell serves the
/// segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BellOf {
    /// Member << 16 | vector.
    pub bell: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(BellOf, 8 { bell: 0, reserved: 4 });

/// Answer to [`BellOf`]. Holds as long as the endpoint does.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BellOk {
    /// How.
    pub kind: BellKind,
    /// What to store in the doorbell register.
    pub bell: u32,
    /// File descriptors that come along ([`Fds::PEER_EVENT`]).
    pub fds: Fds,
    /// Zero.
    pub reserved: u32,
}
layout!(BellOk, 16 { kind: 0, bell: 4, fds: 8, reserved: 12 });

/// Asks for a readiness board ([`crate::board`]). It is the endpoint's until that has ended and its peers have closed their
/// channels with it, because they may be about to write to it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BoardOpen {
    /// As [`SyncOpen::nonce`]: the same request asked again yields the same board.
    pub nonce: u64,
}
const _: () = assert!(size_of::<BoardOpen>() == 8);

/// Answer to [`BoardOpen`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Board {
    /// Offset of the board from the start of the segment.
    pub offset: u64,
}
const _: () = assert!(size_of::<Board>() == 8);

/// What may be done with a block. Each right includes those below it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Rights(pub u32);

impl Rights {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Loads.
    pub const READ: Self = Self(1);
    /// Loads and stores.
    pub const READ_WRITE: Self = Self(2);
    /// The same, and nobody else has it open for stores meanwhile.
    pub const WRITE_EXCLUSIVE: Self = Self(3);

    /// Whether this release knows it.
    pub const fn is_known(self) -> bool {
        self.0 <= 3
    }

    /// Whether stores are allowed.
    pub const fn may_write(self) -> bool {
        self.0 >= 2
    }

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NONE => "none",
            Self::READ => "read",
            Self::READ_WRITE => "read-write",
            Self::WRITE_EXCLUSIVE => "write-exclusive",
            _ => "?",
        }
    }
}

/// Makes a block of the segment and opens it. Its bytes are what they are: who wants zeros writes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockCreate {
    /// Its name; [`Name::NONE`] for a block without one.
    pub name: Name,
    /// Bytes wished for; at least 1. What it gets is a multiple of the segment's page.
    pub size: u64,
    /// Its offset is a multiple of this power of two, and of the segment's page; 0 means the latter.
    pub align: u64,
    /// How the creator opens it: [`Rights::READ_WRITE`] or [`Rights::WRITE_EXCLUSIVE`].
    pub rights: Rights,
    /// What those may who have not been granted anything else.
    pub others: Rights,
    /// [`BlockCreate::PERSISTENT`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
    /// As [`SyncOpen::nonce`]: the same request asked again yields the same handle.
    pub nonce: u64,
}
layout!(BlockCreate, 104 {
    name: 0, size: 64, align: 72, rights: 80, others: 84, flags: 88, reserved: 92, nonce: 96,
});

impl BlockCreate {
    /// The name outlives the endpoint that has made the block.
    pub const PERSISTENT: u32 = 1;
}

/// Opens a block by name.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockOpen {
    /// Its name.
    pub name: Name,
    /// The rights that are needed; not [`Rights::NONE`].
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
    /// As [`SyncOpen::nonce`].
    pub nonce: u64,
}
layout!(BlockOpen, 80 { name: 0, rights: 64, reserved: 68, nonce: 72 });

/// An open block. Answer to [`BlockCreate`], [`BlockOpen`] and [`BlockResize`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Block {
    /// Number of the block. Never used again.
    pub block: u64,
    /// Number of this handle. Never used again.
    pub handle: u64,
    /// Offset of the block from the start of the segment.
    pub offset: u64,
    /// Its bytes, as wished for.
    pub size: u64,
    /// Its bytes, a multiple of the segment's page: these may be mapped.
    pub span: u64,
    /// What this handle may do.
    pub rights: Rights,
    /// The endpoint that owns it; 0 if that has ended.
    pub owner: u32,
    /// Its member.
    pub owner_member: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Block, 56 {
    block: 0, handle: 8, offset: 16, size: 24, span: 32, rights: 40, owner: 44, owner_member: 48,
    reserved: 52,
});

/// Makes an open block longer or shorter. Longer only where there is room behind it, shorter only if nobody else has it
/// open.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockResize {
    /// [`Block::handle`].
    pub handle: u64,
    /// Bytes wished for.
    pub size: u64,
}
layout!(BlockResize, 16 { handle: 0, size: 8 });

/// Gives a name to a block of one's own that has none.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockLink {
    /// [`Block::block`].
    pub block: u64,
    /// Its name from now on.
    pub name: Name,
}
layout!(BlockLink, 72 { block: 0, name: 8 });

/// Says what somebody may do with a block of one's own, from now on.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockGrant {
    /// [`Block::block`].
    pub block: u64,
    /// A member.
    pub member: u32,
    /// One endpoint of it; 0 for all that have not been granted anything of their own.
    pub endpoint: u32,
    /// The most that it may open the block with. Handles that have more lose it.
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
}
layout!(BlockGrant, 24 { block: 0, member: 8, endpoint: 12, rights: 16, reserved: 20 });

/// A handle and what it may do: in `BLOCK_REVOKED` what is left, in `BLOCK_ACK` what is kept. A handle that is left
/// nothing is closed when that is acknowledged. In `BLOCK_CLOSE` the rights are [`Rights::NONE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockRights {
    /// [`Block::handle`].
    pub handle: u64,
    /// What it may do.
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
}
layout!(BlockRights, 16 { handle: 0, rights: 8, reserved: 12 });

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

/// Splits a packet into header and body, without looking into the body.
pub fn split(packet: &[u8]) -> Option<(Header, &[u8])> {
    Header::read_from_prefix(packet).ok()
}

/// The body as a `T`, if it has exactly that length.
pub fn body<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_bytes(bytes).ok()
}
