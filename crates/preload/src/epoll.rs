//! epoll.
//!
//! A socket that is not the kernel's alone stays in the program's epoll instance, but for other events and with other data than the
//! program's: bytes and ends of the kernel's connection, edge-triggered. So a wake byte of the peer, or its end, wakes exactly that
//! instance. What the program asked for is kept here. Of these sockets, those that were busy last are *hot*: `epoll_wait` looks
//! at their rings. All others are armed, and cost nothing until the peer wakes this side.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, c_short, epoll_event};

use crate::errno::{Errno, Kept, Result, check};
use crate::lock::Lock;
use crate::poll;
use crate::real;
use crate::receive;
use crate::send;
use crate::socket::{Carrier, End, Socket};
use crate::table::SOCKETS;
use crate::{kernel, wait};

/// After so many calls that have found something in rings, the kernel is asked too.
const CALLS: u32 = 64;
/// Or after so long.
const INTERVAL: Duration = Duration::from_micros(50);
/// How often somebody looks who cannot be woken.
const STEP: Duration = Duration::from_millis(1);
/// Events that the kernel is asked at a time.
const EVENTS: usize = 64;

/// Bits of the data of our own registrations that are the descriptor.
const FD_BITS: u32 = 20;

/// An epoll instance.
pub struct Instance {
    /// Descriptors of this process.
    pub fds: AtomicU32,
    fd: AtomicI32,
    /// Sockets in it that are not the kernel's alone.
    joined: AtomicU32,
    /// Threads that sleep in the kernel, or are about to.
    sleeping: AtomicU32,
    state: Lock<State>,
}

struct State {
    /// TCP sockets in it.
    watches: HashMap<c_int, Watch>,
    /// Of those, the ones whose rings are looked at.
    hot: Vec<c_int>,
    /// Calls since the kernel was asked.
    calls: u32,
    asked: Option<Instant>,
    /// Looks in a row that have found nothing.
    failures: u32,
}

struct Watch {
    socket: &'static Socket,
    /// What the program wants, and its data.
    events: u32,
    data: u64,
    is_joined: bool,
    /// EPOLLONESHOT has been told.
    is_spent: bool,
    /// Edge-triggered: something has happened that was not told.
    edge: bool,
    /// Edge-triggered: the position in the stream up to which was told.
    seen: u64,
    is_hot: bool,
}

impl Instance {
    pub fn new() -> Self {
        let state = State { watches: HashMap::new(), hot: Vec::new(), calls: 0, asked: None, failures: 0 };
        Self {
            fds: AtomicU32::new(0),
            fd: AtomicI32::new(-1),
            joined: AtomicU32::new(0),
            sleeping: AtomicU32::new(0),
            state: Lock::new(state),
        }
    }

    /// Makes it as new, for another descriptor.
    pub fn begin(&self, fd: c_int) {
        self.fd.store(fd, Ordering::Relaxed);
        self.sleeping.store(0, Ordering::Relaxed);
        self.fds.store(1, Ordering::Relaxed);
    }

    /// Its last descriptor is closed.
    pub fn close(&'static self) {
        let mut state = self.state.lock();
        for (fd, watch) in state.watches.drain() {
            watch.socket.watchers.remove(self, fd);
        }
        state.hot.clear();
        self.joined.store(0, Ordering::Relaxed);
    }

    /// Whether sockets in it are not the kernel's alone.
    #[inline]
    pub fn has_joined(&self) -> bool {
        self.joined.load(Ordering::Acquire) > 0
    }

    /// Whether a ring has something that the program waits for.
    pub fn is_ready(&self) -> bool {
        self.has_joined() && self.state.lock().collect(&mut [], true) > 0
    }

    /// Makes all peers wake this side: for a wait in another instance, or in `poll`.
    pub fn arm(&self) {
        if self.has_joined() {
            // That sleeper does not say when it is awake again: from now on there is always one.
            self.sleeping.fetch_or(1 << 31, Ordering::Relaxed);
            self.state.lock().arm();
        }
    }

    /// `epoll_ctl`.
    pub fn control(
        &'static self,
        epoll: c_int,
        operation: c_int,
        fd: c_int,
        event: Option<epoll_event>,
        native: impl FnOnce() -> c_int,
    ) -> c_int {
        let Some(socket) = SOCKETS.get(fd) else { return native() };
        match (operation, event) {
            (libc::EPOLL_CTL_ADD, Some(event)) => {
                let result = native();
                if result == 0 {
                    self.add(epoll, fd, socket, event);
                }
                result
            }
            (libc::EPOLL_CTL_MOD, Some(event)) => self.modify(epoll, fd, event, native),
            (libc::EPOLL_CTL_DEL, _) => {
                let result = native();
                self.remove(fd);
                socket.watchers.remove(self, fd);
                result
            }
            _ => native(),
        }
    }

    fn add(&'static self, epoll: c_int, fd: c_int, socket: &'static Socket, event: epoll_event) {
        let watch = Watch {
            socket,
            events: event.events,
            data: event.u64,
            is_joined: false,
            is_spent: false,
            edge: true,
            seen: 0,
            is_hot: false,
        };
        self.state.lock().watches.insert(fd, watch);
        socket.watchers.add(self, fd);
        if socket.is_joined() && has_changed(socket) {
            self.take_over(epoll, fd);
        }
    }

    fn modify(&self, epoll: c_int, fd: c_int, event: epoll_event, native: impl FnOnce() -> c_int) -> c_int {
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd) else {
            drop(state);
            return native();
        };
        (watch.events, watch.data, watch.is_spent, watch.edge) = (event.events, event.u64, false, true);
        if !watch.is_joined {
            return native();
        }
        state.heat(fd);
        // Said under the lock, as whoever is about to sleep looks under it.
        let somebody_sleeps = self.sleeping.load(Ordering::Relaxed) > 0;
        drop(state);
        if somebody_sleeps {
            register(epoll, fd);
        }
        0
    }

    fn remove(&self, fd: c_int) {
        let mut state = self.state.lock();
        if let Some(watch) = state.watches.remove(&fd) {
            state.hot.retain(|other| *other != fd);
            if watch.is_joined {
                self.joined.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// The kernel no longer carries this socket alone: from now on its events are told from here.
    fn take_over(&self, epoll: c_int, fd: c_int) {
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd) else { return };
        if !watch.is_joined {
            watch.is_joined = true;
            self.joined.fetch_add(1, Ordering::AcqRel);
        }
        watch.edge = true;
        state.heat(fd);
        drop(state);
        register(epoll, fd);
    }

    /// As `epoll_wait`. `native` is that call, for so many events and so long.
    pub fn wait(
        &self,
        epoll: c_int,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mut native: impl FnMut(&mut [epoll_event], Option<Duration>) -> Result<usize>,
    ) -> Result<usize> {
        let _ = epoll;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut may_look = true;
        loop {
            if !self.has_joined() {
                let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                let n = native(events, left.or(timeout))?;
                // One may have changed over while this thread slept.
                let told = self.translate(&mut events[..n]);
                if told > 0 || n == 0 {
                    return Ok(told);
                }
                continue;
            }
            let found = {
                let mut state = self.state.lock();
                let found = state.collect(events, false);
                if found > 0 && !state.is_kernel_due() {
                    return Ok(found);
                }
                found
            };
            // The kernel has a word for other descriptors, and of wakes.
            if found < events.len() {
                let n = native(&mut events[found..], Some(Duration::ZERO))?;
                let told = self.translate(&mut events[found..found + n]);
                if found + told > 0 {
                    return Ok(found + told);
                }
                if n > 0 {
                    continue;
                }
            } else {
                return Ok(found);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.or(timeout) == Some(Duration::ZERO) {
                return Ok(0);
            }
            if std::mem::take(&mut may_look) && self.looks_pay() {
                let mut kernel = 0;
                let found = wait::spin_between(
                    || self.state.lock().collect(&mut [], true) > 0,
                    || {
                        kernel = native(events, Some(Duration::ZERO)).unwrap_or(0);
                        kernel > 0
                    },
                );
                // What the kernel had says nothing of the rings.
                if kernel == 0 {
                    self.learn(found);
                }
                if kernel > 0 {
                    let told = self.translate(&mut events[..kernel]);
                    if told > 0 {
                        return Ok(told);
                    }
                }
                if found {
                    continue;
                }
            }
            let can_be_woken = {
                let mut state = self.state.lock();
                let can_be_woken = state.arm();
                if state.collect(&mut [], true) > 0 {
                    continue;
                }
                if can_be_woken {
                    state.cool();
                }
                self.sleeping.fetch_add(1, Ordering::Relaxed);
                can_be_woken
            };
            let left = match (left.or(timeout), can_be_woken) {
                (left, true) => left,
                (left, false) => Some(left.map_or(STEP, |left| left.min(STEP))),
            };
            let slept = native(events, left);
            self.sleeping.fetch_sub(1, Ordering::Relaxed);
            let n = slept?;
            let told = self.translate(&mut events[..n]);
            if told > 0 {
                return Ok(told);
            }
            may_look = n > 0;
            if n == 0 && deadline.is_some_and(|at| Instant::now() >= at) {
                return Ok(self.state.lock().collect(events, false));
            }
        }
    }

    fn looks_pay(&self) -> bool {
        let mut state = self.state.lock();
        if !wait::may_look() || state.hot.is_empty() {
            return false;
        }
        state.failures += u32::from(state.failures >= 2);
        state.failures < 2 || state.failures.is_multiple_of(32)
    }

    fn learn(&self, found: bool) {
        let mut state = self.state.lock();
        state.failures = if found { 0 } else { state.failures.saturating_add(1) };
    }

    /// Takes our own events out of what the kernel has told, and takes what they say. Returns how many are left for the program.
    fn translate(&self, events: &mut [epoll_event]) -> usize {
        let mut kept = 0;
        for i in 0..events.len() {
            let event = events[i];
            match descriptor(event.u64) {
                None => {
                    events[kept] = event;
                    kept += 1;
                }
                Some(fd) => self.woken(fd),
            }
        }
        kept
    }

    /// The kernel's socket has something: a wake byte, bytes of the program's, or the end.
    fn woken(&self, fd: c_int) {
        let _errno = Kept::new();
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd) else { return };
        watch.edge = true;
        let socket = watch.socket;
        if socket.receiving.carrier() == Carrier::Ring && socket.end() == End::None {
            kernel::drain(socket, fd);
        }
        state.heat(fd);
    }
}

impl State {
    /// This socket's ring is looked at from now on.
    fn heat(&mut self, fd: c_int) {
        if let Some(watch) = self.watches.get_mut(&fd)
            && !std::mem::replace(&mut watch.is_hot, true)
        {
            self.hot.push(fd);
        }
    }

    /// All are armed: none needs to be looked at.
    fn cool(&mut self) {
        for fd in self.hot.drain(..) {
            if let Some(watch) = self.watches.get_mut(&fd) {
                watch.is_hot = false;
            }
        }
    }

    /// Makes the peers of the hot ones wake this side. True if all of them can.
    fn arm(&mut self) -> bool {
        let mut all = true;
        for fd in &self.hot {
            let Some(watch) = self.watches.get(fd) else { continue };
            if watch.is_spent {
                continue;
            }
            let interest = watch.events as c_short;
            poll::arm(watch.socket, interest);
            // Who waits for room only when there is none needs no waking now.
            all &= poll::can_be_woken(watch.socket, interest);
        }
        all
    }

    fn is_kernel_due(&mut self) -> bool {
        self.calls += 1;
        let now = Instant::now();
        if self.calls < CALLS && self.asked.is_some_and(|at| now - at < INTERVAL) {
            return false;
        }
        (self.calls, self.asked) = (0, Some(now));
        true
    }

    /// What the hot ones have for the program, in `events`; with `only_look`, how many have something, up to one, and nothing is
    /// told.
    fn collect(&mut self, events: &mut [epoll_event], only_look: bool) -> usize {
        let mut n = 0;
        let mut i = 0;
        while i < self.hot.len() && (only_look || n < events.len()) {
            let fd = self.hot[i];
            i += 1;
            let Some(watch) = self.watches.get_mut(&fd) else { continue };
            let ready = watch.ready(fd, only_look);
            if ready == 0 {
                continue;
            }
            if only_look {
                return 1;
            }
            events[n] = epoll_event { events: ready, u64: watch.data };
            n += 1;
            if watch.events & libc::EPOLLONESHOT as u32 != 0 {
                watch.is_spent = true;
            }
        }
        // Whoever was told now comes last the next time.
        if n > 0 && i < self.hot.len() {
            self.hot.rotate_left(i);
        }
        n
    }
}

impl Watch {
    /// What is to be told of it.
    fn ready(&mut self, fd: c_int, only_look: bool) -> u32 {
        if self.is_spent {
            return 0;
        }
        let ready = poll::readiness(self.socket, fd, self.events as c_short) as u16 as u32;
        if ready == 0 || self.events & libc::EPOLLET as u32 == 0 {
            return ready;
        }
        let position = receive::position(self.socket);
        let news = self.edge || position != self.seen || send::has_room_again(self.socket, only_look);
        if !news {
            return 0;
        }
        if !only_look {
            (self.edge, self.seen) = (false, position);
        }
        ready
    }
}

/// Whether a direction is not the kernel's alone.
fn has_changed(socket: &'static Socket) -> bool {
    socket.sending.carrier() == Carrier::Ring
        || matches!(socket.receiving.carrier(), Carrier::Counted | Carrier::Ring)
}

/// A direction of the socket has changed over: all instances that watch it tell its events from now on.
pub fn changed(socket: &'static Socket) {
    socket.watchers.each(|instance, fd| instance.take_over(instance.fd.load(Ordering::Relaxed), fd));
}

/// In the kernel, our events and data instead of the program's. The kernel tells at once, because the socket can be written: so a thread
/// that sleeps in the instance looks.
fn register(epoll: c_int, fd: c_int) {
    let _errno = Kept::new();
    let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    let mut event = epoll_event { events: events as u32, u64: cookie() | fd as u64 };
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: one event.
    let _ = unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_MOD, fd, &raw mut event) };
}

/// The bits that tell our registrations from the program's: a number that no program uses.
fn cookie() -> u64 {
    static COOKIE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *COOKIE.get_or_init(|| {
        let mut bytes = [0u8; 8];
        #[expect(unsafe_code, reason = "getrandom")]
        // SAFETY: room for as many bytes.
        let _ = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
        (u64::from_ne_bytes(bytes) | 1 << 63) >> FD_BITS << FD_BITS
    })
}

/// The descriptor of one of our registrations.
fn descriptor(data: u64) -> Option<c_int> {
    (data >> FD_BITS == cookie() >> FD_BITS).then_some((data & ((1 << FD_BITS) - 1)) as c_int)
}

/// The instances that watch a socket.
pub struct Watchers(Lock<Vec<(&'static Instance, c_int)>>, AtomicU32);

impl Watchers {
    pub const fn new() -> Self {
        Self(Lock::new(Vec::new()), AtomicU32::new(0))
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.1.load(Ordering::Relaxed) == 0
    }

    fn add(&self, instance: &'static Instance, fd: c_int) {
        let mut list = self.0.lock();
        list.push((instance, fd));
        self.1.store(list.len() as u32, Ordering::Relaxed);
    }

    fn remove(&self, instance: &Instance, fd: c_int) {
        let mut list = self.0.lock();
        list.retain(|(other, of)| !std::ptr::eq(*other, instance) || *of != fd);
        self.1.store(list.len() as u32, Ordering::Relaxed);
    }

    fn each(&self, mut work: impl FnMut(&'static Instance, c_int)) {
        let list: Vec<_> = self.0.lock().clone();
        list.into_iter().for_each(|(instance, fd)| work(instance, fd));
    }

    /// The socket ends: the kernel takes it out of its instances.
    pub fn close(&self, _socket: &'static Socket) {
        self.each(|instance, fd| instance.remove(fd));
        self.clear();
    }

    /// As new.
    pub fn clear(&self) {
        self.0.lock().clear();
        self.1.store(0, Ordering::Relaxed);
    }
}

/// The kernel's call.
pub fn native(
    epoll: c_int,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<usize> {
    let milliseconds =
        timeout.map_or(-1, |timeout| timeout.as_nanos().div_ceil(1_000_000).min(c_int::MAX as u128) as c_int);
    let count = c_int::try_from(events.len().min(1 << 20)).unwrap_or(EVENTS as c_int);
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: room for as many events; the mask is the program's, or none.
    let n = unsafe {
        if mask.is_null() {
            real::epoll_wait(epoll, events.as_mut_ptr(), count, milliseconds)
        } else {
            real::epoll_pwait(epoll, events.as_mut_ptr(), count, milliseconds, mask)
        }
    };
    check(n as isize).map_err(|errno: Errno| errno)
}
