//! A number of permits.

use crate::error::{Corrupt, SyncError};
use crate::seat::{Patience, SLEEPERS, Seat, TRIES, User, World};
use ginnel_layout::sync::{SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a counting semaphore. For one thread at a time; others open handles of their own.
///
/// Permits belong to nobody: who gives one back need not be who took it, and one that was taken by a process that dies
/// does not come back by itself.
#[derive(Clone)]
pub struct Semaphore<M> {
    seat: Seat<M>,
    limit: u32,
}

impl<M: SharedMemory> Semaphore<M> {
    /// The semaphore in `page`, which may have `limit` permits, for a user that the daemon has seated there. Panics if
    /// `page` is too short.
    pub fn new(page: M, user: User, limit: u32) -> Self {
        Self { seat: Seat::new(page, user), limit }
    }

    /// Takes a permit, waiting for one.
    #[inline]
    pub fn acquire<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        let permits = self.seat.page.load_relaxed_u64(STATE);
        if self.seat.is_ours() && self.has_one(permits) && self.change(permits, permits - 1) {
            return Ok(());
        }
        self.acquire_slowly(world, patience)
    }

    /// Takes a permit if there is one, else [`SyncError::Busy`].
    pub fn try_acquire(&mut self) -> Result<(), SyncError> {
        self.seat.check()?;
        self.attempt().unwrap_or(Err(SyncError::Busy))
    }

    /// Gives `count` permits, and wakes as many who sleep for one. Never blocks. [`SyncError::Overflow`] if there would be
    /// more than the limit; then none is given.
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

    /// How many permits there are just now.
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
        // Whether or not we got one: the permit that we were rung for may be there still. If the permits are corrupt, the others
        // are to find out, too.
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
