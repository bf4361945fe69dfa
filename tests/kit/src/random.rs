//! Numbers that look random, and that a seed repeats.

/// A generator of numbers (SplitMix64). Any seed will do.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Returns a generator that gives the same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the number that belongs to another one. For two sides that must both know what one of them sends.
    pub fn of(number: u64) -> u64 {
        Self::new(number).next()
    }

    /// Returns any number.
    #[allow(clippy::should_implement_trait)] // An iterator could end.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The upper half of a product, so that all numbers come about equally often.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns an index into a list of this length, which is not 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Returns one of these.
    pub fn one_of<T, const N: usize>(&mut self, choices: [T; N]) -> T {
        let chosen = self.index(N);
        choices.into_iter().nth(chosen).expect("below the number of choices")
    }

    /// Fills a buffer.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_repeats_its_numbers_and_others_differ() {
        let numbers = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.next(), random.next()]
        };
        assert_eq!(numbers(1), numbers(1));
        assert_ne!(numbers(1), numbers(2));
        // From the reference implementation, for seed 0.
        assert_eq!(Random::new(0).next(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(Random::of(0), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn each_number_below_a_bound_comes_and_no_other() {
        let (mut random, mut seen) = (Random::new(7), [0; 10]);
        (0..10_000).for_each(|_| seen[random.index(10)] += 1);
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
        (0..1000).for_each(|_| seen[random.one_of([3, 5])] = 0);
        assert!(seen.iter().enumerate().all(|(n, &count)| (count == 0) == [3, 5].contains(&n)), "{seen:?}");
    }
}
