//! A connection, and how it becomes an endpoint.

use super::Fds;
use crate::Name;
use crate::segment::{self, Access, MappingKind};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First message of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Hello {
    /// [`VERSION`](super::VERSION).
    pub version: u32,
    /// Zero.
    pub reserved: u32,
    /// Bits of optional features that the client understands: [`features`](super::features).
    pub features: u64,
}
layout!(Hello, 16 { version: 0, reserved: 4, features: 8 });

/// Answer to [`Hello`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct HelloOk {
    /// [`VERSION`](super::VERSION).
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
    /// Zero; or the number of the endpoint that this process already is (its daemon has restarted) or adopts.
    pub endpoint: u32,
    /// That endpoint's epoch.
    pub epoch: u32,
    /// That endpoint's token, or that of a [`Hold`].
    pub token: [u8; 16],
}
layout!(Attach, 152 { segment: 0, name: 64, endpoint: 128, epoch: 132, token: 136 });

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

/// Has the endpoint live for a while even if no process owns it, so that another one can adopt it: by [`Attach`] with the token
/// of the hold, once. That ends the hold, as does its time. The same token again begins the time anew.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Hold {
    /// Chosen by the client so that nobody can guess it; not all zeros.
    pub token: [u8; 16],
    /// For how long, in milliseconds; 0 ends the hold.
    pub millis: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Hold, 24 { token: 0, millis: 16, reserved: 20 });
