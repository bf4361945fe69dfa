//! The position of one side of a ring, in a form that can be kept outside of the process that has the side.

use crate::error::Corrupt;
use ginnel_layout::ring::RECORD_ALIGN;

/// Everything that one side of a ring knows and that is not in the ring. If a program keeps it in memory that outlives the
/// process, or that is shared over a fork, another process can continue where this one stopped: the `resume` functions of the
/// four sides take what their `cursor` has returned. By then, the earlier process must not use the side any more.
///
/// # When to save it
///
/// **Before** each publish and each release, and after each sleep. Then the earlier process may die at any instruction, and
/// no byte is sent twice or taken twice:
///
/// - A producer commits, saves [`Producer::cursor`](crate::message::Producer::cursor) (of a stream:
///   [`Room::cursor`](crate::stream::Room::cursor)), and publishes. The cursor contains the position of the producer and the
///   number of bytes that it is about to publish. If it dies, either these were published or they were not. The ring shows
///   which: by the first header of the batch, or by the tail. `resume` looks there, and the new producer's own `cursor`
///   contains the position at which it continues.
/// - A consumer processes a message, saves [`Message::cursor`](crate::message::Message::cursor) (of a stream:
///   [`Bytes::cursor`](crate::stream::Bytes::cursor)), and releases. If it dies after that, it does not matter whether it had
///   released: the next consumer does so again. If it dies before it saves, the message is still there, so the program should
///   save the result of the message together with the cursor.
///
/// The earlier process may have died before it rang a doorbell. Therefore the caller calls `take_owed` after `resume`.
///
/// The peer can write the words in the ring, too, so `resume` does not trust them: they only select one of the two positions
/// that the cursor contains. A peer that lies in them gets a message twice, or not at all, which it could also do by itself
/// by ignoring a message. A word that selects neither position, for example after a publish that was not saved, is
/// [`Corrupt`].
///
/// A program that can write to the saved cursor can break the ring, as the peer can, but nothing else: values out of range
/// are refused ([`Corrupt::Cursor`]), and no value leads outside the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Bytes since the ring began that a producer has published, or a consumer has taken.
    pub position: u64,
    /// Bytes after `position` that a producer is about to publish. Not used for a consumer.
    pub pending: u64,
    /// Bytes, out of `position`, that the consumer has released: as the producer has last seen, or as the consumer has last
    /// stored.
    pub released: u64,
    /// The last token with which this side has armed its wake word.
    pub token: u32,
    /// The last token of the other side for which this side has rung.
    pub rung: u32,
}

impl Cursor {
    /// Maximum position, so that additions to a position cannot overflow. No ring lives so long.
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

    /// Checks the cursor as [`Cursor::check`] does, and that its positions are those of records.
    pub(crate) fn check_records(self, capacity: usize) -> Result<Self, Corrupt> {
        let Self { position, released, .. } = self;
        if !(position | self.pending | released).is_multiple_of(RECORD_ALIGN as u64) {
            return Err(Corrupt::Cursor { position, released });
        }
        self.check(capacity)
    }
}
