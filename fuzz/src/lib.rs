//! What the fuzz targets share: the translation of bytes into what they run. The models are those of the property tests
//! (`kit::models`).

pub mod farm;
pub mod vfio_user;
pub mod vhost_user;

use kit::models::{Op, ring};

/// An input for a model: a byte that chooses something (what, is up to the target), and five bytes for each operation.
pub struct ModelInput {
    pub choice: u8,
    pub ops: Vec<Op>,
}

/// The most operations of an input. Longer lists find nothing that shorter ones do not, and take long under a sanitizer.
const MOST_OPS: usize = 1000;

impl ModelInput {
    pub fn parse(input: &[u8]) -> Option<Self> {
        let (&choice, rest) = input.split_first()?;
        let (ops, _) = rest.as_chunks::<5>();
        let op = |&[code, a0, a1, b0, b1]: &[u8; 5]| Op {
            code,
            a: u16::from_le_bytes([a0, a1]),
            b: u16::from_le_bytes([b0, b1]),
        };
        Some(Self { choice, ops: ops.iter().take(MOST_OPS).map(op).collect() })
    }

    pub fn bytes(choice: u8, ops: &[Op]) -> Vec<u8> {
        let op = |op: &Op| {
            let ([a0, a1], [b0, b1]) = (op.a.to_le_bytes(), op.b.to_le_bytes());
            [op.code, a0, a1, b0, b1]
        };
        std::iter::once(choice).chain(ops.iter().flat_map(op)).collect()
    }

    /// Returns what the byte chooses for a ring: whether it is one for messages (the top bit says that it is not), and its capacity.
    pub fn ring(&self) -> (bool, usize) {
        (self.choice & 0x80 == 0, ring::capacity(self.choice & 0x7f))
    }
}

/// Memory that a driver and a front end have written and that a device must handle: a byte that chooses the queue, then words.
/// Each word has a u16, with the place in its upper bits and, in its lowest bit, whether the device takes a turn afterwards,
/// and eight bytes.
pub struct WordsInput<'a> {
    pub choice: u8,
    words: &'a [[u8; 10]],
}

impl<'a> WordsInput<'a> {
    pub fn parse(input: &'a [u8]) -> Option<Self> {
        let (&choice, rest) = input.split_first()?;
        let (words, _) = rest.as_chunks();
        Some(Self { choice, words: &words[..words.len().min(MOST_OPS)] })
    }

    /// Returns the place (in words) and the value of each word, and whether the device takes a turn afterwards.
    pub fn words(&self) -> impl Iterator<Item = (usize, u64, bool)> {
        self.words.iter().map(|&[a, b, c, d, e, f, g, h, i, j]| {
            let place = u16::from_le_bytes([a, b]);
            (usize::from(place >> 1), u64::from_le_bytes([c, d, e, f, g, h, i, j]), place & 1 != 0)
        })
    }

    pub fn bytes(choice: u8, words: impl IntoIterator<Item = (usize, u64, bool)>) -> Vec<u8> {
        let word = |(place, value, turn): (usize, u64, bool)| {
            let [a, b] = ((place as u16) << 1 | u16::from(turn)).to_le_bytes();
            let [c, d, e, f, g, h, i, j] = value.to_le_bytes();
            [a, b, c, d, e, f, g, h, i, j]
        };
        std::iter::once(choice).chain(words.into_iter().flat_map(word)).collect()
    }
}
