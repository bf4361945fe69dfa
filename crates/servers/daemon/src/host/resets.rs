//! The resets of a guest, as its QEMU reports them. Each costs lines of the journal and a new session, and a hostile QEMU can report them
//! without end: so many that come soon after another are handled as one, a moment later.

use std::time::{Duration, Instant};

/// The shortest time between two. A kernel that was reset takes longer to begin a session.
const INTERVAL: Duration = Duration::from_millis(100);

/// The resets of one guest.
#[derive(Debug, Default)]
pub struct Resets {
    /// When the one is to be handled that was reported.
    due: Option<Instant>,
    /// The earliest time for the next one.
    next: Option<Instant>,
}

impl Resets {
    /// Notes that one was reported.
    pub fn report(&mut self, now: Instant) {
        self.due.get_or_insert(self.next.map_or(now, |next| next.max(now)));
    }

    /// Forgets what was reported: the guest has ended altogether.
    pub fn forget(&mut self) {
        self.due = None;
    }

    /// Returns when one is to be handled, if one was reported.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns whether one is to be handled now. Then it counts as handled.
    pub fn take_due(&mut self, now: Instant) -> bool {
        let is_due = self.due.is_some_and(|due| due <= now);
        if is_due {
            *self = Self { due: None, next: Some(now + INTERVAL) };
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_are_handled_as_few_and_the_last_one_counts() {
        let mut resets = Resets::default();
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let mut handled = Vec::new();
        for now in 0..1000 {
            resets.report(at(now));
            if resets.take_due(at(now)) {
                handled.push(now);
            }
        }
        assert_eq!(handled, (0..1000).step_by(100).collect::<Vec<_>>());
        assert_eq!(resets.due(), Some(at(1000)));
        assert!(resets.take_due(at(1000)) && !resets.take_due(at(2000)));
        // One that comes after a rest is handled at once.
        resets.report(at(2000));
        assert!(resets.take_due(at(2000)));
        resets.report(at(2000));
        resets.forget();
        assert!(resets.due().is_none() && !resets.take_due(at(3000)));
    }
}
