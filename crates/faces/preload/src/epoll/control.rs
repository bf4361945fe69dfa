//! `epoll_ctl`: what the program wants to be told of.

use crate::epoll::edge::Edge;
use crate::epoll::hot::State;
use crate::epoll::instance::Instance;
use crate::epoll::watch::{Progress, Watch};
use crate::epoll::{EPOLLS, registration};
use crate::process::lock::Guard;
use crate::state::carrier::Carrier;
use crate::state::socket::Socket;
use crate::state::sockets::SOCKETS;
use crate::state::watchers::Watcher;
use crate::system::{errno, real};
use crate::waiting::readiness::Armed;
use libc::{c_int, epoll_event};
use std::sync::atomic::Ordering;

impl Instance {
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
                let is_once = event.events & libc::EPOLLONESHOT as u32 != 0;
                // A thread that sleeps may get the event before the kernel's call returns. It notes that with this lock held (`had`).
                let state = is_once.then(|| {
                    self.has_once.store(true, Ordering::Relaxed);
                    self.state.lock()
                });
                let result = native();
                if result == 0 {
                    self.add(epoll, fd, socket, event, state.unwrap_or_else(|| self.state.lock()));
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

    fn add(
        &'static self,
        epoll: c_int,
        fd: c_int,
        socket: &'static Socket,
        event: epoll_event,
        mut state: Guard<'_, State>,
    ) {
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
            is_by_clock: false,
            told: 0,
        };
        if let Some(before) = state.watches.insert(fd, watch) {
            self.removed(&mut state, fd, before);
        }
        self.expect_once(&mut state, fd, event);
        drop(state);
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
    pub(super) fn add_again(
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
    pub(super) fn take_out_entirely(&'static self, epoll: c_int, fd: c_int, socket: &'static Socket) {
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
    pub(super) fn set(&self, epoll: c_int, mut state: Guard<'_, State>, fd: c_int, event: epoll_event) {
        let Some(watch) = state.watches.get_mut(&fd) else { return };
        watch.ask(event);
        watch.rise();
        state.heat(fd);
        // The count is read under the lock, because a thread that is about to sleep also looks at the sockets under it.
        let somebody_sleeps = self.sleeping.load(Ordering::Relaxed) > 0;
        drop(state);
        if somebody_sleeps {
            registration::register(epoll, fd);
        }
    }

    /// Notes a socket of which the kernel is to report one event.
    fn expect_once(&self, state: &mut State, fd: c_int, event: epoll_event) {
        if event.events & libc::EPOLLONESHOT as u32 != 0 {
            state.once.insert(event.u64, fd);
            self.has_once.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that the kernel has reported this event. If it was the only one that a socket was to have, there is none after the change
    /// either, until the program asks again. (A thread that has got the event from the kernel may come here after another one has looked at
    /// the ring. Then the program has it twice.)
    pub(super) fn had(&self, data: u64) {
        if !self.has_once.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        let Some(fd) = state.once.get(&data).copied() else { return };
        if let Some(watch) = state.watches.get_mut(&fd).filter(|watch| watch.data == data) {
            watch.is_spent |= watch.events & libc::EPOLLONESHOT as u32 != 0;
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

    pub(super) fn modify(
        &self,
        epoll: c_int,
        fd: c_int,
        event: epoll_event,
        native: impl FnOnce() -> c_int,
    ) -> c_int {
        let mut state = self.state.lock();
        match state.watches.get_mut(&fd) {
            None => {
                drop(state);
                native()
            }
            Some(watch) if !watch.is_joined => {
                watch.ask(event);
                self.expect_once(&mut state, fd, event);
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
    pub(super) fn remove(&self, fd: c_int, socket: Option<&'static Socket>) {
        let mut state = self.state.lock();
        let is_it =
            state.watches.get(&fd).is_some_and(|watch| socket.is_none_or(|socket| watch.is_of(socket)));
        if is_it && let Some(watch) = state.watches.remove(&fd) {
            self.removed(&mut state, fd, watch);
        }
    }

    /// Finishes the removal of a descriptor that is no longer in the table.
    pub(super) fn removed(&self, state: &mut State, fd: c_int, mut watch: Watch) {
        watch.rise();
        state.hot.retain(|other| *other != fd);
        if state.once.get(&watch.data) == Some(&fd) {
            state.once.remove(&watch.data);
        }
        if watch.is_joined {
            self.joined.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Reports this socket's events from here on, because the kernel no longer carries it alone.
    pub(super) fn take_over(&self, epoll: c_int, fd: c_int, socket: &'static Socket) {
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
        registration::register(epoll, fd);
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

/// Returns whether a direction is no longer the kernel's alone.
fn has_changed(socket: &'static Socket) -> bool {
    [socket.sending.carrier(), socket.receiving.carrier()] != [Carrier::Kernel; 2]
}
