//! Condition variables.

use super::handle::{Handle, common};
use super::mutex::MutexGuard;
use crate::error::Error;
use ginnel_shmem::Mapping;

/// A condition variable in the segment, used together with a [`super::Mutex`]. See [`crate::sync`] for handles, waiting
/// and death.
///
/// If a waiter dies after it was signalled and before it could act on the signal, the signal goes to another waiter.
pub struct Condvar {
    condvar: ginnel_sync::Condvar<Mapping>,
    handle: Handle,
}

common!(Condvar);

impl Condvar {
    pub(super) fn new(handle: Handle) -> Self {
        Self { condvar: ginnel_sync::Condvar::new(handle.page.clone(), handle.user), handle }
    }

    /// Unlocks the mutex, waits for a signal, and locks the mutex again. Returns the guard, and false if this handle's
    /// timeout expired before a signal came. The wait obeys the settings of this handle; locking again obeys those of
    /// the mutex's handle.
    ///
    /// The caller must check its condition in either case: another thread may have changed it first, and there are
    /// spurious signals after a death.
    ///
    /// # Errors
    ///
    /// After any error the mutex is not locked by this handle any more. [`Error::NotOwner`] if the guard's mutex is not
    /// locked; otherwise the errors of [`super::Mutex::lock`].
    pub fn wait<'a>(&mut self, guard: MutexGuard<'a>) -> Result<(MutexGuard<'a>, bool), Error> {
        let Some(mutex) = guard.into_mutex() else { return Err(Error::NotOwner) };
        let relock = mutex.handle.patience;
        let woken = self.condvar.wait(
            &mut self.handle.wakeups,
            self.handle.patience,
            &mut mutex.lock,
            &mut mutex.handle.wakeups,
            relock,
        )?;
        Ok((MutexGuard::of(mutex, woken.locked), woken.signalled))
    }

    /// Wakes one waiter, if there is one; the waiters take turns. Never blocks. The caller need not hold the
    /// mutex, but must have held it while it changed the condition.
    #[inline]
    pub fn notify_one(&mut self) {
        self.condvar.notify_one(&mut self.handle.wakeups);
    }

    /// Wakes all waiters. Never blocks.
    #[inline]
    pub fn notify_all(&mut self) {
        self.condvar.notify_all(&mut self.handle.wakeups);
    }
}
