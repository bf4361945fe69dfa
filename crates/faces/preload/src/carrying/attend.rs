//! What the program's calls do for a connection before they do their own work.

use crate::carrying::advance;
use crate::daemon::session;
use crate::state::socket::Socket;
use crate::system::errno::Kept;
use libc::c_int;

/// Does the work that is due for a connection before a call does its own work.
#[cold]
pub fn attend(socket: &'static Socket, fd: c_int) {
    let _errno = Kept::new();
    advance::advance(socket, fd);
}

/// Does the work that is due for a connection before a call moves bytes.
#[inline]
pub fn attend_or_wait(socket: &'static Socket, fd: c_int) {
    if socket.needs_attention() && !session::is_young(socket) {
        crate::carrying::settle::wait(socket);
        attend(socket, fd);
    }
}

/// Does the same for other calls that look at the socket.
#[inline]
pub fn attend_if_needed(socket: &'static Socket, fd: c_int) {
    if socket.needs_attention() {
        attend(socket, fd);
    }
}
