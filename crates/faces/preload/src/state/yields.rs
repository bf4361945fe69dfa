//! How much a ring carries for each wake-up of its receiver. [`crate::carrying::paying`] says what follows from that.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The sender looks at this many wake-ups at least,
const WAKES: u32 = 128;
/// and at what they were for in so long a time, in microseconds. Until then, both sides may find out that it pays to look for a while
/// before they sleep ([`crate::process::spin`]).
const TIME: u64 = 500_000;
/// A ring pays if it carries so many bytes for each wake-up,
const BYTES: u64 = 4 << 10;
/// or three messages for two of them.
const MESSAGES: (u32, u32) = (3, 2);

/// What a sender has put into rings since it began to count wake-ups.
#[derive(Default)]
pub struct Yield {
    /// The number of messages in total.
    messages: AtomicU32,
    /// The number of wake-ups.
    wakes: AtomicU32,
    /// When the first one was, in microseconds,
    since: AtomicU64,
    /// and how many bytes and messages had been sent by then.
    bytes_before: AtomicU64,
    messages_before: AtomicU32,
}

impl Yield {
    /// Counts a message. The caller holds the ring's lock.
    #[inline]
    pub fn count(&self) {
        self.messages.store(self.messages.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    pub fn reset(&self) {
        self.wakes.store(0, Ordering::Relaxed);
    }

    /// Notes that a message has woken the peer; `bytes` is how many the rings have carried. Returns whether the ring does not pay.
    pub fn is_poor(&self, bytes: u64, now: impl FnOnce() -> u64) -> bool {
        let (wakes, messages) =
            (self.wakes.fetch_add(1, Ordering::Relaxed), self.messages.load(Ordering::Relaxed));
        if wakes == 0 {
            self.since.store(now(), Ordering::Relaxed);
            self.bytes_before.store(bytes, Ordering::Relaxed);
            self.messages_before.store(messages, Ordering::Relaxed);
            return false;
        }
        // The clock is not read each time.
        if wakes < WAKES
            || !wakes.is_multiple_of(16)
            || now().saturating_sub(self.since.load(Ordering::Relaxed)) < TIME
        {
            return false;
        }
        self.reset();
        let messages = messages.wrapping_sub(self.messages_before.load(Ordering::Relaxed));
        let bytes = bytes.wrapping_sub(self.bytes_before.load(Ordering::Relaxed));
        u64::from(messages) * u64::from(MESSAGES.1) < u64::from(wakes) * u64::from(MESSAGES.0)
            && bytes < u64::from(wakes) * BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends groups of messages, each of which wakes the receiver once, at this interval. Returns the number of groups until the
    /// ring does not pay.
    fn groups_until_poor(messages: u32, bytes: u64, interval: u64) -> Option<u64> {
        let sent = Yield::default();
        (1..=30_000).find(|group| {
            (0..messages).for_each(|_| sent.count());
            sent.is_poor(group * bytes * u64::from(messages), || group * interval)
        })
    }

    #[test]
    fn wake_ups_for_little_do_not_pay_after_a_while() {
        assert_eq!(groups_until_poor(1, 64, 25), Some(20_001));
        assert_eq!(groups_until_poor(1, 64, 1_000), Some(513));
        assert_eq!(groups_until_poor(1, 64, 1_000_000), Some(129));
    }

    #[test]
    fn wake_ups_for_several_messages_or_many_bytes_pay() {
        assert_eq!(groups_until_poor(2, 64, 1_000), None);
        assert_eq!(groups_until_poor(1, BYTES, 1_000), None);
    }

    #[test]
    fn what_was_long_ago_does_not_count() {
        let sent = Yield::default();
        let mut now = 0;
        let mut wake = |messages: u32| {
            now += 10_000;
            (0..messages).for_each(|_| sent.count());
            sent.is_poor(0, || now)
        };
        assert!(!(0..300).any(|_| wake(100)));
        assert!((0..300).any(|_| wake(1)));
    }
}
