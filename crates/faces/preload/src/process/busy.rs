//! How many tasks of this machine want a CPU.
//!
//! A thread that spins for a message takes a CPU. If there are more tasks than CPUs, one of them may be the sender, which waits for that
//! CPU or for another one, and the kernel moves no task to a CPU that is in use. No task can see that from its own times on the CPU, but
//! the kernel tells how many tasks run or are ready to run (`/proc/loadavg`, proc(5)).
#![allow(unsafe_code)] // Reads a file without the standard library, which could allocate.

use crate::process::hidden;
use crate::system::errno::Kept;
use crate::system::real;
use libc::c_int;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// The open file; [`NONE`] before it is opened, [`MISSING`] if it cannot be opened.
static FILE: AtomicI32 = AtomicI32::new(NONE);
const NONE: c_int = -1;
const MISSING: c_int = -2;

/// The number of CPUs of the machine, of which this process may have only a part; 0 before it is needed. The kernel counts the tasks of
/// all of them.
static CPUS: AtomicU32 = AtomicU32::new(0);

pub fn cpus() -> u32 {
    match CPUS.load(Ordering::Relaxed) {
        0 => {
            let _errno = Kept::new();
            // SAFETY: it takes a number.
            let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
            let cpus = u32::try_from(cpus).unwrap_or(u32::MAX).max(1);
            CPUS.store(cpus, Ordering::Relaxed);
            cpus
        }
        cpus => cpus,
    }
}

/// Returns whether more tasks want a CPU than there are CPUs, as far as the kernel tells.
pub fn is_full() -> bool {
    tasks().is_some_and(|tasks| tasks > cpus())
}

fn file() -> Option<c_int> {
    match FILE.load(Ordering::Relaxed) {
        NONE => open(),
        MISSING => None,
        file => Some(file),
    }
}

#[cold]
fn open() -> Option<c_int> {
    // SAFETY: the path ends with a zero byte.
    let new = unsafe { libc::open(c"/proc/loadavg".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if new < 0 {
        FILE.store(MISSING, Ordering::Relaxed);
        return None;
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let new = hidden::hide(unsafe { OwnedFd::from_raw_fd(new) }).into_raw_fd();
    match FILE.compare_exchange(NONE, new, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Some(new),
        Err(other) => {
            // SAFETY: this thread has just opened it, and no other thread knows it.
            unsafe { real::close(new) };
            (other >= 0).then_some(other)
        }
    }
}

/// Returns how many tasks run or are ready to run, with the one that asks. Returns `None` if the kernel does not tell.
fn tasks() -> Option<u32> {
    let _errno = Kept::new();
    let mut text = [0; 64];
    // SAFETY: there is room for so many bytes.
    let n = unsafe { libc::pread(file()?, text.as_mut_ptr().cast(), text.len(), 0) };
    parse(text.get(..usize::try_from(n).ok()?)?)
}

/// Finds the number in text such as `0.20 0.18 0.12 1/80 11206`.
fn parse(text: &[u8]) -> Option<u32> {
    let field = text.split(|&byte| byte == b' ').nth(3)?;
    let number = field.split(|&byte| byte == b'/').next()?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_stands_before_the_slash() {
        assert_eq!(parse(b"0.20 0.18 0.12 1/80 11206\n"), Some(1));
        assert_eq!(parse(b"210.20 180.18 99.12 317/4080 11206\n"), Some(317));
        for bad in ["", "0.20", "0.20 0.18 0.12", "0.20 0.18 0.12 x/80 1", "0.20 0.18 0.12 -1/80 1"] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn this_task_runs() {
        if std::path::Path::new("/proc/loadavg").exists() {
            assert!(tasks().is_some_and(|tasks| tasks >= 1));
        }
    }
}
