//! Read-write locks.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;
use ginnel_sync::Locked;

/// A read-write lock in the segment: many readers or one writer. A writer waits for the current readers while no new
/// readers are admitted, and the readers that are waiting get in before the next writer. See [`crate::sync`] for
/// handles, waiting and death.
///
/// If a writer dies, the next writer gets the lock and learns of the death ([`WriteGuard::owner_died`]); readers get
/// [`Error::OwnerDied`] until a writer has declared the data consistent. The death of a reader does not affect the
/// others.
pub struct RwLock {
    lock: ginnel_sync::RwLock<Mapping>,
    handle: Handle,
}

common!(RwLock);

impl RwLock {
    pub(super) fn new(handle: Handle) -> Self {
        Self { lock: ginnel_sync::RwLock::new(handle.page.clone(), handle.user), handle }
    }

    /// Locks for reading. Waits while a writer has the lock or waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::OwnerDied`] if a writer died and no writer has declared the data consistent since,
    /// [`Error::NotRecoverable`] if a writer then unlocked without [`WriteGuard::make_consistent`], [`Error::Deadlock`]
    /// if this handle has the lock already, [`Error::TimedOut`] after this handle's timeout.
    #[inline]
    pub fn read(&mut self) -> Result<ReadGuard<'_>, Error> {
        self.lock.read(&mut self.handle.wakeups, self.handle.patience)?;
        Ok(ReadGuard { lock: self })
    }

    /// Locks for reading if no writer has the lock or waits for it. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if a writer has the lock or waits for it; otherwise as [`RwLock::read`].
    pub fn try_read(&mut self) -> Result<ReadGuard<'_>, Error> {
        self.lock.try_read(&mut self.handle.wakeups)?;
        Ok(ReadGuard { lock: self })
    }

    /// Locks for writing. Waits while another handle has the lock.
    ///
    /// # Errors
    ///
    /// [`Error::NotRecoverable`] if a writer died and the next one unlocked without [`WriteGuard::make_consistent`],
    /// [`Error::Deadlock`] if this handle has the lock already, [`Error::TimedOut`] after this handle's timeout.
    #[inline]
    pub fn write(&mut self) -> Result<WriteGuard<'_>, Error> {
        let locked = self.lock.write(&mut self.handle.wakeups, self.handle.patience)?;
        Ok(WriteGuard { lock: self, locked })
    }

    /// Locks for writing if the lock is free. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if another handle has the lock; otherwise as [`RwLock::write`].
    pub fn try_write(&mut self) -> Result<WriteGuard<'_>, Error> {
        let locked = self.lock.try_write(&mut self.handle.wakeups)?;
        Ok(WriteGuard { lock: self, locked })
    }

    /// Unlocks a lock whose guard was leaked with [`std::mem::forget`]. Never blocks. Meant for bindings to languages
    /// without guards.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the lock.
    pub fn force_unlock(&mut self) -> Result<(), Error> {
        self.lock.unlock(&mut self.handle.wakeups).map_err(Error::from)
    }

    /// Does the same as [`WriteGuard::make_consistent`] for a lock whose guard was leaked.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the lock for writing.
    pub fn force_consistent(&mut self) -> Result<(), Error> {
        self.lock.make_consistent().map_err(Error::from)
    }
}

/// A [`RwLock`] that is locked for reading. Dropping the guard unlocks it, except in the child of a fork while the
/// parent lives.
#[must_use = "dropping the guard at once unlocks the lock"]
pub struct ReadGuard<'a> {
    lock: &'a mut RwLock,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        if self.lock.handle.is_ours() {
            // This handle does not have the lock any more if its endpoint was declared dead; then there is nothing to
            // unlock.
            let _ = self.lock.force_unlock();
        }
    }
}

/// A [`RwLock`] that is locked for writing. Dropping the guard unlocks it, except in the child of a fork while the
/// parent lives.
#[must_use = "dropping the guard at once unlocks the lock"]
pub struct WriteGuard<'a> {
    lock: &'a mut RwLock,
    locked: Locked,
}

impl WriteGuard<'_> {
    /// Returns whether the previous writer died while it had the lock, so that the data may be half-written. Repair the
    /// data and call [`WriteGuard::make_consistent`]; if the lock is unlocked without that, every later lock fails with
    /// [`Error::NotRecoverable`].
    pub fn owner_died(&self) -> bool {
        self.locked == Locked::OwnerDied
    }

    /// Declares the data consistent again after a writer's death. Without effect if no writer died.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`] if this handle does not have the lock any more.
    pub fn make_consistent(&mut self) -> Result<(), Error> {
        self.lock.force_consistent()?;
        self.locked = Locked::Clean;
        Ok(())
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        if self.lock.handle.is_ours() {
            // See the drop of `ReadGuard`.
            let _ = self.lock.force_unlock();
        }
    }
}
