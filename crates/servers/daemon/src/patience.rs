//! How long a daemon that serves others waits for what somebody may hold up.

use std::time::{Duration, Instant};

/// How long it waits while others wait for it, at most at a time.
const MEANWHILE: Duration = Duration::from_secs(1);
/// How much of that comes back while it serves, in percent of the time that passes.
const REFILL: u32 = 10;

/// A supply of time that is waited for. Whoever holds a lock for a short time again and again uses it up, too.
#[derive(Debug)]
pub struct Patience {
    /// The most that can be waited for.
    most: Duration,
    /// What is left of that.
    left: Duration,
    /// How fast what was used comes back, in percent of the time that passes.
    refill: u32,
    /// When some of it came back last.
    refilled: Instant,
}

impl Patience {
    /// Returns a full supply, of which this many percent of the time that passes come back.
    pub fn new(most: Duration, refill: u32) -> Self {
        Self { most, left: most, refill, refilled: Instant::now() }
    }

    /// Returns the supply of a daemon that serves others meanwhile.
    pub fn meanwhile() -> Self {
        Self::new(MEANWHILE, REFILL)
    }

    /// Returns how long it can be waited for now.
    pub fn left(&mut self, now: Instant) -> Duration {
        let back = now.duration_since(std::mem::replace(&mut self.refilled, now)) * self.refill / 100;
        self.left = self.most.min(self.left + back);
        self.left
    }

    /// Takes from it what was waited for.
    pub fn waited(&mut self, time: Duration) {
        self.left = self.left.saturating_sub(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_used_up_by_many_short_waits_and_comes_back_in_time() {
        let mut patience = Patience::new(Duration::from_secs(4), 0);
        let begin = patience.refilled;
        patience.waited(Duration::from_secs(1));
        assert_eq!(
            patience.left(begin + Duration::from_secs(60)),
            Duration::from_secs(3),
            "nothing comes back"
        );
        let mut patience = Patience::meanwhile();
        let begin = patience.refilled;
        for _ in 0..4 {
            patience.waited(Duration::from_millis(300));
        }
        assert_eq!(patience.left(begin), Duration::ZERO);
        assert_eq!(patience.left(begin + Duration::from_secs(1)), Duration::from_millis(100));
        assert_eq!(patience.left(begin + Duration::from_secs(60)), MEANWHILE);
    }
}
