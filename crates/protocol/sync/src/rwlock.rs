//! Read-write locks: many readers or one writer.
//!
//! A reader stores HELD in its own slot and then looks whether there is a writer. A writer takes the owner word and then
//! waits until no slot contains HELD. Each has a full fence between its store and its look, so at least one of the two sees
//! the other: either the reader sees the writer and steps back, or the writer sees the reader and waits. Readers write no
//! word in common; they only read the writer's word.
//!
//! Neither readers nor writers starve. A reader that has to wait stores WANTED, and a writer that ends changes that to HELD
//! before it frees the word. Thus each waiting reader gets in after one writer. A reader that arrives while a writer has the
//! word waits. Thus a writer waits only for the readers that were there before it.
//!
//! All sleepers arm in the same word, whatever they sleep for: writers for the owner word, readers for the writer's end, and
//! the writer that has the owner word for the end of the readers. Between a waker's look at the sleepers and its taking of a
//! bit, the user of a slot may have begun to sleep for something else. Therefore a sleeper that is rung and does not need the
//! wake passes it on:
//!
//! - A writer that has the word sets WAITERS in it if others sleep, and so wakes one of them when it ends.
//! - A reader that has let itself in wakes another sleeper, or sets WAITERS in the word of a writer that has come since.
//! - A reader that a writer has let in has nothing to do: the writer that lets readers in also wakes a writer, which it
//!   selects from those that slept when the word became free.

use crate::error::{Corrupt, SyncError};
use crate::owner::{self, Locked};
use crate::seat::{Patience, SLEEPERS, Seat, TRIES, Term, User, World, slots};
use ginnel_layout::sync::{OwnerWord, ReaderState, SEATED, SLOT_READER, SLOTS_MASK, STATE, slot};
use ginnel_shmem::SharedMemory;
use std::cell::Cell;

/// A handle on a read-write lock. Only one thread at a time may use it; other threads open their own handles.
///
/// The death of a reader does not affect other users. The death of a writer is [`Locked::OwnerDied`] for the next writer, and
/// [`SyncError::OwnerDied`] for readers until a writer has declared the data consistent.
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

/// Result of a reader's attempt.
enum Entry {
    /// A writer that has ended has let this reader in.
    LetIn,
    /// No user had the lock.
    Free,
    /// A writer came first. It may have seen this reader's HELD for a moment, and must be told that the reader is gone.
    TooLate,
}

impl<M: SharedMemory> RwLock<M> {
    /// Returns a handle on the lock in `page`, for a user to which the daemon has given a slot. Panics if `page` is too
    /// short.
    pub fn new(page: M, user: User) -> Self {
        Self { seat: Seat::new(page, user), has: Has::Nothing }
    }

    /// Locks for reading, and waits until that is possible.
    #[inline]
    pub fn read<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        if self.has == Has::Nothing && self.seat.is_ours() && self.read_free() {
            self.has = Has::Read;
            return Ok(());
        }
        self.read_slowly(world, patience)
    }

    /// Locks for reading if no writer has the lock or waits for it; else fails with [`SyncError::Busy`].
    pub fn try_read<W: World>(&mut self, world: &mut W) -> Result<(), SyncError> {
        self.idle()?;
        if self.read_free() {
            self.has = Has::Read;
            return Ok(());
        }
        self.store_own(ReaderState::NONE);
        self.tell_writer(world);
        let word = owner::load(&self.seat)?;
        if word.slot().is_some() && !self.seat.is_there(word) {
            return Err(SyncError::OwnerDied);
        }
        Err(ended(word).unwrap_or(SyncError::Busy))
    }

    /// Locks for writing. Waits for the users that read, while no others can begin to read.
    #[inline]
    pub fn write<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Locked, SyncError> {
        if self.has == Has::Nothing && self.seat.take_free() {
            self.seat.page.full_fence();
            if self.reader().is_none() {
                self.has = Has::Write;
                return Ok(Locked::Clean);
            }
            return self.drain(world, patience.begin(), Locked::Clean);
        }
        self.write_slowly(world, patience)
    }

    /// Locks for writing if no user has the lock; else fails with [`SyncError::Busy`].
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

    /// Unlocks, from reading or writing, and wakes the users that can go on. Never blocks.
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

    /// Declares the data consistent again, after [`Locked::OwnerDied`] and while the lock is held for writing.
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

    /// Changes the caller's own word. The error is the word that was there instead of `from`.
    fn change_own(&self, from: ReaderState, to: ReaderState) -> Result<(), ReaderState> {
        self.seat.page.compare_exchange_u64(self.own(), from.0, to.0).map_err(ReaderState)
    }

    /// Stores HELD, and returns whether no writer has the lock.
    #[inline]
    fn read_free(&self) -> bool {
        self.store_own(ReaderState::HELD);
        // ORDER rwlock.meet: this reader's HELD is stored before its look at the writer. Pairs with: `write`, `drain`.
        self.seat.page.full_fence();
        self.seat.page.load_acquire_u64(STATE) == OwnerWord::FREE.0
    }

    #[cold]
    fn read_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<(), SyncError> {
        self.idle()?;
        let term = patience.begin();
        let mut rung = false;
        // Not HELD any more, so a writer that waits for this reader can go on.
        self.store_own(ReaderState::WANTED);
        let outcome = loop {
            self.tell_writer(world);
            let waited = self.seat.wait(
                world,
                term,
                |_| self.attempt_read(),
                || owner::seems_free(&self.seat) || self.own_state() == ReaderState::HELD,
            );
            rung |= waited.rung;
            match waited.outcome {
                Ok(Entry::LetIn) => break Ok(true),
                Ok(Entry::Free) => break Ok(false),
                Ok(Entry::TooLate) if !term.is_over() => {}
                Ok(Entry::TooLate) => break Err(SyncError::TimedOut),
                Err(error) => break Err(error),
            }
        };
        let outcome = match outcome {
            // A writer has let this reader in at the last moment.
            Err(SyncError::TimedOut)
                if self.change_own(ReaderState::WANTED, ReaderState::NONE) == Err(ReaderState::HELD) =>
            {
                Ok(true)
            }
            // The slot has another user by now.
            Err(error @ (SyncError::Stale | SyncError::Gone)) => return Err(error),
            Err(error) => {
                self.store_own(ReaderState::NONE);
                self.tell_writer(world);
                Err(error)
            }
            Ok(let_in) => Ok(let_in),
        };
        if rung && !matches!(outcome, Ok(true)) {
            owner::hand_on(&self.seat, world);
        }
        outcome.map(|_| self.has = Has::Read)
    }

    fn own_state(&self) -> ReaderState {
        ReaderState(self.seat.page.load_acquire_u64(self.own()))
    }

    /// Makes one attempt of a reader whose word is WANTED. Returns `None` if the word is still WANTED and the writer knows that a
    /// user waits.
    fn attempt_read(&self) -> Option<Result<Entry, SyncError>> {
        for _ in 0..TRIES {
            match self.own_state() {
                ReaderState::HELD => return Some(Ok(Entry::LetIn)),
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
                if !self.seat.is_there(word) {
                    owner::disown(&self.seat, word);
                    continue;
                }
                // The flag is also set if this reader only spins, so that the writer lets it in when it ends.
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
                return Some(Ok(Entry::Free));
            }
            self.store_own(ReaderState::WANTED);
            return Some(Ok(Entry::TooLate));
        }
        Some(Err(Corrupt::Restless.into()))
    }

    /// Wakes a writer that sleeps until the readers are gone, if this was the last one. Called by a reader that does not read
    /// any more, or had stored HELD for a moment.
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
            self.seat.check_memory()?;
            return Err(SyncError::NotOwner);
        }
        // ORDER rwlock.leave: this reader's leaving is stored before its look for a writer. Pairs with: `drain` (which arms
        // first).
        self.seat.page.full_fence();
        if self.seat.page.load_relaxed_u64(STATE) != OwnerWord::FREE.0 {
            self.tell_writer(world);
        }
        Ok(())
    }

    /// Returns a slot that reads, if there is one.
    #[inline]
    fn reader(&self) -> Option<usize> {
        let held = |k: &usize| self.seat.page.load_acquire_u64(slot(*k) + SLOT_READER) == ReaderState::HELD.0;
        slots(self.seat.page.load_relaxed_u64(SEATED)).find(held)
    }

    #[cold]
    fn write_slowly<W: World>(&mut self, world: &mut W, patience: Patience) -> Result<Locked, SyncError> {
        self.idle()?;
        let term = patience.begin();
        let locked = owner::acquire(&self.seat, world, term)?;
        // ORDER rwlock.meet: this writer's word is stored before its look at the readers. Pairs with: `read_free`.
        self.seat.page.full_fence();
        self.drain(world, term, locked)
    }

    /// Waits until no user reads. No user can begin to, since this writer has the word.
    #[cold]
    fn drain<W: World>(&mut self, world: &mut W, term: Term, locked: Locked) -> Result<Locked, SyncError> {
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
        let waited = self.seat.wait(world, term, gone, glance);
        // The wake may have come from a reader that has left, or from the last owner of the word, which then chose this slot
        // instead of one that sleeps for the word.
        if waited.rung {
            owner::hand_on(&self.seat, world);
        }
        match waited.outcome {
            Ok(()) => {
                self.has = Has::Write;
                Ok(locked)
            }
            Err(error) => {
                // If this writer does not have the word any more, it has nothing to give back.
                let _ = self.step_down(world, locked);
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
            self.seat.check_memory()?;
            return Err(SyncError::NotOwner);
        }
        let mut let_in = false;
        if last(word) == OwnerWord::FREE {
            for k in slots(self.seat.page.load_relaxed_u64(SEATED)) {
                let at = slot(k) + SLOT_READER;
                if self.seat.page.load_relaxed_u64(at) == ReaderState::WANTED.0 {
                    // The reader may have given up meanwhile.
                    let_in |= self
                        .seat
                        .page
                        .compare_exchange_u64(at, ReaderState::WANTED.0, ReaderState::HELD.0)
                        .is_ok();
                }
            }
        }
        let word = owner::give_back(&self.seat, &last)?;
        if last(word) != OwnerWord::FREE {
            // All users find that the lock has ended, or that an owner died.
            self.seat.wake_all(SLOTS_MASK, world);
        } else if word.has(OwnerWord::WAITERS) || let_in {
            let asleep = self.seat.others_asleep();
            let reads = |k: &usize| self.seat.page.load_relaxed_u64(slot(*k) + SLOT_READER) != 0;
            let readers = slots(asleep).filter(reads).fold(0, |bits, k| bits | 1 << k);
            self.seat.wake_all(readers, world);
            self.seat.wake_one(asleep & !readers, world);
        }
        Ok(())
    }
}

/// Returns the error for a reader that may not read because of the flags of a word.
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
