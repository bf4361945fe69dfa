//! The signs of life of a guest's daemon.

use std::time::{Duration, Instant};

/// A silent guest is asked for a sign of life after the time after which it counts as hanging, divided by this number.
const SOONER: u32 = 3;

/// The time at which a guest last sent something, and the state of the watch over it.
#[derive(Debug)]
pub struct Pulse {
    heard: Instant,
    asked: bool,
    /// The guest has been silent for as long as its configuration allows.
    pub hangs: bool,
}

impl Pulse {
    /// Starts with a guest that has just sent something.
    pub fn new() -> Self {
        Self { heard: Instant::now(), asked: false, hangs: false }
    }

    /// Returns for how long the guest has been silent.
    pub fn silence(&self) -> Duration {
        self.heard.elapsed()
    }

    /// Returns whether the guest has been silent for so long that it should be asked, if it counts as hanging `after` this time.
    pub fn is_weak(&self, after: Duration) -> bool {
        self.silence() >= after / SOONER
    }

    /// Notes that the guest is asked for a sign of life. Returns false if it was asked before.
    pub fn ask(&mut self) -> bool {
        !std::mem::replace(&mut self.asked, true)
    }

    /// Returns the time until the guest should be asked, or, if it was, counts as hanging.
    pub fn until_due(&self, after: Duration) -> Duration {
        let next = if self.asked { after } else { after / SOONER };
        next.saturating_sub(self.silence())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_guest_is_asked_once_and_then_counts_as_hanging() {
        let after = Duration::from_secs(600);
        let mut pulse = Pulse::new();
        assert!(!pulse.is_weak(after) && pulse.until_due(after) <= after / SOONER);
        pulse.heard = Instant::now().checked_sub(after / 2).unwrap();
        assert!(pulse.is_weak(after) && pulse.until_due(after).is_zero());
        assert!(pulse.ask() && !pulse.ask());
        let due = pulse.until_due(after);
        assert!(due > after / 4 && due <= after / 2, "{due:?}");
        assert!(pulse.is_weak(Duration::ZERO) && pulse.until_due(Duration::ZERO).is_zero());
    }
}
