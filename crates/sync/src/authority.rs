//! What the daemon does: make objects, seat users, take back what the dead had, and look.
//!
//! Nothing here blocks, and nothing that is found in the page is believed beyond that page. The daemon keeps its own books
//! of who has which slot.

use crate::seat::{SLEEPERS, TRIES, User, slots};
use ginnel_layout::sync::{
    ARMED, BARRIER_BROKEN, KIND, LIMIT, OwnerWord, ReaderState, SEATED, SIZE, SLOT_BELL, SLOT_ENDPOINT,
    SLOT_ENDPOINT_EPOCH, SLOT_EPOCH, SLOT_READER, SLOT_SINCE, SLOTS, SLOTS_MASK, STATE, SyncKind, WAITING,
    slot,
};
use ginnel_shmem::SharedMemory;

/// Makes an object of a page that nobody uses yet. `limit` as [`SyncKind::allows`]; a semaphore begins with `permits`.
pub fn format<M: SharedMemory>(page: &M, kind: SyncKind, limit: u32, permits: u32) {
    page.write(0, &[0; SIZE]);
    page.store_relaxed_u32(KIND, kind.0);
    page.store_relaxed_u32(LIMIT, limit);
    if kind == SyncKind::SEMAPHORE {
        page.store_relaxed_u64(STATE, permits.min(limit).into());
    }
    page.full_fence();
}

/// Seats a user, before it is told of its slot. `bell` is how to ring it: `member << 16 | vector`.
pub fn seat<M: SharedMemory>(page: &M, user: User, endpoint_epoch: u32, bell: u32) {
    let at = slot(user.slot());
    page.store_relaxed_u32(at + SLOT_ENDPOINT, user.endpoint());
    page.store_relaxed_u32(at + SLOT_ENDPOINT_EPOCH, endpoint_epoch);
    page.store_relaxed_u32(at + SLOT_BELL, bell);
    page.swap_u64(at + SLOT_READER, 0);
    page.store_relaxed_u64(at + SLOT_SINCE, 0);
    // What the slot's last user has set after it was declared dead is no signal and no wake of this one.
    let bit = 1u64 << user.slot();
    page.fetch_and_u64(ARMED, !bit);
    page.fetch_and_u64(WAITING, !bit);
    // ORDER sync.seat: the slot is written before the user is told, and so before any word that names it.
    // Pairs with: `Seat::is_there`.
    page.store_release_u32(at + SLOT_EPOCH, user.epoch().into());
    page.fetch_or_u64(SEATED, bit);
}

/// Why a slot becomes free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Its user has closed its handle.
    Closed,
    /// Its user has died, or was declared dead.
    Died,
}

/// Takes back a slot and all that its user had, at whichever instruction it stopped. Returns the slots whose users are to be
/// rung, a bit for each: all who sleep. May be repeated.
#[must_use = "the users of these slots sleep, perhaps for something that is theirs now"]
pub fn reclaim<M: SharedMemory>(page: &M, kind: SyncKind, dead: usize, left: Left) -> u64 {
    let (at, bit) = (slot(dead), 1u64 << dead);
    // First of all it must not take any more, should it only have been declared dead. What it takes all the same, because it
    // has looked before, is handed on by whoever finds it (`owner::disown`).
    page.store_release_u32(at + SLOT_EPOCH, 0);
    match kind {
        SyncKind::MUTEX | SyncKind::RWLOCK | SyncKind::ONCE => {
            disown(page, dead);
            page.swap_u64(at + SLOT_READER, ReaderState::NONE.0);
        }
        SyncKind::CONDVAR => {
            // If it was signalled, the signal died with it and is for somebody else. One too many does no harm, so there is no
            // need to know whether it waited at all.
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
    // Those who sleep, and those whose bit the dead may have taken without ringing them.
    let asleep = SLEEPERS.sleepers(page);
    let waits = |k: &usize| page.load_relaxed_u64(slot(*k) + SLOT_SINCE) != 0;
    slots(page.load_relaxed_u64(SEATED)).filter(waits).fold(asleep & SLOTS_MASK, |bits, k| bits | 1 << k)
        & !bit
}

/// Puts "its owner died" in the place of a dead owner.
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
    // A neighbour keeps scribbling. Whatever stands there, it is not the dead's any more.
    page.swap_u64(STATE, OwnerWord::OWNER_DIED);
}

/// What an object looks like just now, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The slot of the owner, or of the writer.
    pub owner: Option<usize>,
    /// An owner has died in it, or (barrier) a party has.
    pub owner_died: bool,
    /// It is of no more use.
    pub not_recoverable: bool,
    /// Once: it has been done.
    pub done: bool,
    /// The slots that read.
    pub readers: Vec<usize>,
    /// The slots that wait, and since when: nanoseconds of `CLOCK_REALTIME`, 0 for those who spin.
    pub waiters: Vec<(usize, u64)>,
    /// Semaphore: permits that are left.
    pub permits: u64,
}

/// Looks. What users have written is taken as it is.
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
