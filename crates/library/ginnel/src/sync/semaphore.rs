//! Counting semaphores.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;

/// A counting semaphore in the segment. Permits have no owner: a permit that was acquired by a process that dies is not
/// returned by itself. See [`crate::sync`] for handles, waiting and death.
pub struct Semaphore {
    semaphore: ginnel_sync::Semaphore<Mapping>,
    handle: Handle,
}

common!(Semaphore);

impl Semaphore {
    pub(super) fn new(handle: Handle) -> Self {
        let semaphore = ginnel_sync::Semaphore::new(handle.page.clone(), handle.user, handle.limit);
        Self { semaphore, handle }
    }

    /// Takes one permit. Waits while there is none.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] after this handle's timeout.
    #[inline]
    pub fn acquire(&mut self) -> Result<(), Error> {
        self.semaphore.acquire(&mut self.handle.wakeups, self.handle.patience).map_err(Error::from)
    }

    /// Takes one permit if there is one. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if there is no permit.
    pub fn try_acquire(&mut self) -> Result<(), Error> {
        self.semaphore.try_acquire().map_err(Error::from)
    }

    /// Adds `count` permits, and wakes up to as many waiters. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Overflow`] if the semaphore would have more permits than its limit; then none is added.
    #[inline]
    pub fn release(&mut self, count: u32) -> Result<(), Error> {
        self.semaphore.release(&mut self.handle.wakeups, count).map_err(Error::from)
    }

    /// Returns the current number of permits. It may have changed by the time the caller uses it.
    ///
    /// # Errors
    ///
    /// Only those of every operation: see [`crate::sync`].
    pub fn permits(&self) -> Result<u64, Error> {
        self.semaphore.permits().map_err(Error::from)
    }

    /// Returns the maximum number of permits.
    pub fn limit(&self) -> u32 {
        self.handle.limit
    }
}
