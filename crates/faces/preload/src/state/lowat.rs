//! SO_RCVLOWAT, as the program has set it.

use std::sync::atomic::{AtomicU32, Ordering};

/// What the program has set, while the kernel has 1.
pub struct Lowat(pub AtomicU32);

impl Lowat {
    pub const fn new() -> Self {
        Self(AtomicU32::new(1))
    }

    pub fn reset(&self) {
        self.0.store(1, Ordering::Relaxed);
    }

    /// Returns how many bytes must be there.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed) as usize
    }
}
