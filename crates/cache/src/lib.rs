//! `ginnel-cache`: a cache server that speaks memcached's protocol, and whose items others read out of memory.
//!
//! ```text
//! flags       the command line
//! block       the block in which the items lie
//! engine      what requests do to the items
//! numbers     what is counted, and `stats`
//! hot         which keys are asked for most
//! talk        one client's requests, from bytes to bytes
//! connection  one client: its bytes, and where they come from
//! server      all clients, and the clock
//! ```

pub mod block;
mod connection;
pub mod engine;
pub mod flags;
mod hot;
pub mod numbers;
pub mod server;
pub mod talk;
