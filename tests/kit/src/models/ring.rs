//! Runs operations on a ring, and compares each of them with a queue in private memory ([`messages`], [`stream`]).
//!
//! In [`scribble`], [`board`] and [`carrier`], a scribbler meanwhile writes arbitrary values to a ring, a readiness board, or the words of
//! a change-over.

pub mod board;
pub mod carrier;
pub mod messages;
pub mod scribble;
pub mod stream;

use ginnel_layout::ring::footprint;
use ginnel_shmem::{Mapping, SharedMemory};

/// Returns the capacity that a byte selects.
pub fn capacity(choice: u8) -> usize {
    4096 << (choice % 5)
}

/// Spreads a number over 0..=max. Low values, high values, and those around cache lines come often.
pub fn size(n: u16, max: usize) -> usize {
    let n = usize::from(n);
    match n % 4 {
        0 => (n / 4 % 200).min(max),
        1 => max.saturating_sub(n / 4 % 200),
        2 => ((n / 4 % 256) * 64 + n % 17).saturating_sub(16).min(max),
        _ => n / 4 * max / (usize::from(u16::MAX) / 4),
    }
}

const GUARD: usize = 4096;

/// A ring's memory with known bytes on both sides, which must not change.
pub struct Arena {
    whole: Mapping,
    /// The ring's part of it.
    pub ring: Mapping,
}

impl Arena {
    /// Makes the memory of an empty ring.
    pub fn new(capacity: usize) -> Self {
        let len = footprint(capacity);
        let whole = Mapping::anonymous(len + 2 * GUARD).unwrap();
        for at in [0, GUARD + len] {
            whole.write(at, &[0xa5; GUARD]);
        }
        let ring = whole.part(GUARD, len).unwrap();
        Self { whole, ring }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for at in [0, GUARD + self.ring.len()] {
            let mut bytes = [0; GUARD];
            self.whole.read(at, &mut bytes);
            assert!(bytes == [0xa5; GUARD], "bytes outside the ring have changed");
        }
    }
}

/// The expected effect of one side's wake word on the other.
#[derive(Default)]
pub struct Wake {
    armed: bool,
    /// The other side has rung for this arming.
    rung: bool,
}

impl Wake {
    /// This side arms its word, because it goes to sleep.
    pub fn arm(&mut self) {
        *self = Self { armed: true, rung: false };
    }
    /// This side has woken up.
    pub fn disarm(&mut self) {
        self.armed = false;
    }
    /// Returns whether the other side must ring when it looks.
    pub fn due(&self) -> bool {
        self.armed && !self.rung
    }
    /// The other side looks. Returns whether it must ring.
    pub fn look(&mut self) -> bool {
        let due = self.due();
        self.rung |= due;
        due
    }
}
