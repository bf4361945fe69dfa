//! Listeners and channels.

use super::{BellKind, Fds};
use crate::Name;
use crate::channel::Capacities;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Publishes a name to which other endpoints can connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Listen {
    /// Name of the listener, unique in the segment. Only the member MEMBER may use a name of the form `SERVICE@MEMBER`.
    pub name: Name,
    /// [`crate::channel::ChannelKind`] of the channels that it accepts.
    pub kind: u32,
    /// Maximum number of connections that wait to be accepted; 0 means the daemon's default.
    pub backlog: u32,
    /// Data bytes of the ring into which the acceptor sends; 0 means the daemon's default. Each ring has the larger of the
    /// sizes that the two sides request, up to the daemon's limit.
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
    /// A number of the client's choice, unique for the endpoint. If the daemon has ended without an answer and the client
    /// sends the same request again with the same nonce, it gets the same channel.
    pub nonce: u64,
}
layout!(Connect, 96 { name: 0, kind: 64, reserved: 68, capacity: 72, input_capacity: 80, nonce: 88 });

/// Asks for an existing channel of the endpoint, as one of its sides sees it. A process that continues where another one has
/// stopped sends this. If the acceptor has not sent `ACCEPTED` yet, this request counts as `ACCEPTED`.
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

/// A channel, as one of its two endpoints sees it. Answer to [`Connect`] and [`ChannelSide`], and body of the event
/// `INCOMING`.
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
    /// Value to store in the doorbell register: `peer id << 16 | vector`.
    pub bell: u32,
    /// Member number of the peer.
    pub peer_member: u32,
    /// The peer's endpoint number.
    pub peer_endpoint: u32,
    /// Epoch of the peer's endpoint.
    pub peer_epoch: u32,
    /// File descriptors that come with this message.
    pub fds: Fds,
    /// Zero.
    pub reserved: u32,
    /// Name that the peer's endpoint has given itself.
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
    /// Returns the ring sizes that the acceptor requests; 0 where it leaves the size open.
    pub fn capacities(&self) -> Capacities {
        Capacities::seen(self.capacity, or(self.input_capacity, self.capacity), false)
    }
}

impl Connect {
    /// Returns the ring sizes that the initiator requests; 0 where it leaves the size open.
    pub fn capacities(&self) -> Capacities {
        Capacities::seen(self.capacity, or(self.input_capacity, self.capacity), true)
    }
}

impl Channel {
    /// Returns whether this endpoint has opened the channel.
    pub fn is_initiator(&self) -> bool {
        self.initiator != 0
    }

    /// Returns the data bytes of the channel's rings.
    pub fn capacities(&self) -> Capacities {
        Capacities::seen(self.capacity, self.input_capacity, self.is_initiator())
    }
}

fn or(body: u64, other: u64) -> u64 {
    if body == 0 { other } else { body }
}
