//! Wake bytes in the kernel's socket: how threads sleep for them, and who takes them.
//!
//! A wake byte is for all threads that sleep at the socket when it comes. But the kernel asks a thread that sleeps until the socket is
//! readable once more when the thread runs: if another thread has taken the byte by then, the first one sleeps on. So at most one thread
//! of all processes that have the socket sleeps in that way, the *keeper*, and nobody else takes the last byte. A thread that finds no
//! keeper becomes it, even if it only wants to take what is there.
//!
//! All other threads sleep at edges: at an epoll instance of the library in which the socket is registered with EPOLLET, for bytes and
//! for room. A byte wakes such a thread even if it has been taken meanwhile, because the kernel then finds that the socket has room. The
//! program's own epoll instances contain the socket in the same way (module `epoll`). Where the kernel has no room, which happens while
//! bytes of the program wait in it, nobody takes the last byte as long as somebody may sleep at edges.
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | the keeper is killed, or a signal handler leaves its call (`longjmp`) | others sleep at edges, and take all bytes but one. They replace a keeper that is dead when two bytes are there |
//! | no epoll instance is left for a thread, or the program has confined itself with seccomp | the thread looks at intervals |

use crate::confined::is_confined;
use crate::direction::Carrier;
use crate::doorbell::{Registration, WaitPoint, Wake};
use crate::family::Common;
use crate::socket::{End, Socket};
use crate::table::Using;
use crate::{kernel, lock, returning};
use libc::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering, fence};

/// Who sleeps for the wake bytes of a socket in this process.
pub struct Sleepers {
    /// The thread that may take the last byte, or 0.
    keeper: AtomicI32,
    /// The number of threads that sleep at edges.
    at_edges: AtomicU32,
}

impl Sleepers {
    pub const fn new() -> Self {
        Self { keeper: AtomicI32::new(0), at_edges: AtomicU32::new(0) }
    }

    /// Forgets all of them, for another socket, or in the child of a fork, where they do not exist.
    pub fn clear(&self) {
        self.keeper.store(0, Ordering::Relaxed);
        self.at_edges.store(0, Ordering::Relaxed);
    }

    /// Tells the relatives that get the socket now who is the keeper. A keeper that comes later tells them by itself.
    pub fn share_keeper(&self, common: &Common) {
        // ORDER wakes.keeper: either this thread sees that the keeper comes or goes, or the keeper sees what the relatives share, because
        // both write before they read. Pairs with: `Keeper::begin`, `Keeper::drop`.
        fence(Ordering::SeqCst);
        let keeper = self.keeper.load(Ordering::SeqCst);
        common.replace_keeper(0, keeper);
        fence(Ordering::SeqCst);
        if self.keeper.load(Ordering::SeqCst) != keeper {
            common.replace_keeper(keeper, 0);
        }
    }
}

/// The thread that may take the last wake byte, of this process and of all relatives that have the socket.
pub struct Keeper {
    socket: &'static Socket,
    /// The kernel is known to have room.
    has_room: bool,
}

impl Keeper {
    /// Returns `None` if there is another one, or if this thread is the keeper in a call that a signal handler has interrupted.
    pub fn begin(socket: &'static Socket) -> Option<Self> {
        let me = lock::tid();
        socket.asleep.keeper.compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        let keeper = Self { socket, has_room: false };
        // ORDER wakes.keeper: see `Sleepers::share_keeper`.
        fence(Ordering::SeqCst);
        let is_it = socket.receiving.common().is_none_or(|common| common.replace_keeper(0, me));
        is_it.then_some(keeper)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let me = lock::tid();
        let _ = self.socket.asleep.keeper.compare_exchange(me, 0, Ordering::SeqCst, Ordering::Relaxed);
        // ORDER wakes.keeper: see `Sleepers::share_keeper`.
        fence(Ordering::SeqCst);
        if let Some(common) = self.socket.receiving.common() {
            common.replace_keeper(me, 0);
        }
    }
}

/// Removes a keeper that does not exist any more.
#[cold]
fn bury(socket: &Socket) {
    let keeper = socket.asleep.keeper.load(Ordering::Relaxed);
    if keeper != 0 && !lock::is_alive(keeper) {
        let _ = socket.asleep.keeper.compare_exchange(keeper, 0, Ordering::SeqCst, Ordering::Relaxed);
    }
    if let Some(common) = socket.receiving.common() {
        common.bury_keeper();
    }
}

/// Returns whether a thread may sleep for the wake bytes. The caller holds the receiving direction's lock, so a thread that is not seen
/// here asks the peer for a wake-up later.
pub fn has_sleepers(socket: &Socket) -> bool {
    let asleep = &socket.asleep;
    asleep.keeper.load(Ordering::Relaxed) != 0
        || asleep.at_edges.load(Ordering::Relaxed) != 0
        || socket.receiving.common().is_some()
}

/// Returns whether a thread may sleep at edges, here, in a relative, or in an epoll instance of the program.
fn may_have_edges(socket: &Socket) -> bool {
    !socket.watchers.is_empty()
        || socket.asleep.at_edges.load(Ordering::Relaxed) != 0
        || socket.receiving.common().is_some()
}

/// Returns whether a thread has to leave the last byte in the kernel, for others.
pub fn is_last_kept(socket: &'static Socket, fd: c_int, keeper: Option<&Keeper>) -> bool {
    keeper.is_none_or(|keeper| {
        !keeper.has_room && may_have_edges(socket) && kernel::poll_now(fd, libc::POLLOUT) & libc::POLLOUT == 0
    })
}

/// Returns whether the kernel's socket has a byte that even the keeper leaves there. It cannot sleep until there is one then.
fn is_left(socket: &'static Socket, fd: c_int) -> bool {
    may_have_edges(socket) && {
        let events = kernel::poll_now(fd, libc::POLLIN | libc::POLLOUT);
        events & libc::POLLIN != 0 && events & libc::POLLOUT == 0
    }
}

/// Returns how many of the bytes in the kernel a thread may take that leaves the last one there.
#[cold]
pub fn without_last(socket: &'static Socket, fd: c_int) -> usize {
    if is_confined() {
        return 0;
    }
    let bytes = kernel::unread(fd);
    if bytes > 1 {
        // The keeper has not taken the one before.
        bury(socket);
    }
    bytes.saturating_sub(1)
}

/// The registration of a socket for a thread that sleeps at edges.
struct Edges {
    socket: &'static Socket,
    /// `None` once it has been tried in vain.
    registration: Option<Registration>,
}

impl Edges {
    /// Registers the socket. Returns `None` if that is impossible.
    fn begin(socket: &'static Socket, fd: c_int, point: &WaitPoint) -> Option<Self> {
        let _using = Using::begin(socket, fd)?;
        // Counted before the peer is asked for a byte.
        socket.asleep.at_edges.fetch_add(1, Ordering::SeqCst);
        let mut edges = Self { socket, registration: None };
        edges.registration = point.register(fd);
        edges.registration.is_some().then_some(edges)
    }
}

impl Drop for Edges {
    fn drop(&mut self) {
        drop(self.registration.take());
        // If a signal handler has forked, the child has reset the counter, and it must not go below zero.
        let count = &self.socket.asleep.at_edges;
        let _ = count.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// The wait point of a call, if it needs one.
pub struct Point {
    taken: Option<WaitPoint>,
    may_take: bool,
}

impl Point {
    /// Takes a wait point at the doorbell, if one is free.
    pub fn at_doorbell() -> Self {
        let may_take = !is_confined();
        Self { taken: may_take.then(WaitPoint::take).flatten(), may_take }
    }

    /// Takes none before it is needed.
    pub fn later() -> Self {
        Self { taken: None, may_take: !is_confined() }
    }

    /// Never takes one.
    pub const fn none() -> Self {
        Self { taken: None, may_take: false }
    }

    fn get(&mut self) -> Option<&WaitPoint> {
        if self.taken.is_none() && self.may_take {
            self.taken = WaitPoint::take_without_doorbell();
        }
        self.taken.as_ref()
    }

    pub fn taken(&self) -> Option<&WaitPoint> {
        self.taken.as_ref()
    }

    /// Returns how the peer of a socket is to wake a thread that sleeps here.
    pub fn wake_for(&self, socket: &Socket) -> Wake {
        self.taken.as_ref().map_or(Wake::Byte, |point| point.wake_for(socket))
    }
}

/// A thread's sleep for one socket, from before the peer is asked for a wake-up until the thread is awake.
pub struct Sleep {
    keeper: Option<Keeper>,
    edges: Option<Edges>,
}

impl Sleep {
    /// The caller calls [`settle`] before it asks the peer.
    pub fn begin(socket: &'static Socket, fd: c_int, point: &mut Point) -> Self {
        let keeper = Keeper::begin(socket).filter(|_| !is_left(socket, fd));
        let edges = match keeper {
            Some(_) => None,
            None => point.get().and_then(|point| Edges::begin(socket, fd, point)),
        };
        Self { keeper, edges }
    }

    /// Returns the keeper, if this thread is it. It sleeps until the socket is readable. Any other thread must not.
    pub fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_ref()
    }

    /// Takes the wake bytes that have come, and records whether the connection has ended.
    pub fn take(&self, socket: &'static Socket, fd: c_int) {
        match self.keeper() {
            None => take(socket, fd),
            keeper if is_due(socket) => returning::drain(socket, fd, keeper),
            Some(_) => {}
        }
    }

    /// Returns whether the peer's byte wakes this thread.
    pub fn is_woken(&self) -> bool {
        self.keeper.is_some() || self.edges.is_some()
    }
}

/// Drops the events with which registrations begin. What has come before them, the caller sees when it looks once more.
pub fn settle<'a>(point: &Point, mut sleeps: impl Iterator<Item = &'a Sleep>) {
    if let Some(point) = point.taken()
        && sleeps.any(|sleep| sleep.edges.is_some())
    {
        point.drain();
    }
}

/// Takes the wake bytes on behalf of a thread that does not sleep, and records whether the connection has ended.
pub fn take(socket: &'static Socket, fd: c_int) {
    take_knowing(socket, fd, false);
}

/// Does the same for one that may know that the kernel has room.
pub fn take_knowing(socket: &'static Socket, fd: c_int, has_room: bool) {
    if is_due(socket) {
        let keeper = Keeper::begin(socket).map(|mut keeper| {
            keeper.has_room = has_room;
            keeper
        });
        returning::drain(socket, fd, keeper.as_ref());
    }
}

/// Returns whether what can be received from the kernel's socket is wake bytes.
fn is_due(socket: &'static Socket) -> bool {
    socket.receiving.carrier() == Carrier::Ring && socket.end() == End::None
}
