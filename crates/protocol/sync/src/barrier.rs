//! A barrier: a number of parties wait for each other.
//!
//! The word has a bit for each party that has arrived and waits. The last party to arrive replaces the word with 0, in one
//! instruction; a waiter whose bit is gone may go on. No generation has to be counted: only the user itself sets its bit, so
//! a bit that is gone means that the round is over, however far the other parties are by then.

use crate::error::{Corrupt, SyncError};
use crate::seat::{Patience, Seat, TRIES, User, World};
use ginnel_layout::sync::{BARRIER_BROKEN, SEATED, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// A handle on a barrier, which is one party. Only one thread at a time may use it; other threads open their own handles.
///
/// The death of a party, wherever it is, breaks the barrier, because that party will not arrive. All parties that wait and
/// all that arrive later get [`SyncError::BarrierBroken`] until one of them resets the barrier. A party whose wait times out
/// has not arrived, and may arrive again.
#[derive(Clone)]
pub struct Barrier<M> {
    seat: Seat<M>,
    parties: u32,
}

impl<M: SharedMemory> Barrier<M> {
    /// Returns a handle on the barrier in `page`, which has `parties` parties, for a user to which the daemon has given a
    /// slot. Panics if `page` is too short.
    pub fn new(page: M, user: User, parties: u32) -> Self {
        Self { seat: Seat::new(page, user), parties }
    }

    /// Waits until all parties have arrived. Returns true for exactly one party, which arrived last.
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
            // If the bit is gone already, all parties have arrived just in time.
            Err(error) => match self.seat.page.fetch_and_u64(STATE, !self.seat.bit) & self.seat.bit {
                0 => self.seat.check_memory().map(|()| false),
                _ => Err(error),
            },
        }
    }

    /// Arrives. Returns true if this was the last party.
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

    /// Makes a broken barrier usable again, for the same number of parties. Fails with [`SyncError::Busy`] while parties that
    /// waited have not noticed yet that the barrier is broken.
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

    /// Returns the bits of the slots that have a user. A user that was declared dead may arrive after its slot was taken
    /// back.
    fn seated(&self) -> u64 {
        self.seat.page.load_relaxed_u64(SEATED) & SLOTS_MASK
    }
}
