//! The connection manager: requests, replies and disconnections of queue pairs, as librdmacm's programs know them.
//!
//! A listener has a name in the segment for each of its addresses, so the daemon is the book of who has which, and gives an address and a
//! port to one listener only. A connection is a channel to such a name; its messages are those of InfiniBand's communication management
//! (InfiniBand Architecture Specification 1.2.1, 12.6), and its end is the end of the process at the other side.
//!
//! ```text
//! names         the names of addresses
//! meet          listening and reaching by these names
//! message       what goes through a channel
//! hello         what goes through the stream of an rsocket before its bytes
//! manager       listeners, connections, and the thread that hears for all of them
//! ```
//!
//! Rsockets have the same names, because they share the port space of `RDMA_PS_TCP` with identifiers as they do on a real adapter. But their
//! channels are streams, so an identifier that asks an rsocket for a connection is refused, and the other way round.

pub mod hello;
pub mod manager;
pub mod meet;
pub mod message;
pub mod names;
