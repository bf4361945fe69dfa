//! Where one side of a ring is, to be kept outside of the process that has the side.

use crate::error::Corrupt;
use ginnel_layout::ring::RECORD_ALIGN;

/// All that one side of a ring knows and its ring does not say. Kept in memory that outlives the process, or is shared over a
/// fork, it lets another process go on where this one stopped: `resume` of the four sides takes what their `cursor` has said.
/// By then the earlier owner must use the side no more.
///
/// # When to save it
///
/// **Before** each publish and each release, and after each sleep. Then the earlier owner may die at any instruction, and nothing
/// is sent twice or taken twice:
///
/// - A producer commits, saves [`Producer::cursor`](crate::message::Producer::cursor) (of a stream:
///   [`Room::cursor`](crate::stream::Room::cursor)), and publishes. The cursor says where the producer is and how much it is about
///   to publish. If it dies, either that was published or it was not. Which of the two stands in the ring: the first header of the
///   batch, or the tail. `resume` looks there, and the successor's own `cursor` says where it goes on.
/// - A consumer works with a message, saves [`Message::cursor`](crate::message::Message::cursor) (of a stream:
///   [`Bytes::cursor`](crate::stream::Bytes::cursor)), and releases. Whether it had released does not matter: its successor does it
///   again. If it dies before the save the message is still there, so what was made of it is best kept together with the cursor.
///
/// The doorbell that the earlier owner may have owed is asked for by `take_owed` after `resume`.
///
/// The peer can write the words in the ring, too, so they are not believed: they choose between two positions that the cursor
/// names. A peer that lies about them gets a message twice, or not at all, which it could have for the asking by ignoring one. A
/// word that is neither, as after a publish that was not saved, is [`Corrupt`].
///
/// Whoever can write to where the cursor is kept can break the ring, as the peer can, and nothing else: values out of range are
/// refused ([`Corrupt::Cursor`]), and no value leads outside of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Bytes since the ring began: published by a producer, or taken by a consumer.
    pub position: u64,
    /// Bytes behind that which a producer is about to publish. Of no meaning for a consumer.
    pub pending: u64,
    /// Of the position, the bytes that the consumer has released: as the producer has last seen, or as the consumer has last said.
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
        let Self { position, pending, released, .. } = self;
        let possible = position <= Self::END
            && released <= position
            && pending <= capacity as u64
            && position + pending - released <= capacity as u64;
        if !possible {
            return Err(Corrupt::Cursor { position, released });
        }
        Ok(self)
    }

    /// [`Cursor::check`] for a ring of records.
    pub(crate) fn check_records(self, capacity: usize) -> Result<Self, Corrupt> {
        let Self { position, released, .. } = self;
        if !(position | self.pending | released).is_multiple_of(RECORD_ALIGN as u64) {
            return Err(Corrupt::Cursor { position, released });
        }
        self.check(capacity)
    }
}
