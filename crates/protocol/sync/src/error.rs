//! The errors of locks and of their shared memory.

use std::io;
use thiserror::Error;

/// A word in the page that no correct user writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// An owner that is impossible, or flags that do not fit together.
    #[error("owner word {0:#018x}")]
    Owner(u64),
    /// An unknown reader's word.
    #[error("reader word {0:#x}")]
    Reader(u64),
    /// More permits than the semaphore's limit.
    #[error("{permits} permits in a semaphore with a limit of {limit}")]
    Permits {
        /// The number of permits that was found.
        permits: u64,
        /// The semaphore's highest number of permits.
        limit: u32,
    },
    /// The word kept changing during a bounded number of attempts.
    #[error("a word that keeps changing")]
    Restless,
}

/// Reason why an operation failed. Then the caller does not have the lock, unless it had it before.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// Another user has the lock now.
    #[error("another user has the lock")]
    Busy,
    /// The timeout came first.
    #[error("timed out")]
    TimedOut,
    /// A writer died while it held the lock: no user may read until a writer has declared the data consistent.
    #[error(
        "a writer died while it held the lock: lock it for writing, repair the data, and declare them consistent"
    )]
    OwnerDied,
    /// The owner died, and the next owner unlocked without declaring the data consistent.
    #[error("the lock was released while its data were inconsistent: remove it and create it again")]
    NotRecoverable,
    /// This handle has not locked what it unlocks, or no longer holds it, because it was declared dead.
    #[error("this handle does not have the lock")]
    NotOwner,
    /// This handle already has the lock.
    #[error("this handle has the lock already")]
    Deadlock,
    /// The semaphore would have more permits than its limit.
    #[error("the semaphore would have more than {limit} permits")]
    Overflow {
        /// The limit of the semaphore.
        limit: u32,
    },
    /// A party of the barrier has died.
    #[error("a party of the barrier has died: reset the barrier when the other parties have noticed")]
    BarrierBroken,
    /// This handle's slot was taken back: its endpoint was declared dead.
    #[error("this handle is no longer valid: its endpoint was declared dead")]
    Stale,
    /// Another member of the segment has corrupted the object.
    #[error("corrupt lock: {0}")]
    Corrupt(#[from] Corrupt),
    /// The segment's memory is gone: its file was truncated.
    #[error("the segment's memory is gone (its file was truncated)")]
    Gone,
    /// This side cannot sleep on its doorbell.
    #[error("sleeping on a doorbell: {0}")]
    Sleep(io::Error),
}
