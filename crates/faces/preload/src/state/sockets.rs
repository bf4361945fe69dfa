//! The sockets of this process by their descriptors, and how long a number stays a socket's.

use crate::process::owner;
use crate::state::socket::Socket;
use crate::state::table::Table;
use crate::system::errno::{Errno, Result};
use libc::c_int;
use std::sync::atomic::Ordering;

/// Returns whether a socket has one of these descriptors.
pub fn has_standard_stream(socket: &'static Socket) -> bool {
    (libc::STDIN_FILENO..=libc::STDERR_FILENO).any(|fd| SOCKETS.is(fd, socket))
}

pub static SOCKETS: Table<Socket> = Table::new();

/// An operation of this library that moves bytes over a socket's descriptor, or changes the socket. It does not sleep. While it
/// exists, the number is not given to another file.
pub struct Using<'a>(&'a Socket);

impl<'a> Using<'a> {
    /// Begins the operation. Returns `None` if the number does not refer to that socket any more. The thread that is about to close the
    /// number may still use it.
    pub fn begin(socket: &'a Socket, fd: c_int) -> Option<Self> {
        // ORDER table.using: either this thread sees that the entry has changed, or the thread that closes the descriptor sees this
        // thread, because both write before they read and all four accesses are sequentially consistent. Pairs with:
        // `calls::descriptors::leave`.
        socket.using.fetch_add(1, Ordering::SeqCst);
        let using = Self(socket);
        (SOCKETS.is(fd, socket) || SOCKETS.is_closed_by_this_thread(fd) || is_child_of_vfork())
            .then_some(using)
    }
}

/// Returns whether the tables belong to another process, so that they do not contain the numbers in use now.
#[cold]
fn is_child_of_vfork() -> bool {
    !owner::owns_tables()
}

impl Drop for Using<'_> {
    fn drop(&mut self) {
        // If a signal handler has forked, the child has reset the counter, and it must not go below zero.
        let _ = self.0.using.fetch_update(Ordering::Release, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// Returns the number with which a call continues after it has slept, because the program may have closed the call's own number.
/// Fails with EBADF if there is none.
pub fn number(socket: &'static Socket, fd: c_int) -> Result<c_int> {
    let other = || Some(socket.fd.load(Ordering::Relaxed)).filter(|other| SOCKETS.is(*other, socket));
    if SOCKETS.is(fd, socket) { Ok(fd) } else { other().ok_or(Errno(libc::EBADF)) }
}

/// Does the same for a call that has begun with this connection of the socket. Fails with `error` if the program, in this process or
/// in a relative, has disconnected the socket meanwhile.
pub fn number_in(socket: &'static Socket, connection: u64, fd: c_int, error: Errno) -> Result<c_int> {
    let is_same = socket.connection() == connection && !socket.receiving.is_superseded();
    if is_same { number(socket, fd) } else { Err(error) }
}

/// Resets the counters in the child of a fork, because the threads that were in calls are the parent's.
pub fn in_child() {
    SOCKETS.free_in_child();
    for fd in SOCKETS.used(0, u32::MAX) {
        if let Some(socket) = SOCKETS.get(fd) {
            socket.calls.store(0, Ordering::Relaxed);
            socket.using.store(0, Ordering::Relaxed);
            socket.turn.store(0, Ordering::Relaxed);
            socket.taker.store(0, Ordering::Relaxed);
            socket.asleep.clear();
            socket.sending.in_child();
            socket.receiving.in_child();
        }
    }
}
