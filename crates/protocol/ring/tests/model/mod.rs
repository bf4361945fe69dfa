//! Runs lists of operations on a ring, and compares each operation with a queue in private memory.
//!
//! The property tests (`properties.rs`) and the fuzzer (`fuzz/`) share this harness: both make [`Op`]s, and [`messages`] or
//! [`stream`] panics at the first difference. In [`scribble`], [`board`] and [`carrier`], a scribbler writes arbitrary values
//! to a ring, a readiness board, or the words of a change-over meanwhile.

pub mod board;
pub mod carrier;
pub mod messages;
pub mod scribble;
pub mod stream;

use ginnel_layout::ring::footprint;
use ginnel_shmem::{Mapping, SharedMemory};

/// One operation on any ring: a code, and two numbers as arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    pub code: u8,
    pub a: u16,
    pub b: u16,
}

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
    pub ring: Mapping,
}

impl Arena {
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
    pub fn arm(&mut self) {
        *self = Self { armed: true, rung: false };
    }
    pub fn disarm(&mut self) {
        self.armed = false;
    }
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
