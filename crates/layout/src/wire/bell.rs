//! Doorbells: how to wake a peer.

use super::Fds;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How to wake a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct BellKind(pub u32);

impl BellKind {
    /// It never sleeps on a doorbell (a guest without interrupts).
    pub const NONE: Self = Self(0);
    /// Write to the eventfd that comes along ([`Fds::PEER_EVENT`]).
    pub const EVENT: Self = Self(1);
    /// Store [`Channel::bell`](super::Channel::bell) into the doorbell register ([`Fds::REGISTERS`]).
    pub const REGISTER: Self = Self(2);
}

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
