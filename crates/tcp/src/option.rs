//! Socket options that no crate reads.
#![allow(unsafe_code)] // getsockopt and setsockopt by number: the C library's may be interposed by our own library.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::{Errno, Result};
use syscalls::{Sysno, syscall};

/// IPPROTO_TCP, as a level of options.
pub const TCP: usize = 6;
/// SOL_SOCKET.
pub const SOCKET: usize = 1;

/// Reads an option into `value`. Returns how many bytes the kernel has for it that fit.
pub fn get(fd: impl AsFd, level: usize, name: usize, value: &mut [u8]) -> Result<usize> {
    let mut len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to `value`, and the length to `len`; both are ours and live.
    unsafe { syscall!(Sysno::getsockopt, fd, level, name, value.as_mut_ptr(), &raw mut len) }
        .map_err(errno)?;
    Ok((len as usize).min(value.len()))
}

/// Sets an option that is an `int`.
pub fn set(fd: impl AsFd, level: usize, name: usize, value: i32) -> Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel reads four bytes from `value`, which is ours and lives.
    unsafe { syscall!(Sysno::setsockopt, fd, level, name, &raw const value, size_of::<i32>()) }
        .map_err(errno)?;
    Ok(())
}

fn errno(error: syscalls::Errno) -> Errno {
    Errno::from_raw_os_error(error.into_raw())
}
