//! What a program's user is told on stderr, as the real library does it.
//!
//! Programs learn of an error by a number, and many show no more than that, or go on without the device. That a segment is full has
//! a cure that the number does not say.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Says once in a process what is wrong with a segment. Waits if nobody reads stderr, so that no lock may be held.
pub fn say(error: &impl Display) {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    if !IS_SAID.swap(true, Ordering::Relaxed) {
        // A program that has closed it wants no warnings.
        let _ = writeln!(std::io::stderr(), "libibverbs: Warning: {error}");
    }
}
