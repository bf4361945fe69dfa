//! The messages that the host's daemon and a guest's daemon exchange over the control rings.
//!
//! Each message is an [`Envelope`] followed by its content. The guest's daemon forwards each packet of its programs as
//! [`RelayKind::DATA`] of a numbered client, and forwards the answers to the programs. File descriptors do not cross the
//! control rings: the guest's daemon adds its own to `ATTACHED`, and instead of a `SOCK_REPORT` with its descriptor it sends
//! what its kernel knows about the socket ([`wire::SocketFacts`]).
//!
//! | kind | direction | content |
//! |---|---|---|
//! | `SEGMENTS` | to guest | [`Segment`]s: all segments of this VM. Sent first in a session, and again whenever they change |
//! | `ENDPOINTS` | to guest | [`Endpoint`]s of this VM's earlier guest daemon. Sent second; empty after a reboot. If they do not fit into one message, more messages follow |
//! | `OPEN` | to host | [`Open`]: a program has connected |
//! | `DATA` | both | one packet of the attach protocol |
//! | `CLOSE` | both | nothing: the program or the host has closed the connection. The process and its endpoint may live on |
//! | `GONE` | to host | [`Endpoint`]: this process has ended, and no longer owns the endpoint |
//! | `PING` | to guest | nothing: asks whether the guest's daemon is alive |
//! | `PONG` | to host | nothing: the answer to `PING` |
//! | `MAPPED` | to host | [`Mapped`]: how a segment is mapped in the guest, and how fast it copies |
//! | `JOIN` | to host | [`Endpoint`]: this process owns the endpoint too (a child after `fork`) |

pub use crate::segment::{Access, MappingKind};
use crate::{Name, wire};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Kind of a relay message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct RelayKind(pub u32);

#[expect(missing_docs, reason = "the table at the head of the module describes each")]
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

/// Header of each relay message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Envelope {
    /// Kind of the message.
    pub kind: RelayKind,
    /// Number of the guest's client, chosen by the guest's daemon and unique in a session; 0 if the message concerns no
    /// client.
    pub client: u32,
}
layout!(Envelope, 8 { kind: 0, client: 4 });

/// Maximum length of a relay message, in bytes.
pub const MAX_MESSAGE: usize = size_of::<Envelope>() + wire::MAX_PACKET;
const _: () = assert!(MAX_MESSAGE <= crate::ring::max_message(crate::control::CAPACITY));

/// A program in the guest. The host trusts these values only for this guest.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Open {
    /// Process number in the guest.
    pub pid: u32,
    /// User id of the process in the guest.
    pub uid: u32,
    /// Group id of the process in the guest.
    pub gid: u32,
    /// Zero.
    pub reserved: u32,
    /// Start time of the process (field 22 of `/proc/PID/stat`), which distinguishes it from a later process with the same
    /// number.
    pub started: u64,
}
layout!(Open, 24 { pid: 0, uid: 4, gid: 8, reserved: 12, started: 16 });

/// An endpoint in the guest, and a process that owns it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Endpoint {
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Epoch of the endpoint.
    pub epoch: u32,
    /// Process number in the guest.
    pub pid: u32,
    /// Zero.
    pub reserved: u32,
    /// Start time of that process, as in [`Open::started`].
    pub started: u64,
}
layout!(Endpoint, 24 { endpoint: 0, epoch: 4, pid: 8, reserved: 12, started: 16 });

/// A segment of which the VM is a member.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Segment {
    /// Name of the segment.
    pub name: Name,
    /// Uuid of the segment. The header of its memory device has the same, and so has the DAX info block if there is one.
    pub uuid: [u8; 16],
    /// Bytes of the segment, including the reserved part at its start.
    pub size: u64,
    /// Kind of the memory device by which the segment reaches the VM.
    pub kind: MappingKind,
    /// Unit in which the segment may be mapped, in bytes.
    pub page: u32,
    /// What this VM may do with it.
    pub access: Access,
    /// Zero.
    pub reserved: u32,
}
layout!(Segment, 104 { name: 0, uuid: 64, size: 80, kind: 88, page: 92, access: 96, reserved: 100 });

/// Maximum number of segments of one VM: as many as fit into one message.
pub const MAX_SEGMENTS: usize = wire::MAX_PACKET / size_of::<Segment>();

/// How a segment is mapped in the guest.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Mapped {
    /// Name of the segment.
    pub name: Name,
    /// How it is mapped.
    pub kind: MappingKind,
    /// 1 if the guest's kernel makes a device from the DAX info block without being asked, so that the guest must trust the
    /// segment's members when it boots; else 0.
    pub trusts_members: u32,
    /// Measured speed of copying out of the mapping, in MB/s. A few hundred or less means that the mapping is uncached.
    pub read_mb_s: u32,
    /// Measured speed of copying into the mapping, in MB/s.
    pub write_mb_s: u32,
}
layout!(Mapped, 80 { name: 0, kind: 64, trusts_members: 68, read_mb_s: 72, write_mb_s: 76 });
