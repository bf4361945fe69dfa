//! `epoll`.
//!
//! A socket that the kernel no longer carries alone stays in the program's epoll instance, but this library replaces its
//! registration there: it asks for edge-triggered events about the bytes and the end of the kernel's connection, with data of its
//! own. So a wake byte from the peer, or the peer's end, wakes exactly that instance. This module keeps the events and data that
//! the program asked for. The sockets that were busy last are *hot*: `epoll_wait` looks at their rings. All others are armed, and
//! cost nothing until the peer wakes this side. A socket stays hot until the looks that have found nothing cost about as much as
//! one wake-up. However the load is spread over sockets, looks and wake-ups together therefore cost at most twice as much as the
//! better of the two would.
//!
//! `EPOLL_CTL_DEL` leaves the kernel's registration in place, and `EPOLL_CTL_ADD` finds it there: a program that waits for input
//! and for output in turns makes no system call for that.

mod edge;

use crate::direction::Carrier;
use crate::doorbell::{self, Wake};
use crate::errno::{self, Errno, Kept, Result, check};
use crate::lock::{Guard, Lock};
use crate::poll::{self, Armed};
use crate::socket::{End, Socket};
use crate::table::{EPOLLS, SOCKETS};
use crate::wait::Limit;
use crate::{cancel, real, receive, send, wait, wakes};
use edge::Edge;
use libc::{c_int, c_short, epoll_event};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The number of calls that have found something in rings after which the kernel is asked too.
const CALLS: u32 = 64;
/// The time after which the kernel is asked too, even if there were fewer calls.
const INTERVAL: Duration = Duration::from_micros(50);
/// How often a waiting thread looks again if some peer cannot wake it.
const STEP: Duration = Duration::from_millis(1);
/// The number of looks without a result after which a socket stops being hot: they have cost about as much as a wake-up.
const LOOKS: u32 = 64;
/// The number of events that the kernel is asked for at a time.
const EVENTS: usize = 64;

/// The number of bits in the data of this library's registrations that hold the descriptor.
const FD_BITS: u32 = 21;
/// The descriptor bits in the registration of a doorbell. No socket in the table has a descriptor with this number.
const RUNG: u64 = (1 << FD_BITS) - 1;

/// A bit of [`Instance::sleeping`]. It is set once a thread waits for the instance in `poll` or in another epoll instance. Such a
/// thread does not report when it is awake again, so from then on the instance always counts as having a sleeper.
const WATCHED: u32 = 1 << 31;

/// An epoll instance.
pub struct Instance {
    /// The number of descriptors of this process that refer to the instance.
    pub fds: AtomicU32,
    fd: AtomicI32,
    /// The number of the program's calls that are using this instance.
    calls: AtomicU32,
    /// The number of its sockets that the kernel does not carry alone.
    joined: AtomicU32,
    /// The number of threads that sleep in the kernel, or are about to, and the [`WATCHED`] bit.
    sleeping: AtomicU32,
    /// The number of threads that sleep in the kernel, or are about to, without having looked at any socket.
    unaware: AtomicU32,
    /// True if it contains, or has contained, sockets whose gets this process answers or may answer.
    is_served: AtomicBool,
    state: Lock<State>,
}

struct State {
    /// The TCP sockets in it, by descriptor.
    watches: HashMap<c_int, Watch, BuildHasherDefault<Spread>>,
    /// The descriptors of the hot sockets, whose rings are looked at.
    hot: Vec<c_int>,
    /// The descriptors of the sockets for which their caches have queued something.
    answered: Vec<c_int>,
    /// The number of calls since the kernel was asked last.
    calls: u32,
    asked: Option<Instant>,
    /// True if the kernel is to be asked before any ring, because the last call had no room left for the kernel's events.
    is_kernel_first: bool,
    /// How often a thread that had looked at the sockets first has gone to sleep.
    sleeps: u32,
    /// The number of consecutive spins that have found nothing.
    failures: u32,
    /// The number of calls that have collected events for the program.
    told: u64,
    /// The doorbells registered in it.
    bells: doorbell::Events,
}

struct Watch {
    socket: &'static Socket,
    /// The value of `Socket::life` when the program added the socket. The socket's memory may belong to another socket later.
    life: u64,
    /// True if the program has removed the socket while the kernel's registration stays in place.
    is_absent: bool,
    /// The events that the program has asked for, and its data.
    events: u32,
    data: u64,
    is_joined: bool,
    /// True once an EPOLLONESHOT event has been reported.
    is_spent: bool,
    /// For edge-triggered events: what was reported.
    edge: Edge<Progress>,
    is_hot: bool,
    /// The number of consecutive looks that have found nothing while the socket was hot.
    misses: u32,
    /// How the peer has been asked to wake this instance.
    armed: Armed,
    /// The value of `State::told` at the call that last reported this socket to the program.
    told: u64,
}

/// How far everything at a socket has come of which a program with edge-triggered events is told.
#[derive(PartialEq)]
struct Progress {
    /// What has come in the rings.
    rings: receive::Progress,
    /// The carrier of the receiving direction. Bytes that TCP carries after a return may have arrived, and woken this side, while the
    /// ring still carried the direction.
    carrier: Carrier,
    /// The number of calls that have found no room, as long as there is room again after them.
    without_room: u32,
}

impl Progress {
    const NONE: Self = Self {
        rings: receive::Progress { position: 0, is_ending: false, is_left: false },
        carrier: Carrier::Kernel,
        without_room: 0,
    };

    fn of(socket: &'static Socket, seen: &Self) -> Self {
        Self {
            rings: receive::progress(socket),
            carrier: socket.receiving.carrier(),
            without_room: send::room_again(socket, seen.without_room),
        }
    }
}

impl crate::table::Entry for Instance {
    fn calls(&self) -> &AtomicU32 {
        &self.calls
    }
}

impl Instance {
    pub fn new() -> Self {
        let state = State {
            watches: HashMap::default(),
            hot: Vec::new(),
            answered: Vec::new(),
            calls: 0,
            asked: None,
            is_kernel_first: false,
            sleeps: 0,
            failures: 0,
            told: 0,
            bells: doorbell::Events::new(),
        };
        Self {
            fds: AtomicU32::new(0),
            fd: AtomicI32::new(-1),
            calls: AtomicU32::new(0),
            joined: AtomicU32::new(0),
            sleeping: AtomicU32::new(0),
            unaware: AtomicU32::new(0),
            is_served: AtomicBool::new(false),
            state: Lock::new(state),
        }
    }

    /// Resets the instance for another descriptor.
    pub fn begin(&self, fd: c_int) {
        self.fd.store(fd, Ordering::Relaxed);
        self.sleeping.store(0, Ordering::Relaxed);
        self.unaware.store(0, Ordering::Relaxed);
        self.is_served.store(false, Ordering::Relaxed);
        self.fds.store(1, Ordering::Relaxed);
    }

    /// Clears the instance when its last descriptor is closed.
    pub fn close(&'static self) {
        let mut state = self.state.lock();
        for (fd, mut watch) in state.watches.drain() {
            watch.rise();
            watch.socket.watchers.remove(self, fd);
        }
        state.hot.clear();
        state.answered.clear();
        doorbell::unwatch(&mut state.bells);
        self.joined.store(0, Ordering::Relaxed);
    }

    /// Returns whether it contains sockets that the kernel does not carry alone.
    #[inline]
    pub fn has_joined(&self) -> bool {
        self.joined.load(Ordering::Acquire) > 0 || self.is_served()
    }

    /// Returns whether a cache may answer for sockets in it.
    fn is_served(&self) -> bool {
        // ORDER epoll.served: see `Instance::sleep_unaware`.
        self.is_served.load(Ordering::SeqCst)
    }

    /// Records that a cache may answer for a socket in it from now on.
    fn serve(&self) {
        let _state = self.state.lock();
        // ORDER epoll.served: either a thread that is about to sleep sees the flag, or the thread that offers an answer sees the
        // sleeper, because both write before they read and all four accesses are sequentially consistent. Pairs with:
        // `Instance::sleep_unaware`, `Instance::is_polled`, `Instance::offer`.
        self.is_served.store(true, Ordering::SeqCst);
    }

    /// Notes that something has been queued for a socket. Returns false if a thread that waits for the socket here would not
    /// notice.
    fn offer(&self, fd: c_int, socket: &'static Socket) -> bool {
        let mut state = self.state.lock();
        // ORDER epoll.served: see `Instance::serve`.
        if self.sleeping.load(Ordering::SeqCst) > 0 || self.unaware.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let Some(watch) = state.watches.get_mut(&fd).filter(|watch| watch.is_of(socket)) else { return true };
        // Such an event must be reported only once. The kernel and this library can both report it, and neither knows what the
        // other has reported.
        if watch.events & (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32 != 0 {
            return false;
        }
        watch.edge.set_due();
        if !state.answered.contains(&fd) {
            state.answered.push(fd);
        }
        true
    }

    /// Checks from time to time whether such sockets still exist. Without them, a call that waits makes one system call less.
    fn forget_served(&self, state: &mut State) {
        state.sleeps = state.sleeps.wrapping_add(1);
        if state.sleeps.is_multiple_of(CALLS)
            && self.is_served()
            && !state.watches.values().any(|watch| watch.socket.cache.is_there())
        {
            self.is_served.store(false, Ordering::SeqCst);
        }
    }

    /// Sleeps in the kernel without looking at any socket. Returns `None` if there is a socket to look at.
    fn sleep_unaware<R>(&self, sleep: impl FnOnce() -> R) -> Option<R> {
        /// Counts the thread as a sleeper until it is awake, even if it is cancelled.
        struct Unaware<'a>(&'a AtomicU32);
        impl Drop for Unaware<'_> {
            fn drop(&mut self) {
                let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            }
        }
        // ORDER epoll.served: see `Instance::serve`.
        self.unaware.fetch_add(1, Ordering::SeqCst);
        let _unaware = Unaware(&self.unaware);
        if self.is_served() { None } else { Some(sleep()) }
    }

    /// Returns whether something that the program waits for is ready.
    pub fn is_ready(&self) -> bool {
        self.has_joined() && self.state.lock().collect(&mut [], true) > 0
    }

    /// Makes all peers wake this side, because the caller is about to wait in `poll`.
    pub fn arm(&self) {
        if self.has_joined() {
            self.sleeping.fetch_or(WATCHED, Ordering::Relaxed);
            self.state.lock().arm(self.fd.load(Ordering::Relaxed));
        }
    }

    /// Notes that a thread is about to wait for this instance with `poll`. Returns whether it contains sockets that the kernel does
    /// not carry alone. If it does not, the thread sleeps in the kernel, and would not notice anything that is queued meanwhile.
    pub fn is_polled(&self) -> bool {
        // ORDER epoll.served: see `Instance::serve`.
        self.sleeping.fetch_or(WATCHED, Ordering::SeqCst);
        self.has_joined()
    }

    /// Notes that another instance watches this one. A thread that waits there sleeps in the kernel, and knows nothing of rings.
    fn is_watched(&self) {
        self.sleeping.fetch_or(WATCHED, Ordering::Relaxed);
        self.hand_over(self.fd.load(Ordering::Relaxed), self.state.lock());
    }

    /// Handles `epoll_ctl`. `native` makes that system call.
    pub fn control(
        &'static self,
        epoll: c_int,
        operation: c_int,
        fd: c_int,
        event: Option<epoll_event>,
        native: impl FnOnce() -> c_int,
    ) -> c_int {
        let Some(socket) = SOCKETS.get(fd) else {
            let result = native();
            if result == 0
                && operation == libc::EPOLL_CTL_ADD
                && let Some(inner) = EPOLLS.get(fd)
            {
                inner.is_watched();
            }
            return result;
        };
        match (operation, event) {
            (libc::EPOLL_CTL_ADD, Some(event)) => {
                if self.add_again(epoll, fd, socket, event) {
                    return 0;
                }
                self.take_out_entirely(epoll, fd, socket);
                let result = native();
                if result == 0 {
                    self.add(epoll, fd, socket, event);
                }
                result
            }
            (libc::EPOLL_CTL_MOD, Some(event)) => self.modify(epoll, fd, event, native),
            (libc::EPOLL_CTL_DEL, _) => match self.take_out(fd, socket) {
                Taken::Out => 0,
                Taken::OutBefore => errno::fail(libc::ENOENT),
                Taken::Not => {
                    let result = native();
                    self.remove(fd, None);
                    socket.watchers.remove(self, fd);
                    result
                }
            },
            _ => native(),
        }
    }

    fn add(&'static self, epoll: c_int, fd: c_int, socket: &'static Socket, event: epoll_event) {
        let watch = Watch {
            socket,
            life: socket.life.load(Ordering::Relaxed),
            is_absent: false,
            events: event.events,
            data: event.u64,
            is_joined: false,
            is_spent: false,
            edge: Edge::new(Progress::NONE),
            is_hot: false,
            misses: 0,
            armed: Armed::default(),
            told: 0,
        };
        {
            let mut state = self.state.lock();
            if let Some(before) = state.watches.insert(fd, watch) {
                self.removed(&mut state, fd, before);
            }
        }
        socket.watchers.add(self, fd);
        if socket.cache.is_there() {
            self.serve();
            self.state.lock().note_answers(fd);
        }
        if socket.is_joined() && has_changed(socket) {
            self.take_over(epoll, fd, socket);
        }
    }

    /// Adds a socket again if the kernel still has its registration. Returns false if it has none.
    fn add_again(
        &'static self,
        epoll: c_int,
        fd: c_int,
        socket: &'static Socket,
        event: epoll_event,
    ) -> bool {
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd) else { return false };
        let is_it = watch.is_absent && watch.is_of(socket) && event.events & libc::EPOLLEXCLUSIVE as u32 == 0;
        if !is_it {
            return false;
        }
        watch.is_absent = false;
        socket.watchers.set_active(self, fd, true);
        self.set(epoll, state, fd, event);
        true
    }

    /// Removes the kernel's registration of a socket that the program has removed.
    fn take_out_entirely(&'static self, epoll: c_int, fd: c_int, socket: &'static Socket) {
        let is_absent = |watch: &Watch| watch.is_absent && watch.is_of(socket);
        if self.state.lock().watches.get(&fd).is_some_and(is_absent) {
            #[expect(unsafe_code, reason = "a call of the kernel")]
            // SAFETY: the operation takes no event.
            unsafe {
                real::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut())
            };
            self.remove(fd, Some(socket));
            socket.watchers.remove(self, fd);
        }
    }

    /// Stores what the program wants to know about a socket whose registration in the kernel is this library's.
    fn set(&self, epoll: c_int, mut state: Guard<'_, State>, fd: c_int, event: epoll_event) {
        let Some(watch) = state.watches.get_mut(&fd) else { return };
        watch.ask(event);
        watch.rise();
        state.heat(fd);
        // The count is read under the lock, because a thread that is about to sleep also looks at the sockets under it.
        let somebody_sleeps = self.sleeping.load(Ordering::Relaxed) > 0;
        drop(state);
        if somebody_sleeps {
            register(epoll, fd);
        }
    }

    /// Handles the program's removal of a socket.
    fn take_out(&'static self, fd: c_int, socket: &'static Socket) -> Taken {
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd).filter(|watch| watch.is_joined && watch.is_of(socket))
        else {
            return Taken::Not;
        };
        if std::mem::replace(&mut watch.is_absent, true) {
            return Taken::OutBefore;
        }
        // The socket leaves the hot list later, like a socket that has nothing.
        watch.rise();
        socket.watchers.set_active(self, fd, false);
        Taken::Out
    }

    fn modify(&self, epoll: c_int, fd: c_int, event: epoll_event, native: impl FnOnce() -> c_int) -> c_int {
        let mut state = self.state.lock();
        match state.watches.get_mut(&fd) {
            None => {
                drop(state);
                native()
            }
            Some(watch) if !watch.is_joined => {
                watch.ask(event);
                state.note_answers(fd);
                native()
            }
            Some(watch) if watch.is_absent => errno::fail(libc::ENOENT),
            Some(watch) if (watch.events | event.events) & libc::EPOLLEXCLUSIVE as u32 != 0 => {
                errno::fail(libc::EINVAL)
            }
            Some(_) => {
                self.set(epoll, state, fd, event);
                0
            }
        }
    }

    /// Forgets a descriptor. If a socket is given, forgets the descriptor only if it refers to that socket.
    fn remove(&self, fd: c_int, socket: Option<&'static Socket>) {
        let mut state = self.state.lock();
        let is_it =
            state.watches.get(&fd).is_some_and(|watch| socket.is_none_or(|socket| watch.is_of(socket)));
        if is_it && let Some(watch) = state.watches.remove(&fd) {
            self.removed(&mut state, fd, watch);
        }
    }

    /// Finishes the removal of a descriptor that is no longer in the table.
    fn removed(&self, state: &mut State, fd: c_int, mut watch: Watch) {
        watch.rise();
        state.hot.retain(|other| *other != fd);
        if watch.is_joined {
            self.joined.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Reports this socket's events from here on, because the kernel no longer carries it alone.
    fn take_over(&self, epoll: c_int, fd: c_int, socket: &'static Socket) {
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd).filter(|watch| watch.is_of(socket)) else { return };
        if !watch.is_joined {
            watch.is_joined = true;
            self.joined.fetch_add(1, Ordering::AcqRel);
        }
        watch.edge.set_due();
        if watch.is_absent {
            return;
        }
        state.heat(fd);
        drop(state);
        register(epoll, fd);
    }

    /// Behaves as `epoll_wait`. `native` makes that system call with the given room for events and the given timeout.
    pub fn wait(
        &self,
        epoll: c_int,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mut native: impl FnMut(&mut [epoll_event], Option<Duration>) -> Result<usize>,
    ) -> Result<usize> {
        cancel::point();
        let mut limit = Limit::new(timeout);
        let mut may_look = true;
        loop {
            if !self.has_joined() {
                let left = limit.left();
                let Some(n) = self.sleep_unaware(|| native(events, left)) else { continue };
                let n = n?;
                // A socket may have changed over while this thread slept.
                let told = self.translate(&mut events[..n]);
                if told > 0 || n == 0 {
                    return Ok(told);
                }
                continue;
            }
            let (found, is_kernel_first) = {
                let mut state = self.state.lock();
                let is_kernel_first = std::mem::take(&mut state.is_kernel_first);
                let found = if is_kernel_first { 0 } else { state.collect(events, false) };
                if found > 0 && !state.is_kernel_due() {
                    self.hand_over(epoll, state);
                    return Ok(found);
                }
                (found, is_kernel_first)
            };
            // The kernel may have events for other descriptors, and wake-ups.
            if found < events.len() {
                let n = native(&mut events[found..], Some(Duration::ZERO))?;
                let mut told = self.translate(&mut events[found..found + n]);
                if found > 0 && self.is_served() {
                    told = merge(events, found, told);
                }
                if found + told > 0 {
                    self.hand_over(epoll, self.state.lock());
                    return Ok(found + told);
                }
                if n > 0 || is_kernel_first {
                    continue;
                }
            } else {
                let mut state = self.state.lock();
                state.is_kernel_first = true;
                self.hand_over(epoll, state);
                return Ok(found);
            }
            let mut left = limit.left();
            if left == Some(Duration::ZERO) {
                self.hand_over(epoll, self.state.lock());
                return Ok(0);
            }
            if std::mem::take(&mut may_look) && self.looks_pay() {
                let mut kernel = Ok(0);
                let found = wait::spin_between(
                    || self.state.lock().collect(&mut [], true) > 0,
                    || {
                        kernel = native(events, Some(Duration::ZERO));
                        kernel != Ok(0)
                    },
                );
                let kernel = kernel?;
                // Events from the kernel say nothing about whether looking at rings pays.
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
                left = limit.left();
            }
            let can_be_woken = {
                let mut state = self.state.lock();
                // The program may not ask at present for what is queued. If another thread asks for it later, the kernel does not
                // wake this one, so this thread must look again by itself.
                let can_be_woken = state.arm(epoll) && !state.has_answers();
                if state.collect(&mut [], true) > 0 {
                    self.rise(&mut state);
                    continue;
                }
                self.forget_served(&mut state);
                self.sleeping.fetch_add(1, Ordering::Relaxed);
                can_be_woken
            };
            let sleeping = Sleeping(self);
            let left = match (left, can_be_woken) {
                (left, true) => left,
                (left, false) => Some(left.map_or(STEP, |left| left.min(STEP))),
            };
            let slept = native(events, left);
            drop(sleeping);
            let n = slept?;
            let told = self.translate(&mut events[..n]);
            if told > 0 {
                self.hand_over(epoll, self.state.lock());
                return Ok(told);
            }
            may_look = n > 0;
            if n == 0 && limit.left() == Some(Duration::ZERO) {
                let found = self.state.lock().collect(events, false);
                self.hand_over(epoll, self.state.lock());
                return Ok(found);
            }
        }
    }

    /// Handles the wake-up of a thread. If no other thread sleeps, peers need not wake this side for hot sockets.
    fn rise(&self, state: &mut State) {
        if self.sleeping.load(Ordering::Relaxed) == 0 {
            state.rise();
        }
    }

    /// Prepares the return of a thread to the program. Other threads that sleep have to be woken for later events, and for those
    /// that the returning thread did not report.
    fn hand_over(&self, epoll: c_int, mut state: Guard<'_, State>) {
        if self.sleeping.load(Ordering::Relaxed) == 0 {
            return;
        }
        state.arm(epoll);
        let untold = state.untold();
        drop(state);
        if let Some(fd) = untold {
            register(epoll, fd);
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

    /// Removes this library's own events from those that the kernel has reported, and handles them. Returns how many events are
    /// left for the program.
    fn translate(&self, events: &mut [epoll_event]) -> usize {
        let mut kept = 0;
        for i in 0..events.len() {
            let event = events[i];
            match descriptor(event.u64) {
                None => {
                    events[kept] = event;
                    kept += 1;
                }
                // A doorbell has rung. The caller looks at the hot sockets next.
                Some(fd) if fd as u64 == RUNG => {}
                Some(fd) => self.woken(fd, { event.events } & libc::EPOLLOUT as u32 != 0),
            }
        }
        kept
    }

    /// Handles an event of the kernel's socket: a wake byte, bytes of the program, or the connection's end. `has_room` says whether the
    /// kernel has room.
    fn woken(&self, fd: c_int, has_room: bool) {
        let _errno = Kept::new();
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd) else { return };
        let socket = watch.socket;
        let carriers = (socket.sending.carrier(), socket.receiving.carrier());
        wakes::take_knowing(socket, fd, has_room);
        // A wake byte alone is no new edge: what has arrived is in the ring. The conditions cover all other events.
        if carriers != (Carrier::Ring, Carrier::Ring)
            || socket.end() != End::None
            || !socket.stash.lock().is_empty()
        {
            watch.edge.set_due();
        }
        if !watch.is_absent {
            state.heat(fd);
        }
    }
}

/// A thread that sleeps in the kernel, until it is awake or cancelled.
struct Sleeping<'a>(&'a Instance);

impl Drop for Sleeping<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        self.0.sleeping.fetch_sub(1, Ordering::Relaxed);
        self.0.rise(&mut state);
    }
}

/// The outcome of the program's removal of a socket from an instance.
enum Taken {
    /// The socket is out now.
    Out,
    /// The socket was already out.
    OutBefore,
    /// The socket is still in: its registration is the program's own, or it has none.
    Not,
}

impl State {
    /// Makes this socket hot: its ring is looked at from now on.
    fn heat(&mut self, fd: c_int) {
        if let Some(watch) = self.watches.get_mut(&fd) {
            watch.misses = 0;
            if !std::mem::replace(&mut watch.is_hot, true) {
                watch.rise();
                self.hot.push(fd);
            }
        }
    }

    /// Makes the peers of the hot sockets wake this side. Returns true if all of them can.
    fn arm(&mut self, epoll: c_int) -> bool {
        let mut all = true;
        for fd in &self.hot {
            if let Some(watch) = self.watches.get_mut(fd).filter(|watch| !watch.is_silent()) {
                let how = doorbell::watch(&mut self.bells, epoll, watch.socket, cookie() | RUNG);
                all &= watch.arm(how);
            }
        }
        all
    }

    /// Tells the peers of the hot sockets that they need not wake this side any more.
    fn rise(&mut self) {
        for fd in &self.hot {
            if let Some(watch) = self.watches.get_mut(fd) {
                watch.rise();
            }
        }
    }

    /// Returns a hot socket that has something which the last call has not reported.
    fn untold(&mut self) -> Option<c_int> {
        let (watches, told) = (&mut self.watches, self.told);
        self.hot.iter().copied().find(|fd| {
            watches.get_mut(fd).is_some_and(|watch| watch.told != told && watch.ready(*fd, true) != 0)
        })
    }

    /// Notes a socket if its cache has queued something that must be reported from here.
    fn note_answers(&mut self, fd: c_int) {
        let has_some = self.watches.get(&fd).is_some_and(|watch| watch.socket.cache.has_answers());
        if has_some && !self.answered.contains(&fd) {
            self.answered.push(fd);
        }
    }

    /// Returns whether something is queued.
    fn has_answers(&mut self) -> bool {
        let watches = &self.watches;
        self.answered.retain(|fd| watches.get(fd).is_some_and(|watch| watch.socket.cache.has_answers()));
        !self.answered.is_empty()
    }

    /// Collects what the caches of sockets have queued for the program. The arguments and the result are those of `collect`.
    fn collect_answered(&mut self, events: &mut [epoll_event], only_look: bool) -> usize {
        let mut n = 0;
        if !self.has_answers() {
            return 0;
        }
        for fd in &self.answered {
            let Some(watch) = self.watches.get_mut(fd) else { continue };
            let ready = watch.events & (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
            let is_news = watch.edge.is_due() || watch.events & libc::EPOLLET as u32 == 0;
            if ready == 0 || !is_news || watch.is_silent() {
                continue;
            }
            if only_look {
                return 1;
            }
            let Some(event) = events.get_mut(n) else { break };
            *event = epoll_event { events: ready, u64: watch.data };
            watch.edge.clear();
            watch.is_spent = watch.events & libc::EPOLLONESHOT as u32 != 0;
            if watch.events & libc::EPOLLOUT as u32 != 0 {
                // The kernel is asked next, so that its event for the same socket is reported together with this one.
                self.calls = CALLS;
            }
            n += 1;
        }
        // Sockets that were reported now come last the next time.
        if n > 0 && n < self.answered.len() {
            self.answered.rotate_left(n);
        }
        n
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

    /// Writes the events of the hot sockets to `events`, and returns how many it wrote. With `only_look`, writes and reports
    /// nothing, and returns 1 if any socket has something, else 0.
    fn collect(&mut self, events: &mut [epoll_event], only_look: bool) -> usize {
        let mut n = if self.answered.is_empty() { 0 } else { self.collect_answered(events, only_look) };
        if only_look && n > 0 {
            return n;
        }
        let mut i = 0;
        self.told += u64::from(!only_look);
        while i < self.hot.len() && (only_look || n < events.len()) {
            let fd = self.hot[i];
            i += 1;
            let Some(watch) = self.watches.get_mut(&fd) else { continue };
            let ready = watch.ready(fd, only_look);
            if only_look {
                if ready != 0 {
                    return 1;
                }
                continue;
            }
            if ready == 0 {
                watch.misses += 1;
                if watch.misses >= LOOKS && watch.rests(fd) {
                    i -= 1;
                    self.hot.swap_remove(i);
                }
                continue;
            }
            watch.misses = 0;
            watch.told = self.told;
            events[n] = epoll_event { events: ready, u64: watch.data };
            n += 1;
            if watch.events & libc::EPOLLONESHOT as u32 != 0 {
                watch.is_spent = true;
            }
        }
        // Sockets that were reported now come last the next time.
        if n > 0 && i < self.hot.len() {
            self.hot.rotate_left(i);
        }
        n
    }
}

impl Watch {
    /// Returns whether the watch is for this socket, and not for an earlier one with the same memory.
    fn is_of(&self, socket: &'static Socket) -> bool {
        std::ptr::eq(self.socket, socket) && self.life == socket.life.load(Ordering::Relaxed)
    }

    /// Returns whether no event of it is reported at present.
    fn is_silent(&self) -> bool {
        self.is_spent || self.is_absent
    }

    /// Makes the peer wake this side. Returns true if the peer can.
    fn arm(&mut self, how: Wake) -> bool {
        let interest = self.events as c_short;
        poll::arm_more(self.socket, interest, how, &mut self.armed);
        // A program that asks for room only when there is none needs no wake-up for room now.
        poll::can_be_woken(self.socket, interest)
    }

    /// Tells the peer that it need not wake this side any more.
    fn rise(&mut self) {
        if self.is_of(self.socket) {
            poll::rise(self.socket, &mut self.armed);
        }
    }

    /// Lets the peer wake this side instead of looking at the ring. Returns false if the peer cannot, or if something is ready.
    fn rests(&mut self, fd: c_int) -> bool {
        // A wake byte, unlike a doorbell, says which socket it is for.
        let rests = self.is_silent() || (self.arm(Wake::Byte) && self.ready(fd, true) == 0);
        if rests {
            self.is_hot = false;
        } else {
            self.rise();
        }
        rests
    }

    /// Stores what the program wants to know from now on.
    fn ask(&mut self, event: epoll_event) {
        (self.events, self.data, self.is_spent) = (event.events, event.u64, false);
        self.edge.set_due();
    }

    /// Returns the events to report.
    fn ready(&mut self, fd: c_int, only_look: bool) -> u32 {
        if self.is_silent() {
            return 0;
        }
        let (socket, interest) = (self.socket, self.events as c_short);
        let ready = || poll::readiness(socket, fd, interest) as u16 as u32;
        if self.events & libc::EPOLLET as u32 == 0 {
            return ready();
        }
        self.edge.news(only_look, |seen| Progress::of(socket, seen), ready)
    }
}

/// Merges events of the same descriptor, because the kernel may report one and the socket's cache another. `found` events come
/// first, and `told` events of the kernel follow them. Returns how many of the kernel's events are left.
fn merge(events: &mut [epoll_event], found: usize, told: usize) -> usize {
    let mut kept = 0;
    for i in found..found + told {
        let event = events[i];
        let same = events[..found].iter().position(|other| ({ other.u64 }) == { event.u64 });
        match same {
            Some(same) => events[same].events |= event.events,
            None => {
                events[found + kept] = event;
                kept += 1;
            }
        }
    }
    kept
}

/// Returns whether a direction is no longer the kernel's alone.
fn has_changed(socket: &'static Socket) -> bool {
    socket.sending.carrier() == Carrier::Ring
        || matches!(socket.receiving.carrier(), Carrier::Counted | Carrier::Ring)
}

/// Makes all instances that watch the socket report its events from here on, because one of its directions has changed over.
pub fn changed(socket: &'static Socket) {
    // A signal handler may be what calls this, so a list that is not long needs no memory.
    for (instance, fd) in socket.watchers.few() {
        instance.take_over(instance.fd.load(Ordering::Relaxed), fd, socket);
    }
}

/// Replaces the program's events and data in the kernel's registration by this library's. The kernel reports an event at once,
/// because the socket is writable, so a thread that sleeps in the instance looks at the rings.
fn register(epoll: c_int, fd: c_int) {
    let _errno = Kept::new();
    let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    let mut event = epoll_event { events: events as u32, u64: cookie() | fd as u64 };
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: `event` is one event, valid for the call.
    let mut set = |operation| unsafe { real::epoll_ctl(epoll, operation, fd, &raw mut event) };
    if set(libc::EPOLL_CTL_MOD) != 0 && Errno::last() == Errno(libc::EINVAL) {
        // A registration that was added with EPOLLEXCLUSIVE cannot be modified.
        set(libc::EPOLL_CTL_DEL);
        set(libc::EPOLL_CTL_ADD);
    }
}

/// Creates [`cookie`]. Runs when the library is loaded.
pub fn load() {
    cookie();
}

/// Returns the bits that tell this library's registrations from the program's: a random number that no program uses.
fn cookie() -> u64 {
    static COOKIE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *COOKIE.get_or_init(|| {
        let mut bytes = [0u8; 8];
        #[expect(unsafe_code, reason = "getrandom")]
        // SAFETY: `bytes` has room for that many bytes.
        let _ = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
        (u64::from_ne_bytes(bytes) | 1 << 63) >> FD_BITS << FD_BITS
    })
}

/// Returns the descriptor of one of this library's registrations, or `None` if the registration is the program's.
fn descriptor(data: u64) -> Option<c_int> {
    (data >> FD_BITS == cookie() >> FD_BITS).then_some((data & ((1 << FD_BITS) - 1)) as c_int)
}

/// A hasher that spreads descriptors over a hash table.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_i32(i32::from(*byte)));
    }
    fn write_i32(&mut self, fd: i32) {
        // A hash table takes the bucket from the low bits, and the tag from the high bits.
        self.0 = (self.0 ^ fd as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

/// The instances that watch a socket, each with the descriptor and whether the program has the socket in there.
pub struct Watchers(Lock<Vec<Watcher>>, AtomicU32);

struct Watcher {
    instance: &'static Instance,
    fd: c_int,
    is_active: bool,
}

impl Watcher {
    fn is(&self, instance: &Instance, fd: c_int) -> bool {
        std::ptr::eq(self.instance, instance) && self.fd == fd
    }
}

impl Watchers {
    pub const fn new() -> Self {
        Self(Lock::new(Vec::new()), AtomicU32::new(0))
    }

    /// Returns whether the program has the socket in no instance.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.1.load(Ordering::Relaxed) == 0
    }

    fn add(&self, instance: &'static Instance, fd: c_int) {
        self.update(|list| list.push(Watcher { instance, fd, is_active: true }));
    }

    fn remove(&self, instance: &Instance, fd: c_int) {
        self.update(|list| list.retain(|other| !other.is(instance, fd)));
    }

    fn set_active(&self, instance: &Instance, fd: c_int, is_active: bool) {
        self.update(|list| {
            list.iter_mut()
                .filter(|other| other.is(instance, fd))
                .for_each(|other| other.is_active = is_active);
        });
    }

    fn update(&self, work: impl FnOnce(&mut Vec<Watcher>)) {
        let mut list = self.0.lock();
        work(&mut list);
        self.1.store(list.iter().filter(|watcher| watcher.is_active).count() as u32, Ordering::Relaxed);
    }

    fn each(&self, mut work: impl FnMut(&'static Instance, c_int)) {
        let list: Vec<_> = self.0.lock().iter().map(|watcher| (watcher.instance, watcher.fd)).collect();
        list.into_iter().for_each(|(instance, fd)| work(instance, fd));
    }

    /// Records in all of them that a cache may answer for the socket from now on.
    pub fn serve(&self) {
        self.few().iter().for_each(|(instance, _)| instance.serve());
    }

    /// Notes that something has been queued for the socket. Returns false if a thread that waits for it would not notice.
    pub fn offer(&self, socket: &'static Socket) -> bool {
        self.few().iter().all(|(instance, fd)| instance.offer(*fd, socket))
    }

    /// Returns a copy of the list, which is rarely long. The copy is needed because instances take this list's lock while they hold
    /// their own.
    fn few(&self) -> SmallVec<[(&'static Instance, c_int); 4]> {
        self.0.lock().iter().map(|watcher| (watcher.instance, watcher.fd)).collect()
    }

    /// Forgets the socket when it ends, because the kernel removes it from its instances.
    pub fn close(&self, socket: &'static Socket) {
        if self.0.lock().is_empty() {
            return;
        }
        self.each(|instance, fd| instance.remove(fd, Some(socket)));
        self.clear();
    }

    /// Forgets all instances.
    pub fn clear(&self) {
        self.update(Vec::clear);
    }
}

/// Calls the kernel's `epoll_wait`, or `epoll_pwait` if there is a mask.
pub fn native(
    epoll: c_int,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<usize> {
    let milliseconds = wait::milliseconds(timeout);
    let count = c_int::try_from(events.len().min(1 << 20)).unwrap_or(EVENTS as c_int);
    // The caller may have collected events already, which must not get lost.
    if milliseconds == 0 && mask.is_null() {
        return check(cancel::epoll(epoll, &mut events[..count as usize]) as isize);
    }
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: `events` has room for `count` events; the mask is the program's, or null.
    let n = unsafe {
        if mask.is_null() {
            real::epoll_wait(epoll, events.as_mut_ptr(), count, milliseconds)
        } else {
            real::epoll_pwait(epoll, events.as_mut_ptr(), count, milliseconds, mask)
        }
    };
    check(n as isize).map_err(|errno: Errno| errno)
}
