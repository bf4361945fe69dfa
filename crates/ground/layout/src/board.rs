//! A readiness board: a page on which the peers of an endpoint mark which rings have something for it. With a board, one
//! thread can wait for tens of thousands of rings without looking at each.
//!
//! The daemon gives a board, which is a page of the segment, to an endpoint. It has [`LANES`] lanes. Each lane belongs to one
//! sleeper, and each ring that the sleeper waits for has a slot in its lane:
//!
//! ```text
//! offset   writer     word
//! 0x000    sleeper    armed    u32  wake token of the sleeper, 0 = awake
//! 0x040    all peers* summary  u64  bit w: there may be something in word w
//! 0x080    all peers* bits     u64 x 64  bit b of word w: slot w * 64 + b has something
//! 0x280               the next lane
//! ```
//!
//! `*` Peers set bits, and the sleeper clears them, each with an atomic read-modify-write operation. So the cache lines of these
//! words have many writers.
//!
//! A side of a ring that sleeps on a board records its slot beside its wake token: [`crate::ring::DATA_NOTIFY`] or
//! [`crate::ring::SPACE_NOTIFY`] holds a [`Place`]. A peer that finds the side asleep sets the slot's bit, then the bit in
//! the summary, and rings the doorbell only if the lane is armed.
//!
//! A member of the segment can write anything to a board. If it sets bits wrongly, the sleeper looks at rings in vain. If it
//! clears bits, wake-ups within this segment are lost.

use crate::{CACHE_LINE, PAGE};

/// Bytes of a board.
pub const LEN: usize = PAGE;
/// Number of lanes of a board.
pub const LANES: usize = 6;
/// Number of slots of a lane.
pub const SLOTS: usize = WORDS * 64;
/// Number of words of bits in a lane, one for each bit of its summary.
pub const WORDS: usize = 64;
/// Bytes of a lane.
pub const LANE: usize = BITS + WORDS * 8;

/// Offset in a lane of the sleeper's wake token; 0 while it is awake.
pub const ARMED: usize = 0x000;
/// Offset in a lane of the summary.
pub const SUMMARY: usize = 0x040;
/// Offset in a lane of the first word of bits.
pub const BITS: usize = 0x080;

words!(LANE;
    sleeper { ARMED: u32 }
    summary { SUMMARY: u64 }
    bits { BITS: [u64; WORDS] }
);
const _: () = {
    assert!(LANE == 0x280 && LANE.is_multiple_of(CACHE_LINE));
    assert!(LANES * LANE <= LEN && (LANES + 1) * LANE > LEN);
};

/// A slot of a lane, as it is stored in a notify word of a ring. Zero is no slot, because no board lies at the start of a
/// segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place(pub u64);

impl Place {
    /// No slot: the side sleeps at its doorbell.
    pub const NONE: Self = Self(0);

    /// No slot either, for a side of a socket's ring. Such a side is woken by a byte on the kernel's connection if this word
    /// is zero; with this value, it is woken by its doorbell. (The value is free because the segment's header lies where this
    /// slot would be.)
    pub const DOORBELL: Self = Self(1);

    const SLOT_BITS: u32 = SLOTS.trailing_zeros();

    /// Returns slot `slot` of the lane at offset `lane` in the segment, which is a multiple of a cache line.
    pub const fn new(lane: u64, slot: usize) -> Self {
        Self((lane / CACHE_LINE as u64) << Self::SLOT_BITS | (slot % SLOTS) as u64)
    }

    /// Returns the offset of the lane from the start of the segment. It may be any number, since a peer may have written it.
    pub const fn lane(self) -> u64 {
        (self.0 >> Self::SLOT_BITS) * CACHE_LINE as u64
    }

    /// Returns the slot, which is always below [`SLOTS`].
    pub const fn slot(self) -> usize {
        (self.0 % SLOTS as u64) as usize
    }

    /// Returns the offset of the board that contains the lane. `None` if no lane of a board begins at that offset.
    pub const fn board(self) -> Option<u64> {
        let board = self.lane() / PAGE as u64 * PAGE as u64;
        let at = (self.lane() - board) as usize;
        if at.is_multiple_of(LANE) && at / LANE < LANES { Some(board) } else { None }
    }
}

const _: () = {
    let place = Place::new(0x1234_5000 + 2 * LANE as u64, 4095);
    assert!(place.lane() == 0x1234_5500 && place.slot() == 4095);
    assert!(matches!(place.board(), Some(0x1234_5000)));
    assert!(Place::new(0x1234_5040, 0).board().is_none());
    assert!(Place::new(0x1234_5000 + (LANES * LANE) as u64, 0).board().is_none());
};
