//! TCP connections whose two ends are looked for, so that they can go on over a channel.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Who made a connection. Open: unknown values are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct SocketRole(pub u32);

impl SocketRole {
    /// Called `connect`.
    pub const CONNECTOR: Self = Self(1);
    /// Called `accept`.
    pub const ACCEPTOR: Self = Self(2);
}

/// Asks for the other end of a TCP connection. Comes with one descriptor; the daemon reads from the socket what the kernel knows, and
/// closes it. The descriptor is the socket, or a Unix socket in whose queue lies a message of one byte with it: whoever keeps a copy
/// of that Unix socket can take the message back as long as the daemon has not, and else sees by its end (`POLLHUP` at the other socket of the
/// pair) that the daemon has closed the TCP socket. There is no answer: what comes of it is an event, [`SocketMatched`] or [`SocketStays`], at any later time or never.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketReport {
    /// The client's number for it, not that of another report whose event has not come.
    pub key: u64,
    /// When the program called `connect`, in nanoseconds of its kernel's CLOCK_MONOTONIC. 0 for an acceptor.
    pub before: u64,
    /// And when that call had returned.
    pub after: u64,
    /// Who made the connection.
    pub role: SocketRole,
    /// Zero.
    pub reserved: u32,
}
layout!(SocketReport, 32 { key: 0, before: 8, after: 16, role: 24, reserved: 28 });

/// A report with what a guest's daemon has read from its kernel: what it sends in the place of a [`SocketReport`] and its descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketFacts {
    /// What the program said.
    pub report: SocketReport,
    /// Own address: IPv6, or IPv4 mapped into it.
    pub local: [u8; 16],
    /// The peer's address, likewise.
    pub remote: [u8; 16],
    /// Own port.
    pub local_port: u16,
    /// The peer's port.
    pub remote_port: u16,
    /// [`SocketFacts::CLOCK`] and so on.
    pub flags: u32,
    /// `SO_COOKIE`.
    pub cookie: u64,
    /// `SO_NETNS_COOKIE`.
    pub namespace: u64,
    /// A connector's `TCP_TIMESTAMP`.
    pub clock: u32,
    /// The timestamp in the SYN that an acceptor has received.
    pub syn: u32,
    /// CLOCK_MONOTONIC right before the clock was read, in nanoseconds.
    pub clock_before: u64,
    /// And right after.
    pub clock_after: u64,
}
layout!(SocketFacts, 112 {
    report: 0, local: 32, remote: 48, local_port: 64, remote_port: 66, flags: 68, cookie: 72, namespace: 80, clock: 88,
    syn: 92, clock_before: 96, clock_after: 104,
});

impl SocketFacts {
    /// In `flags`: the clock was read.
    pub const CLOCK: u32 = 1;
    /// The SYN was kept, and had a timestamp.
    pub const SYN: u32 = 2;
    /// The network namespace may be an ordinary user's.
    pub const USER: u32 = 4;
}

/// Body of `SOCK_WITHDRAW`: the connection has ended, or stays on TCP. There is no answer.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketKey {
    /// [`SocketReport::key`].
    pub key: u64,
}
layout!(SocketKey, 8 { key: 0 });

/// Event: the other end has been found. Attach to the segment; the acceptor listens at [`SocketMatched::listener`], the connector
/// connects to it, both with [`crate::channel::ChannelKind::SOCKET`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketMatched {
    /// [`SocketReport::key`].
    pub key: u64,
    /// A segment that both may attach to.
    pub segment: Name,
    /// A name in it that nobody else knows or is shown.
    pub listener: Name,
}
layout!(SocketMatched, 136 { key: 0, segment: 8, listener: 72 });

/// What the names of such listeners begin with. Listeners of that kind are shown to nobody.
pub const SECRET: &str = "tcp.";

/// Event: the connection stays on TCP.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketStays {
    /// [`SocketReport::key`].
    pub key: u64,
    /// Why.
    pub reason: StaysReason,
    /// Zero.
    pub reserved: u32,
}
layout!(SocketStays, 16 { key: 0, reason: 8, reserved: 12 });

/// Why a connection stays on TCP. Open: readers take an unknown value for "some reason".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct StaysReason(pub u32);

impl StaysReason {
    /// What was reported is no established TCP connection.
    pub const NOT_TCP: Self = Self(1);
    /// More than one other socket could be its other end.
    pub const AMBIGUOUS: Self = Self(2);
    /// Too many wait for their other end, or come at a time.
    pub const TOO_MANY: Self = Self(3);
    /// No segment that both ends may use allows sockets.
    pub const NO_SEGMENT: Self = Self(4);
    /// The program is not to leave TCP.
    pub const EXCLUDED: Self = Self(5);
    /// The daemon serves no sockets.
    pub const DISABLED: Self = Self(6);
    /// The kernel does not tell network namespaces apart (before Linux 5.14).
    pub const KERNEL: Self = Self(7);

    /// In words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NOT_TCP => "it is no established TCP connection",
            Self::AMBIGUOUS => "more than one socket could be its other end",
            Self::TOO_MANY => "too many connections wait for their other end",
            Self::NO_SEGMENT => "both ends share no segment that allows sockets",
            Self::EXCLUDED => "the configuration leaves this program out",
            Self::DISABLED => "the daemon's configuration does not allow sockets",
            Self::KERNEL => "the kernel is older than Linux 5.14",
            _ => "the daemon says so",
        }
    }
}
