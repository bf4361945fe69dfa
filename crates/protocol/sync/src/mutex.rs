//! Mutexes: mutual exclusion.

use crate::error::SyncError;
use crate::owner::{self, Locked};
use crate::seat::{Patience, Seat, User, World};
use ginnel_layout::sync::{OwnerWord, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a mutex. Only one thread at a time may use it; other threads open their own handles.
///
/// Without contention, locking and unlocking are one compare-exchange each. The mutex is not fair: a user that arrives may
/// get it before a sleeper that was woken.
#[derive(Clone)]
pub struct Mutex<M> {
    pub(crate) seat: Seat<M>,
}

impl<M: SharedMemory> Mutex<M> {
    /// Returns a handle on the mutex in `page`, for a user to which the daemon has given a slot. Panics if `page` is too
    /// short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user) }
    }

    /// Locks the mutex. Returns [`Locked::OwnerDied`] if the last owner died while it held the mutex.
    #[inline]
    pub fn lock<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Locked, SyncError> {
        if self.seat.take_free() {
            return Ok(Locked::Clean);
        }
        self.lock_slowly(world, patience)
    }

    #[cold]
    fn lock_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Locked, SyncError> {
        owner::acquire(&self.seat, world, patience.begin())
    }

    /// Locks the mutex if no user has it; else fails with [`SyncError::Busy`].
    #[inline]
    pub fn try_lock(&mut self) -> Result<Locked, SyncError> {
        if self.seat.take_free() {
            return Ok(Locked::Clean);
        }
        owner::try_acquire(&self.seat)
    }

    /// Unlocks the mutex, and wakes one user that sleeps for it. Never blocks.
    #[inline]
    pub fn unlock<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        if self.seat.page.compare_exchange_u64(STATE, self.seat.own, OwnerWord::FREE.0).is_ok() {
            return Ok(());
        }
        self.unlock_slowly(world)
    }

    #[cold]
    fn unlock_slowly<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        let word = owner::give_back(&self.seat, owner::left_behind)?;
        if word.has(OwnerWord::OWNER_DIED) {
            self.seat.wake_all(SLOTS_MASK, world);
        } else if word.has(OwnerWord::WAITERS) {
            self.seat.wake_one(SLOTS_MASK, world);
        }
        Ok(())
    }

    /// Declares the data consistent again, after [`Locked::OwnerDied`] and while the mutex is locked.
    pub fn make_consistent(&mut self) -> Result<(), SyncError> {
        owner::make_consistent(&self.seat)
    }
}
