//! The sockets of an instance: those whose rings are looked at, and what is reported of them.

use crate::epoll::registration;
use crate::epoll::registration::RUNG;
use crate::epoll::watch::Watch;
use crate::waiting::points;
use libc::{c_int, epoll_event};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

/// The number of calls that have found something in rings after which the kernel is asked too.
pub const CALLS: u32 = 64;
/// The time after which the kernel is asked too, even if there were fewer calls.
const INTERVAL: Duration = Duration::from_micros(50);
/// The number of looks without a result after which a socket stops being hot: they have cost about as much as a wake-up.
const LOOKS: u32 = 64;

pub struct State {
    /// The TCP sockets in it, by descriptor.
    pub(super) watches: HashMap<c_int, Watch, BuildHasherDefault<Spread>>,
    /// The descriptors of the hot sockets, whose rings are looked at.
    pub(super) hot: Vec<c_int>,
    /// The descriptors of the sockets for which their caches have queued something.
    pub(super) answered: Vec<c_int>,
    /// The number of calls since the kernel was asked last.
    pub(super) calls: u32,
    pub(super) asked: Option<Instant>,
    /// True if the kernel is to be asked before any ring, because the last call had no room left for the kernel's events.
    pub(super) is_kernel_first: bool,
    /// How often a thread that had looked at the sockets first has gone to sleep.
    pub(super) sleeps: u32,
    /// The number of consecutive spins that have found nothing.
    pub(super) failures: u32,
    /// The number of calls that have collected events for the program.
    pub(super) told: u64,
    /// How long a thread may sleep before it looks again, or for ever.
    pub(super) most: Option<Duration>,
    /// The sockets with EPOLLONESHOT, by the data of their events.
    pub(super) once: HashMap<u64, c_int, BuildHasherDefault<Spread>>,
    /// The doorbells registered in it.
    pub(super) bells: points::Events,
}

impl State {
    /// Makes this socket hot: its ring is looked at from now on.
    pub(super) fn heat(&mut self, fd: c_int) {
        if let Some(watch) = self.watches.get_mut(&fd) {
            watch.misses = 0;
            if !std::mem::replace(&mut watch.is_hot, true) {
                watch.rise();
                self.hot.push(fd);
            }
        }
    }

    /// Makes the peers of the hot sockets wake this side. Returns true if all of them can. The threads that sleep look again `by_clock`,
    /// after [`State::most`], or not.
    pub(super) fn arm(&mut self, epoll: c_int, by_clock: bool) -> bool {
        let mut all = true;
        self.most = None;
        for fd in &self.hot {
            if let Some(watch) = self.watches.get_mut(fd).filter(|watch| !watch.is_silent()) {
                let how = points::watch(&mut self.bells, epoll, watch.socket, registration::cookie() | RUNG);
                all &= watch.arm(how);
                if let Some(most) = watch.probe(by_clock) {
                    self.most = Some(self.most.map_or(most, |other| other.min(most)));
                }
            }
        }
        all
    }

    /// Tells the peers of the hot sockets that they need not wake this side any more.
    pub(super) fn rise(&mut self) {
        for fd in &self.hot {
            if let Some(watch) = self.watches.get_mut(fd) {
                watch.rise();
            }
        }
    }

    /// Returns a hot socket that has something which the last call has not reported.
    pub(super) fn untold(&mut self) -> Option<c_int> {
        let (watches, told) = (&mut self.watches, self.told);
        self.hot.iter().copied().find(|fd| {
            watches.get_mut(fd).is_some_and(|watch| watch.told != told && watch.ready(*fd, true) != 0)
        })
    }

    /// Notes a socket if its cache has queued something that must be reported from here.
    pub(super) fn note_answers(&mut self, fd: c_int) {
        let has_some = self.watches.get(&fd).is_some_and(|watch| watch.socket.cache.has_answers());
        if has_some && !self.answered.contains(&fd) {
            self.answered.push(fd);
        }
    }

    /// Returns whether something is queued.
    pub(super) fn has_answers(&mut self) -> bool {
        let watches = &self.watches;
        self.answered.retain(|fd| watches.get(fd).is_some_and(|watch| watch.socket.cache.has_answers()));
        !self.answered.is_empty()
    }

    /// Collects what the caches of sockets have queued for the program. The arguments and the result are those of `collect`.
    pub(super) fn collect_answered(&mut self, events: &mut [epoll_event], only_look: bool) -> usize {
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

    pub(super) fn is_kernel_due(&mut self) -> bool {
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
    pub(super) fn collect(&mut self, events: &mut [epoll_event], only_look: bool) -> usize {
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

/// A hasher that spreads descriptors and data over a hash table.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_i32(i32::from(*byte)));
    }
    fn write_i32(&mut self, fd: i32) {
        self.write_u64(fd as u64);
    }
    fn write_u64(&mut self, value: u64) {
        // A hash table takes the bucket from the low bits, and the tag from the high bits.
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}
