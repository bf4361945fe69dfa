//! What the fuzz targets share: the harnesses of the property tests, and the translation of bytes into operations.

pub mod farm;
pub mod vhost_user;

#[path = "../../crates/protocol/ring/tests/model/mod.rs"]
pub mod model;

#[path = "../../crates/protocol/sync/tests/model/mod.rs"]
pub mod sync_model;

#[path = "../../crates/library/verbs/tests/model/mod.rs"]
pub mod verbs_model;

#[path = "../../crates/protocol/virtqueue/tests/rig/mod.rs"]
pub mod rig;

#[path = "../../crates/protocol/virtqueue/tests/model/mod.rs"]
pub mod virtqueue_model;

use model::Op;

/// An input for the ring harness: the kind of ring, its capacity, and the operations.
///
/// The first byte contains the choice of the capacity and, in its top bit, the kind of ring. Each five bytes after it are an
/// operation.
pub struct RingInput {
    pub messages: bool,
    pub capacity: usize,
    pub ops: Vec<Op>,
}

/// The most operations of an input. Longer lists find nothing that shorter ones do not, and take long under a sanitizer.
const MOST_OPS: usize = 1000;

impl RingInput {
    pub fn parse(input: &[u8]) -> Option<Self> {
        let (&first, rest) = input.split_first()?;
        let (ops, _) = rest.as_chunks::<5>();
        let op = |&[code, a0, a1, b0, b1]: &[u8; 5]| Op {
            code,
            a: u16::from_le_bytes([a0, a1]),
            b: u16::from_le_bytes([b0, b1]),
        };
        Some(Self {
            messages: first & 0x80 == 0,
            capacity: model::capacity(first & 0x7f),
            ops: ops.iter().take(MOST_OPS).map(op).collect(),
        })
    }

    pub fn bytes(choice: u8, ops: &[Op]) -> Vec<u8> {
        let op = |op: &Op| {
            let ([a0, a1], [b0, b1]) = (op.a.to_le_bytes(), op.b.to_le_bytes());
            [op.code, a0, a1, b0, b1]
        };
        std::iter::once(choice).chain(ops.iter().flat_map(op)).collect()
    }
}

/// An input for the harness of locks. The first byte is the kind of lock; each five bytes after it are an operation or a
/// scribble.
pub struct SyncInput {
    pub kind: ginnel_layout::sync::SyncKind,
    pub ops: Vec<sync_model::Op>,
}

impl SyncInput {
    pub fn parse(input: &[u8]) -> Option<Self> {
        let RingInput { ops, .. } = RingInput::parse(input)?;
        let op = |Op { code, a, b }: Op| sync_model::Op { code, a, b };
        Some(Self { kind: sync_model::kind(*input.first()?), ops: ops.into_iter().map(op).collect() })
    }
}

/// An input for the harness of verbs. The first byte has no meaning; each five bytes after it are an operation or a scribble.
pub struct VerbsInput {
    pub ops: Vec<verbs_model::Op>,
}

impl VerbsInput {
    pub fn parse(input: &[u8]) -> Option<Self> {
        let RingInput { ops, .. } = RingInput::parse(input)?;
        let op = |Op { code, a, b }: Op| verbs_model::Op { code, a, b };
        Some(Self { ops: ops.into_iter().map(op).collect() })
    }
}

/// An input for the harness of virtqueues. The first byte chooses the queue; each five bytes after it are an operation or a
/// scribble.
pub struct VirtqueueInput {
    pub choice: u8,
    pub ops: Vec<virtqueue_model::Op>,
}

impl VirtqueueInput {
    pub fn parse(input: &[u8]) -> Option<Self> {
        let RingInput { ops, .. } = RingInput::parse(input)?;
        let op = |Op { code, a, b }: Op| virtqueue_model::Op { code, a, b };
        Some(Self { choice: *input.first()?, ops: ops.into_iter().map(op).collect() })
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
