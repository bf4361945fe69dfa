//! How a sleeping peer is woken: by its doorbell, or by a byte on the kernel's connection ([`crate::waiting::points`]).

use crate::carrying::connection;
use crate::state::socket::Socket;
use crate::system::confined::is_confined;
use ginnel::SocketWaker;
use ginnel_layout::board;
use ginnel_ring::wait::Watchable;
use libc::c_int;
use std::sync::atomic::Ordering;

/// How a peer wakes a sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// By a byte on the kernel's connection.
    Byte,
    /// By the doorbell. A byte wakes the sleeper too.
    Bell,
}

/// Announces how the next wake-up is to reach the sleepers. `is_only` says that no other thread waits. If others
/// already wait, they have announced a method, and `Wake::Bell` does not change it: a byte wakes all of them, and the
/// doorbell only some.
pub fn announce(side: &mut impl Watchable, how: Wake, is_only: bool) {
    match how {
        Wake::Byte => side.notify_at(board::Place::NONE),
        Wake::Bell if is_only => side.notify_at(board::Place::DOORBELL),
        Wake::Bell => {}
    }
}

/// Wakes a sleeping peer in the way that the peer has announced.
#[cold]
pub fn wake(socket: &'static Socket, fd: c_int, waker: &SocketWaker) {
    if !is_confined() && waker.ring() {
        socket.rings.fetch_add(1, Ordering::Relaxed);
    } else {
        connection::wake(socket, fd);
    }
}
