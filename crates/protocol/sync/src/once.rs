//! Once: something is done exactly once.

use crate::error::SyncError;
use crate::owner::{self, Locked};
use crate::seat::{Look, Patience, Seat, User, World};
use ginnel_layout::sync::{OwnerWord, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a once. Only one thread at a time may use it; other threads open their own handles.
#[derive(Clone)]
pub struct Once<M> {
    seat: Seat<M>,
}

/// Whether the caller has to do the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a user that has the turn must end it"]
pub enum Turn {
    /// The work is done.
    Done,
    /// The caller has to do the work, and then call [`Once::complete`] or [`Once::give_up`].
    Mine {
        /// An earlier user died while it had the turn, or gave up: part of the work may be done.
        again: bool,
    },
}

impl<M: SharedMemory> Once<M> {
    /// Returns a handle on the once in `page`, for a user to which the daemon has given a slot. Panics if `page` is too
    /// short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user) }
    }

    /// Returns whether the work is done. If so, its results are visible to the caller.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.seat.page.load_acquire_u64(STATE) == OwnerWord::DONE
    }

    /// Gets the turn, or finds that the work is done. Waits while another user has the turn.
    #[inline]
    pub fn begin<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Turn, SyncError> {
        if self.is_done() {
            return Ok(Turn::Done);
        }
        self.begin_slowly(world, patience)
    }

    #[cold]
    fn begin_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Turn, SyncError> {
        let attempt = |look: Look| {
            if self.is_done() {
                return Some(Ok(Turn::Done));
            }
            match owner::attempt(&self.seat, look) {
                None => None,
                Some(Ok(locked)) => Some(Ok(Turn::Mine { again: locked == Locked::OwnerDied })),
                // The work was completed between the two looks.
                Some(Err(_)) if self.is_done() => Some(Ok(Turn::Done)),
                Some(Err(error)) => Some(Err(error)),
            }
        };
        let waited = self.seat.wait(world, patience.begin(), attempt, || owner::seems_free(&self.seat));
        // A user that has the turn has recorded in the word that others sleep. If the work is done, that does not hold: the
        // user that did it may not have known about the other sleepers.
        if waited.rung && !matches!(waited.outcome, Ok(Turn::Mine { .. })) {
            owner::hand_on(&self.seat, world);
        }
        waited.outcome
    }

    /// Declares that the work is done. Fails with [`SyncError::NotOwner`] if the caller does not have the turn.
    pub fn complete<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        let word = owner::give_back(&self.seat, |_| OwnerWord(OwnerWord::DONE))?;
        if word.has(OwnerWord::WAITERS) {
            self.seat.wake_all(SLOTS_MASK, world);
        }
        Ok(())
    }

    /// Declares that the work has failed: the next user gets the turn, and is told. Fails with [`SyncError::NotOwner`] if the
    /// caller does not have the turn.
    pub fn give_up<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        let word = owner::give_back(&self.seat, |_| OwnerWord(OwnerWord::OWNER_DIED))?;
        if word.has(OwnerWord::WAITERS) {
            self.seat.wake_one(SLOTS_MASK, world);
        }
        Ok(())
    }
}
