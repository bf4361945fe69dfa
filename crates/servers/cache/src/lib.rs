//! `ginnel-cache`: a cache server that speaks memcached's protocol, and whose items clients can read directly from memory.
//!
//! ```text
//! flags       the command line
//! block       creates or opens the block that holds the items
//! engine      carries out requests on the items
//! numbers     the counters and settings, and `stats`
//! hot         finds the keys that are requested most often
//! peers       the addresses of the clients that have connected over TCP
//! talk        the protocol of one client: request bytes in, answer bytes out
//! connection  one client: its socket or channel and its buffers
//! server      the event loop for all clients, and the cache's clock
//! ```

pub mod block;
mod connection;
pub mod engine;
pub mod flags;
mod hot;
pub mod numbers;
mod peers;
pub mod server;
pub mod talk;
