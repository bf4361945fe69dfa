//! TCP connections for which the daemon looks for the other end, so that they can continue over a channel.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Which side made a connection. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct SocketRole(pub u32);

impl SocketRole {
    /// The side that called `connect`.
    pub const CONNECTOR: Self = Self(1);
    /// The side that called `accept`.
    pub const ACCEPTOR: Self = Self(2);
}

/// Asks for the other end of a TCP connection. One descriptor comes with it. The daemon reads from the socket what the kernel
/// knows about it, and closes the descriptor. The descriptor is either the TCP socket, or a Unix socket whose receive queue
/// contains a message of one byte with the TCP socket. In the latter case, a client that keeps a copy of the Unix socket can
/// take the message back as long as the daemon has not received it; otherwise the end of the Unix socket (`POLLHUP` at the
/// other socket of the pair) tells the client that the daemon has closed the TCP socket. There is no answer. The result is an
/// event, [`SocketMatched`] or [`SocketStays`], which may come at any later time or never.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketReport {
    /// A number of the client's choice, which must differ from those of all reports whose event has not come yet.
    pub key: u64,
    /// Time at which the program called `connect`, in nanoseconds of its kernel's CLOCK_MONOTONIC. 0 for an acceptor.
    pub before: u64,
    /// Time at which that call had returned, in the same unit.
    pub after: u64,
    /// Which side made the report.
    pub role: SocketRole,
    /// Zero.
    pub reserved: u32,
}
layout!(SocketReport, 32 { key: 0, before: 8, after: 16, role: 24, reserved: 28 });

/// A report with what a guest's daemon has read from its kernel. It sends this instead of a [`SocketReport`] with a
/// descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketFacts {
    /// The report of the program.
    pub report: SocketReport,
    /// Local address: IPv6, or IPv4 mapped to IPv6.
    pub local: [u8; 16],
    /// Remote address, in the same form.
    pub remote: [u8; 16],
    /// Local port.
    pub local_port: u16,
    /// Remote port.
    pub remote_port: u16,
    /// [`SocketFacts::CLOCK`], [`SocketFacts::SYN`] and [`SocketFacts::USER`].
    pub flags: u32,
    /// The socket's `SO_COOKIE`.
    pub cookie: u64,
    /// The socket's `SO_NETNS_COOKIE`, which identifies its network namespace.
    pub namespace: u64,
    /// `TCP_TIMESTAMP` of a connector's socket.
    pub clock: u32,
    /// The timestamp in the SYN that an acceptor's socket has received.
    pub syn: u32,
    /// CLOCK_MONOTONIC directly before `clock` was read, in nanoseconds.
    pub clock_before: u64,
    /// CLOCK_MONOTONIC directly after `clock` was read, in nanoseconds.
    pub clock_after: u64,
}
layout!(SocketFacts, 112 {
    report: 0, local: 32, remote: 48, local_port: 64, remote_port: 66, flags: 68, cookie: 72, namespace: 80, clock: 88,
    syn: 92, clock_before: 96, clock_after: 104,
});

impl SocketFacts {
    /// Flag: `clock` is valid.
    pub const CLOCK: u32 = 1;
    /// Flag: `syn` is valid, since the kernel kept the SYN and it had a timestamp.
    pub const SYN: u32 = 2;
    /// Flag: the network namespace may belong to an ordinary user.
    pub const USER: u32 = 4;
}

/// Body of `SOCK_WITHDRAW`: the connection has ended or stays on TCP, so the report is withdrawn. There is no answer.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketKey {
    /// [`SocketReport::key`].
    pub key: u64,
}
layout!(SocketKey, 8 { key: 0 });

/// Event: the daemon has found the other end. Both sides attach to the segment. The acceptor listens at
/// [`SocketMatched::listener`] and the connector connects to it, both with [`crate::channel::ChannelKind::SOCKET`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketMatched {
    /// [`SocketReport::key`].
    pub key: u64,
    /// A segment to which both sides may attach.
    pub segment: Name,
    /// Name of the listener, which no other program knows or is shown.
    pub listener: Name,
}
layout!(SocketMatched, 136 { key: 0, segment: 8, listener: 72 });

/// Prefix of the names of such listeners. The daemon does not show listeners with this prefix to anyone.
pub const SECRET: &str = "tcp.";

/// Event: the connection stays on TCP.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketStays {
    /// [`SocketReport::key`].
    pub key: u64,
    /// Reason why it stays.
    pub reason: StaysReason,
    /// Zero.
    pub reserved: u32,
}
layout!(SocketStays, 16 { key: 0, reason: 8, reserved: 12 });

/// Reason why a connection stays on TCP. Readers treat an unknown value as "some reason".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct StaysReason(pub u32);

impl StaysReason {
    /// The reported descriptor is not an established TCP connection.
    pub const NOT_TCP: Self = Self(1);
    /// More than one other socket could be its other end.
    pub const AMBIGUOUS: Self = Self(2);
    /// Too many connections wait for their other end, or too many reports come at once.
    pub const TOO_MANY: Self = Self(3);
    /// No segment that both ends may use allows sockets.
    pub const NO_SEGMENT: Self = Self(4);
    /// The configuration excludes the program.
    pub const EXCLUDED: Self = Self(5);
    /// The daemon's configuration does not allow sockets.
    pub const DISABLED: Self = Self(6);
    /// The kernel does not tell network namespaces apart (before Linux 5.14).
    pub const KERNEL: Self = Self(7);

    /// Returns the reason in words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NOT_TCP => "it is not an established TCP connection",
            Self::AMBIGUOUS => "more than one socket could be its other end",
            Self::TOO_MANY => "too many connections wait for their other end",
            Self::NO_SEGMENT => "both ends share no segment that allows sockets",
            Self::EXCLUDED => "the configuration excludes this program",
            Self::DISABLED => "the daemon's configuration does not allow sockets",
            Self::KERNEL => "the kernel is older than Linux 5.14",
            _ => "the daemon says so",
        }
    }
}
