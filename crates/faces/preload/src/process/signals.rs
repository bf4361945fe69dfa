//! Signals: which may be blocked, and how a thread blocks, sends and sleeps for them.
//!
//! A handler may leave the interrupted call without returning to it (`longjmp`). It does not run while the call holds a lock
//! ([`crate::process::section`]). Code that takes a lock of the C library, or allocates, is in a section or runs with [`Blocked`]
//! signals, and everything that is created only once is created when the library is loaded.
#![allow(unsafe_code)] // System calls about signals.

use crate::system::confined::is_confined;
use crate::system::errno::{Errno, Kept, Result};
use crate::system::real;

/// Signals for faults of the thread itself. They do not arrive while the thread waits. This library and language runtimes have
/// handlers for them.
pub const FAULTS: [libc::c_int; 6] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Blocks all signals of this thread, except those for faults, until it is dropped.
pub struct Blocked(Option<libc::sigset_t>);

impl Blocked {
    pub fn new() -> Self {
        // A seccomp filter may kill the program for the system call below.
        if is_confined() {
            return Self(None);
        }
        // SAFETY: the variables have room for two sets, and zeros are valid sets. The set leaves out the
        // signals for faults, so a fault of this thread still has its usual effect.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            for fault in FAULTS {
                libc::sigdelset(&raw mut all, fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
            Self(Some(before))
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // SAFETY: `before` is the mask that `new` has replaced.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}

/// Returns the mask of all signals that may be blocked for a while. It leaves out those for faults, and the C library's own, which
/// it uses to cancel threads and to change their rights.
pub fn all() -> u64 {
    let bit = |signal: libc::c_int| 1_u64 << (signal - 1);
    let own = 32..libc::SIGRTMIN();
    own.chain(FAULTS).fold(u64::MAX, |mask, signal| mask & !bit(signal))
}

/// Blocks these signals too, and returns the mask before that.
pub fn block(mask: u64) -> u64 {
    change_mask(libc::SIG_BLOCK, mask)
}

/// Sets the mask of blocked signals.
pub fn set_mask(mask: u64) {
    change_mask(libc::SIG_SETMASK, mask);
}

fn change_mask(how: libc::c_int, mask: u64) -> u64 {
    let mut before = 0_u64;
    let words = [how.into(), (&raw const mask).addr() as i64, (&raw mut before).addr() as i64, 8, 0, 0];
    // SAFETY: the kernel reads one mask and writes the other, both of 8 bytes.
    unsafe { real::system_call(libc::SYS_rt_sigprocmask, words) };
    before
}

/// Sends this thread a signal, with this information. Returns 0 if that was possible.
///
/// # Safety
///
/// The information is valid.
pub unsafe fn queue(signal: libc::c_int, info: *const libc::siginfo_t) -> libc::c_long {
    // SAFETY: it cannot fail.
    let process = unsafe { libc::getpid() };
    let words =
        [process.into(), crate::process::thread::tid().into(), signal.into(), info.addr() as i64, 0, 0];
    // SAFETY: the kernel reads the information, which the caller passes.
    unsafe { real::system_call(libc::SYS_rt_tgsigqueueinfo, words) }
}

/// Sleeps for some milliseconds. Fails with EINTR if a signal handler runs.
pub fn sleep(milliseconds: libc::c_int) -> Result<()> {
    let _errno = Kept::new();
    // SAFETY: the list of descriptors is empty, so the kernel does not read it.
    match unsafe { real::poll(std::ptr::null_mut(), 0, milliseconds) } {
        -1 => Err(Errno::last()),
        _ => Ok(()),
    }
}

/// Sends SIGPIPE to this thread, as the kernel does.
#[expect(unsafe_code, reason = "a signal to this very thread")]
pub fn raise_sigpipe() {
    // SAFETY: the numbers are those of this process and of this thread.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), libc::SIGPIPE) };
}
