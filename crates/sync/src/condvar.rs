//! Waiting for a condition, beside a mutex.
//!
//! A waiter sets its bit in the page's `waiting` word before it unlocks the mutex, and waits until the bit is gone; who
//! clears a bit has signalled its waiter. So a signal is one atomic instruction, is for one waiter, and cannot be lost
//! between unlocking and sleeping; and a waiter whose time is up knows, by clearing its own bit, whether a signal came
//! first.

use crate::error::SyncError;
use crate::mutex::Mutex;
use crate::owner::Locked;
use crate::seat::{Patience, Seat, User, World, next_turn, slots};
use ginnel_layout::sync::{SEATED, SLOTS_MASK, WAITING};
use ginnel_shmem::SharedMemory;

/// A handle on a condition variable. For one thread at a time; others open handles of their own.
#[derive(Clone)]
pub struct Condvar<M> {
    seat: Seat<M>,
}

/// How a wait on a condition variable has ended. The mutex is locked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Woken {
    /// What locking the mutex again has said.
    pub locked: Locked,
    /// False if the time was up first.
    pub signalled: bool,
}

impl<M: SharedMemory> Condvar<M> {
    /// The condition variable in `page`, for a user that the daemon has seated there. Panics if `page` is too short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user) }
    }

    /// Unlocks `mutex`, waits in `world` for a signal as `patience` says, and locks `mutex` again as `relock` says; the mutex
    /// has slots of its own, so it has a world of its own. An error means that the mutex is not locked any more (or never was:
    /// [`SyncError::NotOwner`]); a signal is then passed on to another waiter. May wake without a reason (after somebody's
    /// death), so look at the condition again.
    ///
    /// The mutex may be any in the segment, but the same for all who wait here at a time.
    pub fn wait<N: SharedMemory, W: World, V: World>(
        &mut self,
        world: &mut W,
        patience: Patience,
        mutex: &mut Mutex<N>,
        mutex_world: &mut V,
        relock: Patience,
    ) -> Result<Woken, SyncError> {
        if let Err(error) = self.seat.check() {
            mutex.unlock(mutex_world)?;
            return Err(error);
        }
        let page = &self.seat.page;
        page.fetch_or_u64(WAITING, self.seat.bit);
        // ORDER condvar.enrol: the bit before the mutex is free, so whoever notifies after having had the mutex sees it.
        // Pairs with: `notify_one`, `notify_all`, through the mutex.
        if let Err(error) = mutex.unlock(mutex_world) {
            self.give_up(world);
            return Err(error);
        }
        let signalled = || page.load_acquire_u64(WAITING) & self.seat.bit == 0;
        let attempt = |_| signalled().then_some(Ok(()));
        let waited = self.seat.wait(world, patience.begin(), attempt, signalled);
        let signalled = match waited.outcome {
            Ok(()) => true,
            Err(SyncError::TimedOut) => !self.withdraw(),
            // The slot is somebody else's.
            Err(error @ (SyncError::Stale | SyncError::Gone)) => return Err(error),
            Err(error) => {
                self.give_up(world);
                return Err(error);
            }
        };
        match mutex.lock(mutex_world, relock) {
            Ok(locked) => Ok(Woken { locked, signalled }),
            Err(error) => {
                // The caller does not look at the condition, so somebody else has to.
                if signalled {
                    self.notify_one(world);
                }
                Err(error)
            }
        }
    }

    /// Does not wait any more. A signal that has come all the same is somebody else's.
    fn give_up<W: World>(&mut self, world: &mut W) {
        if !self.withdraw() {
            self.notify_one(world);
        }
    }

    /// Does not wait any more. False if it had been signalled.
    fn withdraw(&self) -> bool {
        self.seat.page.fetch_and_u64(WAITING, !self.seat.bit) & self.seat.bit != 0
    }

    /// Signals one waiter, if there is one; they take turns. Never blocks. With or without the mutex, but the condition
    /// must have been changed with it.
    #[inline]
    pub fn notify_one<W: World>(&mut self, world: &mut W) {
        if self.seat.page.load_acquire_u64(WAITING) != 0 {
            self.signal_one(world);
        }
    }

    #[cold]
    fn signal_one<W: World>(&mut self, world: &mut W) {
        for _ in 0..crate::seat::TRIES {
            // A user that was declared dead may set its bit after its slot was taken back.
            let seated = self.seat.page.load_relaxed_u64(SEATED) & SLOTS_MASK;
            let waiting = self.seat.page.load_acquire_u64(WAITING) & seated;
            let Some(next) = next_turn(&self.seat.page, waiting) else { return };
            if self.seat.page.fetch_and_u64(WAITING, !(1 << next)) & 1 << next != 0 {
                return self.seat.wake_all(1 << next, world);
            }
        }
    }

    /// Signals all who wait. Never blocks.
    #[inline]
    pub fn notify_all<W: World>(&mut self, world: &mut W) {
        if self.seat.page.load_acquire_u64(WAITING) != 0 {
            let waiting = self.seat.page.swap_u64(WAITING, 0);
            self.seat.wake_all(waiting, world);
        }
    }

    /// How many wait just now.
    pub fn waiting(&self) -> usize {
        slots(self.seat.page.load_relaxed_u64(WAITING)).count()
    }
}
