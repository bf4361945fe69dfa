//! Doorbells, which wake sleeping threads faster than wake bytes do.
//!
//! A byte on the kernel's connection wakes any sleeper, but it passes through two TCP stacks, and between VMs through
//! two virtual network cards. A process usually has few sleepers, so its doorbell wakes them instead: this costs one
//! system call on the host and one interrupt between VMs. Sleepers also watch the kernel's connection, which reports
//! its end. A peer that cannot ring the doorbell sends a byte.
//!
//! The doorbell belongs to the endpoint, so a ring wakes every thread that sleeps at it. Therefore at most [`MOST`]
//! threads of a process sleep at doorbells, and the others are woken by bytes. A sleeper never reads the eventfd,
//! because other threads sleep on it too. It sleeps in an epoll instance that has the eventfd as an edge-triggered
//! entry: the one of a [`WaitPoint`], or the program's own ([`watch`]). Threads that are not alone at a socket sleep at a
//! wait point too, at its doorbell or not ([`super::sleep`]).
//!
//! A thread that sleeps at one socket again and again makes one system call for that: the socket stays in the instance as its
//! [`Resident`]. Where there is none, the thread sleeps in `poll`, at the socket and at the instance, and then asks the instance what
//! has happened. That is twice the work, and in rings most messages between busy processes are a sleep each.
#![allow(unsafe_code)] // Calls of the kernel with descriptors of this library.

use crate::carrying::bell::Wake;
use crate::carrying::returning;
use crate::process::lock::Lock;
use crate::process::{hidden, ids, thread};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::Socket;
use crate::state::sockets::Using;
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, Result, check};
use crate::system::{cancel, real};
use ginnel::SocketReceiver;
use libc::{c_int, epoll_event, pollfd};
use std::cell::Cell;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The most threads of a process that sleep at its doorbells.
const MOST: usize = 4;
/// The wait points of other threads, which only sleep at sockets.
const OTHERS: usize = 28;
/// The most doorbells that one epoll instance watches. Each segment has one.
const EVENTS: usize = 8;

/// The doorbells that an epoll instance watches, by their eventfds. (An endpoint lasts as long as its process.)
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

    /// Adds an eventfd to the epoll instance, which reports `data` when the doorbell rings. Returns false if there is
    /// no room.
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

/// Returns the eventfd that a socket's peer rings. Returns `None` if the peer does not ring, or if another process
/// may have the socket too.
fn event_of(socket: &Socket) -> Option<c_int> {
    // In the child of a fork, the peer rings the parent's. (`SocketReceiver::is_ours` would ask the kernel, before each sleep.)
    let is_ours = socket.opened_by.load(Ordering::Relaxed) == ids::process();
    if is_confined() || !is_ours || socket.receiving.common().is_some() {
        return None;
    }
    let rings = socket.receiving.lock();
    rings.as_ref().and_then(SocketReceiver::doorbell_event).map(|event| event.as_raw_fd())
}

/// The socket that stays in the instance of a wait point from one sleep to the next. Only the thread that uses the wait point changes it.
///
/// It is an edge-triggered entry, and leaves the instance with its first event, so that the next sleep begins with what is there then.
/// The kernel removes it when the connection is closed. If the number is closed and the connection is not, for example because another
/// process has it too, the entry stays, and its events are dropped: they do not carry the present [`Resident::cookie`].
struct Resident {
    /// The entry's data: a serial number, and the descriptor. 0 means that there is none.
    cookie: AtomicU64,
    /// The address of the socket, and its `life`.
    socket: AtomicUsize,
    life: AtomicU64,
    serial: AtomicU32,
}

impl Resident {
    const fn none() -> Self {
        Self {
            cookie: AtomicU64::new(0),
            socket: AtomicUsize::new(0),
            life: AtomicU64::new(0),
            serial: AtomicU32::new(0),
        }
    }

    /// Returns whether it is this socket.
    fn is(&self, socket: &'static Socket) -> bool {
        self.cookie.load(Ordering::Relaxed) != 0
            && self.socket.load(Ordering::Relaxed) == std::ptr::from_ref(socket).addr()
    }

    /// Returns its cookie if it is this socket, by this number.
    fn cookie_of(&self, socket: &'static Socket, fd: c_int) -> Option<u64> {
        let cookie = self.cookie.load(Ordering::Relaxed);
        let is_it = self.is(socket)
            && cookie as c_int == fd
            && self.life.load(Ordering::Relaxed) == socket.life.load(Ordering::Relaxed);
        is_it.then_some(cookie)
    }

    /// Notes the next one, and returns its cookie.
    fn note(&self, socket: &'static Socket, fd: c_int) -> u64 {
        let serial = (self.serial.load(Ordering::Relaxed) % u32::MAX) + 1;
        let cookie = u64::from(serial) << 32 | u64::from(fd.cast_unsigned());
        self.serial.store(serial, Ordering::Relaxed);
        self.life.store(socket.life.load(Ordering::Relaxed), Ordering::Relaxed);
        self.socket.store(std::ptr::from_ref(socket).addr(), Ordering::Relaxed);
        self.cookie.store(cookie, Ordering::Relaxed);
        cookie
    }
}

/// The state of one wait point. The process has a fixed set of them, which its threads share.
struct Shared {
    /// The thread that uses this wait point, or 0.
    owner: AtomicI32,
    /// An epoll instance of this library, or -1 if it has not been created yet.
    epoll: AtomicI32,
    events: Lock<Events>,
    resident: Resident,
}

/// The wait points at the doorbells come first.
static WAIT_POINTS: [Shared; MOST + OTHERS] = [const {
    Shared {
        owner: AtomicI32::new(0),
        epoll: AtomicI32::new(-1),
        events: Lock::new(Events::new()),
        resident: Resident::none(),
    }
}; MOST + OTHERS];

/// A wait point that one thread uses to sleep at the doorbells, or at sockets. Dropping it frees the wait point.
pub struct WaitPoint {
    shared: &'static Shared,
    has_doorbell: bool,
    /// This thread already uses the wait point, in a call that a signal handler has interrupted for a while or for
    /// good. The thread keeps it: if another thread used it too, a ring would wake only one of them.
    is_borrowed: bool,
    /// The peer rings the doorbell.
    is_rung: Cell<bool>,
}

impl WaitPoint {
    /// Takes a free wait point at the doorbells. Returns `None` if all are in use.
    pub fn take() -> Option<Self> {
        Self::take_of(&WAIT_POINTS[..MOST], true)
    }

    /// Takes a free wait point where no doorbell wakes the thread. Returns `None` if all are in use.
    pub fn take_without_doorbell() -> Option<Self> {
        Self::take_of(&WAIT_POINTS[MOST..], false)
    }

    fn take_of(points: &'static [Shared], has_doorbell: bool) -> Option<Self> {
        let _errno = Kept::new();
        let me = thread::tid();
        // The interrupted call checks its condition again before it sleeps again.
        let own = points.iter().find(|shared| shared.owner.load(Ordering::Relaxed) == me);
        let shared = own.or_else(|| {
            points.iter().find(|shared| {
                // ORDER preload.wait_point: the eventfds and the socket that the previous user has added. Pairs with:
                // `WaitPoint::drop`.
                shared.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            })
        })?;
        let point = Self { shared, has_doorbell, is_borrowed: own.is_some(), is_rung: Cell::new(false) };
        if point.shared.epoll.load(Ordering::Relaxed) < 0 {
            // SAFETY: it takes a number.
            let epoll = unsafe { real::epoll_create1(libc::EPOLL_CLOEXEC) };
            if epoll < 0 {
                return None;
            }
            // SAFETY: the descriptor is new, and nothing else owns it.
            let epoll = hidden::hide(unsafe { OwnedFd::from_raw_fd(epoll) });
            point.shared.epoll.store(epoll.into_raw_fd(), Ordering::Relaxed);
        }
        Some(point)
    }

    /// Returns how the peer of a socket is to wake the thread that sleeps here, and watches that peer's doorbell if
    /// it can.
    pub fn wake_for(&self, socket: &Socket) -> Wake {
        match event_of(socket).filter(|_| self.has_doorbell) {
            Some(event) if self.shared.events.lock().add(self.instance(), event, 0) => {
                self.is_rung.set(true);
                Wake::Bell
            }
            _ => Wake::Byte,
        }
    }

    /// Watches an eventfd, at whose next event the thread that sleeps here wakes. Returns false if there is no room.
    pub fn watch(&self, event: c_int) -> bool {
        self.shared.events.lock().add(self.instance(), event, 0)
    }

    fn instance(&self) -> c_int {
        self.shared.epoll.load(Ordering::Relaxed)
    }

    /// Returns the epoll instance, which becomes readable when the doorbell has rung since the last
    /// [`WaitPoint::drain`].
    pub fn epoll(&self) -> c_int {
        self.move_out();
        self.instance()
    }

    /// Makes the socket the resident. Returns its cookie, or `None` if it cannot be the resident.
    ///
    /// Nothing but the doorbell wakes the thread when another thread closes the socket.
    fn move_in(&self, socket: &'static Socket, fd: c_int) -> Option<u64> {
        // An interrupted call may have its socket there.
        if self.is_borrowed || !self.is_rung.get() || socket.receiving.carrier() != Carrier::Ring {
            return None;
        }
        // ORDER preload.resident: either this thread sees that the number is closed, or the thread that closes it sees the resident and
        // this thread. Pairs with: `wake_residents`.
        let _using = Using::begin(socket, fd)?;
        let resident = &self.shared.resident;
        if let Some(cookie) = resident.cookie_of(socket, fd) {
            return Some(cookie);
        }
        self.move_out();
        let _errno = Kept::new();
        let cookie = resident.note(socket, fd);
        socket.is_resident.store(true, Ordering::Relaxed);
        let events = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
        let mut what = epoll_event { events, u64: cookie };
        // SAFETY: one event.
        if unsafe { real::epoll_ctl(self.instance(), libc::EPOLL_CTL_ADD, fd, &raw mut what) } == 0 {
            return Some(cookie);
        }
        resident.cookie.store(0, Ordering::Relaxed);
        None
    }

    /// Removes the resident.
    fn move_out(&self) {
        let resident = &self.shared.resident;
        let cookie = resident.cookie.load(Ordering::Relaxed);
        if self.is_borrowed || cookie == 0 || is_confined() {
            return;
        }
        let _errno = Kept::new();
        resident.cookie.store(0, Ordering::Relaxed);
        // SAFETY: the operation takes no event. If the number belongs to another file now, that one is not in the instance.
        unsafe {
            real::epoll_ctl(self.instance(), libc::EPOLL_CTL_DEL, cookie as c_int, std::ptr::null_mut())
        };
    }

    /// Adds a socket, whose wake bytes wake the thread that sleeps here even if another thread takes them; see `sleep`.
    pub fn register(&self, fd: c_int) -> Option<Registration> {
        self.move_out();
        let _errno = Kept::new();
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        let mut what = epoll_event { events: events as u32, u64: 0 };
        // SAFETY: one event.
        let result = unsafe { real::epoll_ctl(self.instance(), libc::EPOLL_CTL_ADD, fd, &raw mut what) };
        // A call that a signal handler has interrupted, for a while or for good, may have added it already.
        let is_added = result == 0 || Errno::last() == Errno(libc::EEXIST);
        is_added.then_some(Registration { shared: self.shared, fd })
    }

    /// Sleeps until the doorbell rings, a registered socket has news, this one has ended, or has bytes if this thread is their keeper
    /// ([`crate::waiting::sleep`]), or the time has passed. A negative time means for ever. Returns true if there may be wake bytes.
    pub fn sleep(
        &self,
        socket: &'static Socket,
        fd: c_int,
        is_keeper: bool,
        milliseconds: c_int,
    ) -> Result<bool> {
        if is_keeper && let Some(cookie) = self.move_in(socket, fd) {
            return self.sleep_with(cookie, milliseconds);
        }
        let entry = |fd, events| pollfd { fd, events, revents: 0 };
        let bytes = if is_keeper { libc::POLLIN } else { 0 };
        // An end that is there already, behind which a ring or bytes are left, would wake the thread again and again.
        let has_end = socket.has(Fact::ShutDownReceiving) || !returning::may_be_woken(socket);
        let end = if is_keeper || !has_end { libc::POLLRDHUP } else { 0 };
        let mut polls = [entry(fd, bytes | end), entry(self.epoll(), libc::POLLIN)];
        // SAFETY: two descriptors.
        check(unsafe { real::poll(polls.as_mut_ptr(), 2, milliseconds) } as isize)?;
        if polls[1].revents != 0 {
            self.drain();
        }
        Ok(polls[0].revents != 0 || !is_keeper)
    }

    /// Sleeps until the doorbell rings, the resident has bytes or has ended, or the time has passed. Returns true if it was the resident.
    fn sleep_with(&self, cookie: u64, milliseconds: c_int) -> Result<bool> {
        let mut events = [epoll_event { events: 0, u64: 0 }; EVENTS];
        let room = events.len() as c_int;
        // SAFETY: there is room for so many events.
        let n = unsafe { real::epoll_wait(self.instance(), events.as_mut_ptr(), room, milliseconds) };
        let n = check(n as isize)?;
        let is_resident = events[..n].iter().any(|event| { event.u64 } == cookie);
        if is_resident {
            self.move_out();
        }
        Ok(is_resident)
    }

    /// Makes the events known again that the call of a signal handler may have consumed in place of the call that it has interrupted.
    #[cold]
    fn stir(&self) {
        if is_confined() {
            return;
        }
        let _errno = Kept::new();
        let events = self.shared.events.lock();
        for &event in &events.fds[..events.len] {
            let mut what = epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
            // The eventfd has been written to, and nobody reads it.
            // SAFETY: one event.
            unsafe { real::epoll_ctl(self.instance(), libc::EPOLL_CTL_MOD, event, &raw mut what) };
        }
    }

    /// Consumes the rings and the news of sockets that have come so far.
    pub fn drain(&self) {
        if is_confined() {
            return;
        }
        let _errno = Kept::new();
        let mut events = [epoll_event { events: 0, u64: 0 }; EVENTS];
        while cancel::epoll(self.instance(), &mut events) == EVENTS as c_int {}
    }
}

/// A socket at a wait point. Dropping it removes the socket.
pub struct Registration {
    shared: &'static Shared,
    fd: c_int,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if is_confined() {
            return;
        }
        let _errno = Kept::new();
        // In the child of a fork, there is no instance any more.
        let epoll = self.shared.epoll.load(Ordering::Relaxed);
        // SAFETY: the operation takes no event.
        unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, self.fd, std::ptr::null_mut()) };
    }
}

impl Drop for WaitPoint {
    fn drop(&mut self) {
        if self.is_borrowed {
            self.stir();
        } else {
            // ORDER preload.wait_point: see `WaitPoint::take`.
            self.shared.owner.store(0, Ordering::Release);
        }
    }
}

/// Ends the residence of a socket that the kernel carries again: each message would be an event of the wait point.
#[cold]
pub fn move_out(socket: &'static Socket) {
    if is_confined() || !socket.is_resident.swap(false, Ordering::Relaxed) {
        return;
    }
    let me = thread::tid();
    for shared in &WAIT_POINTS[..MOST] {
        if !shared.resident.is(socket) {
            continue;
        }
        // ORDER preload.wait_point: as in `WaitPoint::take_of`. Pairs with: `WaitPoint::drop`.
        if shared.owner.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
            // The thread that uses the wait point may sleep. A later call tries again.
            socket.is_resident.store(true, Ordering::Relaxed);
            continue;
        }
        let point = WaitPoint { shared, has_doorbell: true, is_borrowed: false, is_rung: Cell::new(false) };
        if shared.resident.is(socket) {
            point.move_out();
        }
    }
}

/// Wakes the threads that sleep with this socket as their resident, because its last number is closed. They would not learn of what
/// happens to the connection after that.
pub fn wake_residents(socket: &'static Socket) {
    // ORDER preload.resident: see `WaitPoint::move_in`. (The caller has waited for `Using`.)
    let sleeps = |shared: &Shared| {
        shared.resident.is(socket) && ![0, thread::tid()].contains(&shared.owner.load(Ordering::Relaxed))
    };
    for shared in WAIT_POINTS[..MOST].iter().filter(|shared| sleeps(shared)) {
        let _errno = Kept::new();
        let events = *shared.events.lock();
        if let Some(&event) = events.fds[..events.len].first() {
            // SAFETY: the doorbell of an endpoint is open as long as the process lives.
            ginnel_doorbell::ring(unsafe { BorrowedFd::borrow_raw(event) });
        }
    }
}

/// The number of the program's epoll instances that watch a doorbell.
static WATCHING: AtomicU32 = AtomicU32::new(0);

/// Returns how the peer of a socket is to wake a thread that sleeps in an epoll instance of the program. The instance
/// reports `data` when the doorbell rings.
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

/// Forgets the doorbells of an epoll instance that is closed.
pub fn unwatch(events: &mut Events) {
    if std::mem::take(events).len > 0 {
        // The child of a fork does not count the instances of its parent.
        let _ = WATCHING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// Resets the wait points in the child of a fork. The child creates its own epoll instances, because a ring would
/// wake only one of the processes that share an instance.
pub fn in_child() {
    for shared in &WAIT_POINTS {
        let epoll = shared.epoll.swap(-1, Ordering::Relaxed);
        if epoll >= 0 {
            // SAFETY: this library's own.
            unsafe { real::close(epoll) };
        }
        *shared.events.lock() = Events::new();
        shared.resident.cookie.store(0, Ordering::Relaxed);
        shared.owner.store(0, Ordering::Relaxed);
    }
    WATCHING.store(0, Ordering::Relaxed);
}
