//! The three system calls that the agent needs and the standard library does not offer.
//!
//! They are declared by hand because the agent is compiled without dependencies (see `build.rs`); every libc has them.
#![allow(unsafe_code)] // calls into libc

use std::ffi::{c_int, c_ulong};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const F_GETFL: c_int = 3;
const F_SETFL: c_int = 4;
const O_NONBLOCK: c_int = 0o4000;
const POLLIN: i16 = 1;

#[repr(C)]
struct PollFd {
    fd: c_int,
    events: i16,
    revents: i16,
}

unsafe extern "C" {
    fn poll(fds: *mut PollFd, count: c_ulong, timeout_ms: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    safe fn kill(pid: c_int, signal: c_int) -> c_int;
}

/// Makes reads of `fd` non-blocking.
pub fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a valid fd, and commands that take and return plain numbers.
    let flags = unsafe { fcntl(fd.as_raw_fd(), F_GETFL) };
    // SAFETY: a valid fd, and a command that takes and returns plain numbers.
    if flags < 0 || unsafe { fcntl(fd.as_raw_fd(), F_SETFL, flags | O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Blocks until one of the descriptors is readable or has ended. Returns which ones.
pub fn wait_readable<const N: usize>(fds: [Option<BorrowedFd<'_>>; N]) -> io::Result<[bool; N]> {
    // `poll` ignores a negative descriptor.
    let mut set = fds.map(|fd| PollFd { fd: fd.map_or(-1, |fd| fd.as_raw_fd()), events: POLLIN, revents: 0 });
    loop {
        // SAFETY: `set` is an array of N pollfd structures that outlives the call.
        let found = unsafe { poll(set.as_mut_ptr(), N as c_ulong, -1) };
        if found >= 0 {
            return Ok(set.map(|entry| entry.revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Sends a signal to a process, or with a negative number to a process group.
pub fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    if kill(pid, signal) == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
