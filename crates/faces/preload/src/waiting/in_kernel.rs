//! Sleeping in a call of the kernel that receives.

use crate::carrying::connection;
use crate::state::socket::Socket;
use crate::state::sockets::{SOCKETS, number};
use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, check};
use crate::system::kernel;
use libc::c_int;

/// Sleeps until the kernel's socket has bytes or has ended, or the socket's own timeout for receiving has passed. The rules for
/// signals and cancellation are those of `recv`. If it `takes`, consumes the first byte and returns it.
pub fn sleep_as_recv(socket: &'static Socket, fd: c_int, takes: bool) -> Result<Option<u8>, Errno> {
    let connection = socket.connection();
    let is_same = || SOCKETS.is(fd, socket) && socket.connection() == connection;
    if is_confined() && !takes {
        return kernel::poll_readable(fd, -1).map(|_| {
            if is_same() {
                connection::look_for_end(socket, fd);
            }
            None
        });
    }
    let _errno = Kept::new();
    // The call asks for one byte at most, because SO_RCVLOWAT could make it wait for more.
    let mut byte = [0];
    let got = check(kernel::receive(fd, &mut byte, if takes { 0 } else { libc::MSG_PEEK }));
    if !is_same() {
        // The thread has slept at another file, to which another thread has given the number, and has consumed nothing there. Or it
        // has slept at the connection, which now has no number, or another one, or which the program has ended.
        return match got {
            Err(errno @ Errno(libc::EINTR)) => Err(errno),
            _ => number(socket, fd).map(|_| None),
        };
    }
    match got {
        Ok(0) => {
            connection::look_for_end(socket, fd);
            Ok(None)
        }
        Ok(_) => Ok(takes.then_some(byte[0])),
        Err(errno @ Errno(libc::EAGAIN | libc::EINTR | libc::EBADF)) => Err(errno),
        Err(errno) => {
            socket.set_error(errno);
            Ok(None)
        }
    }
}
