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
//! [`Error::WouldBlock`] and have a file descriptor for poll and epoll. An [`Endpoint`] and a [`Listener`] may be used
//! from several threads; each half of a channel belongs to one at a time.
//!
//! When a peer's process or VM dies, what it had sent can still be received, then comes [`Error::PeerDead`]. When
//! the daemon dies, nothing happens; whoever needs it waits for its successor.
//!
//! After `fork`, use an endpoint in one of the two processes only.
#![forbid(unsafe_code)]

mod block;
mod channel;
mod connection;
mod daemon;
mod doorbell;
mod endpoint;
mod error;
pub mod farm;
mod listener;
mod message;
mod stream;
pub mod sync;
mod waiter;

pub use block::{Block, BlockOptions};
pub use channel::{Channel, ChannelInfo, Counters, Peer};
pub use daemon::Daemon;
pub use endpoint::{AttachOptions, ChannelOptions, Endpoint};
pub use error::Error;
pub use ginnel_layout::channel::ChannelKind;
pub use ginnel_layout::segment::MappingKind;
pub use ginnel_layout::wire::{ErrorCode, Rights};
pub use ginnel_ring::Corrupt;
pub use ginnel_ring::wait::WaitMode;
pub use ginnel_shmem::{Mapping, Memory, SharedSlice};
pub use listener::Listener;
pub use message::{Claim, Message, MessageChannel, MessageReceiver, MessageSender};
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
