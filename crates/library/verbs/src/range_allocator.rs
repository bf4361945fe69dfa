//! An allocator of ranges.

use std::collections::BTreeMap;

/// Allocates ranges of a space that begins at 0, and keeps the free ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeAllocator {
    /// Length of each free range by its offset. No two free ranges are adjacent.
    free: BTreeMap<u64, u64>,
}

impl RangeAllocator {
    /// Returns an allocator in which the whole space of `len` is free.
    pub fn new(len: u64) -> Self {
        let mut runs = Self::default();
        runs.give(0, len);
        runs
    }

    /// Allocates `len` at the first possible offset that is a multiple of `align`. Returns `None` if there is no room or `len` is 0.
    pub fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let fits = |(&at, &free): (&u64, &u64)| {
            let aligned = at.checked_next_multiple_of(align)?;
            let end = aligned.checked_add(len)?;
            (len > 0 && end <= at + free).then_some((at, free, aligned))
        };
        let (at, free, aligned) = self.free.iter().find_map(fits)?;
        self.free.remove(&at);
        if aligned > at {
            self.free.insert(at, aligned - at);
        }
        if at + free > aligned + len {
            self.free.insert(aligned + len, at + free - (aligned + len));
        }
        Some(aligned)
    }

    /// Returns whether one free range has this length.
    pub fn has(&self, len: u64) -> bool {
        self.free.values().any(|free| *free >= len)
    }

    /// Frees a range that was allocated.
    pub fn give(&mut self, mut at: u64, mut len: u64) {
        if len == 0 {
            return;
        }
        if let Some(after) = self.free.remove(&(at + len)) {
            len += after;
        }
        if let Some((&before, &free)) = self.free.range(..at).next_back()
            && before + free == at
        {
            (at, len) = (before, free + len);
        }
        self.free.insert(at, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn allocations_are_aligned() {
        let mut runs = RangeAllocator::new(100);
        assert_eq!(runs.take(1, 1), Some(0));
        assert_eq!(runs.take(10, 64), Some(64));
        assert_eq!(runs.take(63, 1), Some(1));
        assert_eq!(runs.take(26, 1), Some(74));
        assert_eq!((runs.take(1, 1), runs.take(0, 1)), (None, None));
        runs.give(10, 20);
        assert!(runs.has(20) && !runs.has(21));
    }

    proptest! {
        #[test]
        fn allocations_do_not_overlap_and_all_are_freed(
            requests in prop::collection::vec((1u64..50, 0u32..5, any::<bool>()), 1..60),
        ) {
            let mut runs = RangeAllocator::new(512);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (len, align, gives) in requests {
                if let Some(at) = runs.take(len, 1 << align) {
                    prop_assert!(at % (1 << align) == 0 && at + len <= 512);
                    prop_assert!(taken.iter().all(|(other, n)| at + len <= *other || other + n <= at));
                    taken.push((at, len));
                }
                if gives && !taken.is_empty() {
                    let (at, len) = taken.remove(len as usize % taken.len());
                    runs.give(at, len);
                }
            }
            for (at, len) in taken {
                runs.give(at, len);
            }
            prop_assert_eq!(runs, RangeAllocator::new(512));
        }
    }
}
