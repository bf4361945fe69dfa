//! Mutual exclusion.

use crate::error::SyncError;
use crate::owner::{self, Locked};
use crate::seat::{Patience, Seat, User, World};
use ginnel_layout::sync::{OwnerWord, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a mutex. For one thread at a time; others open handles of their own.
///
/// Uncontended, locking and unlocking are one compare-exchange each. It is not fair: who comes may pass who was woken.
#[derive(Clone)]
pub struct Mutex<M> {
    pub(crate) seat: Seat<M>,
}

impl<M: SharedMemory> Mutex<M> {
    /// The mutex in `page`, for a user that the daemon has seated there. Panics if `page` is too short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user) }
    }

    /// Locks. [`Locked::OwnerDied`] if the owner has died in it.
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

    /// Locks if nobody has it, else [`SyncError::Busy`].
    #[inline]
    pub fn try_lock(&mut self) -> Result<Locked, SyncError> {
        if self.seat.take_free() {
            return Ok(Locked::Clean);
        }
        owner::try_acquire(&self.seat)
    }

    /// Unlocks, and wakes one who sleeps for it. Never blocks.
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

    /// After [`Locked::OwnerDied`], while it is locked: the data are consistent again.
    pub fn make_consistent(&mut self) -> Result<(), SyncError> {
        owner::make_consistent(&self.seat)
    }
}
