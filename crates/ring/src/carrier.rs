//! A ring that takes over from another carrier in the middle of a stream of bytes.
//!
//! A connection that began on the kernel's TCP goes on in a ring from a byte that the producer names, and later perhaps in a larger ring
//! in the same way. Nothing is agreed on beforehand, and nobody waits:
//!
//! | producer | consumer |
//! |---|---|
//! | counts the bytes that it sends over the earlier carrier | counts those that it receives |
//! | | [`count`]: says that it counts, and asks [`left`] before and after each receive from the earlier carrier from then on |
//! | once the consumer [counts](is_counted), [`begin`]: names its count, and sends into the ring from then on | receives so many bytes from the earlier carrier, then from the ring |
//!
//! The words are those of the ring that takes over. Once the producer has begun, what it sends over the kernel's connection means nothing
//! but "wake up", and the consumer drops it.
//!
//! If the earlier carrier is a ring, both sides count in it, from its first byte. The producer publishes nothing more there, and may
//! finish it. A consumer that finds it finished or its producer dead asks [`left`] again before it believes that this was the end: the
//! producer has begun before. A sleeper has armed the ring that it knows, so the producer wakes the consumer once after it has begun,
//! whether it is armed or not.
//!
//! A producer says by [`want_more`] that its ring is too small. That is a hint: whoever says it needlessly gets a ring that it does not need.

use ginnel_layout::ring::{BASE, READY, WANTED};
use ginnel_shmem::Memory;

use crate::error::Corrupt;

/// What READY says.
const COUNTS: u32 = 1;
/// What WANTED says.
const WANTS: u32 = 1;

/// The producer would rather have a larger ring.
pub fn want_more<M: Memory>(memory: &M) {
    memory.store_relaxed_u32(WANTED, WANTS);
}

/// Whether the producer has said so. One load of a line that nobody writes while data flows.
#[inline]
pub fn wants_more<M: Memory>(memory: &M) -> bool {
    memory.load_relaxed_u32(WANTED) == WANTS
}

/// The consumer says that it counts. From now on it must not take a byte from the earlier carrier without [`left`].
pub fn count<M: Memory>(memory: &M) {
    memory.attend();
    // ORDER carrier.ready: what the consumer has received without looking. Pairs with: `is_counted`.
    memory.store_release_u32(READY, COUNTS);
}

/// Whether the producer may [`begin`].
pub fn is_counted<M: Memory>(memory: &M) -> bool {
    // ORDER carrier.ready: see `count`.
    memory.load_acquire_u32(READY) == COUNTS
}

/// The producer has sent `sent` bytes over the earlier carrier and sends no more there. To be called before anything is
/// published in the ring, and before the first wake.
pub fn begin<M: Memory>(memory: &M, sent: u64) {
    memory.attend();
    // ORDER carrier.base: all that was sent before, and nothing of what comes after. Pairs with: `left`.
    memory.store_release_u64(BASE, sent.saturating_add(1));
}

/// How many bytes of the stream the earlier carrier still has for a consumer that has received `received` of them there. `Some(0)`:
/// the ring goes on from here. `None`: the producer has not begun.
///
/// To be asked before a receive, which may take no more, and again after it: bytes beyond mean nothing, because the producer may have
/// begun meanwhile. Error: the producer names a byte that has been received as the ring's first.
pub fn left<M: Memory>(memory: &M, received: u64) -> Result<Option<u64>, Corrupt> {
    // ORDER carrier.base: see `begin`.
    let Some(base) = memory.load_acquire_u64(BASE).checked_sub(1) else { return Ok(None) };
    base.checked_sub(received).map(Some).ok_or(Corrupt::Base { base, received })
}
