//! Many readers or one writer.
//!
//! A reader says HELD in its own slot and looks whether there is a writer; a writer takes the owner word and then waits
//! until no slot says HELD. Each does so with a full fence between its store and its look, so at least one of the two
//! sees the other: the reader, which then steps back, or the writer, which waits. Readers share no word, only the
//! sight of the writer's.
//!
//! Nobody starves. A reader that has to wait says WANTED, and the writer that ends makes that HELD before it frees the word;
//! so each waiting reader gets in after one writer. A reader that comes while a writer has the word waits; so a writer
//! waits for the readers that were there before it, and no others.

use crate::error::{Corrupt, SyncError};
use crate::owner::{self, Locked};
use crate::seat::{Patience, SLEEPERS, Seat, TRIES, User, World, slots};
use ginnel_layout::sync::{OwnerWord, ReaderState, SEATED, SLOT_READER, SLOTS_MASK, STATE, slot};
use ginnel_shmem::Memory;
use std::cell::Cell;
use std::time::Instant;

/// A handle on a read-write lock. For one thread at a time; others open handles of their own.
///
/// A reader's death changes nothing for others. A writer's death is [`Locked::OwnerDied`] for the next writer, and
/// [`SyncError::OwnerDied`] for readers until a writer has called the data consistent.
#[derive(Clone)]
pub struct RwLock<M> {
    seat: Seat<M>,
    has: Has,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Has {
    Nothing,
    Read,
    Write,
}

impl<M: Memory> RwLock<M> {
    /// The lock in `page`, for a user that the daemon has seated there. Panics if `page` is too short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user), has: Has::Nothing }
    }

    /// Locks for reading.
    #[inline]
    pub fn read<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        if self.has == Has::Nothing && self.seat.is_ours() && self.read_free() {
            self.has = Has::Read;
            return Ok(());
        }
        self.read_slowly(world, patience)
    }

    /// Locks for reading if no writer has it or waits for it, else [`SyncError::Busy`].
    pub fn try_read<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        self.idle()?;
        if self.read_free() {
            self.has = Has::Read;
            return Ok(());
        }
        self.store_own(ReaderState::NONE);
        self.tell_writer(world);
        let word = owner::load(&self.seat)?;
        Err(ended(word).unwrap_or(SyncError::Busy))
    }

    /// Locks for writing: waits for those who read, while no others begin to.
    #[inline]
    pub fn write<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Locked, SyncError> {
        if self.has == Has::Nothing && self.seat.take_free() {
            self.seat.page.full_fence();
            if self.reader().is_none() {
                self.has = Has::Write;
                return Ok(Locked::Clean);
            }
            return self.drain(world, patience, Locked::Clean);
        }
        self.write_slowly(world, patience)
    }

    /// Locks for writing if nobody has it, else [`SyncError::Busy`].
    pub fn try_write<W: World>(&mut self, world: &mut W) -> Result<Locked, SyncError> {
        self.idle()?;
        let locked = owner::try_acquire(&self.seat)?;
        self.seat.page.full_fence();
        if self.reader().is_some() {
            self.step_down(world, locked)?;
            return Err(SyncError::Busy);
        }
        self.has = Has::Write;
        Ok(locked)
    }

    /// Unlocks, whichever way it was locked, and wakes who may go on. Never blocks.
    #[inline]
    pub fn unlock<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        match std::mem::replace(&mut self.has, Has::Nothing) {
            Has::Nothing => Err(SyncError::NotOwner),
            Has::Read => self.unlock_read(world),
            Has::Write => {
                if self.seat.page.compare_exchange_u64(STATE, self.seat.own, OwnerWord::FREE.0).is_ok() {
                    return Ok(());
                }
                self.unlock_write(world, owner::left_behind)
            }
        }
    }

    /// After [`Locked::OwnerDied`], while it is locked for writing: the data are consistent again.
    pub fn make_consistent(&mut self) -> Result<(), SyncError> {
        owner::make_consistent(&self.seat)
    }

    fn idle(&self) -> Result<(), SyncError> {
        if self.has != Has::Nothing {
            return Err(SyncError::Deadlock);
        }
        self.seat.check()
    }

    fn own(&self) -> usize {
        slot(self.seat.slot) + SLOT_READER
    }

    fn store_own(&self, state: ReaderState) {
        self.seat.page.swap_u64(self.own(), state.0);
    }

    /// Changes the own word, or tells what stands there instead.
    fn change_own(&self, from: ReaderState, to: ReaderState) -> Result<(), ReaderState> {
        self.seat.page.compare_exchange_u64(self.own(), from.0, to.0).map_err(ReaderState)
    }

    /// Says HELD and looks whether it is true.
    #[inline]
    fn read_free(&self) -> bool {
        self.store_own(ReaderState::HELD);
        // ORDER rwlock.meet: our HELD before the look at the writer. Pairs with: `write`, `drain`.
        self.seat.page.full_fence();
        self.seat.page.load_acquire_u64(STATE) == OwnerWord::FREE.0
    }

    #[cold]
    fn read_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        self.idle()?;
        let deadline = patience.deadline();
        let mut rung = false;
        // Not HELD any more, so a writer that waits for us may go on.
        self.store_own(ReaderState::WANTED);
        let outcome = loop {
            self.tell_writer(world);
            let waited = self.seat.wait(
                world,
                patience.mode,
                deadline,
                |_| self.attempt_read(),
                || owner::seems_free(&self.seat) || self.own_state() == ReaderState::HELD,
            );
            rung |= waited.rung;
            match waited.outcome {
                Ok(true) => break Ok(()),
                Ok(false) if deadline.is_none_or(|d| Instant::now() < d) => {}
                Ok(false) => break Err(SyncError::TimedOut),
                Err(error) => break Err(error),
            }
        };
        match outcome {
            Ok(()) => {}
            // Granted in the last moment.
            Err(SyncError::TimedOut)
                if self.change_own(ReaderState::WANTED, ReaderState::NONE) == Err(ReaderState::HELD) => {}
            // The slot is somebody else's.
            Err(SyncError::Stale | SyncError::Gone) => return outcome,
            Err(_) => {
                self.store_own(ReaderState::NONE);
                self.tell_writer(world);
                if rung {
                    owner::hand_on(&self.seat, world);
                }
                return outcome;
            }
        }
        self.has = Has::Read;
        Ok(())
    }

    fn own_state(&self) -> ReaderState {
        ReaderState(self.seat.page.load_acquire_u64(self.own()))
    }

    /// One try of a reader that says WANTED. `None`: it still does, and the writer knows. False: it has said HELD for a moment,
    /// and somebody has to be told that it does not any more.
    fn attempt_read(&self) -> Option<Result<bool, SyncError>> {
        for _ in 0..TRIES {
            match self.own_state() {
                ReaderState::HELD => return Some(Ok(true)),
                ReaderState::WANTED => {}
                ReaderState(other) => return Some(Err(Corrupt::Reader(other).into())),
            }
            let word = match owner::load(&self.seat) {
                Ok(word) => word,
                Err(error) => return Some(Err(error)),
            };
            if let Some(error) = ended(word) {
                return Some(Err(error));
            }
            if word.slot().is_some() {
                // Also when we only spin, so that the writer lets us in when it ends.
                if word.has(OwnerWord::WAITERS) || owner::flag_waiters(&self.seat, word) {
                    return None;
                }
                continue;
            }
            if self.change_own(ReaderState::WANTED, ReaderState::HELD).is_err() {
                continue;
            }
            // ORDER rwlock.meet: as in `read_free`.
            self.seat.page.full_fence();
            if self.seat.page.load_acquire_u64(STATE) == word.0 {
                return Some(Ok(true));
            }
            self.store_own(ReaderState::WANTED);
            return Some(Ok(false));
        }
        Some(Err(Corrupt::Restless.into()))
    }

    /// We do not read any more (or were about to): if a writer sleeps until the readers are gone, and we were the last, it
    /// is to go on.
    fn tell_writer<W: World>(&self, world: &mut W) {
        let asleep = SLEEPERS.sleepers(&self.seat.page);
        let word = OwnerWord(self.seat.page.load_relaxed_u64(STATE));
        if word.is_valid()
            && let Some(writer) = word.slot()
            && asleep & 1 << writer != 0
            && self.reader().is_none()
        {
            self.seat.wake_all(1 << writer, world);
        }
    }

    #[inline]
    fn unlock_read<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        if !self.seat.is_ours() || self.change_own(ReaderState::HELD, ReaderState::NONE).is_err() {
            return Err(SyncError::NotOwner);
        }
        // ORDER rwlock.leave: our leaving before the look for a writer. Pairs with: `drain` (which arms first).
        self.seat.page.full_fence();
        if self.seat.page.load_relaxed_u64(STATE) != OwnerWord::FREE.0 {
            self.tell_writer(world);
        }
        Ok(())
    }

    /// A slot that reads, if there is one.
    #[inline]
    fn reader(&self) -> Option<usize> {
        let held = |k: &usize| self.seat.page.load_acquire_u64(slot(*k) + SLOT_READER) == ReaderState::HELD.0;
        slots(self.seat.page.load_relaxed_u64(SEATED)).find(held)
    }

    #[cold]
    fn write_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Locked, SyncError> {
        self.idle()?;
        let locked = owner::acquire(&self.seat, world, patience)?;
        // ORDER rwlock.meet: our word before the look at the readers. Pairs with: `read_free`.
        self.seat.page.full_fence();
        self.drain(world, patience, locked)
    }

    /// Waits until nobody reads. Nobody begins to: the word is ours.
    #[cold]
    fn drain<W: World>(
        &mut self,
        world: &mut W,
        patience: Patience,
        locked: Locked,
    ) -> Result<Locked, SyncError> {
        let deadline = patience.deadline();
        let last = Cell::new(self.reader().unwrap_or(0));
        let gone = |_| match self.reader() {
            Some(reader) => {
                last.set(reader);
                None
            }
            None => Some(Ok(())),
        };
        let glance =
            || self.seat.page.load_relaxed_u64(slot(last.get()) + SLOT_READER) != ReaderState::HELD.0;
        // A wake that is spent on us in here is for us alone: only readers that leave wake the owner of the word.
        match self.seat.wait(world, patience.mode, deadline, gone, glance).outcome {
            Ok(()) => {
                self.has = Has::Write;
                Ok(locked)
            }
            Err(error) => {
                self.step_down(world, locked)?;
                Err(error)
            }
        }
    }

    /// Gives the word back without having written.
    fn step_down<W: World>(&mut self, world: &mut W, locked: Locked) -> Result<(), SyncError> {
        let as_found = match locked {
            Locked::Clean => OwnerWord::FREE,
            Locked::OwnerDied => OwnerWord(OwnerWord::OWNER_DIED),
        };
        self.unlock_write(world, move |_| as_found)
    }

    #[cold]
    fn unlock_write<W: World>(
        &mut self,
        world: &mut W,
        last: impl Fn(OwnerWord) -> OwnerWord,
    ) -> Result<(), SyncError> {
        let word = owner::load(&self.seat)?;
        if word.owner().0 != self.seat.own {
            return Err(SyncError::NotOwner);
        }
        if last(word) == OwnerWord::FREE {
            for k in slots(self.seat.page.load_relaxed_u64(SEATED)) {
                let at = slot(k) + SLOT_READER;
                if self.seat.page.load_relaxed_u64(at) == ReaderState::WANTED.0 {
                    // If it has changed its mind meanwhile, good.
                    let _ =
                        self.seat.page.compare_exchange_u64(at, ReaderState::WANTED.0, ReaderState::HELD.0);
                }
            }
        }
        let word = owner::give_back(&self.seat, &last)?;
        if last(word) != OwnerWord::FREE {
            // Everybody finds an end, or an owner that died.
            self.seat.wake_all(SLOTS_MASK, world);
        } else if word.has(OwnerWord::WAITERS) {
            let asleep = SLEEPERS.sleepers(&self.seat.page);
            let reads = |k: &usize| self.seat.page.load_relaxed_u64(slot(*k) + SLOT_READER) != 0;
            let readers = slots(asleep).filter(reads).fold(0, |bits, k| bits | 1 << k);
            self.seat.wake_all(readers, world);
            self.seat.wake_one(SLOTS_MASK & !readers, world);
        }
        Ok(())
    }
}

/// What a word without owner tells a reader that may not read.
fn ended(word: OwnerWord) -> Option<SyncError> {
    if word.has(OwnerWord::NOT_RECOVERABLE) {
        Some(SyncError::NotRecoverable)
    } else if word.has(OwnerWord::DONE) {
        Some(Corrupt::Owner(word.0).into())
    } else if word.slot().is_none() && word.has(OwnerWord::OWNER_DIED) {
        Some(SyncError::OwnerDied)
    } else {
        None
    }
}
