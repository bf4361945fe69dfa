//! Logs that somebody else can cause as fast as he likes.

use std::time::{Duration, Instant};

/// The time in which there is at most one line of a kind.
const PERIOD: Duration = Duration::from_secs(10);

/// Decides which lines of one kind are logged.
#[derive(Clone, Debug, Default)]
pub struct Hush {
    last: Option<Instant>,
    suppressed: u64,
}

impl Hush {
    /// Returns whether a line may be logged now: how many were suppressed before it, or `None` if this one is too.
    pub fn allows(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < PERIOD) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_a_period() {
        let mut hush = Hush::default();
        let begin = Instant::now();
        assert_eq!(hush.allows(begin), Some(0));
        assert!((1..100).all(|_| hush.allows(begin + PERIOD / 2).is_none()));
        assert_eq!(hush.allows(begin + PERIOD), Some(99));
        assert_eq!(hush.allows(begin + PERIOD), None);
    }
}
