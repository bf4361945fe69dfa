//! Warnings for the user of a program, printed to stderr as the real library does.
//!
//! A program gets only an error number. Many programs show nothing else, or go on without the device. But a full segment can be
//! remedied, which the number does not tell the user.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Prints a warning about a segment, once in a process. Blocks while nobody reads stderr, so the caller must not hold a lock.
pub fn say(error: &impl Display) {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    if !IS_SAID.swap(true, Ordering::Relaxed) {
        // If the program has closed stderr, the warning is dropped.
        let _ = writeln!(std::io::stderr(), "libibverbs: Warning: {error}");
    }
}
