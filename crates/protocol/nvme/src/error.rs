//! Errors: the parameters of a queue are impossible, or the other side is broken.

use thiserror::Error;

/// The driver has broken a rule of its queues, and the controller must not use them any more. It sets `CSTS.CFS`, and the driver resets
/// it. (Asynchronous events for such errors exist, but no driver handles them.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Broken {
    /// A tail that is not an entry of the queue.
    #[error("the tail of submission queue {queue} is {tail}, but the queue has {size} entries")]
    Tail {
        /// Submission queue.
        queue: u16,
        /// The value of the doorbell.
        tail: u32,
        /// Number of entries.
        size: u16,
    },
    /// A head that is not an entry of the queue, or beyond the completions that were posted.
    #[error(
        "the head of completion queue {queue} is {head}, but the queue has {size} entries, and {posted} completions wait from entry {from} on"
    )]
    Head {
        /// Completion queue.
        queue: u16,
        /// The value of the doorbell.
        head: u32,
        /// Number of entries.
        size: u16,
        /// Number of completions that were posted and not taken back yet.
        posted: u16,
        /// The last head.
        from: u16,
    },
}

/// The device has broken a rule of the queues (found by a driver).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// A completion of another submission queue than those that the driver has.
    #[error("a completion for submission queue {0}, which does not use this completion queue")]
    Queue(u16),
    /// A head that is not an entry of the submission queue, or beyond the commands that were submitted.
    #[error(
        "a completion says that the head of submission queue {queue} is {head}; the driver has submitted the entries from {from} to {tail}"
    )]
    Head {
        /// Submission queue.
        queue: u16,
        /// The head that was found.
        head: u16,
        /// The last head.
        from: u16,
        /// Where the driver writes its next command.
        tail: u16,
    },
    /// A command that is not outstanding.
    #[error("a completion for command {cid} of submission queue {queue}, which is not outstanding")]
    Command {
        /// Submission queue.
        queue: u16,
        /// Identifier of the command.
        cid: u16,
    },
}

/// The parameters of a queue are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// An impossible size.
    #[error("queue {queue} with {size} entries: allowed are 2 to {most}")]
    Size {
        /// Number of the queue.
        queue: u16,
        /// Number of entries.
        size: u32,
        /// The largest size.
        most: u16,
    },
    /// An area that is misaligned, outside of its memory, or shorter than the queue needs.
    #[error("the {area} at {address:#x}, {len} bytes: it must be aligned to {align} and have {needed} bytes")]
    Area {
        /// Name of the area.
        area: &'static str,
        /// Guest physical address.
        address: u64,
        /// Length in bytes.
        len: usize,
        /// Required alignment.
        align: usize,
        /// Required bytes.
        needed: usize,
    },
    /// A queue that the state does not have, or that belongs to another completion queue.
    #[error("{kind} queue {queue} {why}")]
    Queue {
        /// "submission" or "completion".
        kind: &'static str,
        /// Number of the queue.
        queue: u16,
        /// What is wrong.
        why: &'static str,
    },
    /// The state file has impossible values.
    #[error("the state of the controller: {0}")]
    State(&'static str),
    /// The driver broke a rule before this process began.
    #[error(transparent)]
    Broken(#[from] Broken),
}
