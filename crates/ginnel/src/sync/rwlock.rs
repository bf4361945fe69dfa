//! Many readers or one writer.

use super::handle::{Handle, common};
use crate::error::Error;
use ginnel_shmem::Mapping;
use ginnel_sync::Locked;

/// A read-write lock of the segment. A writer waits for those who read, while no others begin; readers that wait get in
/// before the next writer. See [`crate::sync`] for handles, waiting and death.
///
/// If a writer dies, the next writer gets the lock and is told ([`WriteGuard::owner_died`]); readers get
/// [`Error::OwnerDied`] until a writer has called the data consistent. A reader's death changes nothing for the others.
pub struct RwLock {
    lock: ginnel_sync::RwLock<Mapping>,
    handle: Handle,
}

common!(RwLock);

impl RwLock {
    pub(super) fn new(handle: Handle) -> Self {
        Self { lock: ginnel_sync::RwLock::new(handle.page.clone(), handle.user), handle }
    }

    /// Locks for reading.
    #[inline]
    pub fn read(&mut self) -> Result<ReadGuard<'_>, Error> {
        self.lock.read(&mut self.handle.wakeups, self.handle.patience)?;
        Ok(ReadGuard { lock: self })
    }

    /// Locks for reading if no writer has it or waits for it, else [`Error::WouldBlock`].
    pub fn try_read(&mut self) -> Result<ReadGuard<'_>, Error> {
        self.lock.try_read(&mut self.handle.wakeups)?;
        Ok(ReadGuard { lock: self })
    }

    /// Locks for writing.
    #[inline]
    pub fn write(&mut self) -> Result<WriteGuard<'_>, Error> {
        let locked = self.lock.write(&mut self.handle.wakeups, self.handle.patience)?;
        Ok(WriteGuard { lock: self, locked })
    }

    /// Locks for writing if nobody has it, else [`Error::WouldBlock`].
    pub fn try_write(&mut self) -> Result<WriteGuard<'_>, Error> {
        let locked = self.lock.try_write(&mut self.handle.wakeups)?;
        Ok(WriteGuard { lock: self, locked })
    }

    /// Unlocks a lock whose guard was leaked ([`std::mem::forget`]): for bindings to languages without guards.
    /// [`Error::NotOwner`] if this handle does not have it.
    pub fn force_unlock(&mut self) -> Result<(), Error> {
        self.lock.unlock(&mut self.handle.wakeups).map_err(Error::from)
    }

    /// As [`WriteGuard::make_consistent`], for a lock whose guard was leaked.
    pub fn force_consistent(&mut self) -> Result<(), Error> {
        self.lock.make_consistent().map_err(Error::from)
    }
}

/// A [`RwLock`] that is locked for reading. Dropping it unlocks.
#[must_use = "a guard that is dropped at once has unlocked"]
pub struct ReadGuard<'a> {
    lock: &'a mut RwLock,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        if self.lock.handle.is_ours() {
            // Not ours any more if this endpoint was declared dead; then there is nothing to unlock.
            let _ = self.lock.force_unlock();
        }
    }
}

/// A [`RwLock`] that is locked for writing. Dropping it unlocks.
#[must_use = "a guard that is dropped at once has unlocked"]
pub struct WriteGuard<'a> {
    lock: &'a mut RwLock,
    locked: Locked,
}

impl WriteGuard<'_> {
    /// Whether the last writer died in it: the data may be half-written. Repair them and call
    /// [`WriteGuard::make_consistent`]; without that, unlocking makes the lock [`Error::NotRecoverable`] for all.
    pub fn owner_died(&self) -> bool {
        self.locked == Locked::OwnerDied
    }

    /// The data are consistent again.
    pub fn make_consistent(&mut self) -> Result<(), Error> {
        self.lock.force_consistent()?;
        self.locked = Locked::Clean;
        Ok(())
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        if self.lock.handle.is_ours() {
            // As for readers.
            let _ = self.lock.force_unlock();
        }
    }
}
