//! XXH64 with seed 0, computed straight from memory that a peer shares.
//!
//! Of the checksums that were tried in an emulated guest, where vector and CRC instructions are slow helper calls, this
//! is the fastest standard one: plain 64-bit multiplications and rotations. `xxhsum -H1 FILE` prints the same value.
//! It finds accidents; whoever can write the segment can also write a matching checksum.

use ginnel::{Mapping, SharedSlice};

const P1: u64 = 0x9e37_79b1_85eb_ca87;
const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const P3: u64 = 0x1656_67b1_9e37_79f9;
const P4: u64 = 0x85eb_ca77_c2b2_ae63;
const P5: u64 = 0x27d4_eb2f_1656_67c5;

/// Bytes that go in at once.
pub const STRIPE: usize = 32;

/// The checksum of the bytes so far.
#[derive(Clone)]
pub struct Checksum {
    lanes: [u64; 4],
    total: u64,
    /// What does not fill a stripe yet.
    rest: [u8; STRIPE],
    rest_len: usize,
}

impl Checksum {
    /// Of no bytes.
    pub fn new() -> Self {
        let lanes = [P1.wrapping_add(P2), P2, 0, P1.wrapping_neg()];
        Self { lanes, total: 0, rest: [0; STRIPE], rest_len: 0 }
    }

    /// Adds private bytes.
    pub fn add(&mut self, mut bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if self.rest_len > 0 {
            let n = bytes.len().min(STRIPE - self.rest_len);
            self.rest[self.rest_len..self.rest_len + n].copy_from_slice(&bytes[..n]);
            self.rest_len += n;
            bytes = &bytes[n..];
            if self.rest_len < STRIPE {
                return;
            }
            self.lanes = rounds(self.lanes, words(&self.rest));
            self.rest_len = 0;
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        self.lanes = stripes.iter().fold(self.lanes, |lanes, stripe| rounds(lanes, words(stripe)));
        self.rest[..rest.len()].copy_from_slice(rest);
        self.rest_len = rest.len();
    }

    /// Whether what comes next begins a stripe.
    pub fn is_even(&self) -> bool {
        self.rest_len == 0
    }

    /// Adds bytes that a peer can write at any time; each is loaded once.
    pub fn add_shared(&mut self, slice: &SharedSlice<'_, Mapping>) {
        if !self.is_even() {
            return self.add(&slice.to_vec());
        }
        let done = self.add_words(slice, |_| {});
        let mut rest = [0; STRIPE];
        let n = slice.read(done, &mut rest);
        self.add(&rest[..n]);
    }

    /// Adds whole stripes of shared bytes, and keeps them as they were loaded; returns how many bytes. The checksum must
    /// be even.
    pub fn add_stripes(&mut self, slice: &SharedSlice<'_, Mapping>, copy: &mut [[u8; STRIPE]]) -> usize {
        let mut copy = copy.iter_mut();
        self.add_words(slice, |words| {
            if let Some(stripe) = copy.next() {
                for (to, word) in stripe.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                    *to = word.to_le_bytes();
                }
            }
        })
    }

    fn add_words(&mut self, slice: &SharedSlice<'_, Mapping>, mut keep: impl FnMut([u64; 4])) -> usize {
        let mut lanes = self.lanes;
        let done = slice.stripes(|words| {
            keep(words);
            lanes = rounds(lanes, words);
        });
        self.lanes = lanes;
        self.total += done as u64;
        done
    }

    /// How many bytes so far.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// The checksum so far; more can be added afterwards.
    pub fn value(&self) -> u64 {
        let [a, b, c, d] = self.lanes;
        let mut hash = if self.total >= STRIPE as u64 {
            let sum = [(a, 1), (b, 7), (c, 12), (d, 18)]
                .iter()
                .fold(0u64, |s, &(l, r)| s.wrapping_add(l.rotate_left(r)));
            self.lanes.iter().fold(sum, |h, &lane| (h ^ round(0, lane)).wrapping_mul(P1).wrapping_add(P4))
        } else {
            P5
        };
        hash = hash.wrapping_add(self.total);
        let (eights, rest) = self.rest[..self.rest_len].as_chunks::<8>();
        for eight in eights {
            hash ^= round(0, u64::from_le_bytes(*eight));
            hash = hash.rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
        }
        let (fours, ones) = rest.as_chunks::<4>();
        for four in fours {
            hash ^= u64::from(u32::from_le_bytes(*four)).wrapping_mul(P1);
            hash = hash.rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
        }
        for &one in ones {
            hash = (hash ^ u64::from(one).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
        }
        hash = (hash ^ hash >> 33).wrapping_mul(P2);
        hash = (hash ^ hash >> 29).wrapping_mul(P3);
        hash ^ hash >> 32
    }
}

#[inline]
fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

#[inline]
fn rounds(lanes: [u64; 4], words: [u64; 4]) -> [u64; 4] {
    std::array::from_fn(|i| round(lanes[i], words[i]))
}

fn words(stripe: &[u8; STRIPE]) -> [u64; 4] {
    let (words, _) = stripe.as_chunks::<8>();
    std::array::from_fn(|i| u64::from_le_bytes(words[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh64::xxh64;

    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn agrees_with_the_reference_at_every_length() {
        for n in (0..200).chain([4096, 10_007]) {
            let bytes = bytes(n);
            let mut sum = Checksum::new();
            sum.add(&bytes);
            assert_eq!(sum.value(), xxh64(&bytes, 0), "{n} bytes");
        }
    }

    #[test]
    fn pieces_do_not_matter() {
        let bytes = bytes(5000);
        for piece in [1, 3, 31, 32, 33, 64, 1000] {
            let mut sum = Checksum::new();
            bytes.chunks(piece).for_each(|piece| sum.add(piece));
            assert_eq!((sum.value(), sum.len()), (xxh64(&bytes, 0), 5000), "pieces of {piece}");
        }
    }

    #[test]
    fn shared_bytes_count_like_private_ones() {
        let memory = Mapping::anonymous(8192).unwrap();
        let bytes = bytes(5000);
        SharedSlice::new(&memory, 40, 5000).write(0, &bytes);
        let mut sum = Checksum::new();
        for (at, len) in [(0, 4096), (4096, 904)] {
            sum.add_shared(&SharedSlice::new(&memory, 40 + at, len));
        }
        assert_eq!(sum.value(), xxh64(&bytes, 0));
    }
}
