//! Which addresses of the device are free.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// No memory lies below this address: a device that takes a zero for an address finds nothing there.
const LOWEST: u64 = 1 << 20;

/// What a kernel that does not say it allows: all that 39 bits can name, but for the addresses of interrupts.
const USUAL: [RangeInclusive<u64>; 2] = [LOWEST..=0xfedf_ffff, 0x1_0000_0000..=0x7f_ffff_ffff];

/// The free addresses.
pub struct Addresses {
    /// For each free range, its first address, and the one behind its last.
    free: BTreeMap<u64, u64>,
}

impl Addresses {
    /// All these addresses are free. If there are none, nobody knows which the device can use.
    pub fn new(ranges: &[RangeInclusive<u64>]) -> Self {
        let ranges = if ranges.is_empty() { &USUAL[..] } else { ranges };
        let whole =
            |range: &RangeInclusive<u64>| (*range.start().max(&LOWEST), range.end().saturating_add(1));
        Self { free: ranges.iter().map(whole).filter(|(start, end)| start < end).collect() }
    }

    /// Takes `len` bytes. Large areas begin where the IOMMU can use large pages. `None` if there is no room.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let align: u64 = match len {
            0x4000_0000.. => 1 << 30,
            0x20_0000.. => 2 << 20,
            _ => 4096,
        };
        let found = self.free.iter().find_map(|(&start, &end)| {
            let at = start.checked_next_multiple_of(align)?;
            (at.checked_add(len)? <= end).then_some((start, at, end))
        });
        let (start, at, end) = found?;
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at);
        }
        if at + len < end {
            self.free.insert(at + len, end);
        }
        Some(at)
    }

    /// Gives back what was taken.
    pub fn give_back(&mut self, at: u64, len: u64) {
        let (mut start, mut end) = (at, at + len);
        if let Some((&before, &its_end)) = self.free.range(..at).next_back()
            && its_end == at
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(its_end) = self.free.remove(&end) {
            end = its_end;
        }
        self.free.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What is taken lies inside the ranges and apart, and all of it is there again when it was given back.
        #[test]
        fn what_is_taken_is_taken_once(steps in prop::collection::vec((any::<bool>(), 1..4000_u64, any::<prop::sample::Index>()), 1..100)) {
            let ranges = [0..=0xfedf_ffff_u64, 0xfef0_0000..=0x1_ffff_ffff];
            let mut addresses = Addresses::new(&ranges);
            let before = addresses.free.clone();
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (takes, pages, which) in steps {
                if takes || taken.is_empty() {
                    let len = pages * 4096;
                    let Some(at) = addresses.take(len) else { continue };
                    prop_assert!(at % 4096 == 0 && at >= LOWEST);
                    prop_assert!(ranges.iter().any(|range| range.contains(&at) && range.contains(&(at + len - 1))));
                    prop_assert!(taken.iter().all(|&(other, its)| at + len <= other || other + its <= at));
                    taken.push((at, len));
                } else {
                    let (at, len) = taken.swap_remove(which.index(taken.len()));
                    addresses.give_back(at, len);
                }
            }
            for (at, len) in taken {
                addresses.give_back(at, len);
            }
            prop_assert_eq!(addresses.free, before);
        }
    }

    #[test]
    fn large_areas_begin_at_large_pages() {
        let mut addresses = Addresses::new(&[]);
        assert_eq!(addresses.take(4096), Some(LOWEST));
        assert_eq!(addresses.take(2 << 20), Some(2 << 20));
        assert_eq!(addresses.take(3 << 30), Some(0x1_0000_0000), "the first range has too little room");
        assert_eq!(addresses.take(1 << 40), None);
    }
}
