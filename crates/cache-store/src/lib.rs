//! The memory of a cache.
//!
//! A server keeps its items in a block of a segment ([`store`]). Others that have the segment, if only to read it, look items up there
//! themselves ([`reader`]): a GET needs no server. `ginnel_layout::cache` says what lies where.
//!
//! ```text
//! shape    which parts a block of some size gets
//! item     one item, as it is found in memory and checked
//! store    the server's side: items, versions, the clock
//! log      where items lie: log segments in two queues, and which items have to go
//! ghosts   which items have gone not long ago
//! reader   the readers' side
//! survey   how the whole looks to a reader
//! ```
//!
//! # Who can harm whom
//!
//! A reader only reads, so it harms nobody. A reader believes nothing that it reads: each offset and length is checked, no loop is longer than
//! a few buckets, and a copy that the server has changed meanwhile is thrown away. A hostile server, or a hostile member that may write
//! the segment, can give a reader wrong values and nothing worse. Neither can a hostile member make the server access anything outside
//! of the block.

mod ghosts;
mod item;
mod log;
pub mod reader;
pub mod shape;
pub mod store;
pub mod survey;

pub use item::Hasher;
