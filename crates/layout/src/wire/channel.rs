//! Listeners and channels.

use super::{BellKind, Fds};
use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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

/// Names a channel in `ACCEPTED` and `CLOSE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChannelRef {
    /// [`Channel::channel`].
    pub channel: u64,
}
layout!(ChannelRef, 8 { channel: 0 });
