//! Memory for calls that move many bytes from one descriptor to another. Threads may have small stacks, and a signal handler may leave such
//! a call, but not an allocator.
#![allow(unsafe_code)] // Hands out memory.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// The length of a buffer.
pub const LEN: usize = 64 << 10;
const COUNT: usize = 8;

struct Place {
    is_taken: AtomicBool,
    bytes: UnsafeCell<[u8; LEN]>,
}

// SAFETY: only the owner of the one `Buffer` that has set `is_taken` uses the bytes.
unsafe impl Sync for Place {}

static PLACES: [Place; COUNT] =
    [const { Place { is_taken: AtomicBool::new(false), bytes: UnsafeCell::new([0; LEN]) } }; COUNT];

/// A buffer of one call. If a handler leaves the call for good, its place stays taken.
pub struct Buffer(&'static Place);

impl Buffer {
    /// Returns `None` if all are in use.
    pub fn take() -> Option<Self> {
        // ORDER preload.buffer: what the last owner has done with the bytes comes first. Pairs with: `Buffer::drop`.
        PLACES.iter().find(|place| !place.is_taken.swap(true, Ordering::Acquire)).map(Self)
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this buffer alone has taken the place, and is borrowed as long as the result is.
        unsafe { &mut *self.0.bytes.get() }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // ORDER preload.buffer: see `Buffer::take`.
        self.0.is_taken.store(false, Ordering::Release);
    }
}

/// The length of what a call uses that gets no buffer.
pub const SMALL: usize = 1 << 10;

/// Returns a buffer of a call, or a small one of its own.
pub fn of<'a>(buffer: &'a mut Option<Buffer>, small: &'a mut [u8; SMALL]) -> &'a mut [u8] {
    buffer.as_mut().map_or(small, |buffer| buffer.bytes())
}

#[cfg(test)]
mod tests {
    use super::{Buffer, COUNT, LEN, SMALL, of};

    #[test]
    fn each_call_has_a_buffer_of_its_own() {
        let mut all: Vec<_> = (0..=COUNT).map(|_| Buffer::take()).collect();
        assert_eq!(all.iter().flatten().count(), COUNT);
        let mut places: Vec<_> = all.iter_mut().flatten().map(|buffer| buffer.bytes().as_ptr()).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), COUNT);
        assert_eq!(of(&mut None, &mut [0; SMALL]).len(), SMALL);
        drop(all);
        assert_eq!(of(&mut Buffer::take(), &mut [0; SMALL]).len(), LEN);
    }
}
