//! The only door to shared memory.
//!
//! Everything above works on the [`SharedMemory`] trait: ordered words, copies, and one fence, at offsets that are checked.
//! There is one implementation for a real mapping ([`Mapping`]), which also serves tests over plain memory, and one
//! for the loom model checker (`LoomMemory`, only with `--cfg loom`). So the ring code that runs in the product is
//! the code that is modelled, property-tested, sanitized and fuzzed.
//!
//! # What is assumed of Rust's memory model
//!
//! Another process, another VM, may write any byte of a mapping at any time. Rust's abstract machine knows no such
//! writer, so we hold on to this:
//!
//! - No reference (`&` or `&mut`) to mapped bytes ever exists. All access is through raw pointers in this crate.
//! - Words are accessed with atomics. A peer's store is then like another thread's: any value may come, but a value
//!   comes, and the stated order holds. Mixed sizes do not occur on one word except by a peer that breaks the rules,
//!   and what it then breaks is the value.
//! - Bulk copies ([`SharedSharedMemory::read`], [`SharedSharedMemory::write`]) of up to [`WORDWISE`] aligned bytes are atomic word by word.
//!   Longer ones are `memcpy`. If a hostile peer writes while we copy out, the copy is some mixture of old and new
//!   bytes, in private memory; we **assume** that `memcpy` on racing bytes does no more than that. LLVM gives racing
//!   non-atomic reads an undefined *value*, not undefined behaviour, and the call is opaque enough that no
//!   assumption of equality between two reads is made; this is the assumption that seqlocks in Rust live by. Nothing
//!   is read twice on the belief that it has not changed.
//! - An honest peer never races with us on the bulk bytes of a ring: its release/acquire pairs order them, which loom and
//!   ThreadSanitizer check. [`SharedSharedMemory::read_acquire`] is for memory that others may write at that moment, honest ones too: the
//!   assumption above holds for it, and its last word says whether the rest is whole.
#![allow(unsafe_code)] // Raw access to mapped memory is what this crate is for; nobody above has any.

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

pub use guard::leave_handlers_alone;
#[cfg(loom)]
pub use loom_memory::{LoomMemory, Order};
pub use mapping::{Mapping, Protection};
pub use memory::{SharedMemory, SharedSlice, WORDWISE};
pub use placed::Placed;
pub use present::{is_mapped, is_private, populate};
pub use stacks::Threads;
