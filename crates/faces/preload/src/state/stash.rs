//! Bytes of the program that were taken from the kernel for wake bytes: the sender had gone back to TCP meanwhile.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// The most bytes that are taken from the kernel at once for wake bytes. Once some of them turn out to be the program's, the place where
/// the wake bytes end is known, and nobody takes bytes behind it.
pub const MOST: usize = 256;

/// The bytes. Relatives share them, so they lie in memory that only the processes of a family have. All calls but [`Stash::is_empty`] need
/// the lock of the receiving direction. A process that is killed in one of them leaves the bytes as they were before, or after; if it has
/// taken them from the kernel and not added them yet, they are lost, as with TCP.
#[repr(C)]
pub struct Stash {
    begin: AtomicU32,
    end: AtomicU32,
    bytes: [AtomicU8; MOST],
}

impl Stash {
    pub const fn new() -> Self {
        Self { begin: AtomicU32::new(0), end: AtomicU32::new(0), bytes: [const { AtomicU8::new(0) }; MOST] }
    }

    fn bytes(&self) -> &[AtomicU8] {
        let at = |place: &AtomicU32| (place.load(Ordering::Relaxed) as usize).min(MOST);
        self.bytes.get(at(&self.begin)..at(&self.end)).unwrap_or(&[])
    }

    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn clear(&self) {
        self.end.store(0, Ordering::Relaxed);
        self.begin.store(0, Ordering::Relaxed);
    }

    /// Adds bytes. Returns false if there is no room for them.
    pub fn push(&self, bytes: &[u8]) -> bool {
        if self.is_empty() {
            self.clear();
        }
        let end = self.end.load(Ordering::Relaxed) as usize;
        let Some(room) = self.bytes.get(end..end + bytes.len()) else { return false };
        for (place, byte) in room.iter().zip(bytes) {
            place.store(*byte, Ordering::Relaxed);
        }
        self.end.store((end + bytes.len()) as u32, Ordering::Relaxed);
        true
    }

    /// Copies bytes from the front, behind `skipped` ones, as many as there are and have room. Returns how many.
    pub fn show(&self, skipped: usize, into: &mut [u8]) -> usize {
        let bytes = self.bytes().get(skipped..).unwrap_or(&[]);
        for (to, byte) in into.iter_mut().zip(bytes) {
            *to = byte.load(Ordering::Relaxed);
        }
        bytes.len().min(into.len())
    }

    /// Removes bytes from the front.
    pub fn remove(&self, bytes: usize) {
        self.begin.fetch_add(bytes.min(self.len()) as u32, Ordering::Relaxed);
    }

    /// Takes over what the other one has.
    pub fn copy(&self, other: &Self) {
        let mut bytes = [0; MOST];
        let n = other.show(0, &mut bytes);
        self.clear();
        self.push(&bytes[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_leave_as_they_came() {
        let (stash, other) = (Stash::new(), Stash::new());
        assert!(stash.is_empty());
        assert!(stash.push(b"abc") && stash.push(b"de"));
        stash.remove(1);
        other.copy(&stash);
        let mut bytes = [0; 8];
        assert_eq!((other.show(0, &mut bytes), &bytes[..4]), (4, &b"bcde"[..]));
        assert_eq!((other.show(2, &mut bytes[..1]), bytes[0]), (1, b'd'));
        assert_eq!(other.show(9, &mut bytes), 0);
        other.remove(9);
        assert!(other.is_empty() && other.push(&[1; MOST]) && !other.push(&[1]));
        assert_eq!((other.len(), stash.len()), (MOST, 4));
        stash.clear();
        assert!(stash.is_empty());
    }
}
