//! The library's answers that the program has not received yet.

/// The maximum number of queued bytes. A single answer may be larger if nothing else is queued.
pub const MOST: usize = 256 << 10;
/// The length of the largest answer that is queued, in bytes.
pub const LARGEST: usize = 8 << 20;

/// The queued bytes, in the order in which the program receives them.
#[derive(Default)]
pub struct Queue {
    bytes: Vec<u8>,
    /// The number of bytes at the beginning of `bytes` that the program has received.
    at: usize,
}

impl Queue {
    /// Allocates the memory of the queue now, so that answering allocates memory for very large answers only.
    pub fn new() -> Self {
        Self { bytes: Vec::with_capacity(MOST), at: 0 }
    }

    /// Returns the number of bytes that the program has not received.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns the vector to which the caller may append bytes, and the maximum length of this vector.
    pub fn append(&mut self) -> (&mut Vec<u8>, usize) {
        if self.at == self.bytes.len() {
            self.bytes.clear();
            self.at = 0;
            return (&mut self.bytes, LARGEST);
        }
        if self.at >= MOST / 2 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        (&mut self.bytes, MOST)
    }

    /// Removes this number of bytes from the end.
    pub fn undo(&mut self, len: usize) {
        self.bytes.truncate(self.bytes.len().saturating_sub(len).max(self.at));
    }

    /// Copies the first bytes out without removing them. Returns how many.
    pub fn look(&self, into: &mut [u8]) -> usize {
        let n = self.len().min(into.len());
        into[..n].copy_from_slice(&self.bytes[self.at..self.at + n]);
        n
    }

    /// Removes this number of bytes from the beginning, because the program has received them.
    pub fn drop_first(&mut self, n: usize) {
        self.at = (self.at + n).min(self.bytes.len());
        if self.len() == 0 && self.bytes.capacity() > 2 * MOST {
            *self = Self::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order() {
        let mut queue = Queue::new();
        let (mut put, mut got) = (0_u32, 0_u32);
        for turn in 0..50_000 {
            let (bytes, most) = queue.append();
            if bytes.len() + 4 <= most.min(MOST) && turn % 3 != 0 {
                bytes.extend(put.to_le_bytes());
                put += 1;
            }
            let mut word = [0; 4];
            if turn % 2 == 0 && queue.look(&mut word) == 4 {
                assert_eq!(u32::from_le_bytes(word), got);
                queue.drop_first(4);
                got += 1;
            }
        }
        assert!(got > 10_000 && put > got && queue.len() == (put - got) as usize * 4);
        queue.undo(4);
        assert_eq!(queue.len(), (put - got - 1) as usize * 4);
        queue.undo(usize::MAX);
        assert_eq!(queue.len(), 0);
    }
}
