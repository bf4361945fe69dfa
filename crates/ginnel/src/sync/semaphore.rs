//! A number of permits.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;

/// A counting semaphore of the segment. Permits belong to nobody: one that was taken by a process that dies does not come
/// back by itself. See [`crate::sync`] for handles, waiting and death.
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

    /// Takes a permit. Waits while there is none.
    #[inline]
    pub fn acquire(&mut self) -> Result<(), Error> {
        self.semaphore.acquire(&mut self.handle.wakeups, self.handle.patience).map_err(Error::from)
    }

    /// Takes a permit if there is one, else [`Error::WouldBlock`].
    pub fn try_acquire(&mut self) -> Result<(), Error> {
        self.semaphore.try_acquire().map_err(Error::from)
    }

    /// Gives `count` permits, and wakes as many who wait. Never blocks. [`Error::Overflow`] if there would be more than the
    /// limit; then none is given.
    #[inline]
    pub fn release(&mut self, count: u32) -> Result<(), Error> {
        self.semaphore.release(&mut self.handle.wakeups, count).map_err(Error::from)
    }

    /// How many permits there are just now.
    pub fn permits(&self) -> Result<u64, Error> {
        self.semaphore.permits().map_err(Error::from)
    }

    /// The most that there may be.
    pub fn limit(&self) -> u32 {
        self.handle.limit
    }
}
