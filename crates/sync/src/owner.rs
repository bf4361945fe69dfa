//! A word that has one owner at a time: the mutex, the writer's side of the rwlock, the run of a once.
//!
//! Taking it is one compare-exchange from 0, giving it back one to 0. A sleeper leaves the flag WAITERS in the owner's
//! word, so that giving back fails the quick way and wakes one sleeper:
//!
//! ```text
//! sleeper                                     owner
//!   S1  armed |= own bit                        O1  word := 0       (sees WAITERS)
//!   S2  full fence                              O2  full fence
//!   S3  word: free -> take it                   O3  armed: take one bit, ring
//!       else set WAITERS in it, sleep
//! ```
//!
//! Either the owner sees the bit or the sleeper sees the word free ([`ginnel_ring::wait`]). Newcomers may take a free word
//! before the one who was rung; that one then sets WAITERS again. The flag goes with the word when it becomes free, so
//! whoever has slept and takes it sets the flag anew if others still sleep: those whose arming it does not see have yet
//! to look at the word, and set it themselves.

use crate::error::{Corrupt, SyncError};
use crate::seat::{Look, Seat, TRIES, Term, Waited, World};
use ginnel_layout::sync::{OwnerWord, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// What the lock's data are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the data may be half-written if the last owner died"]
pub enum Locked {
    /// As the last owner left them.
    Clean,
    /// As a dead owner left them: half-written, perhaps. Repair them and say so (`make_consistent`); unlocking without
    /// makes the lock [`SyncError::NotRecoverable`].
    OwnerDied,
}

pub(crate) fn load<M: SharedMemory>(seat: &Seat<M>) -> Result<OwnerWord, SyncError> {
    let word = OwnerWord(seat.page.load_acquire_u64(STATE));
    if word.is_valid() { Ok(word) } else { Err(Corrupt::Owner(word.0).into()) }
}

/// Whether the word might be free: a look without any promise.
#[inline]
pub(crate) fn seems_free<M: SharedMemory>(seat: &Seat<M>) -> bool {
    seat.page.load_relaxed_u64(STATE) & 0xff == 0
}

/// One try to take the word. `None`: somebody else has it, and if we are armed, knows that we wait.
pub(crate) fn attempt<M: SharedMemory>(seat: &Seat<M>, look: Look) -> Option<Result<Locked, SyncError>> {
    for _ in 0..TRIES {
        let word = match load(seat) {
            Ok(word) => word,
            Err(error) => return Some(Err(error)),
        };
        if word.has(OwnerWord::NOT_RECOVERABLE) {
            return Some(Err(SyncError::NotRecoverable));
        }
        if word.has(OwnerWord::DONE) {
            return Some(Err(Corrupt::Owner(word.0).into()));
        }
        if word.slot().is_some() {
            if word.owner().0 == seat.own {
                return Some(Err(SyncError::Deadlock));
            }
            if !seat.is_there(word) {
                disown(seat, word);
                continue;
            }
            if !look.armed || word.has(OwnerWord::WAITERS) || flag_waiters(seat, word) {
                return None;
            }
            continue;
        }
        // The fence in `others_asleep` stands between having seen the word free and the look at the bits: a sleeper that has
        // seen the last owner's word has its bit seen here.
        let others = look.slept && seat.others_asleep() != 0;
        let waiters = if others { OwnerWord::WAITERS } else { 0 };
        if seat.page.compare_exchange_u64(STATE, word.0, seat.own | word.flags() | waiters).is_ok() {
            return Some(Ok(match word.has(OwnerWord::OWNER_DIED) {
                true => Locked::OwnerDied,
                false => Locked::Clean,
            }));
        }
    }
    // Taken from under us again and again. Those who did are awake; but a sleeper must not rest on that.
    look.armed.then_some(Err(Corrupt::Restless.into()))
}

/// Puts "its owner died" in the place of an owner that is not there, as the daemon does for the owners that it finds when it
/// takes their slots back.
pub(crate) fn disown<M: SharedMemory>(seat: &Seat<M>, word: OwnerWord) {
    // If this fails, the daemon or somebody else was faster.
    let _ = seat.page.compare_exchange_u64(STATE, word.0, OwnerWord::OWNER_DIED);
}

/// Asks the owner to wake us. False if the word has changed meanwhile.
pub(crate) fn flag_waiters<M: SharedMemory>(seat: &Seat<M>, word: OwnerWord) -> bool {
    seat.page.compare_exchange_u64(STATE, word.0, word.0 | OwnerWord::WAITERS).is_ok()
}

/// Takes the word, waiting as `term` says.
pub(crate) fn acquire<M: SharedMemory, W: World>(
    seat: &Seat<M>,
    world: &mut W,
    term: Term,
) -> Result<Locked, SyncError> {
    let not_now = Look { armed: false, slept: false };
    seat.check()?;
    if let Some(outcome) = attempt(seat, not_now) {
        return outcome;
    }
    let Waited { outcome, rung } = seat.wait(world, term, |look| attempt(seat, look), || seems_free(seat));
    if outcome.is_err() && rung {
        hand_on(seat, world);
    }
    outcome
}

/// A wake was spent on us that we do not use: the word is free, and somebody else may sleep for it; or it is taken, and
/// its owner (which may be us) must know of the others.
#[cold]
pub(crate) fn hand_on<M: SharedMemory, W: World>(seat: &Seat<M>, world: &mut W) {
    for _ in 0..TRIES {
        if seat.others_asleep() == 0 {
            return;
        }
        let Ok(word) = load(seat) else { break };
        if !seat.is_there(word) {
            return seat.wake_one(SLOTS_MASK, world);
        }
        if word.has(OwnerWord::WAITERS) || flag_waiters(seat, word) {
            return;
        }
    }
    seat.wake_all(SLOTS_MASK, world);
}

/// Gives the word back where the quick way has failed: as what `last` says, given the word as it was. Returns that word.
pub(crate) fn give_back<M: SharedMemory>(
    seat: &Seat<M>,
    last: impl Fn(OwnerWord) -> OwnerWord,
) -> Result<OwnerWord, SyncError> {
    for _ in 0..TRIES {
        let word = load(seat)?;
        if word.owner().0 != seat.own {
            seat.check_memory()?;
            return Err(SyncError::NotOwner);
        }
        if seat.page.compare_exchange_u64(STATE, word.0, last(word).0).is_ok() {
            return Ok(word);
        }
    }
    Err(Corrupt::Restless.into())
}

/// What an owner leaves: free, or of no more use if the data are still inconsistent.
pub(crate) fn left_behind(word: OwnerWord) -> OwnerWord {
    match word.has(OwnerWord::OWNER_DIED) {
        true => OwnerWord(OwnerWord::NOT_RECOVERABLE),
        false => OwnerWord::FREE,
    }
}

/// The owner calls the data consistent.
pub(crate) fn make_consistent<M: SharedMemory>(seat: &Seat<M>) -> Result<(), SyncError> {
    if load(seat)?.owner().0 != seat.own {
        seat.check_memory()?;
        return Err(SyncError::NotOwner);
    }
    seat.page.fetch_and_u64(STATE, !OwnerWord::OWNER_DIED);
    Ok(())
}

/// Takes the word if nobody has it.
#[cold]
pub(crate) fn try_acquire<M: SharedMemory>(seat: &Seat<M>) -> Result<Locked, SyncError> {
    seat.check()?;
    attempt(seat, Look { armed: false, slept: false }).unwrap_or(Err(SyncError::Busy))
}
