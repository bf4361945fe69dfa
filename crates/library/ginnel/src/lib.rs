//! Shared-memory channels between virtual machines on one host, and between those and the host. Data bypasses the
//! hypervisor, the kernel and every daemon.
//!
//! A process attaches to a *segment* and so becomes an [`Endpoint`]. Endpoints of one segment listen and connect by
//! name. A connection is a [`MessageChannel`] or a [`StreamChannel`]: a pair of rings in shared memory that only its
//! two endpoints use. The daemon is needed to open and to close a channel, but not to use it.
//!
//! ```no_run
//! // One side, anywhere: on the host or in a VM.
//! use ginnel::{Endpoint, MessageChannel};
//! let endpoint = Endpoint::attach("web")?;
//! let listener = endpoint.listen::<MessageChannel>("echo")?;
//! let mut channel = listener.accept()?;
//! while let Ok(message) = channel.recv() {
//!     channel.send(&message)?;
//! }
//! # Ok::<(), ginnel::Error>(())
//! ```
//!
//! ```no_run
//! // The other side, anywhere else.
//! let mut channel = ginnel::connect::<ginnel::MessageChannel>("web/echo")?;
//! channel.send(b"hello")?;
//! assert_eq!(channel.recv()?, b"hello");
//! # Ok::<(), ginnel::Error>(())
//! ```
//!
//! # Blocking and threads
//!
//! Every wait is adaptive by default ([`WaitMode`]): it spins for a short time and then sleeps on a doorbell. Timeouts
//! are set per half of a channel ([`MessageReceiver::set_timeout`] and so on). Non-blocking halves return
//! [`Error::WouldBlock`] and have a file descriptor for poll and epoll. With a [`ReadySet`] one thread can wait for
//! tens of thousands of halves.
//!
//! An [`Endpoint`] and a [`Listener`] may be used from several threads at once. Each half of a channel belongs to one
//! thread at a time.
//!
//! The following calls ask the daemon: [`Endpoint::attach`], [`Endpoint::adopt`], [`Endpoint::hold`],
//! [`Endpoint::resume`], [`Endpoint::listen`], [`Endpoint::connect`] and [`Endpoint::inspect`]; the calls that open,
//! name, resize, grant or close blocks; the calls that open locks; `register` of a half; and [`Daemon::connect`],
//! [`Daemon::inspect`] and [`Daemon::admin`]. They wait up to 10 seconds for a daemon that is slow or is being
//! restarted, and then return [`Error::TimedOut`] or [`Error::NoDaemon`]. If the daemon grants the request after that,
//! the library gives the grant back. No other call waits for the daemon. If the daemon cannot receive at the moment
//! what a `drop` has to tell it, the next call that talks to the daemon does so.
//!
//! # Death
//!
//! When a peer's process or VM dies, everything that it sent can still be received. After that a receiver gets
//! [`Error::PeerDead`], or [`Error::Finished`] if the peer had finished sending. When the daemon dies, open channels
//! are not affected; calls that need a daemon wait for its successor.
//!
//! # Choosing a segment
//!
//! A [`Daemon`] is a session without a segment. It lists the segments to which this user may attach, and can become an
//! [`Endpoint`] of one of them ([`Daemon::attach`]). Calls whose names start with `begin_` do not wait: connecting and
//! attaching return an [`Opening`], and answers come from [`Daemon::poll`].
//!
//! # After `fork`
//!
//! Parent and child are the same endpoint, which lives until both have ended or dropped it. So a program may put itself
//! into the background with open channels. The rules are:
//!
//! - A channel, listener, block or lock that was open before the fork may be used by only one of the two processes from
//!   then on.
//! - It belongs to the process that opened it, as long as that process lives. Meanwhile, a drop in a child tells
//!   neither the peer nor the daemon, and a child cannot accept at such a listener. Once that process has ended, the
//!   object belongs to its children.
//! - An object that a process opens after the fork is its own.
//!
//! # Executing another program, and handing over
//!
//! An endpoint ends with its last process, and a process that executes another program loses its memory. To keep the
//! connections, the process holds the endpoint for a while and saves its channels, and the next program or another
//! process adopts the endpoint:
//!
//! ```no_run
//! # use ginnel::{Endpoint, MessageChannel, SavedChannel, Token};
//! # use std::time::Duration;
//! # fn before(endpoint: Endpoint, channel: MessageChannel) -> Result<(), ginnel::Error> {
//! // Before: pass both texts to the next program, for example in its environment.
//! let token = endpoint.hold(Duration::from_secs(5))?;
//! let texts = (token.reveal(), channel.save().to_string());
//! # Ok(())
//! # }
//! # fn after(texts: (String, String)) -> Result<(), ginnel::Error> {
//! // After: no data is lost or received twice, and the peer has noticed nothing.
//! let endpoint = Endpoint::adopt(&texts.0.parse::<Token>()?)?;
//! let mut channel: MessageChannel = endpoint.resume(&texts.1.parse::<SavedChannel>()?)?;
//! # Ok(())
//! # }
//! ```
//!
//! If the other program cannot be started, this process resumes the channels itself and releases the hold.

mod block;
mod channel;
mod connection;
mod daemon;
mod descriptor;
mod doorbell;
mod endpoint;
mod endpoint_state;
mod error;
mod fork;
mod half;
mod handover;
mod inner;
mod listener;
mod loan;
mod message;
mod open_blocks;
mod opening;
mod peer;
mod peer_doorbells;
mod ready;
mod saved_channel;
mod session;
mod shared;
mod sockets;
mod stream;
pub mod sync;
mod waiter;

pub use block::{Block, BlockOptions};
pub use channel::Channel;
pub use daemon::{Answer, Daemon, Question};
pub use descriptor::{Keep, keep_descriptors};
pub use endpoint::{AttachOptions, ChannelOptions, Endpoint};
pub use error::Error;
pub use ginnel_layout::channel::ChannelKind;
pub use ginnel_layout::segment::MappingKind;
pub use ginnel_layout::wire::{ErrorCode, Rights, StaysReason};
pub use ginnel_ring::Corrupt;
pub use ginnel_ring::wait::WaitMode;
pub use ginnel_shmem::{Mapping, SharedMemory, SharedSlice};
pub use handover::Token;
pub use listener::Listener;
pub use loan::Loan;
pub use message::{Claim, Message, MessageChannel, MessageReceiver, MessageSender};
pub use opening::Opening;
pub use ready::ReadySet;
pub use saved_channel::SavedChannel;
pub use shared::{ChannelInfo, Counters, Peer};
pub use sockets::{
    Meeting, OpeningSocket, SocketChannel, SocketEnd, SocketEvent, SocketReceiver, SocketSender,
    SocketSession, SocketWaker,
};
pub use stream::{Bytes, Room, StreamChannel, StreamReceiver, StreamSender};

/// Attaches to the segment of `address` (`segment/name`) and connects to the name in it. The endpoint lives as long as
/// the channel. Blocks for the daemon: see [`Endpoint::attach`] and [`Endpoint::connect`].
///
/// # Errors
///
/// [`Error::Name`] if `address` has no slash; otherwise as [`Endpoint::attach`] and [`Endpoint::connect`].
pub fn connect<C: Channel>(address: &str) -> Result<C, Error> {
    let (segment, name) = split(address)?;
    Endpoint::attach(segment)?.connect(name)
}

/// Attaches to the segment of `address` (`segment/name`) and listens at the name in it. The endpoint lives as long as
/// the listener and its channels. Blocks for the daemon: see [`Endpoint::attach`] and [`Endpoint::listen`].
///
/// # Errors
///
/// [`Error::Name`] if `address` has no slash; otherwise as [`Endpoint::attach`] and [`Endpoint::listen`].
pub fn listen<C: Channel>(address: &str) -> Result<Listener<C>, Error> {
    let (segment, name) = split(address)?;
    Endpoint::attach(segment)?.listen(name)
}

/// Splits an address `segment/name` at its first slash.
///
/// # Errors
///
/// [`Error::Name`] if there is no slash.
pub fn split(address: &str) -> Result<(&str, &str), Error> {
    address
        .split_once('/')
        .ok_or(Error::Name { name: address.into(), reason: ginnel_layout::name::NameError::Empty })
}
