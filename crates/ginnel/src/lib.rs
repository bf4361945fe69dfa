//! Channels between virtual machines on one host, and between them and the host, around the hypervisor, the kernel and
//! every daemon.
//!
//! A process attaches to a *segment*, which makes it an [`Endpoint`]. Endpoints of one segment listen and connect by
//! name; what they get is a [`MessageChannel`] or a [`StreamChannel`]: a pair of rings in shared memory that they
//! work on alone. The daemon is needed to open and to close a channel, not to use it.
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
//! # Blocking, threads, death
//!
//! Every wait is adaptive unless told otherwise ([`WaitMode`]): it looks for a while, then sleeps on a doorbell.
//! Timeouts are set per half ([`MessageReceiver::set_timeout`] and so on); non-blocking halves return
//! [`Error::WouldBlock`] and have a file descriptor for poll and epoll. One thread waits for tens of thousands of halves with a
//! [`ReadySet`]. An [`Endpoint`] and a [`Listener`] may be used
//! from several threads; each half of a channel belongs to one at a time.
//!
//! When a peer's process or VM dies, what it had sent can still be received, then comes [`Error::PeerDead`], or
//! [`Error::Finished`] if the peer had finished sending. When the daemon dies, nothing
//! happens; whoever needs it waits for its successor.
//!
//! Calls that ask the daemon say so or open something: [`Endpoint::attach`], [`Endpoint::adopt`], [`Endpoint::hold`],
//! [`Endpoint::resume`], [`Endpoint::listen`], [`Endpoint::connect`], those
//! that open, name, resize, grant or close blocks, those that open locks, `register` of the halves, [`Endpoint::inspect`], and of a
//! [`Daemon`] `connect`, `inspect` and `admin`. They wait for a slow or restarted daemon up to 10 seconds, then return
//! [`Error::TimedOut`] or [`Error::NoDaemon`]; what is granted later is given back. No other call waits for the daemon. What a `drop` has to tell a daemon that does not listen just now is told by the
//! next call that talks to it.
//!
//! # Choosing a segment
//!
//! A [`Daemon`] is a session without a segment: it tells which segments this user may attach to, and becomes an [`Endpoint`] of the
//! one that is chosen ([`Daemon::attach`]). Calls named `begin_` do not wait: connecting and attaching are then an [`Opening`], and
//! answers come from [`Daemon::poll`].
//!
//! # After `fork`
//!
//! Parent and child are the same endpoint, which lives until both have ended or dropped it, so a program may put itself
//! into the background with open channels. The rules:
//!
//! - A channel, listener, block or lock that was open before the fork is used by one of the two processes from then on.
//! - It belongs to the process that has opened it, as long as that lives. Meanwhile dropping it in a child tells neither the
//!   peer nor the daemon, and a child cannot accept at such a listener. Once that process has ended, it belongs to its
//!   children.
//! - What a process opens after the fork is its own.
//!
//! # Executing another program, and handing over
//!
//! An endpoint ends with its last process, and a process that executes another program has lost its memory. So that neither
//! ends a connection, the endpoint is held for a while, its channels are saved, and the next program or process adopts it:
//!
//! ```no_run
//! # use ginnel::{Endpoint, MessageChannel, SavedChannel, Token};
//! # use std::time::Duration;
//! # fn before(endpoint: Endpoint, channel: MessageChannel) -> Result<(), ginnel::Error> {
//! // Before: both texts go to whoever goes on, say in the environment of the next program.
//! let token = endpoint.hold(Duration::from_secs(5))?;
//! let texts = (token.reveal(), channel.save().to_string());
//! # Ok(())
//! # }
//! # fn after(texts: (String, String)) -> Result<(), ginnel::Error> {
//! // After: nothing that was on its way is lost or comes twice, and the peer has noticed nothing.
//! let endpoint = Endpoint::adopt(&texts.0.parse::<Token>()?)?;
//! let mut channel: MessageChannel = endpoint.resume(&texts.1.parse::<SavedChannel>()?)?;
//! # Ok(())
//! # }
//! ```
//!
//! Should the other program not start, this process resumes the channels by itself and releases the hold.

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
mod opening;
mod peer;
mod peer_doorbells;
mod ready;
mod session;
mod sockets;
mod stream;
pub mod sync;
mod waiter;

pub use block::{Block, BlockOptions};
pub use channel::{Channel, ChannelInfo, Counters, Peer};
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
pub use handover::{SavedChannel, Token};
pub use listener::Listener;
pub use loan::Loan;
pub use message::{Claim, Message, MessageChannel, MessageReceiver, MessageSender};
pub use opening::Opening;
pub use ready::ReadySet;
pub use sockets::{
    Meeting, OpeningSocket, SocketChannel, SocketEnd, SocketEvent, SocketReceiver, SocketSender,
    SocketSession, SocketWaker,
};
pub use stream::{Bytes, Room, StreamChannel, StreamReceiver, StreamSender};

/// Attaches to the segment of `address` (`segment/name`) and connects to the name in it. The endpoint lives as long
/// as the channel.
pub fn connect<C: Channel>(address: &str) -> Result<C, Error> {
    let (segment, name) = split(address)?;
    Endpoint::attach(segment)?.connect(name)
}

/// Attaches to the segment of `address` (`segment/name`) and listens at the name in it. The endpoint lives as long as
/// the listener and its channels.
pub fn listen<C: Channel>(address: &str) -> Result<Listener<C>, Error> {
    let (segment, name) = split(address)?;
    Endpoint::attach(segment)?.listen(name)
}

/// Splits `segment/name`.
pub fn split(address: &str) -> Result<(&str, &str), Error> {
    address
        .split_once('/')
        .ok_or(Error::Name { name: address.into(), reason: ginnel_layout::name::NameError::Empty })
}
