//! A number of parties wait for each other.
//!
//! The word has a bit for each party that has arrived and waits. The last one to arrive puts 0 in its place, in one
//! instruction; a waiter whose bit is gone is free. There is no generation to count: only its own user sets a bit, so
//! a bit that is gone means that the round is over, however far the others are meanwhile.

use crate::error::{Corrupt, SyncError};
use crate::seat::{Patience, Seat, TRIES, User, World};
use ginnel_layout::sync::{BARRIER_BROKEN, SEATED, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a barrier: one party. For one thread at a time; others open handles of their own.
///
/// A party that dies, wherever it is, breaks the barrier: it will not come. All who wait and all who come get
/// [`SyncError::BarrierBroken`] until somebody resets it. One whose time is up has not arrived, and may come again.
#[derive(Clone)]
pub struct Barrier<M> {
    seat: Seat<M>,
    parties: u32,
}

impl<M: SharedMemory> Barrier<M> {
    /// The barrier in `page` for `parties`, for a user that the daemon has seated there. Panics if `page` is too short.
    pub fn new(page: M, user: User, parties: u32) -> Self {
        Self { seat: Seat::new(page, user), parties }
    }

    /// Waits until all parties have come. True for one of them, who came last.
    pub fn wait<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<bool, SyncError> {
        self.seat.check()?;
        if self.arrive(world)? {
            return Ok(true);
        }
        let attempt = |_| match self.seat.page.load_acquire_u64(STATE) {
            state if state & self.seat.bit == 0 => Some(Ok(())),
            state if state & BARRIER_BROKEN != 0 => Some(Err(SyncError::BarrierBroken)),
            _ => None,
        };
        let glance = || self.seat.page.load_relaxed_u64(STATE) & self.seat.bit == 0;
        match self.seat.wait(world, patience.begin(), attempt, glance).outcome {
            Ok(()) => self.seat.check_memory().map(|()| false),
            Err(error @ (SyncError::Stale | SyncError::Gone)) => Err(error),
            // Gone already: all have come after all.
            Err(error) => match self.seat.page.fetch_and_u64(STATE, !self.seat.bit) & self.seat.bit {
                0 => self.seat.check_memory().map(|()| false),
                _ => Err(error),
            },
        }
    }

    /// Arrives; true if all have.
    fn arrive<W: World>(&self, world: &mut W) -> Result<bool, SyncError> {
        for _ in 0..TRIES {
            let state = self.seat.page.load_acquire_u64(STATE);
            if state & BARRIER_BROKEN != 0 {
                return Err(SyncError::BarrierBroken);
            }
            let all = state & self.seated() | self.seat.bit;
            let last = all.count_ones() >= self.parties;
            if self.seat.page.compare_exchange_u64(STATE, state, if last { 0 } else { all }).is_ok() {
                self.seat.check_memory()?;
                if last {
                    self.seat.wake_all(all, world);
                }
                return Ok(last);
            }
        }
        Err(Corrupt::Restless.into())
    }

    /// Makes a broken barrier usable again, for as many parties as ever. [`SyncError::Busy`] while some of those who waited
    /// have not found out yet.
    pub fn reset(&mut self) -> Result<(), SyncError> {
        self.seat.check()?;
        for _ in 0..TRIES {
            let state = self.seat.page.load_acquire_u64(STATE);
            if state & BARRIER_BROKEN == 0 {
                return Ok(());
            }
            if state & self.seated() != 0 {
                return Err(SyncError::Busy);
            }
            if self.seat.page.compare_exchange_u64(STATE, state, 0).is_ok() {
                return Ok(());
            }
        }
        Err(Corrupt::Restless.into())
    }

    /// The slots that have a user. One that was declared dead may arrive after its slot was taken back.
    fn seated(&self) -> u64 {
        self.seat.page.load_relaxed_u64(SEATED) & SLOTS_MASK
    }
}
