//! Condition variables: users wait for a condition that a mutex protects.
//!
//! A waiter sets its bit in the page's `waiting` word before it unlocks the mutex, and waits until the bit is gone. The user
//! that clears a bit has signalled that waiter. Therefore a signal is one atomic instruction, is for one waiter, and cannot
//! be lost between unlocking and sleeping. A waiter whose time is up clears its own bit, and thereby learns whether a signal
//! came first.

use crate::error::SyncError;
use crate::mutex::Mutex;
use crate::owner::Locked;
use crate::seat::{Patience, Seat, User, World, next_turn, slots};
use ginnel_layout::sync::{SEATED, SLOTS_MASK, WAITING};
use ginnel_shmem::SharedMemory;

/// A handle on a condition variable. Only one thread at a time may use it; other threads open their own handles.
#[derive(Clone)]
pub struct Condvar<M> {
    seat: Seat<M>,
}

/// Result of a wait on a condition variable. The mutex is locked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Woken {
    /// Result of locking the mutex again.
    pub locked: Locked,
    /// False if the wait timed out before a signal came.
    pub signalled: bool,
}

impl<M: SharedMemory> Condvar<M> {
    /// Returns a handle on the condition variable in `page`, for a user to which the daemon has given a slot. Panics if
    /// `page` is too short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user) }
    }

    /// Unlocks `mutex`, waits in `world` for a signal with `patience`, and locks `mutex` again with `relock`. The mutex has
    /// slots of its own, so it has a world of its own. After an error, the mutex is not locked (or never was:
    /// [`SyncError::NotOwner`]), and a signal that has come is passed on to another waiter. The wait may end without a
    /// reason, for example after another user's death, so the caller must check the condition again.
    ///
    /// The mutex may be any mutex in the segment, but all users that wait at the same time must use the same one.
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
        // ORDER condvar.enrol: the bit is set before the mutex is free, so a user that notifies after it has had the mutex
        // sees the bit.
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
            // The slot has another user by now.
            Err(error @ (SyncError::Stale | SyncError::Gone)) => return Err(error),
            Err(error) => {
                self.give_up(world);
                return Err(error);
            }
        };
        match mutex.lock(mutex_world, relock) {
            Ok(locked) => Ok(Woken { locked, signalled }),
            Err(error) => {
                // The caller does not check the condition, so another user has to.
                if signalled {
                    self.notify_one(world);
                }
                Err(error)
            }
        }
    }

    /// Stops waiting. If a signal has come nevertheless, passes it on to another user.
    fn give_up<W: World>(&mut self, world: &mut W) {
        if !self.withdraw() {
            self.notify_one(world);
        }
    }

    /// Stops waiting. Returns false if a signal had come.
    fn withdraw(&self) -> bool {
        self.seat.page.fetch_and_u64(WAITING, !self.seat.bit) & self.seat.bit != 0
    }

    /// Signals one waiter, if there is one. The waiters take turns. Never blocks. The caller need not hold the mutex, but
    /// must have held it when it changed the condition.
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

    /// Signals all waiters. Never blocks.
    #[inline]
    pub fn notify_all<W: World>(&mut self, world: &mut W) {
        if self.seat.page.load_acquire_u64(WAITING) != 0 {
            let waiting = self.seat.page.swap_u64(WAITING, 0);
            self.seat.wake_all(waiting, world);
        }
    }

    /// Returns how many users wait at the moment.
    pub fn waiting(&self) -> usize {
        slots(self.seat.page.load_relaxed_u64(WAITING)).count()
    }
}
