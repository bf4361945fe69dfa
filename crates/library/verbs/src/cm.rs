//! The connection manager: connection requests, replies and disconnections of queue pairs, as programs use them through librdmacm.
//!
//! A listener has one name in the segment for each of its addresses. The daemon therefore keeps track of the addresses in use, and gives
//! each address and port to one listener only. A connection is a channel to such a name. Its messages follow InfiniBand's communication
//! management (InfiniBand Architecture Specification 1.2.1, 12.6). It ends when the process at the other side ends.
//!
//! ```text
//! names         the names of addresses in the segment
//! rendezvous    listening and connecting by these names
//! message       the messages on a channel
//! hello         what the two sides of an rsocket exchange before the program's bytes
//! manager       listeners, connections, and the thread that receives for all of them
//! ```
//!
//! Rsockets use the same names, because they share the port space `RDMA_PS_TCP` with `rdma_cm_id`s, as on a real adapter. But their
//! channels are byte streams, so an `rdma_cm_id` that connects to an rsocket is refused, and the other way round.

pub mod hello;
pub mod manager;
pub mod message;
pub mod names;
pub mod rendezvous;
