//! Calls that wait for one socket.
//!
//! A waiting thread polls the ring for a while. Then it announces in the ring that it is about to sleep, checks the
//! ring again, and sleeps in a system call on the kernel's socket. A byte from the peer, or the peer's end, wakes it
//! there.

use crate::confined::is_confined;
use crate::direction::Carrier;
use crate::errno::{Errno, Result};
use crate::returning::{self, Taker};
use crate::socket::{End, Socket};
use crate::wakes::{self, Point, Sleep};
use crate::{kernel, receive, send, signals};
use ginnel_ring::wait::Watchable;
use libc::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The interval, in milliseconds, at which a thread that cannot be woken checks again.
const STEP: c_int = 1;

/// The time at which a call of the program ends at the latest. It is fixed when the call begins to wait, however often the call is woken.
///
/// Most calls wait at most once, and then most of them only look at the ring, or sleep in a call of the kernel that knows the time. So
/// neither the clock is read nor the kernel asked before this is needed.
#[derive(Default)]
pub struct Deadline {
    has_waited: bool,
    begun: Option<Instant>,
    end: Option<Option<Instant>>,
}

impl Deadline {
    /// Notes that the call waits now. Fails if it has waited before and the deadline has passed.
    fn waits(&mut self, fd: c_int, option: c_int) -> Result<()> {
        match std::mem::replace(&mut self.has_waited, true) {
            true => self.left(fd, option).map(drop),
            false => Ok(()),
        }
    }

    /// Notes that the call sleeps now. Returns whether this is the first time, so that all of the time is left.
    fn sleeps(&mut self) -> bool {
        let is_first = self.begun.is_none();
        self.begun.get_or_insert_with(Instant::now);
        is_first
    }

    /// Returns the time that is left, or an error if the deadline has passed.
    fn left(&mut self, fd: c_int, option: c_int) -> Result<Option<Duration>> {
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let end = *self
            .end
            .get_or_insert_with(|| kernel::timeout(fd, option).and_then(|time| begun.checked_add(time)));
        let Some(end) = end else { return Ok(None) };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Errno(libc::EAGAIN)) } else { Ok(Some(left)) }
    }
}

/// How long a call of `poll` or `epoll_wait` may take; `None` is for ever. The clock is not read before the call is
/// about to wait, because most calls do not wait, and in some guests reading the clock is slow.
pub struct Limit {
    timeout: Option<Duration>,
    end: Option<Instant>,
}

impl Limit {
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, end: None }
    }

    /// Returns whether the call may not wait at all.
    pub fn is_zero(&self) -> bool {
        self.timeout == Some(Duration::ZERO)
    }

    /// Returns the time that is left, counted from the first call of this function.
    pub fn left(&mut self) -> Option<Duration> {
        let timeout = self.timeout?;
        if timeout.is_zero() {
            return Some(timeout);
        }
        let now = Instant::now();
        let Some(end) = self.end else {
            // The end is later than the clock can represent, so the call never times out.
            self.end = now.checked_add(timeout);
            return Some(timeout);
        };
        Some(end.saturating_duration_since(now))
    }

    /// Returns what is left after a call that has ended. The clock is not read if the call has not waited.
    pub fn rest(&mut self) -> Option<Duration> {
        if self.end.is_some() { self.left() } else { self.timeout }
    }
}

/// A thread that the peer wakes, until it is awake or cancelled.
struct Armed(&'static Socket, fn(&'static Socket));

impl Drop for Armed {
    fn drop(&mut self) {
        self.1(self.0);
    }
}

/// Waits until another attempt to receive is worthwhile.
pub fn for_data(socket: &'static Socket, fd: c_int, deadline: &mut Deadline) -> Result<()> {
    deadline.waits(fd, libc::SO_RCVTIMEO)?;
    if socket.receiving.carrier() != Carrier::Kernel && looks_pay(socket) {
        let what = socket.receiving.lock().as_ref().map(|receiver| receiver.ring.watch().look);
        if let Some(what) = what {
            let found = spin(|| what.has_changed());
            learn(socket, found);
            if found {
                return Ok(());
            }
        }
    }
    let mut point = point(socket);
    let sleep = Sleep::begin(socket, fd, &mut point);
    wakes::settle(&point, std::iter::once(&sleep));
    receive::arm(socket, point.wake_for(socket));
    let _armed = Armed(socket, receive::rise);
    if receive::is_ready(socket) {
        return Ok(());
    }
    sleep_for_data(socket, fd, deadline, &sleep, &point)
}

/// Takes a wait point at the doorbell for a thread that waits for what a ring carries.
fn point(socket: &'static Socket) -> Point {
    let is_rung = socket.receiving.carrier() == Carrier::Ring
        && socket.end() == End::None
        && socket.receiving.common().is_none();
    if is_rung { Point::at_doorbell() } else { Point::later() }
}

/// Converts a timeout for `poll`, rounded up so that the call does not end too early. A negative result means for
/// ever.
pub fn milliseconds(left: Option<Duration>) -> c_int {
    left.map_or(-1, |left| {
        let rest = u64::from(left.subsec_nanos()).div_ceil(1_000_000);
        left.as_secs().saturating_mul(1000).saturating_add(rest).min(c_int::MAX as u64) as c_int
    })
}

fn sleep_for_data(
    socket: &'static Socket,
    fd: c_int,
    deadline: &mut Deadline,
    sleep: &Sleep,
    point: &Point,
) -> Result<()> {
    // If the kernel carries the direction, it may have bytes of the program. They end the sleep, and stay where they
    // are.
    let wakes_only = socket.receiving.carrier() == Carrier::Ring;
    if !sleep.is_woken() {
        return a_moment(fd, deadline);
    }
    if let Some(point) = point.taken() {
        if sleep.keeper().is_none() && !wakes_only && kernel::poll_now(fd, READABLE) != 0 {
            return Ok(());
        }
        let left = deadline.left(fd, libc::SO_RCVTIMEO)?;
        match point.sleep(fd, sleep.keeper().is_some(), milliseconds(left)) {
            Err(Errno(libc::EINTR)) => signals::interrupted(left.is_some())?,
            result => {
                if !result? {
                    return Ok(());
                }
            }
        }
    } else if sleep_at_socket(socket, fd, deadline, wakes_only)? {
        return Ok(());
    }
    if wakes_only {
        sleep.take(socket, fd);
    }
    Ok(())
}

const READABLE: libc::c_short = libc::POLLIN | libc::POLLRDHUP;

/// Sleeps as the keeper. Returns whether the call that has slept has taken the byte that has woken it.
fn sleep_at_socket(
    socket: &'static Socket,
    fd: c_int,
    deadline: &mut Deadline,
    wakes_only: bool,
) -> Result<bool> {
    if !deadline.sleeps()
        && let Some(left) = deadline.left(fd, libc::SO_RCVTIMEO)?
    {
        // The call of the kernel would begin the time anew.
        return match kernel::poll_readable(fd, milliseconds(Some(left))) {
            Err(Errno(libc::EINTR)) => signals::interrupted(true).map(|()| false),
            result => result.map(|_| false),
        };
    }
    // The byte that wakes this thread is for no other thread, so the call that sleeps also takes it. If there are
    // other threads, one may give the descriptor's number to another file, whose bytes must not be taken.
    let may_take = is_only_thread()
        && wakes_only
        && socket.receiving.common().is_none()
        && socket.end() == End::None
        && socket.watchers.is_empty()
        && socket.receiving.waiting.load(Ordering::Relaxed) == 1;
    let taker = may_take.then(|| Taker::begin(socket)).flatten();
    let byte = kernel::sleep_as_recv(socket, fd, taker.is_some())?;
    if let (Some(taker), Some(byte)) = (&taker, byte) {
        taker.took(fd, byte);
    }
    Ok(taker.is_some())
}

/// Returns whether this process has no other thread.
#[expect(unsafe_code, reason = "the C library's word for it")]
fn is_only_thread() -> bool {
    unsafe extern "C" {
        static __libc_single_threaded: std::ffi::c_char;
    }
    // SAFETY: a byte, which other threads do not write once there are some.
    unsafe { (&raw const __libc_single_threaded).read_volatile() != 0 }
}

/// Waits until another attempt to send so many bytes at once is worthwhile.
pub fn for_space(socket: &'static Socket, fd: c_int, least: usize, deadline: &mut Deadline) -> Result<()> {
    deadline.waits(fd, libc::SO_SNDTIMEO)?;
    let what = socket.sending.lock().as_ref().map(|sender| sender.ring.watch().look);
    if may_look()
        && let Some(what) = what
        && spin(|| what.has_changed())
    {
        return Ok(());
    }
    let mut point = point(socket);
    let sleep = Sleep::begin(socket, fd, &mut point);
    wakes::settle(&point, std::iter::once(&sleep));
    send::arm(socket, point.wake_for(socket));
    let _armed = Armed(socket, send::rise);
    if send::has_room(socket, least) {
        return Ok(());
    }
    sleep_for_space(socket, fd, least, deadline, &sleep, &point)
}

fn sleep_for_space(
    socket: &'static Socket,
    fd: c_int,
    least: usize,
    deadline: &mut Deadline,
    sleep: &Sleep,
    point: &Point,
) -> Result<()> {
    let left = deadline.left(fd, libc::SO_SNDTIMEO)?;
    receive::begin_ring_if_due(socket);
    if !returning::is_full_for(socket, fd, least) {
        return Ok(());
    }
    // The peer can send a wake byte only once its direction has changed over; and while bytes of the program wait in the kernel,
    // a wake byte is not seen behind them.
    let can_be_woken = !crate::grow::attend_waiting(socket)
        && sleep.is_woken()
        && socket.receiving.carrier() == Carrier::Ring
        && !socket.has_shut_down_receiving()
        && socket.end() == End::None;
    let result = if can_be_woken {
        // Nothing reports that there will be no room.
        let most = returning::STEP;
        let milliseconds = left.map_or(most, |left| left.as_millis().clamp(1, most as u128) as c_int);
        match point.taken() {
            Some(point) => point.sleep(fd, sleep.keeper().is_some(), milliseconds),
            None => kernel::poll_readable(fd, milliseconds),
        }
    } else {
        signals::sleep(STEP).map(|()| false)
    };
    // Without a wait point, a byte has woken this thread.
    let has_bytes = result != Ok(false) || point.taken().is_none();
    let result = result.map(drop).or_else(|errno| match errno {
        Errno(libc::EINTR) => signals::interrupted(left.is_some()),
        errno => Err(errno),
    });
    if !sleep.is_woken() {
        kernel::look_for_end(socket, fd);
    } else if can_be_woken && has_bytes {
        sleep.take(socket, fd);
    }
    // A peer that has ended may have released room before, or never will.
    if socket.end() != End::None && !send::has_room(socket, 1) {
        return Err(Errno(libc::ECONNRESET));
    }
    result
}

/// Sleeps for a moment, for a call that sends when another one has ended.
pub fn for_turn(fd: c_int, deadline: &mut Deadline) -> Result<()> {
    let left = deadline.left(fd, libc::SO_SNDTIMEO)?;
    signals::sleep(STEP).or_else(|_| signals::interrupted(left.is_some()))
}

/// Sleeps for a moment, for a call that receives and that nothing wakes.
pub fn a_moment(fd: c_int, deadline: &mut Deadline) -> Result<()> {
    let left = deadline.left(fd, libc::SO_RCVTIMEO)?;
    signals::sleep(STEP).or_else(|_| signals::interrupted(left.is_some()))
}

/// Waits until the kernel has something for a call that receives.
pub fn for_more(fd: c_int, deadline: &mut Deadline) -> Result<()> {
    let left = deadline.left(fd, libc::SO_RCVTIMEO)?;
    match kernel::poll_readable(fd, milliseconds(left)) {
        Err(Errno(libc::EINTR)) => signals::interrupted(left.is_some()),
        result => result.map(drop),
    }
}

/// Waits until the kernel has room for what a call sends.
pub fn for_kernel(fd: c_int, deadline: &mut Deadline) -> Result<()> {
    let left = deadline.left(fd, libc::SO_SNDTIMEO)?;
    match kernel::poll_writable(fd, milliseconds(left)) {
        Err(Errno(libc::EINTR)) => signals::interrupted(left.is_some()),
        result => result,
    }
}

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
}

fn cpus() -> u32 {
    static CPUS: OnceLock<u32> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get() as u32))
}

/// The time until which no thread spins because others want the CPUs, in nanoseconds of CLOCK_MONOTONIC. 0 means that
/// spinning is allowed.
static CROWDED: AtomicU64 = AtomicU64::new(0);
/// How long no thread spins after the next spin that another task has interrupted, in nanoseconds. A spinning thread
/// takes the CPU from others, and uses up its share of the scheduler's time, which would otherwise let it run at once
/// when it is woken.
static PAUSE: AtomicU64 = AtomicU64::new(SHORTEST_PAUSE);
/// The pause is doubled by each interrupted spin, and halved by each spin that has found something.
const SHORTEST_PAUSE: u64 = 500_000;
const LONGEST_PAUSE: u64 = 32_000_000;

fn now() -> u64 {
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

/// The number of rounds after which other tasks may use the CPU between two checks.
const ROUNDS_ALONE: u32 = 16;

/// A spin and its time budget.
struct Spin {
    /// When the first round ended. A peer that is at work answers before that, so the clock need not be read earlier.
    begun: Option<Instant>,
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
                let pause = PAUSE.load(Ordering::Relaxed);
                CROWDED.store(now() + pause, Ordering::Relaxed);
                PAUSE.store((pause * 2).min(LONGEST_PAUSE), Ordering::Relaxed);
                return false;
            }
        }
        let now = Instant::now();
        let begun = *self.begun.get_or_insert(now);
        (now - begun).as_nanos() < u128::from(BUDGET.load(Ordering::Relaxed))
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

/// The number of failures in a row from which on the thread spins only now and then,
const FAILURES: u32 = 2;
/// which is one time in this many.
const PROBE: u32 = 32;

/// Returns whether a spin before the next sleep is likely to find something.
pub fn looks_pay(socket: &'static Socket) -> bool {
    if !may_look() {
        return false;
    }
    let failures = socket.patience.load(Ordering::Relaxed);
    if failures < FAILURES {
        return true;
    }
    socket.patience.store(failures + 1, Ordering::Relaxed);
    failures.is_multiple_of(PROBE)
}

/// Records whether a spin has found something.
pub fn learn(socket: &'static Socket, found: bool) {
    if found {
        socket.patience.store(0, Ordering::Relaxed);
    } else {
        let failures = socket.patience.load(Ordering::Relaxed);
        socket.patience.store(
            failures.max(FAILURES - 1).saturating_add(u32::from(failures < FAILURES)),
            Ordering::Relaxed,
        );
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
