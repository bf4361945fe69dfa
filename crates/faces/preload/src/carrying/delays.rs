//! The program's TCP options that would delay wake bytes. The kernel has this library's values while a ring carries.

use crate::state::socket::Socket;
use crate::system::kernel;
use libc::c_int;
use std::sync::atomic::Ordering;

/// The TCP options that decide whether the kernel delays bytes to wait for more, each with the value that disables the delay.
pub const DELAYS: [(c_int, bool); 2] = [(libc::TCP_NODELAY, true), (libc::TCP_CORK, false)];

/// Makes the kernel send wake bytes at once. Remembers what the program has set, because the program may ask for it.
pub fn hurry(socket: &Socket, fd: c_int) {
    for (i, (option, at_once)) in DELAYS.into_iter().enumerate() {
        let set = kernel::tcp_flag(fd, option);
        socket.delays[i].store(set, Ordering::Relaxed);
        if set != at_once {
            kernel::set_tcp_flag(fd, option, at_once);
        }
    }
}

/// Notes the program's socket options that also apply to bytes in a ring. A connection may have inherited them from its listener.
pub fn note_options(socket: &Socket, fd: c_int) {
    socket.gives_up.store(kernel::tcp_flag(fd, libc::TCP_USER_TIMEOUT), Ordering::Relaxed);
    socket.tells_inq.store(kernel::tcp_flag(fd, libc::TCP_INQ), Ordering::Relaxed);
}

/// Restores the options that the program has set.
pub fn relax(socket: &'static Socket, fd: c_int) {
    let delays = crate::state::family::delays(socket);
    for (i, (option, at_once)) in DELAYS.into_iter().enumerate() {
        let set = delays[i].load(Ordering::Relaxed);
        if set != at_once {
            kernel::set_tcp_flag(fd, option, set);
        }
    }
}
