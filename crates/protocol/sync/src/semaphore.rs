//! Semaphores: a number of permits.

use crate::error::{Corrupt, SyncError};
use crate::seat::{Patience, SLEEPERS, Seat, TRIES, User, World};
use ginnel_layout::sync::{SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a counting semaphore. Only one thread at a time may use it; other threads open their own handles.
///
/// Permits have no owner. One user may give back a permit that another has taken, and a permit that a process took before it
/// died does not come back by itself.
#[derive(Clone)]
pub struct Semaphore<M> {
    seat: Seat<M>,
    limit: u32,
}

impl<M: SharedMemory> Semaphore<M> {
    /// Returns a handle on the semaphore in `page`, which has at most `limit` permits, for a user to which the daemon has
    /// given a slot. Panics if `page` is too short.
    pub fn new(page: M, user: User, limit: u32) -> Self {
        Self { seat: Seat::new(page, user), limit }
    }

    /// Takes a permit, and waits until there is one.
    #[inline]
    pub fn acquire<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        let permits = self.seat.page.load_relaxed_u64(STATE);
        if self.seat.is_ours() && self.has_one(permits) && self.change(permits, permits - 1) {
            return Ok(());
        }
        self.acquire_slowly(world, patience)
    }

    /// Takes a permit if there is one; else fails with [`SyncError::Busy`].
    pub fn try_acquire(&mut self) -> Result<(), SyncError> {
        self.seat.check()?;
        self.attempt().unwrap_or(Err(SyncError::Busy))
    }

    /// Gives `count` permits, and wakes as many users that sleep for one. Never blocks. Fails with [`SyncError::Overflow`],
    /// and gives none, if there would be more permits than the limit.
    #[inline]
    pub fn release<W: World>(&mut self, world: &mut W, count: u32) -> Result<(), SyncError> {
        for _ in 0..TRIES {
            let permits = self.permits()?;
            if permits + u64::from(count) > self.limit.into() {
                return Err(SyncError::Overflow { limit: self.limit });
            }
            if self.change(permits, permits + u64::from(count)) {
                self.seat.check_memory()?;
                self.wake(world, count);
                return Ok(());
            }
        }
        Err(Corrupt::Restless.into())
    }

    /// Returns how many permits there are at the moment.
    pub fn permits(&self) -> Result<u64, SyncError> {
        self.seat.page.attend();
        let permits = self.seat.page.load_relaxed_u64(STATE);
        self.seat.check_memory()?;
        match permits {
            permits if permits <= self.limit.into() => Ok(permits),
            permits => Err(Corrupt::Permits { permits, limit: self.limit }.into()),
        }
    }

    #[inline]
    fn has_one(&self, permits: u64) -> bool {
        permits != 0 && permits <= self.limit.into()
    }

    #[inline]
    fn change(&self, from: u64, to: u64) -> bool {
        self.seat.page.compare_exchange_u64(STATE, from, to).is_ok()
    }

    fn attempt(&self) -> Option<Result<(), SyncError>> {
        for _ in 0..TRIES {
            match self.permits() {
                Ok(0) => return None,
                Ok(permits) if self.change(permits, permits - 1) => return Some(Ok(())),
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Err(Corrupt::Restless.into()))
    }

    #[cold]
    fn acquire_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        self.seat.check()?;
        let glance = || self.seat.page.load_relaxed_u64(STATE) != 0;
        let waited = self.seat.wait(world, patience.begin(), |_| self.attempt(), glance);
        // Whether or not the caller got a permit, the one for which it was rung may still be there. If the number of permits
        // is corrupt, the other users must find that out, too.
        if waited.rung && !matches!(self.permits(), Ok(0)) {
            self.seat.wake_one(SLOTS_MASK, world);
        }
        waited.outcome
    }

    #[inline]
    fn wake<W: World>(&self, world: &mut W, count: u32) {
        if SLEEPERS.sleepers(&self.seat.page) != 0 {
            for _ in 0..count.min(SLOTS_MASK.count_ones()) {
                self.seat.wake_one(SLOTS_MASK, world);
            }
        }
    }
}
