//! The memory of a cache.
//!
//! A server keeps its items in a block of a segment ([`store`]). Processes that have the segment mapped, even
//! read-only, look items up there directly ([`reader`]): a GET needs no server. `ginnel_layout::cache` defines the
//! memory layout.
//!
//! ```text
//! shape    the parts that a block of a given size has
//! item     one item, as it is found in memory and checked
//! store    the server's side: items, versions, the clock
//! log      where items lie: log segments in two queues, and which items have to go
//! ghosts   the hashes of items that were evicted recently
//! reader   the readers' side
//! survey   statistics of a whole cache, for processes that only read it
//! ```
//!
//! # Hostile members and servers
//!
//! A reader only reads, so it cannot harm others. A reader trusts nothing that it reads: it checks each offset and
//! length, no loop is longer than a few buckets, and it discards a copy that the server has changed meanwhile. A
//! hostile server, or a hostile member that may write the segment, can give a reader wrong values and nothing worse.
//! A hostile member cannot make the server access memory outside the block either.

mod ghosts;
mod item;
mod log;
pub mod reader;
pub mod shape;
pub mod store;
pub mod survey;

pub use item::Hasher;
