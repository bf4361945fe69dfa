//! A number of parties wait for each other.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;

/// A barrier of the segment; each handle is a party. See [`crate::sync`] for handles, waiting and death.
///
/// A party that dies breaks it: all who wait and all who come get [`Error::BarrierBroken`] until somebody resets it. One
/// whose timeout came has not arrived, and may come again.
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

    /// Waits until all parties have come. True for one of them: the last.
    pub fn wait(&mut self) -> Result<bool, Error> {
        self.barrier.wait(&mut self.handle.wakeups, self.handle.patience).map_err(Error::from)
    }

    /// Makes a broken barrier usable again, for as many parties as ever. [`Error::WouldBlock`] while some of those who waited
    /// have not found out yet.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.barrier.reset().map_err(Error::from)
    }

    /// How many parties it is for.
    pub fn parties(&self) -> u32 {
        self.handle.limit
    }
}
