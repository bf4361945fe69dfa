//! Listeners and channels.

use super::{BellKind, Fds};
use crate::Name;
use crate::channel::Capacities;
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
    /// Data bytes of the ring into which the acceptor sends; 0 means the daemon's default. For each ring the larger wish of the
    /// two sides counts, up to the daemon's limit.
    pub capacity: u64,
    /// Data bytes of the ring from which the acceptor receives; 0 means as many as `capacity`.
    pub input_capacity: u64,
}
layout!(Listen, 88 { name: 0, kind: 64, backlog: 68, capacity: 72, input_capacity: 80 });

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
    /// Data bytes of the ring into which the initiator sends; 0 means the default.
    pub capacity: u64,
    /// Data bytes of the ring from which the initiator receives; 0 means as many as `capacity`.
    pub input_capacity: u64,
    /// Chosen by the client, unique for the endpoint. The same request asked again (after the daemon has gone without an
    /// answer) with the same nonce yields the same channel.
    pub nonce: u64,
}
layout!(Connect, 96 { name: 0, kind: 64, reserved: 68, capacity: 72, input_capacity: 80, nonce: 88 });

/// Asks for a channel that the endpoint has, as one of its sides sees it: for a process that goes on where another one has
/// stopped. An acceptor that has not said `ACCEPTED` yet says it with this.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChannelSide {
    /// [`Channel::channel`].
    pub channel: u64,
    /// [`Channel::initiator`].
    pub initiator: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(ChannelSide, 16 { channel: 0, initiator: 8, reserved: 12 });

/// Answer to [`Connect`] and [`ChannelSide`], and the event `INCOMING`: a channel, seen from one of its two endpoints.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Channel {
    /// Number of the channel. Never used again.
    pub channel: u64,
    /// Offset of the channel's block from the start of the segment.
    pub offset: u64,
    /// Data bytes of the ring into which this endpoint sends.
    pub capacity: u64,
    /// Data bytes of the ring from which this endpoint receives.
    pub input_capacity: u64,
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
layout!(Channel, 208 {
    channel: 0, offset: 8, capacity: 16, input_capacity: 24, nonce: 32, kind: 40, initiator: 44, listener: 48,
    bell_kind: 52, bell: 56, peer_member: 60, peer_endpoint: 64, peer_epoch: 68, fds: 72, reserved: 76,
    peer_name: 80, peer_member_name: 144,
});

/// Names a channel in `ACCEPTED` and `CLOSE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChannelRef {
    /// [`Channel::channel`].
    pub channel: u64,
}
layout!(ChannelRef, 8 { channel: 0 });

impl Listen {
    /// What the acceptor wishes of the rings; 0 where it does not care.
    pub fn wishes(&self) -> Capacities {
        Capacities::seen(self.capacity, or(self.input_capacity, self.capacity), false)
    }
}

impl Connect {
    /// What the initiator wishes of the rings; 0 where it does not care.
    pub fn wishes(&self) -> Capacities {
        Capacities::seen(self.capacity, or(self.input_capacity, self.capacity), true)
    }
}

impl Channel {
    /// Whether this endpoint has opened the channel.
    pub fn is_initiator(&self) -> bool {
        self.initiator != 0
    }

    /// Data bytes of its rings.
    pub fn capacities(&self) -> Capacities {
        Capacities::seen(self.capacity, self.input_capacity, self.is_initiator())
    }
}

fn or(wish: u64, other: u64) -> u64 {
    if wish == 0 { other } else { wish }
}
