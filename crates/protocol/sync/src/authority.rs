//! The daemon's operations: to make objects, to give slots to users, to take back what a dead user had, and to inspect an
//! object.
//!
//! No function here blocks. The daemon does not trust anything that it finds in the page, beyond that page; it keeps its own
//! books about which user has which slot.

use crate::seat::{SLEEPERS, TRIES, User, slots};
use ginnel_layout::sync::{
    ARMED, BARRIER_BROKEN, KIND, LIMIT, OwnerWord, ReaderState, SEATED, SIZE, SLOT_BELL, SLOT_ENDPOINT,
    SLOT_ENDPOINT_EPOCH, SLOT_EPOCH, SLOT_READER, SLOT_SINCE, SLOTS, SLOTS_MASK, STATE, SyncKind, WAITING,
    slot,
};
use ginnel_shmem::SharedMemory;

/// Makes an object of a page that no user has yet. `limit` must be one that [`SyncKind::allows`] accepts. A semaphore begins
/// with `permits` permits.
pub fn format<M: SharedMemory>(page: &M, kind: SyncKind, limit: u32, permits: u32) {
    page.write(0, &[0; SIZE]);
    page.store_relaxed_u32(KIND, kind.0);
    page.store_relaxed_u32(LIMIT, limit);
    if kind == SyncKind::SEMAPHORE {
        page.store_relaxed_u64(STATE, permits.min(limit).into());
    }
    page.full_fence();
}

/// Gives a slot to a user, before the user is told about it. `bell` is the user's doorbell: `member << 16 | vector`.
pub fn seat<M: SharedMemory>(page: &M, user: User, endpoint_epoch: u32, bell: u32) {
    let at = slot(user.slot());
    page.store_relaxed_u32(at + SLOT_ENDPOINT, user.endpoint());
    page.store_relaxed_u32(at + SLOT_ENDPOINT_EPOCH, endpoint_epoch);
    page.store_relaxed_u32(at + SLOT_BELL, bell);
    page.swap_u64(at + SLOT_READER, 0);
    page.store_relaxed_u64(at + SLOT_SINCE, 0);
    // The last user of the slot may have set these bits after it was declared dead. They are not a wake or a signal for this
    // user.
    let bit = 1u64 << user.slot();
    page.fetch_and_u64(ARMED, !bit);
    page.fetch_and_u64(WAITING, !bit);
    // ORDER sync.seat: the slot is written before the user is told of it, and so before any word that names it.
    // Pairs with: `Seat::is_there`.
    page.store_release_u32(at + SLOT_EPOCH, user.epoch().into());
    page.fetch_or_u64(SEATED, bit);
}

/// Reason why a slot becomes free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The user has closed its handle.
    Closed,
    /// The user has died, or was declared dead.
    Died,
}

/// Takes back a slot and everything that its user had, at whichever instruction the user stopped. Returns the slots whose
/// users the daemon must ring, one bit for each: all users that sleep. May be repeated.
#[must_use = "the users of these slots sleep, perhaps for something that they can have now"]
pub fn reclaim<M: SharedMemory>(page: &M, kind: SyncKind, dead: usize, left: Left) -> u64 {
    let (at, bit) = (slot(dead), 1u64 << dead);
    // First, the user must not take anything more, in case that it was only declared dead. It may have checked its slot
    // before this, and take the lock all the same; then the next user that finds its word replaces it (`owner::disown`).
    page.store_release_u32(at + SLOT_EPOCH, 0);
    match kind {
        SyncKind::MUTEX | SyncKind::RWLOCK | SyncKind::ONCE => {
            disown(page, dead);
            page.swap_u64(at + SLOT_READER, ReaderState::NONE.0);
        }
        SyncKind::CONDVAR => {
            // If the dead user was signalled, the signal died with it and must go to another user. One signal too many does
            // no harm, so it does not matter whether the dead user waited at all.
            if page.fetch_and_u64(WAITING, !bit) & bit == 0
                && let Some(other) =
                    slots(page.load_relaxed_u64(WAITING) & page.load_relaxed_u64(SEATED)).next()
            {
                page.fetch_and_u64(WAITING, !(1 << other));
            }
        }
        SyncKind::BARRIER => {
            page.fetch_and_u64(STATE, !bit);
            if left == Left::Died {
                page.fetch_or_u64(STATE, BARRIER_BROKEN);
            }
        }
        _ => {}
    }
    page.fetch_and_u64(ARMED, !bit);
    page.fetch_and_u64(SEATED, !bit);
    page.store_relaxed_u64(at + SLOT_SINCE, 0);
    // The users that sleep, and those whose bit the dead user may have taken without ringing them.
    let asleep = SLEEPERS.sleepers(page);
    let waits = |k: &usize| page.load_relaxed_u64(slot(*k) + SLOT_SINCE) != 0;
    slots(page.load_relaxed_u64(SEATED)).filter(waits).fold(asleep & SLOTS_MASK, |bits, k| bits | 1 << k)
        & !bit
}

/// Replaces a dead owner by "its owner died".
fn disown<M: SharedMemory>(page: &M, dead: usize) {
    for _ in 0..TRIES {
        let word = OwnerWord(page.load_acquire_u64(STATE));
        if word.0 & 0xff != dead as u64 + 1 {
            return;
        }
        if page.compare_exchange_u64(STATE, word.0, OwnerWord::OWNER_DIED).is_ok() {
            return;
        }
    }
    // Another member keeps changing the word. Whatever the word is now, it does not name the dead user any more.
    page.swap_u64(STATE, OwnerWord::OWNER_DIED);
}

/// The present state of an object, for messages to people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Slot of the owner, or of the writer.
    pub owner: Option<usize>,
    /// An owner has died while it held the lock; for a barrier, a party has died.
    pub owner_died: bool,
    /// The lock can never be locked again.
    pub not_recoverable: bool,
    /// Once: the run is complete.
    pub done: bool,
    /// Slots that hold the lock for reading.
    pub readers: Vec<usize>,
    /// Slots that wait, with the time at which they began: nanoseconds of `CLOCK_REALTIME`, or 0 for those that spin.
    pub waiters: Vec<(usize, u64)>,
    /// Semaphore: number of permits that are left.
    pub permits: u64,
}

/// Returns the present state of an object. Values that users have written are not checked.
pub fn look<M: SharedMemory>(page: &M, kind: SyncKind) -> View {
    let state = page.load_acquire_u64(STATE);
    let mut view = View::default();
    let mut waiting = page.load_relaxed_u64(ARMED);
    match kind {
        SyncKind::MUTEX | SyncKind::RWLOCK | SyncKind::ONCE => {
            let word = OwnerWord(state);
            view.owner = word.slot().filter(|_| word.is_valid());
            view.owner_died = word.has(OwnerWord::OWNER_DIED);
            view.not_recoverable = word.has(OwnerWord::NOT_RECOVERABLE);
            view.done = word.has(OwnerWord::DONE);
            let reads = |k: usize| ReaderState(page.load_relaxed_u64(slot(k) + SLOT_READER));
            view.readers = (0..SLOTS).filter(|&k| reads(k) == ReaderState::HELD).collect();
            waiting |=
                (0..SLOTS).filter(|&k| reads(k) == ReaderState::WANTED).fold(0, |bits, k| bits | 1 << k);
        }
        SyncKind::CONDVAR => waiting |= page.load_relaxed_u64(WAITING),
        SyncKind::SEMAPHORE => view.permits = state,
        SyncKind::BARRIER => {
            view.owner_died = state & BARRIER_BROKEN != 0;
            waiting |= state;
        }
        _ => {}
    }
    let since = |k: usize| page.load_relaxed_u64(slot(k) + SLOT_SINCE);
    view.waiters =
        (0..SLOTS).filter(|&k| waiting & 1 << k != 0 || since(k) != 0).map(|k| (k, since(k))).collect();
    view
}
