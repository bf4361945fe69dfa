//! The error type of this crate.

use ginnel_layout::wire::{ErrorCode, Rights};
use ginnel_ring::{Corrupt, RecvError, SendError};
use ginnel_sync::SyncError;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The reason why an operation failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The operation cannot be done now, and the caller has asked not to wait.
    #[error("the operation would block")]
    WouldBlock,
    /// The timeout expired first, or the daemon did not answer in time.
    #[error("timed out")]
    TimedOut,
    /// The peer has finished sending, and everything that it sent has been received.
    #[error("the peer has finished sending")]
    Finished,
    /// The peer does not receive any more.
    #[error("the peer has closed the channel")]
    Closed,
    /// The peer or this side has aborted the channel (`abort` of a half). Data that had not been received is lost.
    #[error("the channel was aborted; data that was not received is lost")]
    Aborted,
    /// The peer's process or its VM has died. Everything that it sent before has been received.
    #[error("the peer has died")]
    PeerDead,
    /// A member of the segment has corrupted the channel, which is unusable now.
    #[error("corrupt channel: {0}")]
    Corrupt(#[from] Corrupt),
    /// The segment's memory is gone, because its file was truncated.
    #[error("the segment's memory is gone: its file was truncated")]
    Broken,
    /// The message is longer than the channel's ring allows.
    #[error("a message of {len} bytes: this channel takes at most {max}; open it with a larger capacity")]
    TooLong {
        /// Length of the message, in bytes.
        len: usize,
        /// The longest message that the channel takes, in bytes.
        max: usize,
    },
    /// The next message is longer than the buffer. The message stays in the channel.
    #[error(
        "the next message has {len} bytes and the buffer only {buffer}; the message stays in the channel"
    )]
    BufferTooSmall {
        /// Length of the message, in bytes.
        len: usize,
        /// Length of the buffer, in bytes.
        buffer: usize,
    },
    /// The caller has sent after it had called `finish`.
    #[error("sending after finish")]
    AfterFinish,
    /// The daemon has refused the request.
    #[error("{text}")]
    Refused {
        /// The reason, for programs.
        code: ErrorCode,
        /// The reason, for people: what was refused, where, and how to fix it.
        text: String,
    },
    /// No daemon answers.
    #[error("{}", no_daemon(path, source))]
    NoDaemon {
        /// The daemon's socket.
        path: PathBuf,
        /// The error of the last attempt to connect or to send.
        source: io::Error,
    },
    /// The daemon has sent something that violates the attach protocol.
    #[error("the daemon at {path} broke the attach protocol: {what}")]
    Protocol {
        /// The daemon's socket.
        path: PathBuf,
        /// A description of the violation.
        what: &'static str,
    },
    /// This member may only read the segment, and the operation needs write access: both sides of a channel or a lock
    /// write to it, and so does the creator of a block.
    #[error(
        "this member may only read segment {segment}, and channels, locks and new blocks need write access: on the host, \
         move it from `readers` to `members` of [segment.{segment}]"
    )]
    ReadOnly {
        /// Name of the segment.
        segment: String,
    },
    /// The handle of a block does not have the right for this operation, or a store without the right was caught
    /// ([`crate::Block::guard_writes`]).
    #[error("not permitted for this handle of the block, which has {} rights", rights.name())]
    Denied {
        /// The rights that the handle has.
        rights: Rights,
    },
    /// The byte range is not inside the block.
    #[error("{len} bytes at offset {at} are not inside the block, which has {size} bytes")]
    OutOfBlock {
        /// Offset of the first byte.
        at: usize,
        /// Length of the range, in bytes.
        len: usize,
        /// Length of the block, in bytes.
        size: usize,
    },
    /// A writer of a read-write lock has died. Reading fails until a writer has declared the data consistent.
    #[error(
        "a writer died while it held the lock: lock it for writing, repair the data and mark them consistent"
    )]
    OwnerDied,
    /// The lock's owner died, and the next owner unlocked it without declaring the data consistent.
    #[error(
        "the lock was unlocked with inconsistent data after its owner had died: unlink it and create a new one"
    )]
    NotRecoverable,
    /// This handle does not have the lock that it should unlock, or has lost it.
    #[error("this handle does not have the lock")]
    NotOwner,
    /// This handle has the lock already.
    #[error("this handle has the lock already: unlock it first, or open another handle")]
    Deadlock,
    /// The semaphore would have more permits than its limit.
    #[error("the semaphore would have more than its {limit} permits")]
    Overflow {
        /// The semaphore's highest number of permits.
        limit: u32,
    },
    /// A party of the barrier has died.
    #[error("a party of the barrier has died: reset the barrier when the others have noticed")]
    BarrierBroken,
    /// This endpoint was declared dead, and its locks were handed on. Attach again.
    #[error("this endpoint was declared dead, and its locks were handed on: attach again")]
    Fenced,
    /// A member of the segment has corrupted the synchronisation object.
    #[error("corrupt lock: {0}")]
    CorruptLock(ginnel_sync::Corrupt),
    /// Not a valid name.
    #[error("bad name {name:?}: {reason}")]
    Name {
        /// The name as the caller gave it.
        name: String,
        /// The rule that it violates.
        reason: ginnel_layout::name::NameError,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The action that failed, for people.
        what: &'static str,
        /// The error of the system call.
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

    /// A text that cannot be read, which comes from another process.
    pub(crate) fn unreadable(what: &'static str) -> Self {
        Self::System { what, source: io::ErrorKind::InvalidInput.into() }
    }

    /// Returns the daemon's error code if this is [`Error::Refused`].
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
            // `Broken`, and any variant that a later version adds: the channel is unusable.
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
            // `Gone`, and errors that a later version may add: the object can no longer be used.
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

/// Says why no daemon answers, and what to do.
fn no_daemon(path: &Path, source: &io::Error) -> String {
    let path = path.display();
    match source.kind() {
        io::ErrorKind::PermissionDenied => format!(
            "this user may not use the ginnel daemon's socket {path}: {source}; see `socket_mode` and `socket_group` of [daemon] \
             in the daemon's configuration (in a VM: the options of `ginneld guest`)"
        ),
        _ => {
            format!("no ginnel daemon at {path}: {source}; start `ginneld host` (or `ginneld guest` in a VM)")
        }
    }
}
