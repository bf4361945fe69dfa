//! Which bytes of a segment are free: books in private memory, never in the segment.

use ginnel_layout::{PAGE, segment};
use std::collections::{BTreeMap, BTreeSet};

/// The free part of one segment, in runs of whole pages. Best fit, lowest offset first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    start: u64,
    end: u64,
    /// Free runs: start and length. No two touch each other.
    free: BTreeMap<u64, u64>,
    /// The same, by length.
    by_len: BTreeSet<(u64, u64)>,
}

impl Arena {
    /// The arena of a segment of `size` bytes, all free.
    pub fn of_segment(size: u64) -> Self {
        let mut arena = Self {
            start: segment::ARENA,
            end: size.max(segment::ARENA),
            free: BTreeMap::new(),
            by_len: BTreeSet::new(),
        };
        let len = (arena.end - arena.start) & !(PAGE as u64 - 1);
        if len > 0 {
            arena.insert(arena.start, len);
        }
        arena
    }

    /// Where a block of `len` bytes would go; `None` if no run is long enough.
    pub fn find(&self, len: u64) -> Option<u64> {
        let len = rounded(len)?;
        self.by_len.range((len, 0)..).next().map(|&(_, start)| start)
    }

    /// Takes exactly these bytes. False, and no change, if they are not all free.
    #[must_use]
    pub fn take(&mut self, at: u64, len: u64) -> bool {
        let Some(len) = rounded(len).filter(|_| at.is_multiple_of(PAGE as u64)) else { return false };
        let Some((&start, &run)) = self.free.range(..=at).next_back() else { return false };
        let Some(behind) = (start + run).checked_sub(at).and_then(|left| left.checked_sub(len)) else {
            return false;
        };
        self.remove(start, run);
        if at > start {
            self.insert(start, at - start);
        }
        if behind > 0 {
            self.insert(at + len, behind);
        }
        true
    }

    /// Gives back what was taken. False, and no change, if any of it is free already or outside.
    #[must_use]
    pub fn give(&mut self, at: u64, len: u64) -> bool {
        let Some(len) = rounded(len).filter(|_| at.is_multiple_of(PAGE as u64)) else { return false };
        let Some(end) = at.checked_add(len).filter(|&end| at >= self.start && end <= self.end) else {
            return false;
        };
        let before = self.free.range(..end).next_back().map(|(&start, &run)| (start, run));
        let mut whole = (at, len);
        if let Some((start, run)) = before {
            if start + run > at {
                return false;
            }
            if start + run == at {
                self.remove(start, run);
                whole = (start, run + len);
            }
        }
        if let Some(&run) = self.free.get(&end) {
            self.remove(end, run);
            whole.1 += run;
        }
        self.insert(whole.0, whole.1);
        true
    }

    /// Bytes that are taken.
    pub fn used(&self) -> u64 {
        ((self.end - self.start) & !(PAGE as u64 - 1)) - self.free.values().sum::<u64>()
    }

    /// The longest free run, in bytes.
    pub fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    fn insert(&mut self, start: u64, len: u64) {
        self.free.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.free.remove(&start);
        self.by_len.remove(&(len, start));
    }
}

/// Whole pages, at least one.
fn rounded(len: u64) -> Option<u64> {
    len.max(1).checked_next_multiple_of(PAGE as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: u64 = 4 << 20;

    proptest! {
        #[test]
        fn blocks_never_overlap_and_nothing_leaks(steps in prop::collection::vec((any::<bool>(), 1u64..600_000, any::<prop::sample::Index>()), 1..200)) {
            let mut arena = Arena::of_segment(SIZE);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (give, len, index) in steps {
                if give && !taken.is_empty() {
                    let (at, len) = taken.swap_remove(index.index(taken.len()));
                    prop_assert!(arena.give(at, len));
                    prop_assert!(!arena.give(at, len), "given twice");
                } else if let Some(at) = arena.find(len) {
                    let len = len.next_multiple_of(PAGE as u64);
                    prop_assert!(at >= segment::ARENA && at + len <= SIZE && at.is_multiple_of(PAGE as u64));
                    prop_assert!(taken.iter().all(|&(a, l)| at + len <= a || a + l <= at), "overlap");
                    prop_assert!(arena.take(at, len));
                    prop_assert!(!arena.take(at, 1), "taken twice");
                    taken.push((at, len));
                } else {
                    prop_assert!(arena.longest() < len);
                }
                prop_assert_eq!(arena.used(), taken.iter().map(|t| t.1).sum::<u64>());
            }
            // The same blocks taken in another order make the same books, as a replay does.
            let mut replayed = Arena::of_segment(SIZE);
            for &(at, len) in taken.iter().rev() {
                prop_assert!(replayed.take(at, len));
            }
            prop_assert_eq!(&replayed, &arena);
            for (at, len) in taken {
                prop_assert!(arena.give(at, len));
            }
            prop_assert_eq!(arena, Arena::of_segment(SIZE));
        }

        #[test]
        fn wild_arguments_change_nothing(at in any::<u64>(), len in any::<u64>()) {
            let mut arena = Arena::of_segment(SIZE);
            prop_assert!(!arena.give(at, len));
            let took = arena.take(at, len);
            prop_assert_eq!(took, at >= segment::ARENA && at.is_multiple_of(PAGE as u64) && len <= SIZE && at < SIZE && at + len.max(1) <= SIZE);
            let _ = arena.find(len);
        }
    }

    #[test]
    fn a_segment_without_an_arena_has_no_room() {
        assert_eq!(Arena::of_segment(0).find(1), None);
        assert_eq!(Arena::of_segment(segment::ARENA).find(1), None);
    }
}
