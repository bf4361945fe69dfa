//! Looking again and again for a while, which costs less than a sleep if what is awaited comes soon.

use crate::process::busy;
use crate::system::confined::is_confined;
use crate::system::kernel;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The number of this process's threads that spin.
static LOOKING: AtomicU32 = AtomicU32::new(0);

/// A peer runs in another VM, so it needs none of the CPUs here.
static ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// The longest time that a thread spins, in nanoseconds: about the cost of a sleep.
static BUDGET: AtomicU64 = AtomicU64::new(SHORTEST_BUDGET);
const SHORTEST_BUDGET: u64 = 100_000;
const LONGEST_BUDGET: u64 = 2_000_000;

/// Records that a connection has a peer in another VM, and how long a TCP segment to it and the acknowledgement take.
///
/// A sleeping peer there is woken by an interrupt, or by a byte over TCP. A thread that spins for its answer sees it
/// only after that. A shorter spin would fail each time, and both sides would sleep for each message. So the spin
/// budget is a few such round trips.
pub fn note_peer_elsewhere(round_trip: Duration) {
    ELSEWHERE.store(true, Ordering::Relaxed);
    let budget = (round_trip.as_nanos() as u64).saturating_mul(TRIPS).clamp(SHORTEST_BUDGET, LONGEST_BUDGET);
    BUDGET.fetch_max(budget, Ordering::Relaxed);
}

/// The round trips in which a sleeping peer wakes up and answers.
const TRIPS: u64 = 2;

/// Counts the CPUs when the library is loaded. If the first call that needs the number did that, a signal handler
/// might jump out of it.
pub fn load() {
    cpus();
    busy::cpus();
}

fn cpus() -> u32 {
    static CPUS: OnceLock<u32> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get() as u32))
}

/// The time until which no thread spins because others want the CPUs, in nanoseconds of CLOCK_MONOTONIC. 0 means that
/// spinning is allowed.
static CROWDED: AtomicU64 = AtomicU64::new(0);
/// How long no thread spins after the next spin that ends for that reason, in nanoseconds. A spinning thread
/// takes the CPU from others, and uses up its share of the scheduler's time, which would otherwise let it run at once
/// when it is woken.
static PAUSE: AtomicU64 = AtomicU64::new(SHORTEST_PAUSE);
/// The pause is doubled by each spin that ends because others want the CPUs, and halved by each spin that has found something.
const SHORTEST_PAUSE: u64 = 500_000;
const LONGEST_PAUSE: u64 = 32_000_000;

pub fn now() -> u64 {
    ginnel_clock::monotonic().as_nanos() as u64
}

/// Returns whether one more thread may spin. There must be a CPU left for the task that produces what the thread
/// waits for.
pub fn may_look() -> bool {
    if is_confined() {
        return false;
    }
    let cpus = cpus();
    (cpus > 1 || ELSEWHERE.load(Ordering::Relaxed))
        && LOOKING.load(Ordering::Relaxed) < cpus.div_ceil(2)
        && !is_crowded()
}

/// Returns whether others have wanted the CPUs a short while ago. The clock, which is slow in some guests, is read
/// only if they have.
fn is_crowded() -> bool {
    let until = CROWDED.load(Ordering::Relaxed);
    if until == 0 {
        return false;
    }
    let is_crowded = now() < until;
    if !is_crowded {
        let _ = CROWDED.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
    is_crowded
}

/// When this process last asked how many tasks want a CPU, in nanoseconds of CLOCK_MONOTONIC.
static ASKED: AtomicU64 = AtomicU64::new(0);
/// How often it asks. The kernel adds up a number of each CPU.
const INTERVAL: u64 = 1_000_000;
const INTERVAL_PER_CPU: u64 = 10_000;

/// Asks that if it is time to. Returns whether there are more tasks than CPUs.
fn is_full(now: u64) -> bool {
    let interval = INTERVAL + INTERVAL_PER_CPU * u64::from(busy::cpus());
    if now.saturating_sub(ASKED.load(Ordering::Relaxed)) < interval {
        return false;
    }
    ASKED.store(now, Ordering::Relaxed);
    busy::is_full()
}

/// Keeps all threads from spinning for a while.
fn pause(now: u64) {
    let pause = PAUSE.load(Ordering::Relaxed);
    CROWDED.store(now + pause, Ordering::Relaxed);
    PAUSE.store((pause * 2).min(LONGEST_PAUSE), Ordering::Relaxed);
}

/// The number of rounds after which other tasks may use the CPU between two checks.
const ROUNDS_ALONE: u32 = 16;

/// A spin and its time budget.
struct Spin {
    /// When the first round ended. A peer that is at work answers before that, so the clock need not be read earlier.
    begun: Option<u64>,
    rounds: u32,
    /// How often this thread had been taken off its CPU before.
    switches: Option<i64>,
}

impl Spin {
    fn begin() -> Self {
        LOOKING.fetch_add(1, Ordering::Relaxed);
        Self { begun: None, rounds: 0, switches: None }
    }

    /// Ends a round. Returns false if the budget is used up.
    fn goes_on(&mut self) -> bool {
        self.rounds += 1;
        if self.rounds > ROUNDS_ALONE {
            let before = *self.switches.get_or_insert_with(kernel::switches);
            std::thread::yield_now();
            if kernel::switches() != before {
                pause(now());
                return false;
            }
        }
        let now = now();
        if is_full(now) {
            pause(now);
            return false;
        }
        let begun = *self.begun.get_or_insert(now);
        now.saturating_sub(begun) < BUDGET.load(Ordering::Relaxed)
    }

    /// Records that the spin has found something.
    fn found(&self) {
        let pause = PAUSE.load(Ordering::Relaxed);
        if pause > SHORTEST_PAUSE {
            PAUSE.store(pause / 2, Ordering::Relaxed);
        }
    }
}

impl Drop for Spin {
    fn drop(&mut self) {
        LOOKING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of checks between two readings of the clock.
const GLANCES: u32 = 512;

/// Checks again and again until something is found or the time budget ([`BUDGET`]) is used up.
pub fn spin(mut look: impl FnMut() -> bool) -> bool {
    let mut spin = Spin::begin();
    loop {
        if (0..GLANCES).any(|_| look()) {
            spin.found();
            return true;
        }
        if !spin.goes_on() {
            return false;
        }
    }
}

/// The number of checks between two calls of the kernel.
const BETWEEN: u32 = 64;

/// Spins on several things, and asks the kernel about others now and then. Returns true if `look` has found
/// something. Also ends if the kernel has something.
pub fn spin_between(mut look: impl FnMut() -> bool, mut ask: impl FnMut() -> bool) -> bool {
    let mut spin = Spin::begin();
    loop {
        if (0..BETWEEN).any(|_| look()) {
            spin.found();
            return true;
        }
        if !spin.goes_on() || ask() {
            return false;
        }
    }
}
