//! Models: each runs a list of operations, and panics at the first wrong result.
//!
//! | model | of | feature |
//! |---|---|---|
//! | `nvme` | a driver and a device on a completion queue and its submission queues | `nvme` |
//! | `ring` | both sides of a ring, a readiness board, a stream that changes its carrier | `ring` |
//! | `sync` | users of a lock | `sync` |
//! | `virtqueue` | a driver and a device on one queue | `virtqueue` |
//! | `verbs` | two endpoints with all kinds of queue pairs | `verbs` |
//!
//! Property tests and the fuzzer share them: both make [`Op`]s.

#[cfg(feature = "nvme")]
pub mod nvme;
#[cfg(feature = "ring")]
pub mod ring;
#[cfg(feature = "sync")]
pub mod sync;
#[cfg(feature = "verbs")]
pub mod verbs;
#[cfg(feature = "virtqueue")]
pub mod virtqueue;

/// An operation: a code, and two numbers as arguments. What they mean is up to the model. In a model that has scribbles, a code with the
/// top bit is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Selects the operation, or the scribble.
    pub code: u8,
    /// The first argument.
    pub a: u16,
    /// The second argument.
    pub b: u16,
}
