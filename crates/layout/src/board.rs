//! A readiness board: where those who have something for an endpoint leave a bit for each, so that one thread can wait for
//! tens of thousands of rings without looking at them.
//!
//! A board is a page of the segment that the daemon gives an endpoint. It has [`LANES`] lanes; one sleeper uses a lane, and
//! each ring that it waits for has a slot there:
//!
//! ```text
//! offset   writer     word
//! 0x000    sleeper    armed    u32  wake token of the sleeper, 0 = awake
//! 0x040    everybody  summary  u64  bit w: there may be something in word w
//! 0x080    everybody  bits     u64 x 64  bit b of word w: slot w * 64 + b has something
//! 0x280               the next lane
//! ```
//!
//! A side of a ring that sleeps by way of a board says so beside its wake token: [`crate::ring::DATA_NOTIFY`] or
//! [`crate::ring::SPACE_NOTIFY`] holds a [`Place`]. Whoever finds that side asleep sets the slot's bit, then the summary's, and
//! rings the doorbell only if the lane is armed.
//!
//! A neighbour can write anything to a board. Bits that nobody has set cost needless looks; bits that it clears cost wake-ups
//! of its segment.

use crate::{CACHE_LINE, PAGE};

/// Bytes of a board.
pub const LEN: usize = PAGE;
/// Lanes of a board.
pub const LANES: usize = 6;
/// Slots of a lane.
pub const SLOTS: usize = WORDS * 64;
/// Words of bits in a lane, one for each bit of its summary.
pub const WORDS: usize = 64;
/// Bytes of a lane.
pub const LANE: usize = BITS + WORDS * 8;

/// Offset, in a lane, of the sleeper's wake token.
pub const ARMED: usize = 0x000;
/// Offset of the summary.
pub const SUMMARY: usize = 0x040;
/// Offset of the first word of bits.
pub const BITS: usize = 0x080;

const _: () = {
    assert!(LANE == 0x280 && LANE.is_multiple_of(CACHE_LINE));
    assert!(LANES * LANE <= LEN && (LANES + 1) * LANE > LEN);
};

/// A slot of a lane: what stands in a notify word of a ring. Zero names none, because no board lies at the start of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place(pub u64);

impl Place {
    /// No slot: the doorbell is to be rung.
    pub const NONE: Self = Self(0);

    /// The same, said by a side of a socket's ring, which otherwise is woken by a byte on the kernel's connection. (Where this slot would be
    /// lies the segment's header, so it is none.)
    pub const DOORBELL: Self = Self(1);

    const SLOT_BITS: u32 = SLOTS.trailing_zeros();

    /// The slot of the lane at this offset of the segment, which is a multiple of a cache line.
    pub const fn new(lane: u64, slot: usize) -> Self {
        Self((lane / CACHE_LINE as u64) << Self::SLOT_BITS | (slot % SLOTS) as u64)
    }

    /// Offset of the lane from the start of the segment. May be anything: a neighbour may have written it.
    pub const fn lane(self) -> u64 {
        (self.0 >> Self::SLOT_BITS) * CACHE_LINE as u64
    }

    /// The slot, which is one of the lane's.
    pub const fn slot(self) -> usize {
        (self.0 % SLOTS as u64) as usize
    }

    /// The board that the lane would be of, and whether one of its lanes begins there.
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
