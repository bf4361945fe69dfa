//! Waiting for a condition.

use super::handle::{Handle, common};
use super::mutex::MutexGuard;
use crate::error::Error;
use ginnel_shmem::Mapping;

/// A condition variable of the segment, beside a [`super::Mutex`]. See [`crate::sync`] for handles, waiting and death.
///
/// A waiter that dies with a signal it has not used passes that on.
pub struct Condvar {
    condvar: ginnel_sync::Condvar<Mapping>,
    handle: Handle,
}

common!(Condvar);

impl Condvar {
    pub(super) fn new(handle: Handle) -> Self {
        Self { condvar: ginnel_sync::Condvar::new(handle.page.clone(), handle.user), handle }
    }

    /// Unlocks the mutex, waits for a signal as this handle is set up to wait, and locks again as the mutex's handle is. False
    /// if this handle's timeout came first. Look at the condition in any case: somebody may have been quicker, and after a
    /// death there are signals without a reason. With an error the mutex is not locked any more.
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

    /// Signals one waiter, if there is one; they take turns. Never blocks. With or without the mutex, but the condition must
    /// have been changed with it.
    #[inline]
    pub fn notify_one(&mut self) {
        self.condvar.notify_one(&mut self.handle.wakeups);
    }

    /// Signals all who wait. Never blocks.
    #[inline]
    pub fn notify_all(&mut self) {
        self.condvar.notify_all(&mut self.handle.wakeups);
    }
}
