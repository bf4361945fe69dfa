//! What the two daemons of a VM say to each other in the control rings.
//!
//! Each message is an [`Envelope`] and its content. The guest's daemon passes on what its programs say, packet by
//! packet, as [`RelayKind::DATA`] of a numbered client, and their answers back; file descriptors stay where they
//! are: the guest's daemon adds its own to `ATTACHED`, and sends what its kernel says of a socket ([`wire::SocketFacts`]) in the
//! place of a `SOCK_REPORT`'s.
//!
//! | kind | direction | content |
//! |---|---|---|
//! | `SEGMENTS` | to guest | [`Segment`]s: all that this VM has. Sent first in a session and whenever it changes |
//! | `ENDPOINTS` | to guest | [`Endpoint`]s that this VM's earlier guest daemon had. Sent second; empty after a reboot. More than fit come in further messages |
//! | `OPEN` | to host | [`Open`]: a program has connected |
//! | `DATA` | both | one packet of the attach protocol |
//! | `CLOSE` | both | nothing: the program, or the host, has ended the connection. The process may live on, and the endpoint with it |
//! | `GONE` | to host | [`Endpoint`]: this process has ended, and no longer owns that endpoint |
//! | `PING` | to guest | nothing: is its daemon there? |
//! | `PONG` | to host | nothing: it is |
//! | `MAPPED` | to host | [`Mapped`]: how a segment is mapped in the guest, and how fast it copies |
//! | `JOIN` | to host | [`Endpoint`]: this process owns that endpoint too (a child after `fork`) |

use crate::{Name, wire};

pub use crate::segment::{Access, MappingKind};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Kind of a relay message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct RelayKind(pub u32);

#[expect(missing_docs, reason = "the table on top of the module says what each is")]
impl RelayKind {
    pub const SEGMENTS: Self = Self(1);
    pub const ENDPOINTS: Self = Self(2);
    pub const OPEN: Self = Self(3);
    pub const DATA: Self = Self(4);
    pub const CLOSE: Self = Self(5);
    pub const GONE: Self = Self(6);
    pub const MAPPED: Self = Self(7);
    pub const PING: Self = Self(8);
    pub const PONG: Self = Self(9);
    pub const JOIN: Self = Self(10);
}

/// In front of each message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Envelope {
    /// What follows.
    pub kind: RelayKind,
    /// Number of the guest's client, chosen by the guest's daemon, unique in a session; 0 where none is meant.
    pub client: u32,
}
layout!(Envelope, 8 { kind: 0, client: 4 });

/// The longest relay message.
pub const MAX_MESSAGE: usize = size_of::<Envelope>() + wire::MAX_PACKET;
const _: () = assert!(MAX_MESSAGE <= crate::ring::max_message(crate::control::CAPACITY));

/// A program in the guest. Believed for that guest only.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Open {
    /// Its process number in the guest.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Zero.
    pub reserved: u32,
    /// When the process started (field 22 of `/proc/PID/stat`), so that a reused pid is not taken for it.
    pub started: u64,
}
layout!(Open, 24 { pid: 0, uid: 4, gid: 8, reserved: 12, started: 16 });

/// An endpoint in the guest.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Endpoint {
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Its epoch.
    pub epoch: u32,
    /// Process number in the guest.
    pub pid: u32,
    /// Zero.
    pub reserved: u32,
    /// Start time of that process.
    pub started: u64,
}
layout!(Endpoint, 24 { endpoint: 0, epoch: 4, pid: 8, reserved: 12, started: 16 });

/// A segment that the VM has a share in.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Segment {
    /// Its name.
    pub name: Name,
    /// Its uuid, which stands in the header of the right memory device, and in the DAX info block if it has one.
    pub uuid: [u8; 16],
    /// Its bytes, the reserved front among them.
    pub size: u64,
    /// By which kind of device it comes.
    pub kind: MappingKind,
    /// Unit in which it may be mapped, in bytes.
    pub page: u32,
    /// What this VM may do with it.
    pub access: Access,
    /// Zero.
    pub reserved: u32,
}
layout!(Segment, 104 { name: 0, uuid: 64, size: 80, kind: 88, page: 92, access: 96, reserved: 100 });

/// Most segments of one VM: what fits into the one message that names them.
pub const MAX_SEGMENTS: usize = wire::MAX_PACKET / size_of::<Segment>();

/// What the guest found.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Mapped {
    /// Which segment.
    pub name: Name,
    /// How it is mapped.
    pub kind: MappingKind,
    /// 1 if the guest's kernel does by itself what the DAX info block says, so that when it boots the members of the
    /// segment must be trusted with that; else 0.
    pub trusts_members: u32,
    /// Measured copy speed out of the mapping, in MB/s. A few hundred or less means uncached.
    pub read_mb_s: u32,
    /// Measured copy speed into it, in MB/s.
    pub write_mb_s: u32,
}
layout!(Mapped, 80 { name: 0, kind: 64, trusts_members: 68, read_mb_s: 72, write_mb_s: 76 });
