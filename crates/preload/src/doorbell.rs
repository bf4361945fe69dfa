//! Doorbells.
//!
//! A byte on the kernel's connection wakes any sleeper, but it takes a way through two TCP stacks, and between VMs through two virtual
//! network cards. So the few sleepers that a process usually has are woken by its doorbell instead: one call of the kernel on the host,
//! one interrupt between VMs. They watch the connection as well, which says when it ends; and a peer that cannot ring sends a byte.
//!
//! The doorbell is the endpoint's: whoever sleeps there is woken for all who do. So there are at most [`MOST`] of them in a process, and
//! others are woken by bytes as before. A sleeper never reads the eventfd, on which others sleep too; it sleeps in an epoll instance that
//! has it, edge-triggered: a [`WaitPoint`], or the program's own ([`watch`]).
#![allow(unsafe_code)] // Calls of the kernel with descriptors of this library.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use ginnel::{SocketReceiver, SocketWaker};
use ginnel_layout::board;
use ginnel_ring::wait::Watchable;
use libc::{c_int, epoll_event, pollfd};

use crate::confined::is_confined;
use crate::errno::{Errno, Kept, Result, check};
use crate::hidden;
use crate::kernel;
use crate::lock::{self, Lock};
use crate::real;
use crate::socket::Socket;

/// How a peer is to wake a sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// By a byte on the kernel's connection.
    Byte,
    /// By the doorbell. A byte does too.
    Bell,
}

/// Says with the next wake word how its sleepers are to be woken. Others that wait already have said it before, unless this one is the
/// only one: then a byte wakes all of them, and the doorbell only some.
pub fn wish(side: &mut impl Watchable, how: Wake, is_only: bool) {
    match how {
        Wake::Byte => side.notify_at(board::Place::NONE),
        Wake::Bell if is_only => side.notify_at(board::Place::DOORBELL),
        Wake::Bell => {}
    }
}

/// Wakes a peer that sleeps, as it has said.
#[cold]
pub fn wake(socket: &'static Socket, fd: c_int, waker: &SocketWaker) {
    if !is_confined() && waker.ring() {
        socket.rings.fetch_add(1, Ordering::Relaxed);
    } else {
        kernel::wake(socket, fd);
    }
}

/// Sleepers of a process at its doorbells.
const MOST: usize = 4;
/// Doorbells that one of them has: one for each segment.
const EVENTS: usize = 8;

/// The doorbells that an epoll instance has, by their eventfds. (An endpoint lasts as long as its process.)
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Events {
    fds: [c_int; EVENTS],
    len: usize,
}

impl Events {
    pub const fn new() -> Self {
        Self { fds: [-1; EVENTS], len: 0 }
    }

    pub fn has(&self, event: c_int) -> bool {
        self.fds[..self.len].contains(&event)
    }

    /// Adds one to the epoll instance, which tells `data` when it has rung. False if there is no room.
    fn add(&mut self, epoll: c_int, event: c_int, data: u64) -> bool {
        if self.has(event) {
            return true;
        }
        if self.len == EVENTS {
            return false;
        }
        let mut what = epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: data };
        // SAFETY: one event.
        let result = unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, event, &raw mut what) };
        if result != 0 && Errno::last() != Errno(libc::EEXIST) {
            return false;
        }
        self.fds[self.len] = event;
        self.len += 1;
        true
    }
}

/// The eventfd on which a socket's peer rings; `None` if it does not, or another process may have the socket too.
fn event_of(socket: &Socket) -> Option<c_int> {
    if is_confined() || socket.receiving.common().is_some() {
        return None;
    }
    let rings = socket.receiving.lock();
    rings
        .as_ref()
        .filter(|receiver| receiver.is_ours())
        .and_then(SocketReceiver::doorbell_event)
        .map(|event| event.as_raw_fd())
}

/// Where a thread sleeps that waits for one call.
struct Shared {
    /// The thread that has it; 0: none.
    owner: AtomicI32,
    /// An epoll instance of this library; -1: none yet.
    epoll: AtomicI32,
    events: Lock<Events>,
}

static WAIT_POINTS: [Shared; MOST] = [const {
    Shared { owner: AtomicI32::new(0), epoll: AtomicI32::new(-1), events: Lock::new(Events::new()) }
}; MOST];

/// A thread's shared at a doorbell, until it is dropped.
pub struct WaitPoint {
    shared: &'static Shared,
    /// It is that of a call of the same thread which a handler has interrupted, for a while or for good, and stays the thread's: if
    /// another thread had it too, a ring would wake only one of them.
    is_borrowed: bool,
}

impl WaitPoint {
    /// `None` if all are taken.
    pub fn take() -> Option<Self> {
        let _errno = Kept::new();
        let me = lock::tid();
        // The interrupted call looks again before it sleeps on.
        let own = WAIT_POINTS.iter().find(|shared| shared.owner.load(Ordering::Relaxed) == me);
        let shared = own.or_else(|| {
            WAIT_POINTS.iter().find(|shared| {
                // ORDER preload.wait_point: what the one before has added. Pairs with: `WaitPoint::drop`.
                shared.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            })
        })?;
        let point = Self { shared, is_borrowed: own.is_some() };
        if point.shared.epoll.load(Ordering::Relaxed) < 0 {
            // SAFETY: it takes a number.
            let epoll = unsafe { real::epoll_create1(libc::EPOLL_CLOEXEC) };
            if epoll < 0 {
                return None;
            }
            // SAFETY: new, and nobody else's.
            let epoll = hidden::hide(unsafe { OwnedFd::from_raw_fd(epoll) });
            point.shared.epoll.store(epoll.into_raw_fd(), Ordering::Relaxed);
        }
        Some(point)
    }

    /// How the peer of a socket is to wake whoever sleeps here.
    pub fn wake_for(&self, socket: &Socket) -> Wake {
        match event_of(socket) {
            Some(event) if self.shared.events.lock().add(self.epoll(), event, 0) => Wake::Bell,
            _ => Wake::Byte,
        }
    }

    /// What becomes readable when the doorbell has rung since [`WaitPoint::drain`].
    pub fn epoll(&self) -> c_int {
        self.shared.epoll.load(Ordering::Relaxed)
    }

    /// Sleeps until the doorbell has rung, `fd` has bytes or has ended, or so many milliseconds have passed; for ever, if negative. True
    /// if it was `fd`.
    pub fn sleep(&self, fd: c_int, milliseconds: c_int) -> Result<bool> {
        let entry = |fd, events| pollfd { fd, events, revents: 0 };
        let mut polls = [entry(fd, libc::POLLIN | libc::POLLRDHUP), entry(self.epoll(), libc::POLLIN)];
        // SAFETY: two descriptors.
        check(unsafe { real::poll(polls.as_mut_ptr(), 2, milliseconds) } as isize)?;
        if polls[1].revents != 0 {
            self.drain();
        }
        Ok(polls[0].revents != 0)
    }

    /// The rings that have come so far are heard.
    pub fn drain(&self) {
        let _errno = Kept::new();
        let mut events = [epoll_event { events: 0, u64: 0 }; EVENTS];
        // SAFETY: room for as many events.
        unsafe { real::epoll_wait(self.epoll(), events.as_mut_ptr(), EVENTS as c_int, 0) };
    }
}

impl Drop for WaitPoint {
    fn drop(&mut self) {
        if !self.is_borrowed {
            // ORDER preload.wait_point: see `WaitPoint::take`.
            self.shared.owner.store(0, Ordering::Release);
        }
    }
}

/// Epoll instances of the program that have a doorbell.
static WATCHING: AtomicU32 = AtomicU32::new(0);

/// How the peer of a socket is to wake whoever sleeps in an epoll instance of the program, which tells `data` when the doorbell has rung.
pub fn watch(events: &mut Events, epoll: c_int, socket: &Socket, data: u64) -> Wake {
    let Some(event) = event_of(socket) else { return Wake::Byte };
    if events.has(event) {
        return Wake::Bell;
    }
    let _errno = Kept::new();
    if events.len == 0 && WATCHING.fetch_add(1, Ordering::Relaxed) >= MOST as u32 {
        WATCHING.fetch_sub(1, Ordering::Relaxed);
        return Wake::Byte;
    }
    let is_added = events.add(epoll, event, data);
    if events.len == 0 {
        WATCHING.fetch_sub(1, Ordering::Relaxed);
    }
    if is_added { Wake::Bell } else { Wake::Byte }
}

/// An epoll instance is closed.
pub fn unwatch(events: &mut Events) {
    if std::mem::take(events).len > 0 {
        // Those of a parent are not counted in its child.
        let _ = WATCHING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// The child of a fork makes its own: an instance that it shared with its parent would tell only one of them.
pub fn in_child() {
    for shared in &WAIT_POINTS {
        let epoll = shared.epoll.swap(-1, Ordering::Relaxed);
        if epoll >= 0 {
            // SAFETY: this library's own.
            unsafe { real::close(epoll) };
        }
        *shared.events.lock() = Events::new();
        shared.owner.store(0, Ordering::Relaxed);
    }
    WATCHING.store(0, Ordering::Relaxed);
}
