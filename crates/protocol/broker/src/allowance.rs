//! Rate limits: a token bucket.

use std::time::Duration;

/// The size of a bucket and the rate at which it fills.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// The number of actions that are allowed at once.
    pub burst: u32,
    /// The time after which one more action is allowed.
    pub interval: Duration,
}

/// How often a process may report a connection.
pub const REPORTS_OF_PROCESS: Rate = Rate { burst: 2000, interval: Duration::from_millis(1) };

/// A bucket, stored as the time at which it is full again. Times count from any fixed moment.
#[derive(Clone, Copy, Debug)]
pub struct Allowance(Duration);

impl Allowance {
    /// Makes a full bucket.
    pub fn new(now: Duration) -> Self {
        Self(now)
    }

    /// Takes a token at `now`, and returns false if there is none. `now` must not go backwards.
    pub fn take(&mut self, rate: Rate, now: Duration) -> bool {
        let full = self.0.max(now);
        if full - now > rate.interval * (rate.burst - 1) {
            return false;
        }
        self.0 = full + rate.interval;
        true
    }

    /// Returns whether the bucket is full, and so no different from a new one.
    pub fn is_full(&self, now: Duration) -> bool {
        self.0 <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_followed_by_one_per_interval() {
        let start = Duration::from_secs(1);
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
