//! Barriers: a fixed number of parties wait for each other.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;

/// A barrier in the segment; each handle is a party. See [`crate::sync`] for handles, waiting and death.
///
/// If a party dies, the barrier breaks: every party that waits or arrives gets [`Error::BarrierBroken`] until one of
/// them resets it. A party whose timeout has expired does not count as arrived, and may arrive again.
pub struct Barrier {
    barrier: ginnel_sync::Barrier<Mapping>,
    handle: Handle,
}

common!(Barrier);

impl Barrier {
    pub(super) fn new(handle: Handle) -> Self {
        let barrier = ginnel_sync::Barrier::new(handle.page.clone(), handle.user, handle.limit);
        Self { barrier, handle }
    }

    /// Arrives at the barrier and waits until all parties have arrived. Returns true in exactly one of them, the last
    /// to arrive.
    ///
    /// # Errors
    ///
    /// [`Error::BarrierBroken`] if a party has died, [`Error::TimedOut`] after this handle's timeout.
    pub fn wait(&mut self) -> Result<bool, Error> {
        self.barrier.wait(&mut self.handle.wakeups, self.handle.patience).map_err(Error::from)
    }

    /// Makes a broken barrier usable again, for the same number of parties. Does not block.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] while some of the parties that waited have not yet noticed that the barrier is broken.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.barrier.reset().map_err(Error::from)
    }

    /// Returns the number of parties that the barrier waits for.
    pub fn parties(&self) -> u32 {
        self.handle.limit
    }
}
