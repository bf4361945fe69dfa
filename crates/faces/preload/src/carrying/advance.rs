//! The way of a connection to its rings, one step with each call of the program.

use crate::carrying::{change, passing};
use crate::daemon::session;
use crate::state::socket::Socket;
use libc::c_int;

/// Does what is due for a connection now. Never waits, unless the program wants signals from it.
#[cold]
pub fn advance(socket: &'static Socket, fd: c_int) {
    if session::attend(socket, fd) {
        passing::signalled(socket, fd);
    }
    if socket.is_joined() {
        change::attend(socket, fd);
    }
}
