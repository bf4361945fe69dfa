//! Further names of the functions that this library interposes.

use libc::{
    c_char, c_int, fd_set, nfds_t, pollfd, sighandler_t, size_t, sockaddr, socklen_t, ssize_t, timeval,
};
use std::ffi::c_void;

macro_rules! aliases {
    ($($alias:ident = $module:ident::$name:ident($($arg:ident: $t:ty),*) -> $r:ty;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $alias($($arg: $t),*) -> $r {
            // SAFETY: both names have the same rules.
            unsafe { super::$module::$name($($arg),*) }
        }
    )*};
}

aliases! {
    __read = io::read(fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t;
    __write = io::write(fd: c_int, buffer: *const c_void, len: size_t) -> ssize_t;
    __recv = io::recv(fd: c_int, buffer: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    __send = io::send(fd: c_int, buffer: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    __socket = sockets::socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    __connect = sockets::connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    __close = descriptors::close_for_program(fd: c_int) -> c_int;
    __dup2 = descriptors::dup2(from: c_int, to: c_int) -> c_int;
    __fcntl = descriptors::fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;
    __libc_fcntl64 = descriptors::fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;
    __poll = polling::poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    __select = polling::select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    __sigaction = handlers::sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    bsd_signal = handlers::signal(signal: c_int, function: sighandler_t) -> sighandler_t;
    ssignal = handlers::signal(signal: c_int, function: sighandler_t) -> sighandler_t;
    sysv_signal = handlers::__sysv_signal(signal: c_int, function: sighandler_t) -> sighandler_t;
    _IO_fdopen = streams::fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE;
    __fork = process::fork() -> libc::pid_t;
    __libc_fork = process::fork() -> libc::pid_t;
}
