//! A synchronisation object: one page of a segment's arena. Mutex, read-write lock, condition variable, semaphore, barrier
//! and once use the same words at the same offsets, with different meanings.
//!
//! ```text
//! offset          writer   word
//! 0x000           daemon   kind      u32  SyncKind: a copy for readers; users know it from the daemon's answer
//! 0x004           daemon   limit     u32  semaphore: maximum permits; barrier: parties; else 0. Also a copy
//! 0x008           users*   state     u64  the object itself, see below
//! 0x010           users*   armed     u64  bit k: slot k sleeps and wants to be rung. A waker clears the bit, then rings
//! 0x018           users*   waiting   u64  condvar: bit k: slot k waits. Another user signals it by clearing the bit
//! 0x020           users    turn      u64  the slot that was woken last: a hint for fairness, for which any value is allowed
//! 0x028           daemon   seated    u64  bit k: slot k has a user. Users ignore other slots
//! 0x030                    reserved, zero
//!
//! 0x040 * (k + 1)          slot k of 63: one user, that is, one open handle
//!     + 0x00      daemon   endpoint  u32  number of the user's endpoint
//!     + 0x04      daemon   endpoint_epoch u32
//!     + 0x08      daemon   epoch     u32  epoch of the slot: 1 to 0xffff, new for each user; 0 while the slot is free
//!                                         (the other words then still tell who had it last)
//!     + 0x0c      daemon   bell      u32  the user's doorbell: member << 16 | vector. A hint that the ringer checks
//!     + 0x10      users*   reader    u64  rwlock: ReaderState
//!     + 0x18      user     since     u64  when the user began to wait, in ns of CLOCK_REALTIME; 0 while it does not wait
//!     + 0x20               reserved, zero
//! ```
//!
//! `*` Users change these words only with atomic read-modify-write operations. The daemon changes them too, when it reclaims
//! the slot of a dead user.
//!
//! All users and the daemon write the first cache line, and the daemon seldom does. A slot has a line of its own, in which the
//! daemon writes when the slot gets or loses its user, and other users write only `reader`.
//!
//! The meaning of `state`:
//!
//! | kind | state |
//! |---|---|
//! | mutex, once | an [`OwnerWord`] |
//! | rwlock | an [`OwnerWord`]: the writer. Readers are in the `reader` words of the slots |
//! | condvar | unused |
//! | semaphore | the number of permits that are left |
//! | barrier | bit k: slot k has arrived and waits; bit 63: [`BARRIER_BROKEN`] |
//!
//! The daemon allocates the page, zeroes it, and writes the kind, the limit and the first state of a semaphore before it
//! names the page in an answer. It writes a slot's identity before it answers the open request that the slot is for. It never
//! reads any of this back as truth.

use crate::{CACHE_LINE, PAGE};

/// Bytes of an object.
pub const SIZE: usize = PAGE;
/// Maximum number of users that an object has at a time.
pub const SLOTS: usize = SIZE / CACHE_LINE - 1;
/// Mask of the bits of all slots.
pub const SLOTS_MASK: u64 = (1 << SLOTS) - 1;

/// Offset of the [`SyncKind`].
pub const KIND: usize = 0x00;
/// Offset of the limit.
pub const LIMIT: usize = 0x04;
/// Offset of the state of the object.
pub const STATE: usize = 0x08;
/// Offset of the bits of the slots that sleep.
pub const ARMED: usize = 0x10;
/// Offset of the bits of the slots that wait on a condition variable.
pub const WAITING: usize = 0x18;
/// Offset of the slot that was woken last, a hint for fairness.
pub const TURN: usize = 0x20;
/// Offset of the bits of the slots that have a user.
pub const SEATED: usize = 0x28;

/// Returns the offset of a slot. Panics if the slot does not exist.
#[inline]
pub const fn slot(slot: usize) -> usize {
    assert!(slot < SLOTS);
    (slot + 1) * CACHE_LINE
}

/// Offset, in a slot, of the number of the endpoint that has it.
pub const SLOT_ENDPOINT: usize = 0x00;
/// Offset, in a slot, of that endpoint's epoch.
pub const SLOT_ENDPOINT_EPOCH: usize = 0x04;
/// Offset, in a slot, of the slot's epoch.
pub const SLOT_EPOCH: usize = 0x08;
/// Offset, in a slot, of the user's doorbell.
pub const SLOT_BELL: usize = 0x0c;
/// Offset, in a slot, of the [`ReaderState`].
pub const SLOT_READER: usize = 0x10;
/// Offset, in a slot, of the time at which its user began to wait.
pub const SLOT_SINCE: usize = 0x18;

const _: () = {
    assert!(SIZE == 4096 && SLOTS == 63 && SLOTS_MASK == u64::MAX >> 1);
    assert!(slot(0) == 0x40 && slot(SLOTS - 1) + CACHE_LINE == SIZE);
    // Each word begins where the previous one ends.
    assert!(KIND == 0 && LIMIT == KIND + 4 && STATE == LIMIT + 4 && ARMED == STATE + 8);
    assert!(WAITING == ARMED + 8 && TURN == WAITING + 8 && SEATED == TURN + 8);
    assert!(SLOT_ENDPOINT == 0 && SLOT_ENDPOINT_EPOCH == SLOT_ENDPOINT + 4);
    assert!(SLOT_EPOCH == SLOT_ENDPOINT_EPOCH + 4 && SLOT_BELL == SLOT_EPOCH + 4);
    assert!(SLOT_READER == SLOT_BELL + 4 && SLOT_SINCE == SLOT_READER + 8);
};
words!(CACHE_LINE;
    object { KIND: u32, LIMIT: u32, STATE: u64, ARMED: u64, WAITING: u64, TURN: u64, SEATED: u64 }
);
words!(CACHE_LINE;
    slot {
        SLOT_ENDPOINT: u32, SLOT_ENDPOINT_EPOCH: u32, SLOT_EPOCH: u32, SLOT_BELL: u32, SLOT_READER: u64,
        SLOT_SINCE: u64,
    }
);

/// Kind of a synchronisation object. Readers refuse unknown values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct SyncKind(pub u32);

impl SyncKind {
    /// Mutex: mutual exclusion. The death of an owner is reported.
    pub const MUTEX: Self = Self(1);
    /// Read-write lock: many readers or one writer. The death of a writer is reported.
    pub const RWLOCK: Self = Self(2);
    /// Condition variable: users wait for a condition that a mutex protects.
    pub const CONDVAR: Self = Self(3);
    /// Semaphore: a number of permits.
    pub const SEMAPHORE: Self = Self(4);
    /// Barrier: a number of parties wait for each other.
    pub const BARRIER: Self = Self(5);
    /// Once: something is done exactly once.
    pub const ONCE: Self = Self(6);

    /// Returns whether this release knows the kind.
    pub const fn is_known(self) -> bool {
        matches!(self.0, 1..=6)
    }

    /// Returns whether an object of this kind may have this limit: the permits of a semaphore, or the parties of a barrier
    /// (at most as many as there are slots). The limit of other kinds is 0.
    pub const fn allows(self, limit: u32) -> bool {
        match self {
            Self::SEMAPHORE => limit >= 1,
            Self::BARRIER => limit >= 1 && limit as usize <= SLOTS,
            _ => limit == 0,
        }
    }

    /// Returns the name of the kind for messages to people; `"?"` if it is unknown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MUTEX => "mutex",
            Self::RWLOCK => "rwlock",
            Self::CONDVAR => "condvar",
            Self::SEMAPHORE => "semaphore",
            Self::BARRIER => "barrier",
            Self::ONCE => "once",
            _ => "?",
        }
    }
}

/// The owner of a mutex, of the writer's side of a read-write lock, or of the run of a once, with flags.
///
/// ```text
/// 63            32 31       16 15    8 7      0
/// | endpoint      | slot epoch | flags | slot+1 |      all zero: free
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct OwnerWord(pub u64);

impl OwnerWord {
    /// No owner and no flags.
    pub const FREE: Self = Self(0);
    /// A user sleeps until the word is free. The user that frees it wakes one of the armed slots.
    pub const WAITERS: u64 = 1 << 8;
    /// An owner has died while it held the lock, and no later owner has declared the data consistent.
    pub const OWNER_DIED: u64 = 1 << 9;
    /// A lock with [`OwnerWord::OWNER_DIED`] was unlocked without being declared consistent. It can never be locked again.
    pub const NOT_RECOVERABLE: u64 = 1 << 10;
    /// Once: the run is complete.
    pub const DONE: u64 = 1 << 11;

    const FLAGS: u64 = Self::WAITERS | Self::OWNER_DIED | Self::NOT_RECOVERABLE | Self::DONE;

    /// Returns the word of this owner, without flags.
    pub const fn owned(slot: usize, slot_epoch: u16, endpoint: u32) -> Self {
        assert!(slot < SLOTS);
        Self((endpoint as u64) << 32 | (slot_epoch as u64) << 16 | (slot as u64 + 1))
    }

    /// Returns the owner's slot. `None` if there is no owner. Meaningful only if [`OwnerWord::is_valid`] returns true.
    pub const fn slot(self) -> Option<usize> {
        match (self.0 & 0xff) as usize {
            0 => None,
            slot => Some(slot - 1),
        }
    }

    /// Returns the epoch of the owner's slot.
    pub const fn slot_epoch(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Returns the number of the owner's endpoint.
    pub const fn endpoint(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns whether any of these flags is set.
    pub const fn has(self, flags: u64) -> bool {
        self.0 & flags & Self::FLAGS != 0
    }

    /// Returns the word without flags: free, or the owner.
    pub const fn owner(self) -> Self {
        Self(self.0 & !(0xff << 8))
    }

    /// Returns the flags alone.
    pub const fn flags(self) -> u64 {
        self.0 & 0xff << 8
    }

    /// Returns whether a correct user can have written this word: its slot exists, its flags are known, and its flags fit
    /// together.
    pub const fn is_valid(self) -> bool {
        let slot = self.0 & 0xff;
        let ended = self.0 & (Self::NOT_RECOVERABLE | Self::DONE);
        self.flags() & !Self::FLAGS == 0
            && slot <= SLOTS as u64
            && (slot != 0) == (self.slot_epoch() != 0)
            && (slot != 0 || self.endpoint() == 0)
            && (ended == 0 || self.0 == ended && ended.is_power_of_two())
    }
}

const _: () = {
    let word = OwnerWord::owned(62, 0xfffe, 0xdead_beef);
    let with = OwnerWord(word.0 | OwnerWord::WAITERS | OwnerWord::OWNER_DIED);
    assert!(word.is_valid() && with.is_valid() && with.owner().0 == word.0 && with.has(OwnerWord::WAITERS));
    assert!(matches!(with.slot(), Some(62)) && with.slot_epoch() == 0xfffe && with.endpoint() == 0xdead_beef);
    assert!(OwnerWord::FREE.is_valid() && OwnerWord(OwnerWord::OWNER_DIED).is_valid());
    assert!(!OwnerWord(64).is_valid() && !OwnerWord(1).is_valid() && !OwnerWord(1 << 32).is_valid());
    assert!(!OwnerWord(word.0 | OwnerWord::DONE).is_valid() && !OwnerWord(1 << 15).is_valid());
};

/// The part of a slot in a read-write lock. An unknown value is corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct ReaderState(pub u64);

impl ReaderState {
    /// The user of the slot does not hold the lock for reading.
    pub const NONE: Self = Self(0);
    /// The user reads, or is about to check whether it may. A writer waits for it.
    pub const HELD: Self = Self(1);
    /// The user waits for the writer to end. The writer changes the word to [`ReaderState::HELD`] when it ends.
    pub const WANTED: Self = Self(2);
}

/// Flag in a barrier's state: a party has died, and nobody has reset the barrier since.
pub const BARRIER_BROKEN: u64 = 1 << 63;

const _: () = assert!(BARRIER_BROKEN & SLOTS_MASK == 0);
