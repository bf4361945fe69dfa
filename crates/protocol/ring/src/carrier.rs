//! A ring that takes over from another carrier in the middle of a stream of bytes, and gives the stream back to it.
//!
//! A connection that began on the kernel's TCP continues in a ring from a byte that the producer names, and perhaps later in
//! a larger ring in the same way. The two sides agree on nothing beforehand, and neither waits for the other:
//!
//! | producer | consumer |
//! |---|---|
//! | counts the bytes that it sends over the earlier carrier | counts the bytes that it receives from it |
//! | | calls [`count`], which says that it counts, and in which carrier; from then on calls [`left`] before and after each receive from that carrier |
//! | once the consumer [counts](is_counted), calls [`begin`] with its count, and sends into the ring from then on | receives that many bytes from the earlier carrier, then from the ring |
//!
//! The words are those of the ring that takes over. Once the producer has begun, each byte that it sends over the kernel's
//! connection is a *wake byte*: it only wakes the consumer, which drops it. The kernel's count includes these bytes.
//!
//! If the earlier carrier is a ring, both sides count the bytes of that ring, from its first byte. The producer publishes
//! nothing more there, and may finish that ring. A consumer that finds the earlier ring finished, or its producer dead, calls
//! [`left`] again before it treats this as the end of the stream, since the producer has begun before that. A sleeping
//! consumer has armed the ring that it knows; therefore the producer wakes the consumer once after it has begun, whether the
//! consumer is armed or not.
//!
//! A producer calls [`want_more`] to say that its ring is too small. This is a hint: a producer that says it needlessly gets
//! a ring that it does not need.
//!
//! A producer may go back to the kernel's connection at any time, without the consumer's help:
//!
//! | producer | consumer |
//! |---|---|
//! | calls [`end_wakes`] with the bytes that the kernel has carried, and sends no more wake bytes | |
//! | calls [`give_back`] with the bytes that the ring and the kernel have carried, and sends over the kernel's connection from then on | |
//! | | finds the ring empty, finished or its producer dead, and calls [`given_back`], which returns this place: drops the remaining wake bytes, then receives from the kernel |
//!
//! A consumer that drops wake bytes calls [`wakes_end`] after each receive: bytes beyond that place are not wake bytes. (The
//! producer names the place before it sends anything other than wake bytes, so a consumer that has received such a byte sees
//! the place.)
//!
//! Between the two calls, the producer may send bytes once more over the kernel's connection that it has put into the ring
//! and that the consumer has not released. If the kernel takes all of them, the producer says so in the place: they are the
//! last `repeated` bytes of the ring, and the consumer drops those that it already has from the ring. Therefore the consumer
//! may leave the ring with unread bytes, for example because it passes the connection to another process, which has no ring:
//! the bytes that it has not received are in the kernel's stream again. If the kernel takes fewer, they are of no use, and
//! the producer counts them as wake bytes. The consumer asks the producer to go back:
//!
//! | producer | consumer |
//! |---|---|
//! | | calls [`recall`] |
//! | calls [`is_recalled`] now and then, and [`begin`] calls it too: goes back as above | |
//! | | finds, after [`recall`], that the producer has not begun ([`left`]): it never will, and the kernel carries the stream on |

use crate::error::Corrupt;
use ginnel_layout::ring::{BASE, END, READY, RECALL, REPEATED, RESUME, TAKEN, WANTED};
use ginnel_shmem::SharedMemory;

/// Value of the word WANTED.
const WANTS: u32 = 1;
/// Value of the word RECALL.
const RECALLS: u32 = 1;

/// The carrier that a ring takes over from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Earlier {
    /// The kernel's connection.
    Kernel = 1,
    /// Another ring.
    Ring = 2,
}

/// Tells the consumer that the producer wants a larger ring.
pub fn want_more<M: SharedMemory>(memory: &M) {
    memory.store_relaxed_u32(WANTED, WANTS);
}

/// Returns whether the producer wants a larger ring. This is one load of a cache line that neither side writes while data
/// flows.
#[inline]
pub fn wants_more<M: SharedMemory>(memory: &M) -> bool {
    memory.load_relaxed_u32(WANTED) == WANTS
}

/// Tells the producer that the consumer counts the bytes of the earlier carrier. From now on, the consumer must not take a
/// byte from there without calling [`left`].
pub fn count<M: SharedMemory>(memory: &M, earlier: Earlier) {
    memory.attend();
    // ORDER carrier.ready: what the consumer has received without looking comes before this. Pairs with: `is_counted`.
    memory.store_release_u32(READY, earlier as u32);
}

/// Returns whether the producer may call [`begin`] with its count of this carrier.
pub fn is_counted<M: SharedMemory>(memory: &M, earlier: Earlier) -> bool {
    // ORDER carrier.ready: see `count`.
    memory.load_acquire_u32(READY) == earlier as u32
}

/// Records that the producer has sent `sent` bytes over the earlier carrier and sends no more there. The producer calls this
/// before it publishes anything in the ring, and before the first wake. Returns false if the consumer has [recalled](recall)
/// the producer meanwhile, perhaps before the consumer could see that the producer has begun. Then the producer must not
/// publish anything in the ring nor send a wake byte, and must give the ring back at once.
#[must_use = "the consumer may have recalled the producer"]
pub fn begin<M: SharedMemory>(memory: &M, sent: u64) -> bool {
    memory.attend();
    // ORDER carrier.base: all that was sent before comes before this, and all that is sent later comes after it. Pairs with:
    // `left`.
    memory.store_release_u64(BASE, sent.saturating_add(1));
    // ORDER carrier.recall: both sides write before they read. So either the consumer sees that the producer has begun, or
    // the producer sees that it is recalled. Pairs with: `recall`.
    memory.full_fence();
    !is_recalled(memory)
}

/// Returns how many bytes of the stream the earlier carrier still has for a consumer that has received `received` bytes from
/// it. `Some(0)`: the stream continues in the ring. `None`: the producer has not begun.
///
/// The consumer calls this before a receive, which must not take more, and again after it, because the producer may have
/// begun meanwhile: bytes beyond the returned number are not part of the stream. Error: the ring's first byte, according to
/// the producer, has been received already.
pub fn left<M: SharedMemory>(memory: &M, received: u64) -> Result<Option<u64>, Corrupt> {
    // ORDER carrier.base: see `begin`.
    let Some(base) = memory.load_acquire_u64(BASE).checked_sub(1) else { return Ok(None) };
    base.checked_sub(received).map(Some).ok_or(Corrupt::Base { base, received })
}

/// The place at which a stream continues over the kernel's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bytes that the ring has carried.
    pub ring: u64,
    /// Bytes that the kernel has carried, wake bytes included.
    pub kernel: u64,
    /// The last `repeated` bytes of the ring come once more over the kernel's connection from there on.
    pub repeated: u64,
}

/// Records that the producer has sent `kernel` bytes over the kernel's connection, and that no wake byte follows them. The
/// producer calls this before it sends anything else there.
pub fn end_wakes<M: SharedMemory>(memory: &M, kernel: u64) {
    memory.attend();
    // ORDER carrier.resume: this comes before all that is sent over the kernel's connection from now on. Pairs with:
    // `wakes_end`.
    memory.store_release_u64(RESUME, kernel.saturating_add(1));
}

/// Returns how many bytes of the kernel's connection may be wake bytes, if the producer has said so. The consumer calls this
/// after each receive of wake bytes. The number can grow later, but not shrink.
pub fn wakes_end<M: SharedMemory>(memory: &M) -> Option<u64> {
    // ORDER carrier.resume: see `end_wakes`.
    memory.load_acquire_u64(RESUME).checked_sub(1)
}

/// Records that the producer sends no more into the ring. The producer calls this after its last publish and after
/// [`end_wakes`], and before it sends bytes of the stream over the kernel's connection that are in no ring.
pub fn give_back<M: SharedMemory>(memory: &M, place: Place) {
    memory.attend();
    memory.store_relaxed_u64(RESUME, place.kernel.saturating_add(1));
    memory.store_relaxed_u64(REPEATED, place.repeated);
    // ORDER carrier.end: the other words, and all published data, are visible before this. Pairs with: `given_back`.
    memory.store_release_u64(END, place.ring.saturating_add(1));
}

/// Returns the place at which the producer has left the ring for the kernel's connection; `None` if it has not.
pub fn given_back<M: SharedMemory>(memory: &M) -> Option<Place> {
    // ORDER carrier.end: see `give_back`.
    let ring = memory.load_acquire_u64(END).checked_sub(1)?;
    let (wakes_end, repeated) = (memory.load_relaxed_u64(RESUME), memory.load_relaxed_u64(REPEATED));
    Some(Place { ring, kernel: wakes_end.saturating_sub(1), repeated })
}

/// Records that the consumer's program has received `position` bytes of the ring. This does not release their room, which
/// goes back later. It is meant for a producer whose consumer has died. It costs one store to a cache line at which the
/// producer does not look while data flows.
#[inline]
pub fn note_taken<M: SharedMemory>(memory: &M, position: u64) {
    memory.store_relaxed_u64(TAKEN, position);
}

/// Returns how many bytes of the ring the consumer's program has received. The producer asks when the consumer has ended.
pub fn taken<M: SharedMemory>(memory: &M) -> u64 {
    memory.load_relaxed_u64(TAKEN)
}

/// Asks the producer to go back to the kernel's connection. If the producer had not begun, the consumer calls [`left`]
/// afterwards, whose result is then final.
pub fn recall<M: SharedMemory>(memory: &M) {
    memory.attend();
    memory.store_relaxed_u32(RECALL, RECALLS);
    // ORDER carrier.recall: see `begin`. Pairs with: `begin`.
    memory.full_fence();
}

/// Returns whether the consumer has asked the producer to go back to the kernel's connection.
pub fn is_recalled<M: SharedMemory>(memory: &M) -> bool {
    memory.load_relaxed_u32(RECALL) == RECALLS
}
