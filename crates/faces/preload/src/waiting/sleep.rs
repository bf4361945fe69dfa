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
//! A thread that has slept in the kernel since before the connection got its rings ([`super::unaware`]) sleeps like a keeper, and knows
//! nothing of these rules. As long as there is one, nobody else is a keeper, and nobody takes the last byte. Bytes of the program that
//! nobody receives, and the end of a stream behind them, would also wake a keeper again and again, so beside them nobody is one.
//!
//! What can go wrong:
//!
//! | | |
//! |---|---|
//! | a signal handler leaves the call of a thread that knows nothing of the rules | all others sleep at edges from then on, and are woken by bytes |
//! | the keeper is killed, or a signal handler leaves its call (`longjmp`) | others sleep at edges, and take all bytes but one. They replace a keeper that is dead when two bytes are there |
//! | no epoll instance is left for a thread, or the program has confined itself with seccomp | the thread looks at intervals |

use crate::carrying::bell::Wake;
use crate::carrying::keeper::Keeper;
use crate::carrying::{keeper, returning};
use crate::state::carrier::Carrier;
use crate::state::known::Fact;
use crate::state::socket::{End, Socket};
use crate::state::sockets::Using;
use crate::system::confined::is_confined;
use crate::system::kernel;
use crate::waiting::points::{Registration, WaitPoint};
use libc::c_int;
use std::sync::atomic::Ordering;

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

    /// Watches an eventfd, if there is a wait point for that.
    pub fn watch(&mut self, event: c_int) -> bool {
        self.get().is_some_and(|point| point.watch(event))
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
        // The keeper would sleep beside a byte that it has to leave to another thread, bytes of the program, or the end of its stream. Once
        // the program has shut down receiving, the kernel's socket is readable for good.
        let is_beside = keeper::has_unaware(socket)
            || socket.has(Fact::ShutDownReceiving)
            || !returning::may_be_woken(socket) && kernel::poll_now(fd, kernel::READABLE) != 0;
        let keeper = match is_beside {
            true => None,
            false => Keeper::begin(socket).filter(|_| !keeper::is_left(socket, fd)),
        };
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
