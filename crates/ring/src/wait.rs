//! The one way to wait, and the one way to know whether somebody must be woken.
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
//! Without the fences a CPU may do its load before its own store is visible (even x86 does), and then both look too
//! early: the consumer sleeps, the producer does not ring, and nobody ever wakes. With both fences, one of the two
//! comes first in the single order of all full fences: if C2, then P3 sees the token and rings; if P2, then C3 sees
//! what was published and does not sleep. A producer that waits for space plays the consumer's part with the roles
//! exchanged; locks and completion queues use the same pair. It is implemented here ([`Armed::arm`],
//! [`Bell::needed`]; for the many sleepers of a lock [`ArmedSet`]) and nowhere else, and modelled with loom in
//! `tests/loom.rs`.
//!
//! Waking costs the sleeper's side a doorbell (tens of microseconds), so the token is a counter: a producer rings once
//! for each arming, not once for each message. Each word of a ring has one writer, and needs no atomic
//! read-modify-write; an [`ArmedSet`] has many.
//!
//! A neighbour who scribbles on the words can cause needless doorbells and missed ones on its own ring. A missed one
//! is bounded by the caller's timeout, and without one the daemon still wakes the sleeper when the peer dies.

use ginnel_layout::board::Place;
use ginnel_layout::ring::SideState;
use ginnel_shmem::SharedMemory;
use std::io;
use std::time::{Duration, Instant};

/// How to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// Look until it is there. Lowest latency; uses a CPU, but leaves it to others who want it (`sched_yield`) when what is
    /// waited for does not come within microseconds: there may be more who look than CPUs.
    Poll,
    /// Sleep at once. Uses no CPU; each wake costs a doorbell.
    Interrupt,
    /// Look for as long as the budget, then sleep. A budget of about the cost of a doorbell is never worse than twice
    /// the better of the two.
    Adaptive {
        /// How long to look.
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

/// Sleeps until the own doorbell has been rung.
pub trait Sleeper {
    /// Returns when the doorbell has rung since the last return, or at the deadline, or for no reason. An error means
    /// that this side cannot sleep at all.
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()>;
}

/// Something that can be waited for.
pub trait Waitable {
    /// Whether the wait is over: the thing is there, or it will never be.
    fn ready(&mut self) -> bool;
    /// A cheaper look: true if something has changed since [`Waitable::ready`] said no. May overlook an end, but must not
    /// stay true while `ready` says no.
    #[inline]
    fn glance(&self) -> bool {
        false
    }
    /// Tells the other side that we are about to sleep ([`Armed::arm`]).
    fn arm(&mut self);
    /// We are awake again.
    fn disarm(&mut self);
}

/// A side of a ring that somebody else can wait for, together with many others.
pub trait Watchable: Waitable {
    /// Where the ring lies.
    type Memory: SharedMemory;

    /// What to look at after [`Waitable::ready`] has said no. Until [`Watchable::unwatch`], the wake word is the watch's.
    fn watch(&self) -> Watch<Self::Memory>;
    /// The side itself waits again.
    fn unwatch(&mut self, watch: Watch<Self::Memory>);
    /// By way of which slot of a board the side wants to be woken from its next sleep on; [`Place::NONE`]: by its doorbell.
    fn notify_at(&mut self, place: Place);
}

/// Where a side of a ring looks for what it waits for.
#[derive(Clone, Debug)]
pub struct Look<M: SharedMemory> {
    pub(crate) memory: M,
    /// This word ...
    pub(crate) word: usize,
    /// ... is something else when there is something to do.
    pub(crate) seen: u64,
    /// The state word of the other side.
    pub(crate) state: usize,
}

impl<M: SharedMemory> Look<M> {
    /// Whether another try of the side is worth it: something came, or the other side has ended.
    #[inline]
    pub fn has_changed(&self) -> bool {
        self.memory.load_relaxed_u64(self.word) != self.seen
            || self.memory.load_relaxed_u32(self.state) & !SideState::OPEN.0 != 0
            || self.memory.is_broken()
    }
}

/// A side of a ring that rests. It can be looked at, armed and disarmed without the side itself.
#[derive(Debug)]
pub struct Watch<M: SharedMemory> {
    /// Where to look.
    pub look: Look<M>,
    pub(crate) armed: Armed,
}

impl<M: SharedMemory> Watch<M> {
    /// Says "wake me". The caller must look once more before it sleeps.
    pub fn arm(&mut self) {
        self.look.memory.attend();
        self.armed.arm(&self.look.memory);
    }

    /// Says "I am awake".
    pub fn disarm(&mut self) {
        self.armed.disarm(&self.look.memory);
    }
}

/// Glances between two full looks. Nothing but loads of one word: what is waited for is then seen as early as can be.
const GLANCES: u32 = 64;
/// Full looks between two looks at the clock, which may be slow in a guest.
const LOOKS_PER_CLOCK: u32 = 8;

/// Rounds of looks before others are let onto the CPU: some microseconds. Who is waited for may need this very CPU, and would
/// get it only at the end of our time slice, milliseconds later.
const ROUNDS_ALONE: u32 = 16;

/// Waits until `what` is ready, or at least has changed. `Ok(false)` if the deadline came first.
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
            // A peer that is at work answers before the clock is worth a look; in some guests that takes a microsecond.
            if look(what) {
                return Ok(true);
            }
            // A budget beyond what the clock can say has no end of its own.
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

/// Looks many times. A glance that sees a change ends the wait: the caller looks closer anyway.
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
    // Once in a while only: it takes long on some CPUs, and in some hypervisors it gives up the time slice.
    std::hint::spin_loop();
    false
}

/// Sleeps that may pass before a sleeper notes its token.
const NOT_NOTED: u32 = 1 << 24;

/// The sleeper's end of a wake word.
#[derive(Clone, Debug)]
pub struct Armed {
    at: usize,
    token: u32,
}

impl Armed {
    /// The wake word at `at`, which this side writes.
    pub fn new(at: usize) -> Self {
        Self { at, token: 0 }
    }

    /// Goes on after `token` and all those that may have been used since it was noted: a waker that has rung for a token does not
    /// ring for it again.
    pub fn resume(at: usize, token: u32) -> Self {
        Self { at, token: token.wrapping_add(NOT_NOTED) }
    }

    /// The last token.
    pub fn token(&self) -> u32 {
        self.token
    }

    /// Says "ring me", with a fresh token. The caller must look once more before it sleeps.
    pub fn arm<M: SharedMemory>(&mut self, memory: &M) {
        memory.before_sleep();
        self.token = self.token.checked_add(1).unwrap_or(1);
        // ORDER wait.notify: where this side sleeps before the token. Pairs with: `notified_at`.
        memory.store_release_u32(self.at, self.token);
        // ORDER wait.fence: the token before the coming look at the ring. Pairs with: `Bell::needed`.
        memory.full_fence();
    }

    /// Says "I am awake".
    pub fn disarm<M: SharedMemory>(&mut self, memory: &M) {
        memory.store_relaxed_u32(self.at, 0);
    }
}

/// The waker's end of a wake word.
#[derive(Debug)]
pub struct Bell {
    at: usize,
    rung: u32,
}

impl Bell {
    /// The wake word at `at`, which the other side writes.
    pub fn new(at: usize) -> Self {
        Self::resume(at, 0)
    }

    /// Goes on after `rung`.
    pub fn resume(at: usize, rung: u32) -> Self {
        Self { at, rung }
    }

    /// The last token that was rung for.
    pub fn rung(&self) -> u32 {
        self.rung
    }

    /// After something was published: whether the doorbell must be rung for it.
    pub fn needed<M: SharedMemory>(&mut self, memory: &M) -> bool {
        let token = self.asked(memory);
        if let Some(token) = token {
            self.answered(token);
        }
        token.is_some()
    }

    /// The same for a waker that may be stopped before it has rung: asked again, it is told so again until it says that it has.
    pub fn asked<M: SharedMemory>(&self, memory: &M) -> Option<u32> {
        // ORDER wait.fence: what was published before the coming look at the token. Pairs with: `Armed::arm`.
        memory.full_fence();
        let token = memory.load_relaxed_u32(self.at);
        (token != 0 && token != self.rung).then_some(token)
    }

    /// The doorbell was rung for this token.
    pub fn answered(&mut self, token: u32) {
        self.rung = token;
    }
}

/// Offset of the word, beside a ring's wake word, that says by way of which board its sleeper wants to be woken.
const NOTIFY: usize = ginnel_layout::ring::DATA_NOTIFY - ginnel_layout::ring::DATA_ARMED;
const _: () = assert!(NOTIFY == ginnel_layout::ring::SPACE_NOTIFY - ginnel_layout::ring::SPACE_ARMED);

impl Armed {
    /// From the next [`Armed::arm`] on, the sleeper of this wake word of a ring wants to be woken by way of a slot of a board;
    /// with [`Place::NONE`], by its doorbell.
    pub fn notify_at<M: SharedMemory>(&self, memory: &M, place: Place) {
        memory.store_relaxed_u64(self.at + NOTIFY, place.0);
    }
}

/// After the wake word at `at` of a ring was found armed: by way of which slot of a board its sleeper wants to be woken. A
/// neighbour may have written anything there.
pub fn notified_at<M: SharedMemory>(memory: &M, at: usize) -> Place {
    // ORDER wait.notify: the token before what was said with it. Pairs with: `Armed::arm`.
    memory.load_acquire_u32(at);
    Place(memory.load_relaxed_u64(at + NOTIFY))
}

/// The wake word of many sleepers: a bit for each. A waker chooses whom it wakes; whoever takes a sleeper's bit away has
/// to ring it.
#[derive(Clone, Copy, Debug)]
pub struct ArmedSet {
    at: usize,
}

impl ArmedSet {
    /// The wake word at `at`.
    pub const fn new(at: usize) -> Self {
        Self { at }
    }

    /// Says "ring me" for the sleeper of this bit. It must look once more before it sleeps.
    pub fn arm<M: SharedMemory>(&self, memory: &M, bit: u64) {
        memory.before_sleep();
        memory.fetch_or_u64(self.at, bit);
        // ORDER wait.fence: the bit before the coming look at what is waited for. Pairs with: `ArmedSet::sleepers`.
        memory.full_fence();
    }

    /// Says "I am awake". True if a waker has taken the bit: it has rung, or is about to.
    pub fn disarm<M: SharedMemory>(&self, memory: &M, bit: u64) -> bool {
        memory.fetch_and_u64(self.at, !bit) & bit == 0
    }

    /// After something was published: those who sleep.
    pub fn sleepers<M: SharedMemory>(&self, memory: &M) -> u64 {
        // ORDER wait.fence: what was published before the coming look at the bits. Pairs with: `ArmedSet::arm`.
        memory.full_fence();
        memory.load_relaxed_u64(self.at)
    }

    /// Takes the bits of sleepers who are to be rung; returns those that were still there.
    #[must_use = "whoever takes a bit has to ring"]
    pub fn take<M: SharedMemory>(&self, memory: &M, bits: u64) -> u64 {
        memory.fetch_and_u64(self.at, !bits) & bits
    }
}
