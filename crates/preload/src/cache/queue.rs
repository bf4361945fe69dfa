//! Answers that the program has not received.

/// So many bytes are queued at most, but for a single answer that is larger.
pub const MOST: usize = 256 << 10;
/// The largest answer that is queued.
pub const LARGEST: usize = 8 << 20;

/// Bytes in the order in which they are received.
#[derive(Default)]
pub struct Queue {
    bytes: Vec<u8>,
    /// Of those, so many have been received.
    at: usize,
}

impl Queue {
    /// Has its memory at once: answering allocates nothing, but for very large answers.
    pub fn new() -> Self {
        Self { bytes: Vec::with_capacity(MOST), at: 0 }
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The bytes, to be appended to, and up to which length.
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

    /// So many bytes at the end are not to be received.
    pub fn undo(&mut self, len: usize) {
        self.bytes.truncate(self.bytes.len().saturating_sub(len).max(self.at));
    }

    /// Copies the first bytes out.
    pub fn look(&self, into: &mut [u8]) -> usize {
        let n = self.len().min(into.len());
        into[..n].copy_from_slice(&self.bytes[self.at..self.at + n]);
        n
    }

    /// So many have been received.
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
