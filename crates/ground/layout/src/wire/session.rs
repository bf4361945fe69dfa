//! Connections, and how they become endpoints.

use super::Fds;
use crate::Name;
use crate::segment::{self, Access, MappingKind};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First message of a connection, from the client.
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
    /// Bits of the optional features that both sides understand.
    pub features: u64,
    /// The member's name.
    pub name: Name,
}
layout!(HelloOk, 80 { version: 0, member: 4, features: 8, name: 16 });

/// Makes this connection an endpoint of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Attach {
    /// Name of the segment.
    pub segment: Name,
    /// A name for messages to people, of the client's choice; it need not be unique.
    pub name: Name,
    /// Zero for a new endpoint; else the number of the endpoint that this process already is (after its daemon restarted) or
    /// adopts.
    pub endpoint: u32,
    /// Epoch of that endpoint.
    pub epoch: u32,
    /// Token of that endpoint, or of a [`Hold`].
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
    /// Epoch of the endpoint.
    pub epoch: u32,
    /// Doorbell vector of the endpoint.
    pub vector: u32,
    /// A secret with which a process can prove later that it is this endpoint.
    pub token: [u8; 16],
    /// The segment's uuid.
    pub uuid: [u8; 16],
    /// Bytes of the whole segment. The first [`segment::RESERVED`] bytes may not be mapped.
    pub segment_len: u64,
    /// Offset in the memory's file of the segment's byte [`segment::RESERVED`], which is the first that is mapped.
    pub map_offset: u64,
    /// File descriptors that come with this answer.
    pub fds: Fds,
    /// Unit in which the memory may be mapped, in bytes: offset and length are multiples of it.
    pub page: u32,
    /// The way in which the segment reaches this member.
    pub kind: MappingKind,
    /// What the endpoint may do with the segment.
    pub access: Access,
}
layout!(Attached, 80 {
    member: 0, endpoint: 4, epoch: 8, vector: 12, token: 16, uuid: 32, segment_len: 48, map_offset: 56,
    fds: 64, page: 68, kind: 72, access: 76,
});

impl Attached {
    /// Returns the number of bytes to map. `None` if the segment has nothing behind its reserved part.
    pub fn mapped_len(&self) -> Option<u64> {
        self.segment_len.checked_sub(segment::RESERVED).filter(|&len| len > 0)
    }
}

/// Keeps the endpoint alive for a while even if no process owns it, so that another process can adopt it once, by [`Attach`]
/// with the token of the hold. The adoption ends the hold, and so does the end of its time. A `HOLD` with the same token
/// starts the time anew.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Hold {
    /// A secret of the client's choice, which must not be guessable; not all zeros.
    pub token: [u8; 16],
    /// Duration of the hold in milliseconds; 0 ends the hold.
    pub millis: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Hold, 24 { token: 0, millis: 16, reserved: 20 });
