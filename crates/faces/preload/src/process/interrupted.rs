//! Signals that end a waiting call.
//!
//! After a handler with SA_RESTART, the kernel restarts a `recv` or `send` that has no timeout. After any other handler the
//! call ends. The kernel never restarts `poll` and `epoll_wait`, in which this library sometimes waits on behalf of such a call, and it
//! ends `epoll_wait` also after a stop (SIGSTOP, SIGCONT), without any handler. So this module decides whether the call would have been
//! restarted. A program that has handlers of both kinds must expect EINTR, so its call fails with EINTR.
#![allow(unsafe_code)] // Asks the kernel which handlers are installed.

use crate::process::signals::FAULTS;
use crate::process::{handlers, thread};
use crate::system::errno::{Errno, Kept, Result};

/// Decides what happens to the program's call after its sleep was interrupted. `handled` is what [`thread::handled`] has returned before.
/// Returns EINTR if the call ends.
#[cold]
pub fn interrupted(has_timeout: bool, handled: u32) -> Result<()> {
    let _errno = Kept::new();
    let has_run = thread::handled() != handled;
    let ends = |signal| ends_calls(signal, has_run);
    if has_timeout || (1..=libc::SIGRTMAX()).any(ends) { Err(Errno(libc::EINTR)) } else { Ok(()) }
}

/// Returns whether a signal has a handler without SA_RESTART that may have run while a call waited. `has_run`: a handler of the program
/// has run that this library calls.
fn ends_calls(signal: libc::c_int, has_run: bool) -> bool {
    // SAFETY: `now` has room for the current action, and zeros are a valid value for it. The call changes no action.
    let (result, now) = unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, std::ptr::null(), &raw mut now), now)
    };
    let has_handler = now.sa_sigaction != libc::SIG_DFL && now.sa_sigaction != libc::SIG_IGN;
    let may_have_run =
        || has_run || handlers::of(signal).is_none_or(|handler| handler.now().0 != now.sa_sigaction);
    result == 0
        && !FAULTS.contains(&signal)
        && has_handler
        && now.sa_flags & libc::SA_RESTART == 0
        && may_have_run()
}
