//! A ring that takes over from another carrier in the middle of a stream of bytes, and gives back to it.
//!
//! A connection that began on the kernel's TCP goes on in a ring from a byte that the producer names, and later perhaps in a larger ring
//! in the same way. Nothing is agreed on beforehand, and nobody waits:
//!
//! | producer | consumer |
//! |---|---|
//! | counts the bytes that it sends over the earlier carrier | counts those that it receives |
//! | | [`count`]: says that it counts, and in which carrier, and asks [`left`] before and after each receive from that one |
//! | once the consumer [counts](is_counted), [`begin`]: names its count, and sends into the ring from then on | receives so many bytes from the earlier carrier, then from the ring |
//!
//! The words are those of the ring that takes over. Once the producer has begun, what it sends over the kernel's connection means nothing
//! but "wake up", and the consumer drops it. The kernel's count includes these bytes.
//!
//! If the earlier carrier is a ring, both sides count in it, from its first byte. The producer publishes nothing more there, and may
//! finish it. A consumer that finds it finished or its producer dead asks [`left`] again before it believes that this was the end: the
//! producer has begun before. A sleeper has armed the ring that it knows, so the producer wakes the consumer once after it has begun,
//! whether it is armed or not.
//!
//! A producer says by [`want_more`] that its ring is too small. That is a hint: whoever says it needlessly gets a ring that it does not need.
//!
//! A producer may go back to the kernel's connection at any time, without the consumer's help:
//!
//! | producer | consumer |
//! |---|---|
//! | [`end_wakes`]: names what the kernel has carried, and sends no more wake bytes | |
//! | [`give_back`]: names what the ring and the kernel have carried, and sends over the kernel's connection from then on | |
//! | | finds the ring empty, finished or its producer dead, and [`given_back`] names this place: drops what it has not dropped of the wake bytes, then receives from the kernel |
//!
//! A consumer that drops wake bytes asks [`wakes_end`] after each receive: what is beyond that place is not a wake byte. (The producer
//! names the place before it sends anything but wake bytes, so whoever has received such a byte sees the place.)
//!
//! Between the two calls, the producer may send bytes once more over the kernel's connection that it has put into the ring and that the
//! consumer has not released. If the kernel takes all of them, the producer says so with the place: the ring's last `repeated` bytes. The
//! consumer drops those that it has from the ring. So it may leave the ring with bytes unread, because the connection is to be another
//! process's, which has no ring: what it has not received is in the kernel's stream again. If the kernel takes fewer, they are of no use:
//! the producer counts them as wake bytes. The consumer asks the producer to go back:
//!
//! | producer | consumer |
//! |---|---|
//! | | [`recall`] |
//! | finds itself [recalled](is_recalled), now and then and when it [begins](begin): goes back as above | |
//! | | finds, after [`recall`], that the producer has not begun ([`left`]): it never will, and the kernel goes on |

use ginnel_layout::ring::{BASE, END, READY, RECALL, REPEATED, RESUME, TAKEN, WANTED};
use ginnel_shmem::SharedMemory;

use crate::error::Corrupt;

/// What WANTED says.
const WANTS: u32 = 1;
/// What RECALL says.
const RECALLS: u32 = 1;

/// The carrier before a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Earlier {
    /// The kernel's connection.
    Kernel = 1,
    /// Another ring.
    Ring = 2,
}

/// The producer would rather have a larger ring.
pub fn want_more<M: SharedMemory>(memory: &M) {
    memory.store_relaxed_u32(WANTED, WANTS);
}

/// Whether the producer has said so. One load of a line that nobody writes while data flows.
#[inline]
pub fn wants_more<M: SharedMemory>(memory: &M) -> bool {
    memory.load_relaxed_u32(WANTED) == WANTS
}

/// The consumer says that it counts what the earlier carrier carries. From now on it must not take a byte from there without [`left`].
pub fn count<M: SharedMemory>(memory: &M, earlier: Earlier) {
    memory.attend();
    // ORDER carrier.ready: what the consumer has received without looking. Pairs with: `is_counted`.
    memory.store_release_u32(READY, earlier as u32);
}

/// Whether the producer may [`begin`], by its count in this carrier.
pub fn is_counted<M: SharedMemory>(memory: &M, earlier: Earlier) -> bool {
    // ORDER carrier.ready: see `count`.
    memory.load_acquire_u32(READY) == earlier as u32
}

/// The producer has sent `sent` bytes over the earlier carrier and sends no more there. To be called before anything is
/// published in the ring, and before the first wake. False if the consumer has [`recall`]ed it meanwhile, perhaps before it could see that
/// the producer has begun: then nothing may be published in the ring, nor any wake byte sent, and the producer gives it back at once.
#[must_use = "the consumer may have recalled the producer"]
pub fn begin<M: SharedMemory>(memory: &M, sent: u64) -> bool {
    memory.attend();
    // ORDER carrier.base: all that was sent before, and nothing of what comes after. Pairs with: `left`.
    memory.store_release_u64(BASE, sent.saturating_add(1));
    // ORDER carrier.recall: either the consumer sees that the producer has begun, or the producer sees that it is recalled, because both
    // write before they read. Pairs with: `recall`.
    memory.full_fence();
    !is_recalled(memory)
}

/// How many bytes of the stream the earlier carrier still has for a consumer that has received `received` of them there. `Some(0)`:
/// the ring goes on from here. `None`: the producer has not begun.
///
/// To be asked before a receive, which may take no more, and again after it: bytes beyond mean nothing, because the producer may have
/// begun meanwhile. Error: the producer names a byte that has been received as the ring's first.
pub fn left<M: SharedMemory>(memory: &M, received: u64) -> Result<Option<u64>, Corrupt> {
    // ORDER carrier.base: see `begin`.
    let Some(base) = memory.load_acquire_u64(BASE).checked_sub(1) else { return Ok(None) };
    base.checked_sub(received).map(Some).ok_or(Corrupt::Base { base, received })
}

/// Where a stream goes on over the kernel's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bytes that the ring has carried.
    pub ring: u64,
    /// Bytes that the kernel has carried, wake bytes included.
    pub kernel: u64,
    /// The last bytes of the ring, so many, come once more over the kernel's connection from there on.
    pub repeated: u64,
}

/// The producer has sent `kernel` bytes over the kernel's connection, and no wake byte comes after them. To be called before it sends
/// anything else there.
pub fn end_wakes<M: SharedMemory>(memory: &M, kernel: u64) {
    memory.attend();
    // ORDER carrier.resume: before what is sent over the kernel's connection. Pairs with: `wakes_end`.
    memory.store_release_u64(RESUME, kernel.saturating_add(1));
}

/// How many bytes of the kernel's connection may be wake bytes, if the producer has said so. To be asked after each receive of wake bytes.
/// It may be more later, but not less.
pub fn wakes_end<M: SharedMemory>(memory: &M) -> Option<u64> {
    // ORDER carrier.resume: see `end_wakes`.
    memory.load_acquire_u64(RESUME).checked_sub(1)
}

/// The producer sends no more into the ring. To be called after its last publish and after [`end_wakes`], and before it sends bytes of the
/// stream over the kernel's connection that are in no ring.
pub fn give_back<M: SharedMemory>(memory: &M, place: Place) {
    memory.attend();
    memory.store_relaxed_u64(RESUME, place.kernel.saturating_add(1));
    memory.store_relaxed_u64(REPEATED, place.repeated);
    // ORDER carrier.end: the other words, and all that was published. Pairs with: `given_back`.
    memory.store_release_u64(END, place.ring.saturating_add(1));
}

/// Where the producer has left the ring for the kernel's connection; `None` if it has not.
pub fn given_back<M: SharedMemory>(memory: &M) -> Option<Place> {
    // ORDER carrier.end: see `give_back`.
    let ring = memory.load_acquire_u64(END).checked_sub(1)?;
    let (wakes_end, repeated) = (memory.load_relaxed_u64(RESUME), memory.load_relaxed_u64(REPEATED));
    Some(Place { ring, kernel: wakes_end.saturating_sub(1), repeated })
}

/// The consumer's program has received so many bytes of the ring. Says nothing of their room, which goes back later: this is for a producer
/// whose consumer has died. One store to a line that the producer does not look at while data flows.
#[inline]
pub fn note_taken<M: SharedMemory>(memory: &M, position: u64) {
    memory.store_relaxed_u64(TAKEN, position);
}

/// How many bytes of the ring the consumer's program has received. To be asked when the consumer has ended.
pub fn taken<M: SharedMemory>(memory: &M) -> u64 {
    memory.load_relaxed_u64(TAKEN)
}

/// The consumer asks the producer to go back to the kernel's connection. To be followed by [`left`] if the producer had not begun: what that
/// says then is final.
pub fn recall<M: SharedMemory>(memory: &M) {
    memory.attend();
    memory.store_relaxed_u32(RECALL, RECALLS);
    // ORDER carrier.recall: see `begin`. Pairs with: `begin`.
    memory.full_fence();
}

/// Whether the consumer has asked for that.
pub fn is_recalled<M: SharedMemory>(memory: &M) -> bool {
    memory.load_relaxed_u32(RECALL) == RECALLS
}
