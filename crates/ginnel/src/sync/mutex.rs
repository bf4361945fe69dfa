//! Mutual exclusion.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;
use ginnel_sync::Locked;

/// A mutex of the segment, robust: if its owner dies, the next one gets it and is told ([`MutexGuard::owner_died`]). See
/// [`crate::sync`] for handles, waiting and death.
pub struct Mutex {
    pub(super) lock: ginnel_sync::Mutex<Mapping>,
    pub(super) handle: Handle,
}

common!(Mutex);

impl Mutex {
    pub(super) fn new(handle: Handle) -> Self {
        Self { lock: ginnel_sync::Mutex::new(handle.page.clone(), handle.user), handle }
    }

    /// Locks. Waits while somebody else has it. [`Error::NotRecoverable`] after an owner died and the next unlocked without
    /// calling the data consistent.
    #[inline]
    pub fn lock(&mut self) -> Result<MutexGuard<'_>, Error> {
        let locked = self.lock.lock(&mut self.handle.wakeups, self.handle.patience)?;
        Ok(MutexGuard { mutex: Some(self), locked })
    }

    /// Locks if nobody has it, else [`Error::WouldBlock`].
    #[inline]
    pub fn try_lock(&mut self) -> Result<MutexGuard<'_>, Error> {
        let locked = self.lock.try_lock()?;
        Ok(MutexGuard { mutex: Some(self), locked })
    }

    /// The guard of a mutex whose guard was leaked ([`std::mem::forget`]), as if its owner had not died: for bindings to
    /// languages without guards. If the mutex is not locked, what is done with the guard fails with [`Error::NotOwner`].
    pub fn assume_locked(&mut self) -> MutexGuard<'_> {
        MutexGuard { mutex: Some(self), locked: Locked::Clean }
    }

    /// Unlocks a mutex whose guard was leaked: for bindings to languages without guards.
    /// [`Error::NotOwner`] if this handle does not have it.
    #[inline]
    pub fn force_unlock(&mut self) -> Result<(), Error> {
        self.lock.unlock(&mut self.handle.wakeups).map_err(Error::from)
    }

    /// As [`MutexGuard::make_consistent`], for a mutex whose guard was leaked.
    pub fn force_consistent(&mut self) -> Result<(), Error> {
        self.lock.make_consistent().map_err(Error::from)
    }
}

/// A locked [`Mutex`]. Dropping it unlocks.
#[must_use = "a guard that is dropped at once has unlocked"]
pub struct MutexGuard<'a> {
    /// `None` once it is unlocked.
    mutex: Option<&'a mut Mutex>,
    locked: Locked,
}

impl<'a> MutexGuard<'a> {
    /// Whether the last owner died in it: the data may be half-written. Repair them and call
    /// [`MutexGuard::make_consistent`]; without that, unlocking makes the mutex [`Error::NotRecoverable`] for all.
    #[inline]
    pub fn owner_died(&self) -> bool {
        self.locked == Locked::OwnerDied
    }

    /// The data are consistent again.
    pub fn make_consistent(&mut self) -> Result<(), Error> {
        if let Some(mutex) = &mut self.mutex {
            mutex.lock.make_consistent()?;
            self.locked = Locked::Clean;
        }
        Ok(())
    }

    /// Unlocks, as dropping does, and says if it was not ours any more: [`Error::NotOwner`], after this endpoint was declared
    /// dead.
    pub fn unlock(mut self) -> Result<(), Error> {
        self.mutex.take().map_or(Ok(()), |mutex| mutex.force_unlock())
    }

    /// The mutex behind it, still locked.
    pub(super) fn into_mutex(mut self) -> Option<&'a mut Mutex> {
        self.mutex.take()
    }

    pub(super) fn of(mutex: &'a mut Mutex, locked: Locked) -> Self {
        Self { mutex: Some(mutex), locked }
    }
}

impl Drop for MutexGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(mutex) = &mut self.mutex
            && mutex.handle.is_ours()
        {
            // What could be said of it, nobody asks for: see `unlock`.
            let _ = mutex.lock.unlock(&mut mutex.handle.wakeups);
        }
    }
}
