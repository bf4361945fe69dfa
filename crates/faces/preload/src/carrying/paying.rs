//! Whether a ring pays for the direction that it carries.
//!
//! A message whose receiver sleeps costs a wake-up, in a ring as over TCP. If nearly every message does, the ring saves little, and it can
//! lose: the wake-up itself costs less than TCP's, but this library has more to do around a sleep than the kernel has. So a sender that has
//! rung again and again for a few bytes each returns to the kernel ([`returning`]), and asks for a ring again after a long pause, because
//! the program may do something else by then. It advises its peer to do the same. With one direction over TCP and one in a ring, calls have
//! more to do than with either alone.
//!
//! A peer in another VM is worth a ring in any case: there TCP has to pass two kernels and the hypervisor for each message.

use crate::carrying::returning;
use crate::process::settings;
use crate::state::carrier::Carrier;
use crate::state::socket::Socket;
use crate::system::clock::now;
use ginnel::{SocketReceiver, SocketSender};
use ginnel_ring::carrier;
use libc::c_int;
use std::sync::atomic::Ordering;

/// Notes that a message has woken the peer. Returns whether the ring does not pay any more.
pub fn is_poor(socket: &Socket) -> bool {
    !socket.has_peer_elsewhere.load(Ordering::Relaxed)
        && socket.yields.is_poor(socket.sending.shared.load(Ordering::Relaxed), now)
        // In tests that wait for it, connections change over once and for all.
        && settings::wait().is_none()
}

/// Returns whether a program at either end has waited for more than this connection.
fn has_declined(socket: &Socket) -> bool {
    let by_peer = |sender: &SocketSender| carrier::has_declined(sender.ring.memory());
    let by_program = |receiver: &SocketReceiver| carrier::has_declined(receiver.ring.memory());
    socket.sending.lock().as_ref().is_some_and(by_peer)
        || socket.receiving.lock().as_ref().is_some_and(by_program)
}

/// Notes that the program waits in `poll` or `epoll`. There, this library asks the kernel and looks at the ring as long as a connection
/// has rings, whatever carries, so TCP would cost more than it does alone.
#[inline]
pub fn decline(socket: &'static Socket) {
    if let Some(receiver) = socket.receiving.lock().as_ref() {
        carrier::decline(receiver.ring.memory());
    }
}

/// Returns to the kernel for a while. Returns false if that is not possible now.
fn rest(socket: &'static Socket, fd: c_int) -> bool {
    let has_left = returning::may_leave(socket) && returning::leave_now(socket, fd);
    if has_left {
        socket.rest();
    }
    has_left
}

/// Returns to the kernel because the ring does not pay, and advises the peer to do the same for the other direction.
#[cold]
pub fn leave_unless_declined(socket: &'static Socket, fd: c_int) {
    if !has_declined(socket)
        && rest(socket, fd)
        && let Some(receiver) = socket.receiving.lock().as_ref()
        && !carrier::is_recalled(receiver.ring.memory())
    {
        carrier::advise(receiver.ring.memory());
    }
}

/// Follows the peer's advice. The peer's own direction has returned by then, so calls have something to do for the connection.
#[cold]
pub fn follow(socket: &'static Socket, fd: c_int) {
    let is_advised = |sender: &SocketSender| carrier::is_advised(sender.ring.memory());
    if socket.sending.carrier() == Carrier::Ring && socket.sending.lock().as_ref().is_some_and(is_advised) {
        rest(socket, fd);
    }
}
