//! Where one side of a ring is, to be kept outside of the process that has the side.

use crate::error::Corrupt;
use ginnel_layout::ring::RECORD_ALIGN;

/// All that one side of a ring knows and its ring does not say. Kept in memory that outlives the process, or is shared over a
/// fork, it lets another process go on where this one stopped: `resume` of the four sides takes what their `cursor` has said.
/// By then the earlier owner must use the side no more.
///
/// To be saved after each publish, release and sleep. What a producer has published after the last save must not be published
/// again: the other side may have taken it.
///
/// Whoever can write to where it is kept can break the ring, as the peer can, and nothing else: values out of range are
/// refused ([`Corrupt::Cursor`]), and no value leads outside of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Bytes since the ring began: published by a producer, or taken by a consumer.
    pub position: u64,
    /// Of these, the bytes that the consumer has released: as the producer has last seen, or as the consumer has last said.
    pub released: u64,
    /// The last token that this side has armed its wake word with.
    pub token: u32,
    /// The last token of the other side for which this one has asked for a doorbell.
    pub rung: u32,
}

impl Cursor {
    /// Positions beyond are refused, so that adding to one cannot overflow. No ring lives so long.
    const END: u64 = 1 << 62;

    pub(crate) fn check(self, capacity: usize) -> Result<Self, Corrupt> {
        let Self { position, released, .. } = self;
        if position > Self::END || released > position || position - released > capacity as u64 {
            return Err(Corrupt::Cursor { position, released });
        }
        Ok(self)
    }

    /// [`Cursor::check`] for a ring of records.
    pub(crate) fn check_records(self, capacity: usize) -> Result<Self, Corrupt> {
        let Self { position, released, .. } = self;
        if !(position | released).is_multiple_of(RECORD_ALIGN as u64) {
            return Err(Corrupt::Cursor { position, released });
        }
        self.check(capacity)
    }
}
