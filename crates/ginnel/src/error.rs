//! What can go wrong, for callers.

use ginnel_layout::wire::{ErrorCode, Rights};
use ginnel_ring::{Corrupt, RecvError, SendError};
use ginnel_sync::SyncError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why an operation failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing can be done now, and the handle is non-blocking.
    #[error("the operation would block")]
    WouldBlock,
    /// The timeout came first.
    #[error("timed out")]
    TimedOut,
    /// The peer has finished sending, and everything has been received.
    #[error("the peer has finished sending")]
    Finished,
    /// The peer receives nothing more.
    #[error("the peer has closed the channel")]
    Closed,
    /// The peer, or this side, has aborted (`abort` of a half): what was on its way is lost.
    #[error("the channel was aborted; what was on its way is lost")]
    Aborted,
    /// The peer's process, or its VM, has died. What it had sent has been received.
    #[error("the peer has died")]
    PeerDead,
    /// Somebody in the segment has broken the channel; it is of no more use.
    #[error("corrupt channel: {0}")]
    Corrupt(#[from] Corrupt),
    /// The segment's memory is gone (its file was truncated).
    #[error("the segment's memory is gone: its file was truncated")]
    Broken,
    /// A message longer than the channel's rings allow.
    #[error("a message of {len} bytes: this channel takes at most {max}; open it with a larger capacity")]
    TooLong {
        /// Its length.
        len: usize,
        /// The longest that fits.
        max: usize,
    },
    /// The message is longer than the buffer; it is still there.
    #[error("the next message has {len} bytes and the buffer {buffer}; it stays until received")]
    BufferTooSmall {
        /// The message's length.
        len: usize,
        /// The buffer's.
        buffer: usize,
    },
    /// Sending after `finish`.
    #[error("sending after finish")]
    AfterFinish,
    /// The daemon refuses.
    #[error("{text}")]
    Refused {
        /// Why.
        code: ErrorCode,
        /// For people: what, where, and the fix.
        text: String,
    },
    /// No daemon answers.
    #[error("no ginnel daemon at {path}: {source}; start `ginneld host` (or `ginneld guest` in a VM)")]
    NoDaemon {
        /// Its socket.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The daemon says something that is not in the protocol.
    #[error("the daemon at {path} broke the attach protocol: {what}")]
    Protocol {
        /// Its socket.
        path: PathBuf,
        /// What was wrong.
        what: &'static str,
    },
    /// This member may only read the segment, and whoever has a channel, a lock or a block of its own writes.
    #[error(
        "this member may only read segment {segment}, and whoever has a channel, a lock or a block of its own writes: on the \
         host, move it from `readers` to `members` of [segment.{segment}]"
    )]
    ReadOnly {
        /// The segment.
        segment: String,
    },
    /// The handle of a block does not have the right for this, or (with [`crate::Block::guard_writes`]) a store was tried
    /// without it.
    #[error("this block may not be written, or not be used any more: its handle has {} rights", rights.name())]
    Denied {
        /// What it has.
        rights: Rights,
    },
    /// Bytes that the block does not have.
    #[error("{len} bytes at {at} of a block that has {size}")]
    OutOfBlock {
        /// Where.
        at: usize,
        /// How many.
        len: usize,
        /// What it has.
        size: usize,
    },
    /// A writer has died in the read-write lock: nobody may read until a writer has called the data consistent.
    #[error("a writer died in the lock: take it for writing, repair the data and call them consistent")]
    OwnerDied,
    /// The lock's owner died, and the next one unlocked without calling the data consistent.
    #[error("the lock was given up with its data inconsistent: unlink it and make it anew")]
    NotRecoverable,
    /// Unlocking what this handle has not locked, or no longer has.
    #[error("this handle does not have the lock")]
    NotOwner,
    /// This handle has the lock already.
    #[error("this handle has the lock already: unlock it first, or open another handle")]
    Deadlock,
    /// The semaphore would have more permits than it may have.
    #[error("the semaphore would have more than its {limit} permits")]
    Overflow {
        /// The most it may have.
        limit: u32,
    },
    /// A party of the barrier has died.
    #[error("a party of the barrier has died: reset it once the others know")]
    BarrierBroken,
    /// The endpoint was declared dead, and what it had was handed on.
    #[error("this endpoint was declared dead, and its locks were handed on: attach again")]
    Fenced,
    /// Somebody in the segment has broken the synchronisation object.
    #[error("corrupt lock: {0}")]
    CorruptLock(ginnel_sync::Corrupt),
    /// A name that is none.
    #[error("bad name {name:?}: {reason}")]
    Name {
        /// As given.
        name: String,
        /// What is wrong with it.
        reason: ginnel_layout::name::NameError,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }

    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    /// The daemon's code, if it refused.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }
}

impl From<RecvError> for Error {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Empty => Self::WouldBlock,
            RecvError::Finished => Self::Finished,
            RecvError::Aborted => Self::Aborted,
            RecvError::PeerDead => Self::PeerDead,
            RecvError::Corrupt(corrupt) => Self::Corrupt(corrupt),
            // `Broken`, and whatever a later version adds: the channel is of no more use.
            _ => Self::Broken,
        }
    }
}

impl From<SendError> for Error {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Full => Self::WouldBlock,
            SendError::TooLong { len, max } => Self::TooLong { len, max },
            SendError::AfterFinish => Self::AfterFinish,
            SendError::Closed => Self::Closed,
            SendError::Aborted => Self::Aborted,
            SendError::PeerDead => Self::PeerDead,
            SendError::Corrupt(corrupt) => Self::Corrupt(corrupt),
            // As above.
            _ => Self::Broken,
        }
    }
}

impl From<SyncError> for Error {
    fn from(error: SyncError) -> Self {
        match error {
            SyncError::Busy => Self::WouldBlock,
            SyncError::TimedOut => Self::TimedOut,
            SyncError::OwnerDied => Self::OwnerDied,
            SyncError::NotRecoverable => Self::NotRecoverable,
            SyncError::NotOwner => Self::NotOwner,
            SyncError::Deadlock => Self::Deadlock,
            SyncError::Overflow { limit } => Self::Overflow { limit },
            SyncError::BarrierBroken => Self::BarrierBroken,
            SyncError::Stale => Self::Fenced,
            SyncError::Corrupt(corrupt) => Self::CorruptLock(corrupt),
            SyncError::Sleep(source) => Self::System { what: "sleeping on a doorbell", source },
            // `Gone`, and whatever a later version adds: the object is of no more use.
            _ => Self::Broken,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::WouldBlock => io::ErrorKind::WouldBlock,
            Error::TimedOut => io::ErrorKind::TimedOut,
            Error::Finished => io::ErrorKind::UnexpectedEof,
            Error::Closed => io::ErrorKind::BrokenPipe,
            Error::PeerDead | Error::Aborted => io::ErrorKind::ConnectionReset,
            Error::Corrupt(_) | Error::Protocol { .. } => io::ErrorKind::InvalidData,
            Error::TooLong { .. }
            | Error::BufferTooSmall { .. }
            | Error::OutOfBlock { .. }
            | Error::Name { .. } => io::ErrorKind::InvalidInput,
            Error::Refused { code: ErrorCode::REFUSED, .. } => io::ErrorKind::ConnectionRefused,
            Error::Refused { code: ErrorCode::DENIED | ErrorCode::READ_ONLY, .. }
            | Error::ReadOnly { .. }
            | Error::Denied { .. } => io::ErrorKind::PermissionDenied,
            Error::Refused { code: ErrorCode::IN_USE, .. } => io::ErrorKind::AddrInUse,
            Error::Refused { code: ErrorCode::NO_SEGMENT | ErrorCode::NOT_FOUND, .. } => {
                io::ErrorKind::NotFound
            }
            Error::NoDaemon { source, .. } | Error::System { source, .. } => source.kind(),
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
