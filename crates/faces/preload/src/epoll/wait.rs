//! `epoll_wait`.

use crate::carrying::{connection, returning};
use crate::epoll::hot::{CALLS, State};
use crate::epoll::instance::Instance;
use crate::epoll::registration;
use crate::epoll::registration::RUNG;
use crate::process::spin;
use crate::state::carrier::Carrier;
use crate::state::socket::End;
use crate::system::cancel;
use crate::system::errno::{Kept, Result};
use crate::waiting::limit::Limit;
use crate::waiting::sleep;
use libc::{c_int, epoll_event};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How often a waiting thread looks again if some peer cannot wake it.
const STEP: Duration = Duration::from_millis(1);

impl Instance {
    /// Behaves as `epoll_wait`. `native` makes that system call with the given room for events and the given timeout. The library writes
    /// no more than the first `most` events by itself.
    pub fn wait(
        &self,
        epoll: c_int,
        events: &mut [epoll_event],
        most: usize,
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
                let found = if is_kernel_first { 0 } else { state.collect(&mut events[..most], false) };
                if found > 0 && !state.is_kernel_due() {
                    self.hand_over(epoll, state);
                    return Ok(found);
                }
                (found, is_kernel_first)
            };
            if found == events.len() {
                let mut state = self.state.lock();
                state.is_kernel_first = true;
                self.hand_over(epoll, state);
                return Ok(found);
            }
            let looks = found == 0 && !limit.is_zero() && may_look && self.looks_pay();
            // The kernel may have events for other descriptors, and wake-ups. A thread that is about to spin asks for them now and then,
            // and one that is about to sleep gets them there.
            if found > 0 || is_kernel_first || limit.is_zero() {
                // There may be no memory behind the events that were found.
                let n = match native(&mut events[found..], Some(Duration::ZERO)) {
                    Err(_) if found > 0 => 0,
                    asked => asked?,
                };
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
            }
            may_look = false;
            let mut left = limit.left();
            if left == Some(Duration::ZERO) {
                self.hand_over(epoll, self.state.lock());
                return Ok(0);
            }
            if looks {
                let mut kernel = Ok(0);
                let found = spin::spin_between(
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
            let (can_be_woken, longest) = {
                let mut state = self.state.lock();
                // The program may not ask at present for what is queued. If another thread asks for it later, the kernel does not
                // wake this one, so this thread must look again by itself.
                let can_be_woken = state.arm(epoll, self.sleeps_by_clock()) && !state.has_answers();
                if state.collect(&mut [], true) > 0 {
                    self.rise(&mut state);
                    continue;
                }
                self.forget_served(&mut state);
                self.sleeping.fetch_add(1, Ordering::Relaxed);
                (can_be_woken, state.most)
            };
            let sleeping = Sleeping(self);
            let longest = if can_be_woken { longest } else { Some(STEP) };
            let left = longest.map_or(left, |most| Some(left.map_or(most, |left| left.min(most))));
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
                let found = self.state.lock().collect(&mut events[..most], false);
                self.hand_over(epoll, self.state.lock());
                return Ok(found);
            }
        }
    }

    /// Sleeps in the kernel without looking at any socket. Returns `None` if there is a socket to look at.
    pub(super) fn sleep_unaware<R>(&self, sleep: impl FnOnce() -> R) -> Option<R> {
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

    /// Checks from time to time whether such sockets still exist. Without them, a call that waits makes one system call less.
    pub(super) fn forget_served(&self, state: &mut State) {
        state.sleeps = state.sleeps.wrapping_add(1);
        if state.sleeps.is_multiple_of(CALLS)
            && self.is_served()
            && !state.watches.values().any(|watch| watch.socket.cache.is_there())
        {
            self.is_served.store(false, Ordering::SeqCst);
        }
    }

    pub(super) fn looks_pay(&self) -> bool {
        let mut state = self.state.lock();
        if !spin::may_look() || state.hot.is_empty() {
            return false;
        }
        state.failures += u32::from(state.failures >= 2);
        state.failures < 2 || state.failures.is_multiple_of(32)
    }

    pub(super) fn learn(&self, found: bool) {
        let mut state = self.state.lock();
        state.failures = if found { 0 } else { state.failures.saturating_add(1) };
    }

    /// Removes this library's own events from those that the kernel has reported, and handles them. Returns how many events are
    /// left for the program.
    pub(super) fn translate(&self, events: &mut [epoll_event]) -> usize {
        let mut kept = 0;
        for i in 0..events.len() {
            let event = events[i];
            match registration::descriptor(event.u64) {
                None => {
                    self.had(event.u64);
                    events[kept] = event;
                    kept += 1;
                }
                // A doorbell has rung. The caller looks at the hot sockets next.
                Some(fd) if fd as u64 == RUNG => {}
                Some(fd) => self.woken(fd, event.events),
            }
        }
        kept
    }

    /// Handles events of the kernel's socket: a wake byte, bytes of the program, room, or the connection's end.
    pub(super) fn woken(&self, fd: c_int, events: u32) {
        let _errno = Kept::new();
        let mut state = self.state.lock();
        let Some(watch) = state.watches.get_mut(&fd) else { return };
        let socket = watch.socket;
        let carriers = (socket.sending.carrier(), socket.receiving.carrier());
        sleep::take_knowing(socket, fd, events & libc::EPOLLOUT as u32 != 0);
        // There may have been bytes before the end. The kernel does not report the end once more.
        let is_end = events & (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0;
        if is_end && socket.end() == End::None && socket.receiving.carrier() == Carrier::Ring {
            connection::look_for_end(socket, fd);
        }
        // A wake byte alone is no new edge: what has arrived is in the ring. The conditions cover all other events. Behind a ring that the
        // sender has left, the kernel carries the program's bytes, although this side may not have received all of the ring.
        if carriers != (Carrier::Ring, Carrier::Ring)
            || !returning::may_be_woken(socket)
            || socket.end() != End::None
            || !socket.receiving.stash().is_empty()
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
