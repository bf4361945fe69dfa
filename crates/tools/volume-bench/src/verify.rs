//! Blocks that contain where and when they were written, and a ledger of what must be on the disk.
//!
//! Each block contains its offset, a sequence number and a checksum; the rest of it is computed from the two numbers.
//! The [`Ledger`] knows which sequence number each block must have: the newest acknowledged one while the storage
//! lives, and the newest one that a completed FLUSH covers after a power cut.

use thiserror::Error;
use zerocopy::IntoBytes;

/// Number of bytes at the start of each block that are not filling.
pub const STAMP: usize = 32;

const MAGIC: u64 = u64::from_le_bytes(*b"ginnelVB");

/// A block does not have the expected contents.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Wrong {
    /// A block that was stamped, but is not intact.
    #[error("the block at {offset} is damaged: {what}")]
    Damaged {
        /// Offset at which it was read, in bytes.
        offset: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// An intact block that belongs elsewhere.
    #[error("the block at {offset} holds what was written to {found}")]
    Elsewhere {
        /// Offset at which it was read, in bytes.
        offset: u64,
        /// Offset at which it belongs, in bytes.
        found: u64,
    },
    /// An acknowledged write is missing, or was replaced by an earlier one.
    #[error("the block at {offset} holds write {found}; it must be {least} or a later one")]
    Lost {
        /// Offset at which it was read, in bytes.
        offset: u64,
        /// Sequence number that was found; 0 for a block without a stamp.
        found: u64,
        /// The smallest allowed sequence number.
        least: u64,
    },
    /// A sequence number that was not written yet.
    #[error("the block at {offset} holds write {found}, which is later than the last one, {newest}")]
    Unwritten {
        /// Offset at which it was read, in bytes.
        offset: u64,
        /// Sequence number that was found.
        found: u64,
        /// The last sequence number that was written.
        newest: u64,
    },
}

/// Returns one word of filling.
#[inline]
fn filling(offset: u64, sequence: u64, at: usize) -> u64 {
    let x = (offset ^ sequence.rotate_left(32)).wrapping_add((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn checksum(offset: u64, sequence: u64, words: impl Iterator<Item = u64>) -> u64 {
    words.fold(offset ^ sequence.rotate_left(17), |sum, word| {
        (sum.rotate_left(5) ^ word).wrapping_mul(0x2127_599b_f432_5c37)
    })
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
}

/// Stamps and fills a block. Its length must be a multiple of 8 and at least [`STAMP`].
pub fn stamp(block: &mut [u8], offset: u64, sequence: u64) {
    let (head, body) = block.split_at_mut(STAMP);
    let mut sum = checksum(offset, sequence, std::iter::empty());
    for (at, word) in body.chunks_exact_mut(8).enumerate() {
        let value = filling(offset, sequence, at);
        word.copy_from_slice(&value.to_le_bytes());
        sum = (sum.rotate_left(5) ^ value).wrapping_mul(0x2127_599b_f432_5c37);
    }
    head.copy_from_slice([MAGIC, offset, sequence, sum].as_bytes());
}

/// Returns the sequence number of a stamped block; `None` if the block has no stamp.
pub fn read_stamp(block: &[u8], offset: u64) -> Result<Option<u64>, Wrong> {
    let (head, body) = block.split_at(STAMP);
    let mut numbers = words(head);
    let mut next = || numbers.next().unwrap_or_default();
    let (magic, place, sequence, sum) = (next(), next(), next(), next());
    if magic != MAGIC {
        return Ok(None);
    }
    if checksum(place, sequence, words(body)) != sum {
        return Err(Wrong::Damaged { offset, what: "its checksum is wrong" });
    }
    if place != offset {
        return Err(Wrong::Elsewhere { offset, found: place });
    }
    Ok(Some(sequence))
}

/// What has happened to the storage since the writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Nothing, or its server was killed. Every acknowledged write must be there.
    Running,
    /// The power was cut. Everything that a completed flush covers must be there.
    PowerCut,
}

/// An acknowledged write, and its number in the order of acknowledgements.
#[derive(Clone, Copy, Debug, Default)]
struct Acknowledged {
    sequence: u64,
    order: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// The last write that was begun. It equals the last acknowledged one, unless a write is in flight or has failed.
    newest: u64,
    last: Acknowledged,
    /// The last write that the current or the last completed flush covers, if that is not `last`.
    covered: Acknowledged,
    /// The last write before `covered` that a completed flush covers.
    durable: u64,
}

/// Records the writes to the blocks of one run. At most one write to a block, and one flush, are in flight at a time.
pub struct Ledger {
    block: u32,
    /// The number on the disk of its first block, and the step from one of its blocks to the next.
    first: usize,
    step: usize,
    /// The largest sequence number before this run.
    before: u64,
    sequence: u64,
    order: u64,
    flushing: u64,
    flushed: u64,
    states: Vec<State>,
}

impl Ledger {
    /// Returns a ledger for `blocks` blocks of `block` bytes each. Its sequence numbers begin after `before`, which
    /// must be at least the largest number of an earlier run on the same disk (nanoseconds since 1970 are suitable).
    pub fn new(block: u32, blocks: usize, before: u64) -> Self {
        Self {
            block,
            first: 0,
            step: 1,
            before,
            sequence: before,
            order: 0,
            flushing: 0,
            flushed: 0,
            states: vec![State::default(); blocks],
        }
    }

    /// Makes its block `index` the block `first + index * step` of the disk.
    pub fn every(self, first: usize, step: usize) -> Self {
        Self { first, step, ..self }
    }

    /// Returns the offset of block `index`, in bytes.
    pub fn offset(&self, index: usize) -> u64 {
        (self.first + index * self.step) as u64 * u64::from(self.block)
    }

    /// Returns how many blocks it covers.
    pub fn blocks(&self) -> usize {
        self.states.len()
    }

    /// Begins a write: fills a buffer with the next contents of block `index`. Panics if there is no such block, or if
    /// the buffer is not as long as a block.
    pub fn write(&mut self, index: usize, buffer: &mut [u8]) {
        assert_eq!(buffer.len(), self.block as usize, "a buffer is one block");
        self.sequence += 1;
        self.states[index].newest = self.sequence;
        stamp(buffer, self.offset(index), self.sequence);
    }

    /// Records that the write to a block was acknowledged.
    pub fn acknowledged(&mut self, index: usize) {
        self.order += 1;
        let state = &mut self.states[index];
        if state.last.order <= self.flushing {
            if state.covered.order <= self.flushed {
                state.durable = state.covered.sequence;
            }
            state.covered = state.last;
        }
        state.last = Acknowledged { sequence: state.newest, order: self.order };
    }

    /// Records that a flush is about to be submitted, which covers everything that has been acknowledged so far.
    pub fn flush(&mut self) {
        self.flushing = self.order;
    }

    /// Records that the flush was acknowledged.
    pub fn flushed(&mut self) {
        self.flushed = self.flushing;
    }

    /// Returns whether this run has written to the block.
    pub fn is_written(&self, index: usize) -> bool {
        self.states[index].newest != 0
    }

    /// Returns the smallest sequence number that the block may have.
    fn least(&self, index: usize, since: Since) -> u64 {
        let State { last, covered, durable, .. } = self.states[index];
        match since {
            Since::Running => last.sequence,
            Since::PowerCut if last.order <= self.flushed => last.sequence,
            Since::PowerCut if covered.order <= self.flushed => covered.sequence,
            Since::PowerCut => durable,
        }
    }

    /// Checks the contents of a block, and takes them as its contents from now on. No write to the block may be in
    /// flight when the read is submitted.
    pub fn check(&mut self, index: usize, bytes: &[u8], since: Since) -> Result<(), Wrong> {
        let offset = self.offset(index);
        let newest = self.states[index].newest;
        // Before the first write the block may have any contents, except a damaged stamp or a sequence number of the
        // future.
        let found = read_stamp(bytes, offset)?.unwrap_or(0);
        let least = self.least(index, since);
        if found < least {
            return Err(Wrong::Lost { offset, found, least });
        }
        if found > newest.max(self.before) {
            return Err(Wrong::Unwritten { offset, found, newest });
        }
        if newest != 0 && found != self.states[index].last.sequence {
            // A failed write has reached the disk, or unflushed ones were lost.
            let last = Acknowledged { sequence: found, order: 0 };
            self.states[index] = State { newest: found, last, covered: last, durable: found };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 512;

    fn written(ledger: &mut Ledger, index: usize) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        ledger.write(index, &mut block);
        block
    }

    #[test]
    fn a_block_is_known_again() {
        let mut ledger = Ledger::new(BLOCK as u32, 4, 100);
        let block = written(&mut ledger, 3);
        assert_eq!(read_stamp(&block, 3 * 512), Ok(Some(101)));
        assert_eq!(read_stamp(&block, 512), Err(Wrong::Elsewhere { offset: 512, found: 1536 }));
        for at in [8, 16, 24, 32, 511] {
            let mut broken = block.clone();
            broken[at] ^= 1;
            assert!(matches!(read_stamp(&broken, 3 * 512), Err(Wrong::Damaged { .. })), "byte {at}");
        }
    }

    #[test]
    fn acknowledged_writes_stay() {
        let mut ledger = Ledger::new(BLOCK as u32, 1, 0);
        let nothing = vec![0; BLOCK];
        assert_eq!(ledger.check(0, &nothing, Since::Running), Ok(()));
        let first = written(&mut ledger, 0);
        assert_eq!(ledger.check(0, &nothing, Since::Running), Ok(()), "not acknowledged");
        let mut ledger = Ledger::new(BLOCK as u32, 1, 0);
        assert_eq!(written(&mut ledger, 0), first);
        ledger.acknowledged(0);
        let lost = Err(Wrong::Lost { offset: 0, found: 0, least: 1 });
        assert_eq!(ledger.check(0, &nothing, Since::Running), lost);
        assert_eq!(ledger.check(0, &first, Since::Running), Ok(()));
        let second = written(&mut ledger, 0);
        ledger.acknowledged(0);
        assert!(ledger.check(0, &first, Since::Running).is_err());
        assert_eq!(ledger.check(0, &second, Since::Running), Ok(()));
        let mut early = Ledger::new(BLOCK as u32, 1, 0);
        assert!(matches!(early.check(0, &second, Since::Running), Err(Wrong::Unwritten { .. })));
    }

    #[test]
    fn a_power_cut_keeps_what_was_flushed() {
        let mut ledger = Ledger::new(BLOCK as u32, 2, 0);
        let first = written(&mut ledger, 0);
        ledger.acknowledged(0);
        ledger.flush();
        // Acknowledged while the flush is in flight, so the flush may or may not cover it.
        let second = written(&mut ledger, 0);
        ledger.acknowledged(0);
        let other = written(&mut ledger, 1);
        ledger.acknowledged(1);
        ledger.flushed();
        let nothing = vec![0; BLOCK];
        assert!(ledger.check(0, &nothing, Since::PowerCut).is_err());
        assert_eq!(ledger.check(1, &nothing, Since::PowerCut), Ok(()), "never flushed");
        assert_eq!(ledger.check(0, &second, Since::PowerCut), Ok(()));
        assert!(ledger.check(1, &other, Since::Running).is_err(), "it was lost, and cannot come back");
        let mut ledger = Ledger::new(BLOCK as u32, 2, 0);
        assert_eq!(written(&mut ledger, 0), first);
        ledger.acknowledged(0);
        ledger.flush();
        ledger.flushed();
        written(&mut ledger, 0);
        ledger.acknowledged(0);
        assert_eq!(ledger.check(0, &first, Since::PowerCut), Ok(()));
        // From here on, these are the block's contents.
        assert_eq!(ledger.check(0, &first, Since::Running), Ok(()));
        assert!(ledger.check(0, &nothing, Since::PowerCut).is_err(), "what was found stays");
    }
}
