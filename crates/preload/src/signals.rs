//! Signals that end a call which waits.
//!
//! The kernel restarts a `recv` or `send` without a timeout after a handler with SA_RESTART, and ends one after any other handler. It
//! never restarts `poll`, in which this library waits for such calls now and then; so what that call would have done is decided here. A
//! program with some handlers of either kind has to expect EINTR, so it is told.
//!
//! A handler may leave the call that it interrupts without returning to it (`longjmp`): what that call had locked stays locked. The locks of
//! directions know that ([`crate::lock`]). What takes another lock, or allocates, runs with [`Blocked`] signals, and what is made once is
//! made when the library is loaded.
#![allow(unsafe_code)] // Asks the kernel what handlers there are.

use crate::confined::is_confined;
use crate::errno::{Errno, Kept, Result};
use crate::real;

/// A handler has run while a call waited in `poll`. EINTR if the call that the program made ends by that.
#[cold]
pub fn interrupted(has_timeout: bool) -> Result<()> {
    let _errno = Kept::new();
    if has_timeout || (1..=libc::SIGRTMAX()).any(ends_calls) { Err(Errno(libc::EINTR)) } else { Ok(()) }
}

/// Signals of a thread's own faults. None comes while the thread waits, and this library and runtimes have handlers for them.
const FAULTS: [libc::c_int; 6] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Whether a signal has a handler without SA_RESTART that may have run while a call waited.
fn ends_calls(signal: libc::c_int) -> bool {
    // SAFETY: room for what is there now; it is valid as zeros, and nothing is changed.
    let (result, now) = unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, std::ptr::null(), &raw mut now), now)
    };
    let has_handler = now.sa_sigaction != libc::SIG_DFL && now.sa_sigaction != libc::SIG_IGN;
    result == 0 && !FAULTS.contains(&signal) && has_handler && now.sa_flags & libc::SA_RESTART == 0
}

/// No handler runs in this thread until it is dropped.
pub struct Blocked(Option<libc::sigset_t>);

impl Blocked {
    pub fn new() -> Self {
        // A program that has confined itself may be killed for it.
        if is_confined() {
            return Self(None);
        }
        // SAFETY: room for two sets; zeros are valid ones. A fault of this thread's own would kill it, as it should.
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
            // SAFETY: what was there before.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}

/// Sleeps for some milliseconds, in a call of the kernel that a handler ends.
pub fn sleep(milliseconds: libc::c_int) -> Result<()> {
    let _errno = Kept::new();
    // SAFETY: no descriptors.
    match unsafe { real::poll(std::ptr::null_mut(), 0, milliseconds) } {
        -1 => Err(Errno::last()),
        _ => Ok(()),
    }
}
