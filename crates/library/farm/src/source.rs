//! The input of a job, from which pieces are filled.

use ginnel::{Mapping, SharedSlice};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsFd;

/// The input of a job. The manager reads a piece each time it gives that piece to a worker, so it reads some pieces
/// more than once.
pub trait Source {
    /// Fills `room`, which lies in the worker's ring, with the input's bytes from `offset`. Must write the same bytes
    /// each time. Fails if the input ends before `room` is full.
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()>;
}

/// Returns the ranges of the pieces that make up `total` bytes. Each has `size` bytes, except that the last may be
/// shorter. A `size` of 0 counts as 1.
pub fn equal(total: u64, size: usize) -> impl Iterator<Item = Range<u64>> + Clone {
    let size = size.max(1) as u64;
    (0..total.div_ceil(size)).map(move |n| n * size..total.min((n + 1).saturating_mul(size)))
}

/// Reads the input as `&File` does.
impl Source for File {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()> {
        (&*self).fill(offset, room)
    }
}

/// Reads the input from a file, which the kernel copies straight into the rings. This moves the file's position.
impl Source for &File {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()> {
        self.seek(SeekFrom::Start(offset))?;
        let mut filled = 0;
        while filled < room.len() {
            match room.skip(filled).read_from(self.as_fd()) {
                Ok(0) => return Err(short()),
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Copies the input from memory.
impl Source for &[u8] {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()> {
        let at = usize::try_from(offset).ok();
        let bytes = at.and_then(|at| self.get(at..at.checked_add(room.len())?)).ok_or_else(short)?;
        room.write(0, bytes);
        Ok(())
    }
}

fn short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the input is shorter than its pieces say")
}

impl<F: FnMut(u64, SharedSlice<'_, Mapping>) -> io::Result<()>> Source for F {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()> {
        self(offset, room)
    }
}

/// A source of pseudo-random text of any length, for tests and benchmarks. The bytes are those from space to underscore.
/// The same seed always gives the same text.
#[derive(Clone, Copy, Debug)]
pub struct Generated {
    /// The seed. Different seeds give different texts.
    pub seed: u64,
}

/// The size of a block in bytes. Text is generated in blocks, so that any part can be generated without the parts before it.
const BLOCK: usize = 4096;
/// The number of random generators in a block. They are independent, so that the processor can run several in parallel.
const LANES: usize = 8;

impl Generated {
    /// Fills `into` with the text's bytes from `offset`.
    pub fn read(self, offset: u64, into: &mut [u8]) {
        let mut filled = 0;
        self.blocks(offset, into.len(), |part| {
            into[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        });
    }

    /// Calls `f` with the text's `len` bytes from `offset`, part by part.
    fn blocks(self, offset: u64, len: usize, mut f: impl FnMut(&[u8])) {
        let mut block = [0; BLOCK];
        let (mut at, mut left) = (offset, len);
        while left > 0 {
            let skip = (at % BLOCK as u64) as usize;
            let part = (BLOCK - skip).min(left);
            self.block(at / BLOCK as u64, &mut block);
            f(&block[skip..skip + part]);
            (at, left) = (at + part as u64, left - part);
        }
    }

    fn block(self, number: u64, bytes: &mut [u8; BLOCK]) {
        let mut lanes: [u64; LANES] = std::array::from_fn(|lane| {
            // SplitMix64 of a number that no other lane has. The result must not be 0, because xorshift would stay at 0.
            let n = number.wrapping_mul(LANES as u64).wrapping_add(lane as u64 + 1);
            let mut x = self.seed.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (x ^ (x >> 31)) | 1 << 63
        });
        let text = |x: u64| ((x & 0x3f3f_3f3f_3f3f_3f3f) + 0x2020_2020_2020_2020).to_le_bytes();
        for row in bytes.as_chunks_mut::<{ 16 * LANES }>().0 {
            for (words, x) in row.as_chunks_mut::<16>().0.iter_mut().zip(&mut lanes) {
                *x ^= *x << 13;
                *x ^= *x >> 7;
                *x ^= *x << 17;
                // Each random number gives 16 bytes, from different bits, because generating text must not take longer than
                // moving it.
                let (first, second) = words.split_at_mut(8);
                first.copy_from_slice(&text(*x));
                second.copy_from_slice(&text(*x >> 29));
            }
        }
    }
}

impl Source for Generated {
    fn fill(&mut self, offset: u64, room: SharedSlice<'_, Mapping>) -> io::Result<()> {
        let mut filled = 0;
        self.blocks(offset, room.len(), |part| filled += room.write(filled, part));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn filled(source: &mut impl Source, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let memory = Mapping::anonymous(16384).unwrap();
        let room = SharedSlice::new(&memory, 24, len);
        source.fill(offset, room)?;
        Ok(room.to_vec())
    }

    #[test]
    fn equal_pieces_make_up_the_whole() {
        for (total, size) in [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 7), (10, 0)] {
            let mut at = 0;
            for piece in equal(total, size) {
                assert!(
                    piece.start == at && !piece.is_empty() && piece.end - piece.start <= size.max(1) as u64
                );
                at = piece.end;
            }
            assert_eq!(at, total);
        }
    }

    #[test]
    fn any_part_of_generated_text_is_a_part_of_the_whole() {
        let text = Generated { seed: 7 };
        let mut whole = vec![0; 10_000];
        text.read(0, &mut whole);
        assert!(whole.iter().all(|byte| (b' '..=b'_').contains(byte)) && whole.contains(&b' '));
        for (at, len) in [(0, 0), (0, 1), (1, 6), (3, 5), (7, 1), (7, 9), (13, 4096), (8, 9000), (4095, 4099)]
        {
            let mut part = vec![0; len];
            text.read(at as u64, &mut part);
            assert_eq!(part, whole[at..at + len], "{at} {len}");
            assert_eq!(filled(&mut { text }, at as u64, len).unwrap(), part);
        }
        let mut other = vec![0; 100];
        Generated { seed: 8 }.read(0, &mut other);
        assert_ne!(other, whole[..100]);
    }

    #[test]
    fn files_and_memory_are_read_anywhere_and_a_short_one_is_an_error() {
        let bytes: Vec<u8> = (0..9999u32).map(|n| (n % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        for (at, len) in [(0, 9999), (9000, 999), (17, 1), (9999, 0)] {
            assert_eq!(filled(&mut file, at as u64, len).unwrap(), bytes[at..at + len]);
            assert_eq!(filled(&mut bytes.as_slice(), at as u64, len).unwrap(), bytes[at..at + len]);
        }
        for (at, len) in [(0, 10_000), (9999, 1), (u64::MAX, 1), (u64::MAX - 3, 8)] {
            assert!(filled(&mut bytes.as_slice(), at, len).is_err());
        }
        assert_eq!(filled(&mut file, 9990, 10).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
