//! The only implementation of waiting, and of finding out whether a peer must be woken.
//!
//! # The fence pair
//!
//! A consumer that finds nothing wants to sleep; a producer that has published wants to skip the doorbell if the
//! consumer is awake. Each writes one word and then reads the other's:
//!
//! ```text
//! consumer (arm, look again, sleep)          producer (publish, notify?)
//!   C1  armed := token                         P1  publish
//!   C2  full fence                             P2  full fence
//!   C3  look: published?  -> no: sleep         P3  armed?  -> yes: ring
//! ```
//!
//! Without the fences, a CPU may execute its load before its own store is visible to others (even x86 does). Then both sides
//! look too early: the consumer sleeps, the producer does not ring, and nothing ever wakes the consumer. With both fences,
//! one fence comes first in the single order of all full fences. If C2 is first, P3 sees the token and the producer rings. If
//! P2 is first, C3 sees what was published and the consumer does not sleep. A producer that waits for space does the steps of
//! the consumer, with the roles exchanged. Locks and completion queues use the same pair. It is implemented only here
//! ([`Armed::arm`] and [`Bell::needed`]; [`ArmedSet`] for a lock, which has many sleepers), and modelled with loom in
//! `tests/loom.rs`.
//!
//! Waking costs the sleeper's side a doorbell (tens of microseconds). Therefore the token is a counter: a producer rings once
//! for each arming, and not once for each message. Each wake word of a ring has one writer and needs no atomic
//! read-modify-write operation; the word of an [`ArmedSet`] has many writers.
//!
//! A hostile peer that writes to these words can cause needless doorbells and missed ones on its own ring. The caller's
//! timeout limits the delay of a missed one; without a timeout, the daemon still wakes the sleeper when the peer dies.

use ginnel_layout::board::Place;
use ginnel_layout::ring::SideState;
use ginnel_shmem::SharedMemory;
use std::io;
use std::time::{Duration, Instant};

/// The way in which a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// Polls until the wait is over. This has the lowest latency. It uses a CPU, but yields it to other threads
    /// (`sched_yield`) if the wait takes longer than some microseconds, since more threads may poll than there are CPUs.
    Poll,
    /// Sleeps at once. This uses no CPU, but each wake-up costs a doorbell.
    Interrupt,
    /// Polls for the time of the budget, then sleeps. If the budget is about the cost of a doorbell, the total cost is at
    /// most twice that of the better of the other two modes.
    Adaptive {
        /// How long to poll.
        budget: Duration,
    },
}

impl WaitMode {
    /// The default budget of [`WaitMode::Adaptive`].
    pub const DEFAULT_BUDGET: Duration = Duration::from_micros(100);
}

impl Default for WaitMode {
    fn default() -> Self {
        Self::Adaptive { budget: Self::DEFAULT_BUDGET }
    }
}

/// A way to sleep until the caller's own doorbell has been rung.
pub trait Sleeper {
    /// Returns when the doorbell has been rung since the last return, or at the deadline, or spuriously. An error means that
    /// this side cannot sleep at all.
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()>;
}

/// A condition for which a thread can wait.
pub trait Waitable {
    /// Returns whether the wait is over: the condition is true, or will never be.
    fn ready(&mut self) -> bool;
    /// Returns true if something has changed since [`Waitable::ready`] returned false. This is cheaper than `ready`. It may
    /// miss the end of the peer, but must not stay true while `ready` returns false.
    #[inline]
    fn glance(&self) -> bool {
        false
    }
    /// Tells the other side that this side is about to sleep ([`Armed::arm`]).
    fn arm(&mut self);
    /// Tells the other side that this side is awake again.
    fn disarm(&mut self);
}

/// A side of a ring for which another thread can wait, together with many others.
pub trait Watchable: Waitable {
    /// The memory of the ring.
    type Memory: SharedMemory;

    /// Returns where to look after [`Waitable::ready`] has returned false. The wake word belongs to the watch until
    /// [`Watchable::unwatch`].
    fn watch(&self) -> Watch<Self::Memory>;
    /// Gives the wake word back to the side, which waits by itself again.
    fn unwatch(&mut self, watch: Watch<Self::Memory>);
    /// Sets the slot of a board by which the side wants to be woken, from its next sleep on. With [`Place::NONE`], it is
    /// woken by its doorbell.
    fn notify_at(&mut self, place: Place);
}

/// The words at which a waiting side of a ring looks.
#[derive(Clone, Debug)]
pub struct Look<M: SharedMemory> {
    pub(crate) memory: M,
    /// Offset of the word that changes when there is something to do.
    pub(crate) word: usize,
    /// The value of that word when `ready` returned false.
    pub(crate) seen: u64,
    /// Offset of the state word of the other side.
    pub(crate) state: usize,
}

impl<M: SharedMemory> Look<M> {
    /// Returns whether the side should try again: something has come, or the other side has ended.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.memory.load_relaxed_u64(self.word) != self.seen
            || self.memory.load_relaxed_u32(self.state) & !SideState::OPEN.0 != 0
            || self.memory.is_broken()
    }
}

/// The wake word and the look of a side that is not in use. A thread can look, arm and disarm without the side itself.
#[derive(Debug)]
pub struct Watch<M: SharedMemory> {
    /// The words at which to look.
    pub look: Look<M>,
    pub(crate) armed: Armed,
}

impl<M: SharedMemory> Watch<M> {
    /// Tells the other side to wake this one. The caller must look once more before it sleeps.
    pub fn arm(&mut self) {
        self.look.memory.attend();
        self.armed.arm(&self.look.memory);
    }

    /// Tells the other side that this one is awake.
    pub fn disarm(&mut self) {
        self.armed.disarm(&self.look.memory);
    }
}

/// Glances between two full looks. During these, the thread only loads one word, so that it sees a change as early as
/// possible.
const GLANCES: u32 = 64;
/// Full looks between two readings of the clock, which may be slow in a guest.
const LOOKS_PER_CLOCK: u32 = 8;

/// Rounds of looks before the thread yields its CPU to others: some microseconds. The peer may need this CPU, and otherwise
/// would get it only at the end of this thread's time slice, milliseconds later.
const ROUNDS_ALONE: u32 = 16;

/// Waits until `what` is ready, or at least has changed. Returns `Ok(false)` if the deadline came first.
pub fn wait<W: Waitable + ?Sized>(
    what: &mut W,
    mode: WaitMode,
    sleeper: &mut dyn Sleeper,
    deadline: Option<Instant>,
) -> io::Result<bool> {
    if what.ready() {
        return Ok(true);
    }
    match mode {
        WaitMode::Poll => return Ok(spin(what, deadline)),
        WaitMode::Interrupt => {}
        WaitMode::Adaptive { budget } => {
            // A running peer answers before the clock needs to be read, which takes a microsecond in some guests.
            if look(what) {
                return Ok(true);
            }
            // A budget that the clock cannot represent is unlimited.
            let end = Instant::now().checked_add(budget);
            let first = [end, deadline].into_iter().flatten().min();
            if spin(what, first) {
                return Ok(true);
            }
        }
    }
    loop {
        what.arm();
        if what.ready() {
            what.disarm();
            return Ok(true);
        }
        if deadline.is_some_and(|d| Instant::now() >= d) {
            what.disarm();
            return Ok(false);
        }
        let slept = sleeper.sleep(deadline);
        what.disarm();
        slept?;
        if what.ready() {
            return Ok(true);
        }
    }
}

fn spin<W: Waitable + ?Sized>(what: &mut W, deadline: Option<Instant>) -> bool {
    let mut rounds = 0;
    loop {
        if look(what) {
            return true;
        }
        if deadline.is_some_and(|d| Instant::now() >= d) {
            return false;
        }
        if rounds < ROUNDS_ALONE {
            rounds += 1;
        } else {
            std::thread::yield_now();
        }
    }
}

/// Looks many times. A glance that sees a change ends the wait, because the caller looks closer anyway.
fn look<W: Waitable + ?Sized>(what: &mut W) -> bool {
    for _ in 0..LOOKS_PER_CLOCK {
        for _ in 0..GLANCES {
            if what.glance() {
                return true;
            }
        }
        if what.ready() {
            return true;
        }
    }
    // Once per round only: this instruction takes long on some CPUs, and in some hypervisors it gives up the time slice.
    std::hint::spin_loop();
    false
}

/// Maximum number of sleeps for which a sleeper may not have noted its token.
const NOT_NOTED: u32 = 1 << 24;

/// The sleeper's side of a wake word.
#[derive(Clone, Debug)]
pub struct Armed {
    at: usize,
    token: u32,
}

impl Armed {
    /// Returns the sleeper's side of the wake word at offset `at`, which only this side writes.
    pub fn new(at: usize) -> Self {
        Self { at, token: 0 }
    }

    /// Continues after `token` and all tokens that may have been used since it was noted, because a waker that has rung for a
    /// token does not ring for it again.
    pub fn resume(at: usize, token: u32) -> Self {
        Self { at, token: token.wrapping_add(NOT_NOTED) }
    }

    /// Returns the last token.
    pub fn token(&self) -> u32 {
        self.token
    }

    /// Tells the waker to ring, with a fresh token. The caller must look once more before it sleeps.
    pub fn arm<M: SharedMemory>(&mut self, memory: &M) {
        memory.before_sleep();
        self.token = self.token.checked_add(1).unwrap_or(1);
        // ORDER wait.notify: the place where this side sleeps is visible before the token. Pairs with: `notified_at`.
        memory.store_release_u32(self.at, self.token);
        // ORDER wait.fence: the token is stored before the caller's next look at the ring. Pairs with: `Bell::needed`.
        memory.full_fence();
    }

    /// Tells the waker that this side is awake.
    pub fn disarm<M: SharedMemory>(&mut self, memory: &M) {
        memory.store_relaxed_u32(self.at, 0);
    }
}

/// The waker's side of a wake word.
#[derive(Debug)]
pub struct Bell {
    at: usize,
    rung: u32,
}

impl Bell {
    /// Returns the waker's side of the wake word at offset `at`, which the other side writes.
    pub fn new(at: usize) -> Self {
        Self::resume(at, 0)
    }

    /// Continues after the token `rung`, for which the doorbell has been rung already.
    pub fn resume(at: usize, rung: u32) -> Self {
        Self { at, rung }
    }

    /// Returns the last token for which the doorbell was rung.
    pub fn rung(&self) -> u32 {
        self.rung
    }

    /// Returns whether the doorbell must be rung. The caller must have published something.
    pub fn needed<M: SharedMemory>(&mut self, memory: &M) -> bool {
        let token = self.asked(memory);
        if let Some(token) = token {
            self.answered(token);
        }
        token.is_some()
    }

    /// Returns the token for which the doorbell must be rung, as [`Bell::needed`] does, but repeats it until the caller
    /// confirms with [`Bell::answered`] that it has rung. This is for a waker that may be stopped before it rings.
    pub fn asked<M: SharedMemory>(&self, memory: &M) -> Option<u32> {
        // ORDER wait.fence: what was published is visible before the next look at the token. Pairs with: `Armed::arm`.
        memory.full_fence();
        let token = memory.load_relaxed_u32(self.at);
        (token != 0 && token != self.rung).then_some(token)
    }

    /// Records that the doorbell was rung for this token.
    pub fn answered(&mut self, token: u32) {
        self.rung = token;
    }
}

/// Distance from a ring's wake word to the word that names the slot of a board by which its sleeper wants to be woken.
const NOTIFY: usize = ginnel_layout::ring::DATA_NOTIFY - ginnel_layout::ring::DATA_ARMED;
const _: () = assert!(NOTIFY == ginnel_layout::ring::SPACE_NOTIFY - ginnel_layout::ring::SPACE_ARMED);

impl Armed {
    /// Sets the slot of a board by which the sleeper of this wake word wants to be woken from the next [`Armed::arm`] on.
    /// With [`Place::NONE`], it is woken by its doorbell.
    pub fn notify_at<M: SharedMemory>(&self, memory: &M, place: Place) {
        memory.store_relaxed_u64(self.at + NOTIFY, place.0);
    }
}

/// Returns the slot of a board by which the sleeper of a ring's wake word at offset `at` wants to be woken. The caller must
/// have found the word armed. The value may be anything, since a hostile peer can write it.
pub fn notified_at<M: SharedMemory>(memory: &M, at: usize) -> Place {
    // ORDER wait.notify: the token is loaded before the place that was stored with it. Pairs with: `Armed::arm`.
    memory.load_acquire_u32(at);
    Place(memory.load_relaxed_u64(at + NOTIFY))
}

/// The wake word of many sleepers, with one bit for each. The waker selects the sleepers that it wakes. A waker that takes a
/// sleeper's bit away must ring that sleeper.
#[derive(Clone, Copy, Debug)]
pub struct ArmedSet {
    at: usize,
}

impl ArmedSet {
    /// Returns the wake word at offset `at`.
    pub const fn new(at: usize) -> Self {
        Self { at }
    }

    /// Sets the bit of a sleeper, which tells wakers to ring it. The sleeper must look once more before it sleeps.
    pub fn arm<M: SharedMemory>(&self, memory: &M, bit: u64) {
        memory.before_sleep();
        memory.fetch_or_u64(self.at, bit);
        // ORDER wait.fence: the bit is stored before the sleeper's next look at what it waits for. Pairs with:
        // `ArmedSet::sleepers`.
        memory.full_fence();
    }

    /// Clears the bit of a sleeper that is awake. Returns true if a waker has taken the bit: it has rung, or is about to.
    pub fn disarm<M: SharedMemory>(&self, memory: &M, bit: u64) -> bool {
        memory.fetch_and_u64(self.at, !bit) & bit == 0
    }

    /// Returns the bits of the sleepers. The caller must have published something.
    pub fn sleepers<M: SharedMemory>(&self, memory: &M) -> u64 {
        // ORDER wait.fence: what was published is visible before the next look at the bits. Pairs with: `ArmedSet::arm`.
        memory.full_fence();
        memory.load_relaxed_u64(self.at)
    }

    /// Takes the bits of sleepers that the caller wants to ring. Returns those that were still set: the caller must ring
    /// exactly these.
    #[must_use = "a caller that takes a bit must ring"]
    pub fn take<M: SharedMemory>(&self, memory: &M, bits: u64) -> u64 {
        memory.fetch_and_u64(self.at, !bits) & bits
    }
}
