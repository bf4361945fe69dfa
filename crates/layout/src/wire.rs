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
//! | `BELL` [`BellOf`] | `BELL_OK` [`BellOk`] | that event (host only) |
//! | `INSPECT` | `TEXT`..., JSON | |
//! | `ADMIN` + JSON text | `OK`, `TEXT`... or `ERROR` | |
//! | any | `ERROR` [`Error`] + text | |
//!
//! The daemon's one event is `INCOMING` [`Channel`]: somebody has connected to a listener of this endpoint. It is
//! repeated after a reconnect until the endpoint has sent `ACCEPTED` or `CLOSE` for it.

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
const _: () = assert!(size_of::<Header>() == 8);

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
const _: () = assert!(size_of::<Hello>() == 16);

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
const _: () = assert!(size_of::<HelloOk>() == 80);

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
const _: () = assert!(size_of::<Attach>() == 152);

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
const _: () = assert!(size_of::<Attached>() == 80);

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
const _: () = assert!(size_of::<Listen>() == 80);

/// Answer to [`Listen`], and body of `UNLISTEN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Listening {
    /// Number of the listener.
    pub listener: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Listening>() == 8);

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
const _: () = assert!(size_of::<Connect>() == 88);

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
const _: () = assert!(size_of::<Channel>() == 200);

/// Names a channel in `ACCEPTED` and `CLOSE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChannelRef {
    /// [`Channel::channel`].
    pub channel: u64,
}
const _: () = assert!(size_of::<ChannelRef>() == 8);

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
const _: () = assert!(size_of::<SyncOpen>() == 88);

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
const _: () = assert!(size_of::<Sync>() == 40);

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
const _: () = assert!(size_of::<SyncRef>() == 16);

/// Names something in the segment: in `SYNC_UNLINK` and `BLOCK_UNLINK`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ByName {
    /// The name.
    pub name: Name,
}
const _: () = assert!(size_of::<ByName>() == 64);

/// Asks how to ring a doorbell of a member of the endpoint's segment, as it stands in the slots of synchronisation
/// objects. Those are in shared memory, so the daemon checks that the member has a share in the segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BellOf {
    /// Member << 16 | vector.
    pub bell: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<BellOf>() == 8);

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
const _: () = assert!(size_of::<BellOk>() == 16);

/// A request was refused. Text for people follows: what, where, and the fix.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Error {
    /// Why.
    pub code: ErrorCode,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Error>() == 8);

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
}

/// Splits a packet into header and body, without looking into the body.
pub fn split(packet: &[u8]) -> Option<(Header, &[u8])> {
    Header::read_from_prefix(packet).ok()
}

/// The body as a `T`, if it has exactly that length.
pub fn body<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_bytes(bytes).ok()
}
