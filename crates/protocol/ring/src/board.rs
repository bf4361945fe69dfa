//! Waiting for tens of thousands of rings at once: the two sides of a lane of a readiness board (see
//! [`ginnel_layout::board`]).
//!
//! ```text
//! peer (the ring's wake word names this slot)                          sleeper
//!   P1  publish in the ring                                              C1  armed := token
//!   P2  bits |= slot                                                     C2  full fence
//!   P3  summary |= word                                                  C3  summary: anything? -> no: sleep
//!   P4  full fence
//!   P5  armed? -> yes: ring the doorbell
//! ```
//!
//! The sleeper takes the summary before the bits. Therefore a bit that is set between the two is either taken, or announced
//! by a summary bit that is set afterwards.

use crate::wait::{Armed, Bell};
use ginnel_layout::board::{self, ARMED, BITS, SUMMARY};
use ginnel_shmem::SharedMemory;

/// The sleeper's side of a lane.
#[derive(Debug)]
pub struct Lane<M: SharedMemory> {
    memory: M,
    armed: Armed,
}

impl<M: SharedMemory> Lane<M> {
    /// Returns the lane in `memory`, which begins with it. Panics if the memory is too short.
    pub fn new(memory: M) -> Self {
        assert!(memory.len() >= board::LANE, "a lane must lie within its memory");
        Self { memory, armed: Armed::new(ARMED) }
    }

    /// Returns whether any slot may have something.
    #[inline]
    pub fn has_any(&self) -> bool {
        self.memory.load_relaxed_u64(SUMMARY) != 0
    }

    /// Returns whether the memory is gone, so that no slot will ever have anything.
    pub fn is_broken(&self) -> bool {
        self.memory.is_broken()
    }

    /// Takes the slots that have something, and calls `ready` with each. The slots come in no particular order.
    pub fn take(&self, mut ready: impl FnMut(usize)) {
        if !self.has_any() {
            return;
        }
        // ORDER board.summary: the bits that were set before the summary are seen. Pairs with: `post`.
        let summary = self.memory.swap_u64(SUMMARY, 0);
        for word in ones(summary) {
            // ORDER board.bits: what was published before the bit was set is seen. Pairs with: `post`.
            let bits = self.memory.swap_u64(BITS + word * 8, 0);
            ones(bits).for_each(|bit| ready(word * 64 + bit));
        }
    }

    /// Tells peers to ring. The caller must look once more before it sleeps.
    pub fn arm(&mut self) {
        self.armed.arm(&self.memory);
    }

    /// Tells peers that the sleeper is awake.
    pub fn disarm(&mut self) {
        self.armed.disarm(&self.memory);
    }
}

/// Returns the numbers of the bits that are set.
fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = bits.trailing_zeros() as usize;
        bits &= bits.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

/// The peer's side of a lane: the state that one ring has for the lane on which its other side sleeps.
#[derive(Debug)]
pub struct Poster {
    bell: Bell,
}

impl Default for Poster {
    fn default() -> Self {
        Self { bell: Bell::new(ARMED) }
    }
}

impl Poster {
    /// Marks the slot in the lane, after something was published for it. Returns true if the sleeper's doorbell must be rung.
    /// Panics if the memory is too short, or the slot does not exist.
    #[must_use = "the sleeper may have to be woken"]
    pub fn post<M: SharedMemory>(&mut self, lane: &M, slot: usize) -> bool {
        assert!(slot < board::SLOTS, "a slot outside its lane");
        let (word, bit) = (slot / 64, slot % 64);
        // ORDER board.bits: what was published is visible before the bit. Pairs with: `Lane::take`.
        lane.fetch_or_u64(BITS + word * 8, 1 << bit);
        // ORDER board.summary: the bit is visible before the summary. Pairs with: `Lane::take`.
        lane.fetch_or_u64(SUMMARY, 1 << word);
        self.bell.needed(lane)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_shmem::Mapping;

    fn lane() -> Mapping {
        Mapping::anonymous(board::LANE).unwrap()
    }

    fn taken(lane: &Lane<Mapping>) -> Vec<usize> {
        let mut slots = Vec::new();
        lane.take(|slot| slots.push(slot));
        slots
    }

    #[test]
    fn each_slot_is_taken_once() {
        let memory = lane();
        let (lane, mut poster) = (Lane::new(memory.clone()), Poster::default());
        assert_eq!(taken(&lane), []);
        for slot in [4095, 0, 63, 64, 63] {
            assert!(!poster.post(&memory, slot), "no side sleeps");
        }
        assert!(lane.has_any());
        assert_eq!(taken(&lane), [0, 63, 64, 4095]);
        assert!(!lane.has_any());
        assert_eq!(taken(&lane), []);
    }

    #[test]
    fn a_sleeper_is_rung_once_by_each_ring() {
        let memory = lane();
        let mut lane = Lane::new(memory.clone());
        let (mut one, mut other) = (Poster::default(), Poster::default());
        lane.arm();
        assert!(one.post(&memory, 1) && !one.post(&memory, 1) && other.post(&memory, 2));
        lane.disarm();
        assert!(!one.post(&memory, 1));
        lane.arm();
        assert!(one.post(&memory, 1));
    }

    #[test]
    fn a_summary_without_bits_says_nothing() {
        let memory = lane();
        let lane = Lane::new(memory.clone());
        memory.store_relaxed_u64(SUMMARY, !0);
        assert_eq!(taken(&lane), []);
    }
}
