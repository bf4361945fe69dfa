//! Doorbells: how to wake a peer.

use super::Fds;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The way in which a peer is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct BellKind(pub u32);

impl BellKind {
    /// The peer never sleeps on a doorbell (a guest without interrupts).
    pub const NONE: Self = Self(0);
    /// The client writes to the eventfd that comes with the answer ([`Fds::PEER_EVENT`]).
    pub const EVENT: Self = Self(1);
    /// The client stores [`Channel::bell`](super::Channel::bell) into the doorbell register ([`Fds::REGISTERS`]).
    pub const REGISTER: Self = Self(2);
}

/// Rings a doorbell of a member of the endpoint's segment, and asks how to ring it without the daemon in future. The client
/// takes the doorbell from a slot of a synchronisation object. Since the slots are in shared memory, the daemon checks that
/// the doorbell belongs to a member of the segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BellOf {
    /// The doorbell: member << 16 | vector.
    pub bell: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(BellOf, 8 { bell: 0, reserved: 4 });

/// Answer to [`BellOf`]. It is valid as long as the endpoint lives.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BellOk {
    /// How to ring the doorbell.
    pub kind: BellKind,
    /// Value to store in the doorbell register.
    pub bell: u32,
    /// File descriptors that come with the answer ([`Fds::PEER_EVENT`]).
    pub fds: Fds,
    /// Zero.
    pub reserved: u32,
}
layout!(BellOk, 16 { kind: 0, bell: 4, fds: 8, reserved: 12 });
