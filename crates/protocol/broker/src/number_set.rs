//! A set of small numbers that finds the largest number below a bound in constant time.

/// The words of a tree with 64 branches per node. A bit of the lowest level stands for a number; a bit of a higher level says
/// that a word below it is not empty. Six levels hold all numbers of 32 bits.
#[derive(Clone, Debug)]
pub struct NumberSet {
    levels: Vec<Vec<u64>>,
}

impl NumberSet {
    /// Makes the empty set of numbers below `bound`.
    pub fn new(bound: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = bound as usize + 1; // `below` takes the bound itself.
        loop {
            words = words.div_ceil(64).max(1);
            levels.push(vec![0; words]);
            if words == 1 {
                return Self { levels };
            }
        }
    }

    /// Adds a number, which must be below the bound.
    pub fn insert(&mut self, number: u32) {
        let mut at = number as usize;
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    /// Removes a number.
    pub fn remove(&mut self, number: u32) {
        let mut at = number as usize;
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// Returns the largest number of the set below `bound`.
    pub fn below(&self, bound: u32) -> Option<u32> {
        let mut at = bound as usize;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(at / 64).map_or(0, |word| word & ((1 << (at % 64)) - 1));
            if word != 0 {
                at = (at / 64 * 64) | word.ilog2() as usize;
                for level in self.levels[..height].iter().rev() {
                    at = (at * 64) | level[at].ilog2() as usize;
                }
                return u32::try_from(at).ok();
            }
            at /= 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn finds_what_a_tree_finds(
            bound in prop::sample::select(vec![1u32, 64, 65, 4096, 300_000]),
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let (mut starts, mut model) = (NumberSet::new(bound), BTreeSet::new());
            for (add, index) in steps {
                let number = index.index(bound as usize) as u32;
                if add { starts.insert(number); model.insert(number); } else { starts.remove(number); model.remove(&number); }
                for at in [0, number, number + 1, bound] {
                    prop_assert_eq!(starts.below(at), model.range(..at).next_back().copied(), "below {}", at);
                }
            }
        }
    }
}
