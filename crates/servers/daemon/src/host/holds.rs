//! The times at which holds of endpoints end.

use ginnel_broker::text::Hex16;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// An endpoint, and the token of one of its holds.
type Key = (u32, Hex16);

/// The times at which holds end.
#[derive(Debug, Default)]
pub struct Timers {
    /// The time of each hold, and the epoch of its endpoint.
    all: BTreeMap<Key, (Instant, u32)>,
    in_order: BTreeSet<(Instant, Key)>,
}

impl Timers {
    /// Starts or restarts the timer of a hold.
    pub fn set(&mut self, key: Key, epoch: u32, at: Instant) {
        self.forget(key);
        self.all.insert(key, (at, epoch));
        self.in_order.insert((at, key));
    }

    /// Stops the timer of a hold that has ended for another reason.
    pub fn forget(&mut self, key: Key) {
        if let Some((at, _)) = self.all.remove(&key) {
            self.in_order.remove(&(at, key));
        }
    }

    /// Removes and returns the next hold whose time is over: endpoint, epoch and token.
    pub fn take_over(&mut self, now: Instant) -> Option<(u32, u32, Hex16)> {
        let &(at, key) = self.in_order.first()?;
        if at > now {
            return None;
        }
        self.in_order.pop_first();
        let (_, epoch) = self.all.remove(&key)?;
        Some((key.0, epoch, key.1))
    }

    /// Returns the time until [`Timers::take_over`] has something to return.
    pub fn until_next(&self) -> Option<Duration> {
        self.in_order.first().map(|(at, _)| at.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_end_in_the_order_of_their_times() {
        let mut timers = Timers::default();
        let (now, key) = (Instant::now(), |n: u8| (u32::from(n), Hex16([n; 16])));
        let at = |ms| now + Duration::from_millis(ms);
        timers.set(key(1), 7, at(30));
        timers.set(key(2), 8, at(20));
        timers.set(key(3), 9, at(10));
        timers.set(key(2), 8, at(40));
        timers.forget(key(3));
        timers.forget(key(4));
        assert_eq!(timers.take_over(at(29)), None);
        assert_eq!(timers.take_over(at(50)), Some((1, 7, Hex16([1; 16]))));
        assert_eq!(timers.take_over(at(50)), Some((2, 8, Hex16([2; 16]))));
        assert_eq!((timers.take_over(at(50)), timers.until_next()), (None, None));
        assert!(timers.all.is_empty() && timers.in_order.is_empty());
    }
}
