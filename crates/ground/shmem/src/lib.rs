//! The only access to shared memory.
//!
//! All other crates use the [`SharedMemory`] trait: ordered words, copies, and one fence, at offsets that are checked. There
//! is one implementation for a real mapping ([`Mapping`]), which also serves tests over plain memory, and one for the loom
//! model checker (`LoomMemory`, only with `--cfg loom`). Therefore the ring code that runs in the product is the same code
//! that is modelled, property-tested, sanitized and fuzzed.
//!
//! # Assumptions about Rust's memory model
//!
//! Another process or another VM may write any byte of a mapping at any time. Rust's abstract machine does not know such a
//! writer, so this crate keeps to these rules:
//!
//! - No reference (`&` or `&mut`) to mapped bytes ever exists. All access is through raw pointers in this crate.
//! - Words are accessed with atomics. A peer's store is then like a store of another thread: the load may return any value,
//!   but it returns a value, and the stated order holds. Only a peer that breaks the rules accesses one word with different
//!   sizes, and this affects only the value.
//! - Bulk copies ([`SharedMemory::read`], [`SharedMemory::write`]) of up to [`WORDWISE`] aligned bytes are atomic word by
//!   word. Longer ones are `memcpy`. If a hostile peer writes during a copy out, the copy is some mixture of old and new
//!   bytes, in private memory; we **assume** that `memcpy` on racing bytes does no more than that. LLVM gives racing
//!   non-atomic reads an undefined *value*, not undefined behaviour, and the call is opaque enough that the compiler does not
//!   assume that two reads are equal. Seqlocks in Rust rest on the same assumption. No code reads anything twice and relies
//!   on it being unchanged.
//! - An honest peer never races with us on the bulk bytes of a ring: its release/acquire pairs order the accesses, which loom
//!   and ThreadSanitizer check. [`SharedMemory::read_acquire`] is for memory that others, also honest ones, may write at the
//!   same time: the assumption above holds for it, and its last word says whether the rest is complete.
#![allow(unsafe_code)] // Raw access to mapped memory is the purpose of this crate; the crates above it have none.

mod areas;
mod copy;
pub mod device;
mod fault_in;
mod guard;
mod hold;
#[cfg(loom)]
mod loom_memory;
mod mapping;
mod memory;
mod placed;
mod present;
mod stacks;
pub mod touch;

pub use guard::{
    Sigaction, exchange_action, install_handlers_with, leave_handlers_alone, leave_ignored, look_after,
};
#[cfg(loom)]
pub use loom_memory::{LoomMemory, Order};
pub use mapping::{Mapping, Protection};
pub use memory::{SharedMemory, SharedSlice, WORDWISE};
pub use placed::Placed;
pub use present::{is_mapped, is_private, populate};
pub use stacks::Threads;

#[cfg(test)]
kit::test_that_skips_are_seen!();
