//! Something done once.

use crate::error::SyncError;
use crate::owner::{self, Locked};
use crate::seat::{Look, Patience, Seat, User, World};
use ginnel_layout::sync::{OwnerWord, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a once. For one thread at a time; others open handles of their own.
#[derive(Clone)]
pub struct Once<M> {
    seat: Seat<M>,
}

/// Whether it is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "whoever has the turn must end it"]
pub enum Turn {
    /// It has been done.
    Done,
    /// It is to be done by the caller, who then calls [`Once::complete`] or [`Once::give_up`].
    Mine {
        /// Whoever had the turn before has died in it, or failed: some of it may have been done.
        again: bool,
    },
}

impl<M: SharedMemory> Once<M> {
    /// The once in `page`, for a user that the daemon has seated there. Panics if `page` is too short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user) }
    }

    /// Whether it has been done; what was done is seen then.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.seat.page.load_acquire_u64(STATE) == OwnerWord::DONE
    }

    /// Gets the turn, or learns that it has been done; waits while somebody is at it.
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
                // Done between the two looks.
                Some(Err(_)) if self.is_done() => Some(Ok(Turn::Done)),
                Some(Err(error)) => Some(Err(error)),
            }
        };
        let waited = self.seat.wait(world, patience.begin(), attempt, || owner::seems_free(&self.seat));
        // Whoever has the turn has noted the others in the word. Not so if it is done: then whoever did it may not have known
        // of them.
        if waited.rung && !matches!(waited.outcome, Ok(Turn::Mine { .. })) {
            owner::hand_on(&self.seat, world);
        }
        waited.outcome
    }

    /// It is done. [`SyncError::NotOwner`] without the turn.
    pub fn complete<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        let word = owner::give_back(&self.seat, |_| OwnerWord(OwnerWord::DONE))?;
        if word.has(OwnerWord::WAITERS) {
            self.seat.wake_all(SLOTS_MASK, world);
        }
        Ok(())
    }

    /// It has failed: the next one has the turn, and is told. [`SyncError::NotOwner`] without the turn.
    pub fn give_up<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        let word = owner::give_back(&self.seat, |_| OwnerWord(OwnerWord::OWNER_DIED))?;
        if word.has(OwnerWord::WAITERS) {
            self.seat.wake_one(SLOTS_MASK, world);
        }
        Ok(())
    }
}
