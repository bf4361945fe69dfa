//! The keeper of a socket's wake bytes: the one thread that may take the last of them. [`crate::waiting::sleep`] describes the rules.

use crate::process::{lock, thread};
use crate::state::common::Common;
use crate::state::socket::Socket;
use crate::system::confined::is_confined;
use crate::system::kernel;
use libc::c_int;
use std::sync::atomic::{Ordering, fence};

/// The thread that may take the last wake byte, of this process and of all relatives that have the socket.
pub struct Keeper {
    socket: &'static Socket,
    /// The kernel is known to have room.
    pub has_room: bool,
}

impl Keeper {
    /// Returns `None` if there is another one, or if this thread is the keeper in a call that a signal handler has interrupted.
    pub fn begin(socket: &'static Socket) -> Option<Self> {
        let me = thread::tid();
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
        let me = thread::tid();
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

/// Returns whether a thread may sleep at edges, here, in a relative, or in an epoll instance of the program.
fn may_have_edges(socket: &Socket) -> bool {
    !socket.watchers.is_empty()
        || socket.asleep.at_edges.load(Ordering::Relaxed) != 0
        || socket.receiving.common().is_some()
}

/// Returns whether a thread has to leave the last byte in the kernel, for others.
pub fn is_last_kept(socket: &'static Socket, fd: c_int, keeper: Option<&Keeper>) -> bool {
    keeper.is_none_or(|keeper| {
        has_unaware(socket)
            || !keeper.has_room
                && may_have_edges(socket)
                && kernel::poll_now(fd, libc::POLLOUT) & libc::POLLOUT == 0
    })
}

/// Returns whether a thread, of this process or of a relative, may sleep that has begun before the connection got its rings. The kernel
/// asks it once more for the byte that has woken it.
pub fn has_unaware(socket: &Socket) -> bool {
    // ORDER preload.unaware: see `waiting::unaware::Unaware::begin`.
    fence(Ordering::SeqCst);
    socket.asleep.unaware.load(Ordering::Relaxed) > 0
        || socket.receiving.common().is_some_and(Common::has_unaware_elsewhere)
}

/// Returns whether the kernel's socket has a byte that even the keeper leaves there. It cannot sleep until there is one then.
pub fn is_left(socket: &'static Socket, fd: c_int) -> bool {
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
