//! A user of an object: its slot, how it waits, and how it wakes others.

use crate::error::SyncError;
use ginnel_layout::sync::{
    ARMED, OwnerWord, SEATED, SIZE, SLOT_ENDPOINT, SLOT_EPOCH, SLOT_SINCE, SLOTS, SLOTS_MASK, STATE, TURN,
    slot,
};
use ginnel_ring::wait::{self, ArmedSet, Sleeper, WaitMode, Waitable};
use ginnel_shmem::SharedMemory;
use std::io;
use std::time::{Duration, Instant, SystemTime};

/// Interval at which a sleeper looks although it has not been rung.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Maximum number of attempts to change a word that other users keep changing, before that is [`crate::Corrupt::Restless`] or
/// "not now". Correct users change a word once each.
pub(crate) const TRIES: usize = 1000;

/// What the locks need from their environment: a way to sleep, and a way to wake others.
pub trait World: Sleeper {
    /// Rings the user of a slot. Never blocks. A user that cannot be rung finds out by itself, within [`LOOK_EVERY`].
    fn ring(&mut self, slot: usize);
}

/// How to wait, and how long.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    /// Whether to spin, to sleep, or to do one after the other.
    pub mode: WaitMode,
    /// Maximum time to wait. `None`: without a limit.
    pub timeout: Option<Duration>,
}

impl Patience {
    /// Begins a call. Its deadline stays the same however often the call has to wait.
    pub(crate) fn begin(&self) -> Term {
        // A timeout that the clock cannot represent is unlimited.
        let deadline = self.timeout.and_then(|t| Instant::now().checked_add(t));
        Term { mode: self.mode, deadline }
    }
}

/// How one call waits, and its deadline.
#[derive(Clone, Copy)]
pub(crate) struct Term {
    mode: WaitMode,
    deadline: Option<Instant>,
}

impl Term {
    /// Returns whether the deadline has passed.
    pub fn is_over(&self) -> bool {
        self.deadline.is_some_and(|d| Instant::now() >= d)
    }
}

/// Identity of a handle, as the daemon has given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    slot: u8,
    epoch: u16,
    endpoint: u32,
}

impl User {
    /// Returns the user with these numbers. `None` if the slot or epoch is impossible.
    pub fn new(slot: usize, epoch: u16, endpoint: u32) -> Option<Self> {
        (slot < SLOTS && epoch != 0).then_some(Self { slot: slot as u8, epoch, endpoint })
    }

    /// Returns the slot.
    pub fn slot(&self) -> usize {
        self.slot.into()
    }

    /// Returns the epoch of the slot.
    pub fn epoch(&self) -> u16 {
        self.epoch
    }

    /// Returns the number of the user's endpoint.
    pub fn endpoint(&self) -> u32 {
        self.endpoint
    }

    pub(crate) fn word(&self) -> u64 {
        OwnerWord::owned(self.slot(), self.epoch, self.endpoint).0
    }
}

/// The bits of the users that sleep.
pub(crate) const SLEEPERS: ArmedSet = ArmedSet::new(ARMED);

/// The page of an object, and one user's slot in it.
#[derive(Clone)]
pub(crate) struct Seat<M> {
    pub page: M,
    pub slot: usize,
    pub bit: u64,
    /// The owner word of this user.
    pub own: u64,
    epoch: u32,
}

impl<M: SharedMemory> Seat<M> {
    /// Panics if the memory is shorter than a page.
    pub fn new(page: M, user: User) -> Self {
        assert!(page.len() >= SIZE, "a synchronisation object has {SIZE} bytes");
        let slot = user.slot();
        Self { page, slot, bit: 1 << slot, own: user.word(), epoch: user.epoch.into() }
    }

    /// Returns whether the daemon still says that this user has the slot. The epoch reads as zero once the memory is gone, so
    /// this notices that, too.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.page.attend();
        self.page.load_relaxed_u32(slot(self.slot) + SLOT_EPOCH) == self.epoch
    }

    /// Returns the error of a user whose slot was taken back, or whose memory is gone.
    #[cold]
    pub fn check(&self) -> Result<(), SyncError> {
        if self.is_ours() {
            return Ok(());
        }
        Err(if self.page.is_broken() { SyncError::Gone } else { SyncError::Stale })
    }

    /// Returns whether the memory is still there. For operations that would seem to succeed on memory that reads as zeros.
    #[inline]
    pub fn check_memory(&self) -> Result<(), SyncError> {
        if self.page.is_broken() { Err(SyncError::Gone) } else { Ok(()) }
    }

    /// Takes a free word, which is the whole of an uncontended lock.
    #[inline]
    pub fn take_free(&self) -> bool {
        self.is_ours() && self.page.compare_exchange_u64(STATE, 0, self.own).is_ok()
    }

    /// Returns whether, according to the daemon, the owner that a valid word names still has its slot. An owner that was
    /// declared dead between its last look at its slot and its compare-exchange has written its word after the daemon took
    /// the slot back, and the daemon does not look at the word again. (A member that can forge a slot can also forge the
    /// word.)
    #[cold]
    pub fn is_there(&self, word: OwnerWord) -> bool {
        let Some(owner) = word.slot() else { return false };
        // ORDER sync.seat: the slot is loaded after the word, which its owner wrote after it was told that it has the slot.
        // Pairs with: `authority::seat`, through the daemon's answer.
        self.page.load_relaxed_u32(slot(owner) + SLOT_EPOCH) == u32::from(word.slot_epoch())
            && self.page.load_relaxed_u32(slot(owner) + SLOT_ENDPOINT) == word.endpoint()
    }

    /// Returns the bits of the other users that sleep. The caller must have published something. Bits of slots without a user
    /// do not count: a user that was declared dead may set its bit after its slot was taken back.
    pub fn others_asleep(&self) -> u64 {
        SLEEPERS.sleepers(&self.page) & self.page.load_relaxed_u64(SEATED) & SLOTS_MASK & !self.bit
    }

    /// Takes the bit of one sleeper in `among` and rings it, if there is one: the one after the slot that was woken last. The
    /// caller must have published something.
    pub fn wake_one<W: World + ?Sized>(&self, among: u64, world: &mut W) {
        for _ in 0..TRIES {
            let asleep = self.others_asleep() & among;
            let Some(next) = next_turn(&self.page, asleep) else { return };
            if SLEEPERS.take(&self.page, 1 << next) != 0 {
                world.ring(next);
                return;
            }
        }
    }

    /// Takes the bits of all sleepers in `among` and rings them. The caller must have published something.
    pub fn wake_all<W: World + ?Sized>(&self, among: u64, world: &mut W) {
        let asleep = self.others_asleep() & among;
        if asleep != 0 {
            let taken = SLEEPERS.take(&self.page, asleep);
            slots(taken).for_each(|slot| world.ring(slot));
        }
    }

    /// Waits until `attempt` returns an outcome or the time is up.
    pub fn wait<T, W: World>(
        &self,
        world: &mut W,
        term: Term,
        attempt: impl FnMut(Look) -> Option<Result<T, SyncError>>,
        glance: impl Fn() -> bool,
    ) -> Waited<T> {
        let mut wait = Wait {
            seat: self,
            attempt,
            glance,
            outcome: None,
            look: Look { armed: false, slept: false },
            rung: false,
        };
        let outcome = loop {
            let waited = wait::wait(&mut wait, term.mode, &mut Patrol(world), term.deadline);
            if let Some(outcome) = wait.outcome.take() {
                break outcome;
            }
            match waited {
                // A glance has seen a change, which may be gone again when `ready` looks.
                Ok(true) if !wait.ready() && !term.is_over() => {}
                Ok(true) => break wait.outcome.take().unwrap_or(Err(SyncError::TimedOut)),
                Ok(false) => break Err(SyncError::TimedOut),
                Err(error) => break Err(SyncError::Sleep(error)),
            }
        };
        if wait.look.slept && self.is_ours() {
            self.page.store_relaxed_u64(slot(self.slot) + SLOT_SINCE, 0);
        }
        Waited { outcome, rung: wait.rung }
    }
}

/// Result of a wait.
pub(crate) struct Waited<T> {
    pub outcome: Result<T, SyncError>,
    /// A waker has spent its wake on this user. If this user did not need it, it must pass it on.
    pub rung: bool,
}

/// Information for an attempt.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    /// The user sleeps if the attempt fails.
    pub armed: bool,
    /// The user has been armed during this wait, so a waker may have spent a wake on it.
    pub slept: bool,
}

struct Wait<'a, M, A, G, T> {
    seat: &'a Seat<M>,
    attempt: A,
    glance: G,
    outcome: Option<Result<T, SyncError>>,
    look: Look,
    rung: bool,
}

impl<M, A, G, T> Waitable for Wait<'_, M, A, G, T>
where
    M: SharedMemory,
    A: FnMut(Look) -> Option<Result<T, SyncError>>,
    G: Fn() -> bool,
{
    fn ready(&mut self) -> bool {
        if self.outcome.is_none() {
            self.outcome = match self.seat.check() {
                Ok(()) => (self.attempt)(self.look),
                Err(error) => Some(Err(error)),
            };
        }
        self.outcome.is_some()
    }

    #[inline]
    fn glance(&self) -> bool {
        (self.glance)()
    }

    fn arm(&mut self) {
        let page = &self.seat.page;
        if !self.look.slept {
            page.store_relaxed_u64(slot(self.seat.slot) + SLOT_SINCE, now());
        }
        SLEEPERS.arm(page, self.seat.bit);
        self.look = Look { armed: true, slept: true };
    }

    fn disarm(&mut self) {
        // If the slot was taken back during the sleep, the bit belongs to its next user, or to none.
        if self.seat.is_ours() {
            self.rung |= SLEEPERS.disarm(&self.seat.page, self.seat.bit);
        }
        self.look.armed = false;
    }
}

/// A sleeper that also wakes every [`LOOK_EVERY`].
struct Patrol<'a, W>(&'a mut W);

impl<W: World> Sleeper for Patrol<'_, W> {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let look = Instant::now().checked_add(LOOK_EVERY);
        self.0.sleep([deadline, look].into_iter().flatten().min())
    }
}

/// Returns nanoseconds of `CLOCK_REALTIME`, never 0.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// Returns the slots whose bits are set.
pub(crate) fn slots(mut bits: u64) -> impl Iterator<Item = usize> {
    bits &= SLOTS_MASK;
    std::iter::from_fn(move || {
        let slot = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(slot)
    })
}

/// Selects the slot whose turn it is: the first one in `bits` after the slot that was woken last. Records it in the page.
pub(crate) fn next_turn<M: SharedMemory>(page: &M, bits: u64) -> Option<usize> {
    if bits == 0 {
        return None;
    }
    let behind = page.load_relaxed_u64(TURN) % 64 + 1;
    let later = if behind < 64 { bits & (u64::MAX << behind) } else { 0 };
    let next = if later != 0 { later } else { bits }.trailing_zeros();
    page.store_relaxed_u64(TURN, next.into());
    Some(next as usize)
}
