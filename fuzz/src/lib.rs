//! What the fuzz targets share: the harnesses of the property tests, and how bytes become their operations.

pub mod farm;

#[path = "../../crates/ring/tests/model/mod.rs"]
pub mod model;

#[path = "../../crates/sync/tests/model/mod.rs"]
pub mod sync_model;

use model::Op;

/// A run of the ring harness: which ring, how large, what to do.
///
/// The first byte holds the choice of the capacity and, in its top bit, of the kind of ring; each five bytes after it are
/// an operation.
pub struct RingInput {
    pub messages: bool,
    pub capacity: usize,
    pub ops: Vec<Op>,
}

/// Longer lists find nothing that shorter ones do not, and would take long under a sanitizer.
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

/// A run of the harness of locks: which kind, what to do. The first byte is the kind; each five bytes after it are an
/// operation, or a scribble.
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
