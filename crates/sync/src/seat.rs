//! A user at an object: its slot, how it waits and how it wakes others.

use crate::error::SyncError;
use ginnel_layout::sync::{
    ARMED, OwnerWord, SEATED, SIZE, SLOT_ENDPOINT, SLOT_EPOCH, SLOT_SINCE, SLOTS, SLOTS_MASK, STATE, TURN,
    slot,
};
use ginnel_ring::wait::{self, ArmedSet, Sleeper, WaitMode, Waitable};
use ginnel_shmem::SharedMemory;
use std::io;
use std::time::{Duration, Instant, SystemTime};

/// How often a sleeper looks although nobody has rung it.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How often a word may change under our hands before that is called [`crate::Corrupt::Restless`], or "not now". Correct
/// users change a word once each.
pub(crate) const TRIES: usize = 1000;

/// What the algorithms need of the world around: a place to sleep, and a way to wake others.
pub trait World: Sleeper {
    /// Rings the user of a slot. Never blocks; a user that cannot be rung finds out by itself, within [`LOOK_EVERY`].
    fn ring(&mut self, slot: usize);
}

/// How to wait, and how long.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    /// Spin, sleep, or both in turn.
    pub mode: WaitMode,
    /// `None`: for ever.
    pub timeout: Option<Duration>,
}

impl Patience {
    /// The call begins now. However often it has to wait, its deadline stays.
    pub(crate) fn begin(&self) -> Term {
        // A timeout beyond what the clock can express is none.
        let deadline = self.timeout.and_then(|t| Instant::now().checked_add(t));
        Term { mode: self.mode, deadline }
    }
}

/// How one call waits, and until when.
#[derive(Clone, Copy)]
pub(crate) struct Term {
    mode: WaitMode,
    deadline: Option<Instant>,
}

impl Term {
    /// Whether the time is up.
    pub fn is_over(&self) -> bool {
        self.deadline.is_some_and(|d| Instant::now() >= d)
    }
}

/// Who a handle is, as the daemon has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    slot: u8,
    epoch: u16,
    endpoint: u32,
}

impl User {
    /// `None` for a slot or epoch that cannot be.
    pub fn new(slot: usize, epoch: u16, endpoint: u32) -> Option<Self> {
        (slot < SLOTS && epoch != 0).then_some(Self { slot: slot as u8, epoch, endpoint })
    }

    /// Its slot.
    pub fn slot(&self) -> usize {
        self.slot.into()
    }

    /// The slot's epoch.
    pub fn epoch(&self) -> u16 {
        self.epoch
    }

    /// Number of its endpoint.
    pub fn endpoint(&self) -> u32 {
        self.endpoint
    }

    pub(crate) fn word(&self) -> u64 {
        OwnerWord::owned(self.slot(), self.epoch, self.endpoint).0
    }
}

/// The bits of those who sleep.
pub(crate) const SLEEPERS: ArmedSet = ArmedSet::new(ARMED);

/// The page, and this user's place in it.
#[derive(Clone)]
pub(crate) struct Seat<M> {
    pub page: M,
    pub slot: usize,
    pub bit: u64,
    /// The owner word that is ours.
    pub own: u64,
    epoch: u32,
}

impl<M: SharedMemory> Seat<M> {
    /// Panics if the memory is no page.
    pub fn new(page: M, user: User) -> Self {
        assert!(page.len() >= SIZE, "a synchronisation object has {SIZE} bytes");
        let slot = user.slot();
        Self { page, slot, bit: 1 << slot, own: user.word(), epoch: user.epoch.into() }
    }

    /// Whether the daemon still says that the slot is ours. Zero once the memory is gone, so that is noticed, too.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.page.attend();
        self.page.load_relaxed_u32(slot(self.slot) + SLOT_EPOCH) == self.epoch
    }

    /// The error of one whose slot is gone.
    #[cold]
    pub fn check(&self) -> Result<(), SyncError> {
        if self.is_ours() {
            return Ok(());
        }
        Err(if self.page.is_broken() { SyncError::Gone } else { SyncError::Stale })
    }

    /// After an operation whose success zeros could imitate: whether the memory was there.
    #[inline]
    pub fn check_memory(&self) -> Result<(), SyncError> {
        if self.page.is_broken() { Err(SyncError::Gone) } else { Ok(()) }
    }

    /// Puts our word where nothing is: the whole of an uncontended lock.
    #[inline]
    pub fn take_free(&self) -> bool {
        self.is_ours() && self.page.compare_exchange_u64(STATE, 0, self.own).is_ok()
    }

    /// Whether the daemon still says that the owner which a valid word names has its slot. An owner that was declared dead
    /// between its last look at its slot and its compare-exchange has written its word behind the daemon's back, and the
    /// daemon does not come again for it. Whoever can forge a slot can also forge the word.
    #[cold]
    pub fn is_there(&self, word: OwnerWord) -> bool {
        let Some(owner) = word.slot() else { return false };
        // ORDER sync.seat: the slot after the word, which its owner wrote after it was told that it has the slot.
        // Pairs with: `authority::seat`, through the daemon's answer.
        self.page.load_relaxed_u32(slot(owner) + SLOT_EPOCH) == u32::from(word.slot_epoch())
            && self.page.load_relaxed_u32(slot(owner) + SLOT_ENDPOINT) == word.endpoint()
    }

    /// After something was published: the others who sleep. Bits of slots without a user do not count: a user that was
    /// declared dead may set its bit after its slot was taken back.
    pub fn others_asleep(&self) -> u64 {
        SLEEPERS.sleepers(&self.page) & self.page.load_relaxed_u64(SEATED) & SLOTS_MASK & !self.bit
    }

    /// After something was published: takes and rings one of `among` who sleeps, if there is one; the one behind who was
    /// woken last.
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

    /// After something was published: takes and rings all of `among` who sleep.
    pub fn wake_all<W: World + ?Sized>(&self, among: u64, world: &mut W) {
        let asleep = self.others_asleep() & among;
        if asleep != 0 {
            let taken = SLEEPERS.take(&self.page, asleep);
            slots(taken).for_each(|slot| world.ring(slot));
        }
    }

    /// Waits until `attempt` has an outcome or the time is up.
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
                // A glance has seen a change, which a look may find gone again.
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

/// How a wait has ended.
pub(crate) struct Waited<T> {
    pub outcome: Result<T, SyncError>,
    /// Some waker has spent its wake on us; if we did not need it, it belongs to somebody else.
    pub rung: bool,
}

/// What an attempt should know.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    /// We sleep if it fails.
    pub armed: bool,
    /// We have been armed in this wait, so a wake may have been spent on us.
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
        // If the slot was taken back while we slept, the bit is that of its next user, or of nobody.
        if self.seat.is_ours() {
            self.rung |= SLEEPERS.disarm(&self.seat.page, self.seat.bit);
        }
        self.look.armed = false;
    }
}

/// A sleeper that looks from time to time, see [`LOOK_EVERY`].
struct Patrol<'a, W>(&'a mut W);

impl<W: World> Sleeper for Patrol<'_, W> {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let look = Instant::now().checked_add(LOOK_EVERY);
        self.0.sleep([deadline, look].into_iter().flatten().min())
    }
}

/// Nanoseconds of `CLOCK_REALTIME`, never 0.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// The slots whose bits are set.
pub(crate) fn slots(mut bits: u64) -> impl Iterator<Item = usize> {
    bits &= SLOTS_MASK;
    std::iter::from_fn(move || {
        let slot = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(slot)
    })
}

/// Whose turn it is among these: the first behind the last. Notes it.
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
