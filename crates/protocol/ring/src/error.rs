//! Errors: the operation is not possible now, the ring has ended, or its memory is corrupt.

use thiserror::Error;

/// A word in the ring that no correct peer writes. The variant is named after the rule that the word breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// A record header that was written for a different position.
    #[error("record header {header:#018x} does not belong at position {position}")]
    Stamp {
        /// The word that was found.
        header: u64,
        /// Bytes since the ring began.
        position: u64,
    },
    /// A record of an unknown kind.
    #[error("unknown record kind {0}")]
    Kind(u8),
    /// A record longer than the ring allows, or that passes its end.
    #[error("record of {len} bytes at position {position} does not fit the ring")]
    Length {
        /// The length in the header.
        len: usize,
        /// Bytes since the ring began.
        position: u64,
    },
    /// A padding record that does not end where the ring ends.
    #[error("padding of {len} bytes at position {position} does not end at the end of the ring")]
    Padding {
        /// The length in the header.
        len: usize,
        /// Bytes since the ring began.
        position: u64,
    },
    /// A consumer's counter that went back, or beyond what was published.
    #[error("the consumer claims to have released {head} bytes of {tail} published ({seen} before)")]
    Head {
        /// The counter that was found.
        head: u64,
        /// The previous value of the counter.
        seen: u64,
        /// Bytes that have been published.
        tail: u64,
    },
    /// A producer's counter that went back, or further ahead than the length of the ring.
    #[error("the producer claims to have published {tail} bytes, with {head} released ({seen} before)")]
    Tail {
        /// The counter that was found.
        tail: u64,
        /// The previous value of the counter.
        seen: u64,
        /// Bytes that have been released.
        head: u64,
    },
    /// A saved cursor that is impossible in a ring of this capacity.
    #[error("a cursor at position {position} with {released} bytes released is impossible in this ring")]
    Cursor {
        /// Bytes published or taken.
        position: u64,
        /// Bytes released.
        released: u64,
    },
    /// A ring whose first byte in the stream, according to its producer, has been received already.
    #[error(
        "the ring claims to carry the stream from byte {base} on, but {received} bytes were received already"
    )]
    Base {
        /// The position that the producer names.
        base: u64,
        /// Bytes of the stream that have been received.
        received: u64,
    },
    /// An unknown side state.
    #[error("unknown side state {0}")]
    State(u32),
}

/// Reason why nothing was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecvError {
    /// Nothing is there to receive now.
    #[error("nothing to receive now")]
    Empty,
    /// The producer has finished, and everything has been received.
    #[error("the peer has finished sending")]
    Finished,
    /// The producer, or this side, has aborted. What was published and not received is lost.
    #[error("the channel was aborted; what was not received is lost")]
    Aborted,
    /// The producer's process has died, and everything it published has been received.
    #[error("the peer has died")]
    PeerDead,
    /// The producer, or another member of the segment, has corrupted the ring.
    #[error("corrupt ring: {0}")]
    Corrupt(#[from] Corrupt),
    /// The memory is gone: the segment's file was truncated.
    #[error("the segment's memory is gone (its file was truncated)")]
    Broken,
}

/// Reason why nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendError {
    /// There is no room now.
    #[error("no room to send now")]
    Full,
    /// The message is too long for this ring.
    #[error("a message of {len} bytes; this ring takes at most {max}")]
    TooLong {
        /// Length of the message, in bytes.
        len: usize,
        /// Maximum length of a message, in bytes.
        max: usize,
    },
    /// This side has already finished.
    #[error("sending after finish")]
    AfterFinish,
    /// The consumer takes nothing more.
    #[error("the peer has closed the channel")]
    Closed,
    /// The consumer has aborted: it takes nothing more, and has dropped what it had not taken.
    #[error("the peer has aborted the channel; what it had not received is lost")]
    Aborted,
    /// The consumer's process has died.
    #[error("the peer has died")]
    PeerDead,
    /// The consumer, or another member of the segment, has corrupted the ring.
    #[error("corrupt ring: {0}")]
    Corrupt(#[from] Corrupt),
    /// The memory is gone: the segment's file was truncated.
    #[error("the segment's memory is gone (its file was truncated)")]
    Broken,
}
