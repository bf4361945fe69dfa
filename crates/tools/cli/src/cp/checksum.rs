//! The checksum of copied bytes: XXH64 with seed 0, also of memory that a peer can write.
//!
//! This is the fastest standard checksum of those that were tried in an emulated guest, where vector and CRC
//! instructions are slow helper calls: it needs only 64-bit multiplications and rotations. `xxhsum -H1 FILE` prints the
//! same value. It detects accidents; a program that can write to the segment can also write a matching checksum.

use ginnel::{Mapping, SharedSlice};
use xxhash_rust::xxh64::Xxh64;

/// The number of shared bytes that are copied before they are added: few enough to be still in the first-level cache.
const PIECE: usize = 4096;
/// The number of bytes that [`SharedSlice::stripes`] returns at once.
const STRIPE: usize = 32;

/// The checksum of the bytes so far.
#[derive(Clone)]
pub struct Checksum {
    state: Xxh64,
    total: u64,
}

impl Checksum {
    /// Returns the checksum of no bytes.
    pub fn new() -> Self {
        Self { state: Xxh64::new(0), total: 0 }
    }

    /// Adds private bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
        self.total += bytes.len() as u64;
    }

    /// Adds bytes that a peer can write at any time. Each is loaded once. The slice must be aligned to a word.
    pub fn add_shared(&mut self, slice: &SharedSlice<'_, Mapping>) {
        let mut copy = [0; PIECE];
        for at in (0..slice.len()).step_by(PIECE) {
            let piece = slice.skip(at);
            self.copy(&piece, &mut copy[..piece.len().min(PIECE)]);
        }
    }

    /// Does the same as [`Checksum::add_shared`], and stores the loaded bytes in `into`.
    pub fn take_shared(&mut self, slice: &SharedSlice<'_, Mapping>, into: &mut [u8]) {
        for (i, into) in into.chunks_mut(PIECE).enumerate() {
            self.copy(&slice.skip(i * PIECE), into);
        }
    }

    /// Fills `into` with shared bytes, and adds these.
    fn copy(&mut self, slice: &SharedSlice<'_, Mapping>, into: &mut [u8]) {
        // The library's copy would be a single instruction, which emulated processors execute byte by byte.
        let slice = slice.first(into.len());
        let mut stripes = into.as_chunks_mut::<STRIPE>().0.iter_mut();
        let done = slice.stripes(|words| {
            if let Some(stripe) = stripes.next() {
                for (to, word) in stripe.as_chunks_mut().0.iter_mut().zip(words) {
                    *to = word.to_ne_bytes();
                }
            }
        });
        slice.read(done, &mut into[done..]);
        self.add(into);
    }

    /// Returns the number of bytes so far.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Returns the checksum so far. More bytes can be added afterwards.
    pub fn value(&self) -> u64 {
        self.state.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    fn sum(bytes: &[u8]) -> u64 {
        let mut sum = Checksum::new();
        sum.add(bytes);
        sum.value()
    }

    /// These values are part of the protocol and of the partial files of interrupted copies. They were computed with
    /// the implementation that this program had before it used a library; the first value is in the XXH64
    /// specification.
    #[test]
    fn the_values_are_those_of_the_protocol() {
        let values = [
            (0, 0xef46_db37_51d8_e999),
            (1, 0xe934_a84a_db05_2768),
            (3, 0x9ff7_0a63_5a62_09ab),
            (4, 0xae5a_cdc0_0a55_ac41),
            (7, 0xd734_a6b2_6f3d_a63e),
            (8, 0x8711_6b33_65b9_24eb),
            (31, 0x0f18_7c62_b1e7_22b7),
            (32, 0x91b0_cb09_31a8_c629),
            (33, 0x931b_043c_f8d6_5b94),
            (63, 0x2191_10bf_13e2_fa26),
            (64, 0xbf30_52e3_4457_75d0),
            (100, 0x8e22_72c0_8247_d5db),
            (4096, 0x67da_7877_6e77_ad46),
            (10007, 0xa3eb_0bf8_7392_6625),
        ];
        for (len, value) in values {
            assert_eq!(sum(&bytes(len)), value, "{len} bytes");
        }
        assert_eq!(sum(b"abc"), 0x44bc_2cf5_ad77_0999);
    }

    #[test]
    fn pieces_do_not_matter() {
        let bytes = bytes(5000);
        for piece in [1, 3, 31, 32, 33, 64, 1000] {
            let mut sum = Checksum::new();
            bytes.chunks(piece).for_each(|piece| sum.add(piece));
            assert_eq!((sum.value(), sum.len()), (super::tests::sum(&bytes), 5000), "pieces of {piece}");
        }
    }

    #[test]
    fn shared_bytes_count_like_private_ones() {
        let memory = Mapping::anonymous(16384).unwrap();
        let bytes = bytes(10_007);
        let whole = SharedSlice::new(&memory, 40, bytes.len());
        whole.write(0, &bytes);
        for len in [0, 1, 31, 32, 33, 4095, 4096, 4097, 8192, 10_007] {
            let (mut added, mut taken, mut copy) = (Checksum::new(), Checksum::new(), vec![0; len]);
            added.add_shared(&whole.first(len));
            taken.take_shared(&whole.first(len), &mut copy);
            let expected = (sum(&bytes[..len]), len as u64);
            assert_eq!((added.value(), added.len()), expected);
            assert_eq!((taken.value(), taken.len()), expected);
            assert!(copy == bytes[..len]);
        }
    }
}
