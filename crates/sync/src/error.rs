//! What can go wrong.

use std::io;
use thiserror::Error;

/// A word of the page that no correct user writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// An owner that cannot be, or flags that mean nothing.
    #[error("owner word {0:#018x}")]
    Owner(u64),
    /// A reader's word of no known meaning.
    #[error("reader word {0:#x}")]
    Reader(u64),
    /// More permits than the semaphore's limit.
    #[error("{permits} permits of a semaphore that has {limit} at most")]
    Permits {
        /// What the word says.
        permits: u64,
        /// The limit.
        limit: u32,
    },
    /// The word changes without end under our hands.
    #[error("a word that somebody keeps changing")]
    Restless,
}

/// Why an operation failed. Whoever called does not have the lock then, unless it had it before.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SyncError {
    /// Somebody else has it now.
    #[error("somebody else has the lock")]
    Busy,
    /// The timeout came first.
    #[error("timed out")]
    TimedOut,
    /// A writer has died in the lock: nobody may read until a writer has called the data consistent.
    #[error("a writer died in the lock: take it for writing, repair the data, call them consistent")]
    OwnerDied,
    /// The owner died, and the next one unlocked without calling the data consistent.
    #[error("the lock was given up with its data inconsistent: remove it and create it anew")]
    NotRecoverable,
    /// Unlocking what this handle has not locked (or no longer has: it was declared dead meanwhile).
    #[error("this handle does not have the lock")]
    NotOwner,
    /// This handle has the lock already.
    #[error("this handle has the lock already")]
    Deadlock,
    /// More permits than the semaphore may have.
    #[error("the semaphore would have more than {limit} permits")]
    Overflow {
        /// The most it may have.
        limit: u32,
    },
    /// A party of the barrier has died.
    #[error("a party of the barrier has died: reset it when the others know")]
    BarrierBroken,
    /// This handle's slot was taken back: its endpoint was declared dead.
    #[error("this handle is no longer valid: its endpoint was declared dead")]
    Stale,
    /// A neighbour in the segment has broken the object.
    #[error("corrupt lock: {0}")]
    Corrupt(#[from] Corrupt),
    /// The segment's memory is gone: its file was truncated.
    #[error("the segment's memory is gone (its file was truncated)")]
    Gone,
    /// This side cannot sleep.
    #[error("sleeping on a doorbell: {0}")]
    Sleep(io::Error),
}
