//! Mutexes.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;
use ginnel_sync::Locked;

/// A robust mutex in the segment: if its owner dies, the next owner gets it and learns of the death
/// ([`MutexGuard::owner_died`]). See [`crate::sync`] for handles, waiting and death.
pub struct Mutex {
    pub(super) lock: ginnel_sync::Mutex<Mapping>,
    pub(super) handle: Handle,
}

common!(Mutex);

impl Mutex {
    pub(super) fn new(handle: Handle) -> Self {
        Self { lock: ginnel_sync::Mutex::new(handle.page.clone(), handle.user), handle }
    }

    /// Locks the mutex. Waits while another handle has it locked.
    ///
    /// # Errors
    ///
    /// [`Error::NotRecoverable`] if an owner died and the next one unlocked the mutex without
    /// [`MutexGuard::make_consistent`], [`Error::Deadlock`] if this handle has the mutex locked already,
    /// [`Error::TimedOut`] after this handle's timeout.
    #[inline]
    pub fn lock(&mut self) -> Result<MutexGuard<'_>, Error> {
        let locked = self.lock.lock(&mut self.handle.wakeups, self.handle.patience)?;
        Ok(MutexGuard { mutex: Some(self), locked })
    }

    /// Locks the mutex if it is free. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if another handle has it locked; otherwise as [`Mutex::lock`].
    #[inline]
    pub fn try_lock(&mut self) -> Result<MutexGuard<'_>, Error> {
        let locked = self.lock.try_lock()?;
        Ok(MutexGuard { mutex: Some(self), locked })
    }

    /// Returns a guard for a mutex whose guard was leaked with [`std::mem::forget`], without a mark that the previous
    /// owner died. Meant for bindings to languages without guards. If this handle does not have the mutex locked, every
    /// use of the guard fails with [`Error::NotOwner`].
    pub fn assume_locked(&mut self) -> MutexGuard<'_> {
        MutexGuard { mutex: Some(self), locked: Locked::Clean }
    }

    /// Unlocks a mutex whose guard was leaked. Never blocks. Meant for bindings to languages without guards.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the mutex locked.
    #[inline]
    pub fn force_unlock(&mut self) -> Result<(), Error> {
        self.lock.unlock(&mut self.handle.wakeups).map_err(Error::from)
    }

    /// Does the same as [`MutexGuard::make_consistent`] for a mutex whose guard was leaked.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the mutex locked.
    pub fn force_consistent(&mut self) -> Result<(), Error> {
        self.lock.make_consistent().map_err(Error::from)
    }
}

/// A locked [`Mutex`]. Dropping the guard unlocks it, except in the child of a fork while the parent lives.
#[must_use = "dropping the guard at once unlocks the mutex"]
pub struct MutexGuard<'a> {
    /// `None` once the mutex is unlocked.
    mutex: Option<&'a mut Mutex>,
    locked: Locked,
}

impl<'a> MutexGuard<'a> {
    /// Returns whether the previous owner died while it had the mutex locked, so that the data may be half-written.
    /// Repair the data and call [`MutexGuard::make_consistent`]; if the mutex is unlocked without that, every later
    /// lock fails with [`Error::NotRecoverable`].
    #[inline]
    pub fn owner_died(&self) -> bool {
        self.locked == Locked::OwnerDied
    }

    /// Declares the data consistent again after an owner's death. Without effect if no owner died.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the mutex locked any more.
    pub fn make_consistent(&mut self) -> Result<(), Error> {
        if let Some(mutex) = &mut self.mutex {
            mutex.lock.make_consistent()?;
            self.locked = Locked::Clean;
        }
        Ok(())
    }

    /// Unlocks the mutex, as dropping the guard does, but reports errors. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle did not have the mutex any more, because its endpoint was declared dead.
    pub fn unlock(mut self) -> Result<(), Error> {
        self.mutex.take().map_or(Ok(()), |mutex| mutex.force_unlock())
    }

    /// Returns the mutex, which stays locked.
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
            // A drop cannot report an error; `unlock` does.
            let _ = mutex.lock.unlock(&mut mutex.handle.wakeups);
        }
    }
}
