//! A word that has one owner at a time. The mutex, the writer's side of the read-write lock and the run of a once use it.
//!
//! To take the word is one compare-exchange from 0, and to give it back is one to 0. A sleeper sets the flag WAITERS in the
//! owner's word, so that the owner's fast path of giving back fails and the owner wakes one sleeper:
//!
//! ```text
//! sleeper                                     owner
//!   S1  armed |= own bit                        O1  word := 0       (sees WAITERS)
//!   S2  full fence                              O2  full fence
//!   S3  word: free -> take it                   O3  armed: take one bit, ring
//!       else set WAITERS in it, sleep
//! ```
//!
//! Either the owner sees the bit or the sleeper sees the word free ([`ginnel_ring::wait`]). Users that arrive may take a free
//! word before the sleeper that was rung; the sleeper then sets WAITERS again. The flag vanishes when the word becomes free.
//! Therefore a user that has slept and takes the word sets the flag again if others still sleep. It may not see the bits of
//! users that arm just then; but those users have not looked at the word yet, and will set the flag themselves.

use crate::error::{Corrupt, SyncError};
use crate::seat::{Look, Seat, TRIES, Term, Waited, World};
use ginnel_layout::sync::{OwnerWord, SLOTS_MASK, STATE};
use ginnel_shmem::SharedMemory;

/// The state of the data that a lock protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the data may be half-written if the last owner died"]
pub enum Locked {
    /// The data are as the last owner left them.
    Clean,
    /// The data are as a dead owner left them, perhaps half-written. The caller must repair them and declare so
    /// (`make_consistent`); if it unlocks without that, the lock becomes [`SyncError::NotRecoverable`].
    OwnerDied,
}

pub(crate) fn load<M: SharedMemory>(seat: &Seat<M>) -> Result<OwnerWord, SyncError> {
    let word = OwnerWord(seat.page.load_acquire_u64(STATE));
    if word.is_valid() { Ok(word) } else { Err(Corrupt::Owner(word.0).into()) }
}

/// Returns whether the word may be free. This look guarantees nothing.
#[inline]
pub(crate) fn seems_free<M: SharedMemory>(seat: &Seat<M>) -> bool {
    seat.page.load_relaxed_u64(STATE) & 0xff == 0
}

/// Tries once to take the word. `None`: another user has it and, if the caller is armed, knows that a user waits.
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
        // `others_asleep` has a fence between the load of the word, which was free, and the look at the bits. Therefore a
        // sleeper that has seen the last owner's word has its bit seen here.
        let others = look.slept && seat.others_asleep() != 0;
        let waiters = if others { OwnerWord::WAITERS } else { 0 };
        if seat.page.compare_exchange_u64(STATE, word.0, seat.own | word.flags() | waiters).is_ok() {
            return Some(Ok(match word.has(OwnerWord::OWNER_DIED) {
                true => Locked::OwnerDied,
                false => Locked::Clean,
            }));
        }
    }
    // Other users took the word again and again. They are awake; but a caller that is about to sleep must not rely on them.
    look.armed.then_some(Err(Corrupt::Restless.into()))
}

/// Replaces an owner that does not exist any more by "its owner died", as the daemon does for the owners that it finds when
/// it takes their slots back.
pub(crate) fn disown<M: SharedMemory>(seat: &Seat<M>, word: OwnerWord) {
    // If this fails, the daemon or another user was faster.
    let _ = seat.page.compare_exchange_u64(STATE, word.0, OwnerWord::OWNER_DIED);
}

/// Asks the owner to wake a sleeper. Returns false if the word has changed meanwhile.
pub(crate) fn flag_waiters<M: SharedMemory>(seat: &Seat<M>, word: OwnerWord) -> bool {
    seat.page.compare_exchange_u64(STATE, word.0, word.0 | OwnerWord::WAITERS).is_ok()
}

/// Takes the word, and waits for it with `term`.
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

/// Passes on a wake that the caller got and does not use. Either the word is free, and another user may sleep for it; or it
/// is taken, and its owner (which may be the caller) must know about the other sleepers.
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

/// Gives the word back after the fast path has failed. `last` gets the present word and returns the new one. Returns the
/// old word.
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

/// Returns the word that an owner leaves: free, or not recoverable if the data are still inconsistent.
pub(crate) fn left_behind(word: OwnerWord) -> OwnerWord {
    match word.has(OwnerWord::OWNER_DIED) {
        true => OwnerWord(OwnerWord::NOT_RECOVERABLE),
        false => OwnerWord::FREE,
    }
}

/// Declares, as the owner, that the data are consistent.
pub(crate) fn make_consistent<M: SharedMemory>(seat: &Seat<M>) -> Result<(), SyncError> {
    if load(seat)?.owner().0 != seat.own {
        seat.check_memory()?;
        return Err(SyncError::NotOwner);
    }
    seat.page.fetch_and_u64(STATE, !OwnerWord::OWNER_DIED);
    Ok(())
}

/// Takes the word if no user has it.
#[cold]
pub(crate) fn try_acquire<M: SharedMemory>(seat: &Seat<M>) -> Result<Locked, SyncError> {
    seat.check()?;
    attempt(seat, Look { armed: false, slept: false }).unwrap_or(Err(SyncError::Busy))
}
