//! Socket options for which no crate has functions.
#![allow(unsafe_code)] // getsockopt and setsockopt as raw system calls, because our own library may interpose those of the C library.

use rustix::io::{Errno, Result};
use std::os::fd::{AsFd, AsRawFd};
use syscalls::{Sysno, syscall};

/// The level of TCP's options, IPPROTO_TCP.
pub const TCP: usize = 6;
/// The level of the options of all sockets, SOL_SOCKET.
pub const SOCKET: usize = 1;

/// Reads an option into `value`. Returns the number of bytes that the kernel has written.
pub fn get(fd: impl AsFd, level: usize, name: usize, value: &mut [u8]) -> Result<usize> {
    let mut len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to `value`, and the length to `len`. This function has exclusive access to
    // both, and both live during the call.
    unsafe { syscall!(Sysno::getsockopt, fd, level, name, value.as_mut_ptr(), &raw mut len) }
        .map_err(errno)?;
    Ok((len as usize).min(value.len()))
}

/// Sets an option that is an `int`.
pub fn set(fd: impl AsFd, level: usize, name: usize, value: i32) -> Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel reads four bytes from `value`, which lives during the call.
    unsafe { syscall!(Sysno::setsockopt, fd, level, name, &raw const value, size_of::<i32>()) }
        .map_err(errno)?;
    Ok(())
}

fn errno(error: syscalls::Errno) -> Errno {
    Errno::from_raw_os_error(error.into_raw())
}
