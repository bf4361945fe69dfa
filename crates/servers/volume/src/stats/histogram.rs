//! Latencies, counted in buckets whose width grows with them.

use super::Counter;
use ginnel_volume_control::Latency;

/// The binary logarithm of the number of buckets per power of two. With 16 buckets, a bucket's width is at most 1/16 of
/// its lower bound.
const BITS: u32 = 4;
const STEPS: usize = 1 << BITS;
/// Powers of two that have buckets: up to 2^40 ns, which is 18 minutes. The last bucket counts everything longer.
const TOP: u32 = 40;
const BUCKETS: usize = (TOP - BITS + 1) as usize * STEPS;

/// A log-linear histogram of nanoseconds. One thread writes it, with plain stores; any thread can read it.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[Counter; BUCKETS]>,
    sum: Counter,
    max: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: Box::new([const { Counter(std::sync::atomic::AtomicU64::new(0)) }; BUCKETS]),
            sum: Counter::default(),
            max: Counter::default(),
        }
    }
}

impl Histogram {
    /// Counts one value. Only the thread that owns the histogram may call this.
    #[inline]
    pub fn record(&self, nanoseconds: u64) {
        self.buckets[bucket(nanoseconds)].add(1);
        self.sum.add(nanoseconds);
        self.max.raise(nanoseconds);
    }

    /// Returns the number of counted values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// Merges several histograms into one distribution.
    pub fn merged<'h>(histograms: impl Iterator<Item = &'h Self>) -> Latency {
        let mut buckets = vec![0u64; BUCKETS];
        let (mut sum, mut max) = (0u64, 0);
        for histogram in histograms {
            for (total, counter) in buckets.iter_mut().zip(histogram.buckets.iter()) {
                *total += counter.get();
            }
            sum = sum.wrapping_add(histogram.sum.get());
            max = max.max(histogram.max.get());
        }
        let filled = buckets.into_iter().enumerate().filter(|b| b.1 > 0);
        Latency::of(filled.map(|(i, n)| (upper(i), n)).collect(), sum, max)
    }
}

/// Returns the bucket of a value. Each value below 16 has its own bucket; above that, the four bits after the leading
/// one select it.
#[inline]
fn bucket(value: u64) -> usize {
    if value < STEPS as u64 {
        return value as usize;
    }
    let top = value.ilog2();
    let step = (value >> (top - BITS)) as usize & (STEPS - 1);
    ((top - BITS + 1) as usize * STEPS + step).min(BUCKETS - 1)
}

/// Returns the largest value of a bucket.
fn upper(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let (octave, step) = (bucket / STEPS, bucket % STEPS);
    (((STEPS + step + 1) as u64) << (octave - 1)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other() {
        for i in 1..BUCKETS {
            let lower = upper(i - 1) + 1;
            assert_eq!(bucket(lower), i);
            assert_eq!(bucket(upper(i)), i);
            assert!(upper(i) - lower < lower.div_ceil(16), "bucket {i} is wide");
        }
        assert_eq!(upper(BUCKETS - 1), (1 << TOP) - 1);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn powers_of_two_begin_buckets() {
        // The bounds that are reported to Prometheus.
        for bit in 4..TOP {
            assert_eq!(upper(bucket((1 << bit) - 1)), (1 << bit) - 1);
        }
    }

    proptest! {
        #[test]
        fn percentiles_are_near(mut values in prop::collection::vec(0u64..(1 << 38), 1..200)) {
            let histogram = Histogram::default();
            values.iter().for_each(|&v| histogram.record(v));
            values.sort_unstable();
            let latency = Histogram::merged([&histogram].into_iter());
            prop_assert_eq!(latency.count, values.len() as u64);
            prop_assert_eq!(latency.max, *values.last().unwrap());
            let median = values[values.len().div_ceil(2) - 1];
            prop_assert!(latency.p50 >= median && latency.p50 - median <= median / 16, "{} {}", latency.p50, median);
        }
    }
}
