//! How often somebody may do something: a token bucket.

use std::time::{Duration, Instant};

/// How large a bucket is, and how fast it fills.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// So many at once.
    pub burst: u32,
    /// And then one in this time.
    pub interval: Duration,
}

/// How often a process may report a connection.
pub const REPORTS_OF_PROCESS: Rate = Rate { burst: 2000, interval: Duration::from_millis(1) };

/// A bucket, kept as the time at which it is full again.
#[derive(Clone, Copy, Debug)]
pub struct Allowance(Instant);

impl Allowance {
    /// A full one.
    pub fn new(now: Instant) -> Self {
        Self(now)
    }

    /// Whether there is one left at `now`, which only grows. It is taken then.
    pub fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let full = self.0.max(now);
        if full - now > rate.interval * (rate.burst - 1) {
            return false;
        }
        self.0 = full + rate.interval;
        true
    }

    /// Whether it is as good as a new one.
    pub fn is_full(&self, now: Instant) -> bool {
        self.0 <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_burst_and_then_one_each_interval() {
        let start = Instant::now();
        let rate = REPORTS_OF_PROCESS;
        let Rate { burst, interval } = rate;
        let mut allowance = Allowance::new(start);
        assert!(allowance.is_full(start));
        let taken =
            |allowance: &mut Allowance, now| (0..2 * burst).filter(|_| allowance.take(rate, now)).count();
        assert_eq!(taken(&mut allowance, start), burst as usize);
        assert_eq!(taken(&mut allowance, start + 5 * interval), 5);
        assert_eq!(taken(&mut allowance, start + 5 * interval), 0);
        assert!(!allowance.is_full(start + burst * interval));
        assert!(allowance.is_full(start + (burst + 5) * interval));
        let later = start + Duration::from_secs(3600);
        assert_eq!(taken(&mut allowance, later), burst as usize, "no more than that");
    }
}
