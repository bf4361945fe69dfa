//! Runs a child as if it had been started in place of this process: it gets the signals that are meant for it, and this
//! process ends as the child did.
//!
//! The signals stay blocked and are fetched one at a time, so there is no handler, and nothing can happen between two
//! steps.
#![allow(unsafe_code)] // Signal masks, sigwaitinfo and pre_exec, which have no safe equivalent in the crates that we use.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

/// The signals that other processes and terminals send.
const PASSED_ON: [libc::c_int; 8] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
];

/// Runs a child until it ends. An error means that it could not be started.
pub fn run(command: &mut Command) -> io::Result<ExitStatus> {
    let ours = blocked();
    let mut before = empty();
    // SAFETY: both sets are initialised; SIG_BLOCK touches nothing else.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &ours, &mut before) };
    // The parent of this process may have made it ignore SIGCHLD, and then the child's end would not be reported.
    // SAFETY: the default disposition has no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let restore = move || {
        // SAFETY: a set that the kernel has filled in; async-signal-safe, as it must be between fork and exec.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    };
    // SAFETY: `restore` only makes one system call.
    let mut child = unsafe { command.pre_exec(restore) }.spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        pass_on_next(&ours, &child);
    }
}

/// Waits for a signal, and passes it on if another process has sent it to this one.
fn pass_on_next(ours: &libc::sigset_t, child: &Child) {
    // SAFETY: all zeros are a siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: an initialised set, and a siginfo_t to fill in.
    let signal = unsafe { libc::sigwaitinfo(ours, &mut info) };
    // The kernel sends its own signals (with a positive code), such as a terminal's Ctrl-C, to the child as well,
    // because the child is in the same process group.
    if !PASSED_ON.contains(&signal) || info.si_code > 0 {
        return;
    }
    let Ok(child) = libc::pid_t::try_from(child.id()) else { return };
    // SAFETY: a signal that a process has sent has its sender's number.
    let sender = unsafe { info.si_pid() };
    // A child that signals its own process group must not get the signal twice.
    if sender != child {
        // SAFETY: no memory is involved. The child has not been waited for, so the number is still its own.
        unsafe { libc::kill(child, signal) };
    }
}

/// Ends this process in the same way as the child has ended.
pub fn end_as(status: ExitStatus) -> ! {
    let Some(signal) = status.signal() else { std::process::exit(status.code().unwrap_or(1)) };
    // The child has dumped core if it should, so this process must not.
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let mut set = empty();
    // SAFETY: a limit and a set that live; the default disposition has no handler; raise involves no memory.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        libc::signal(signal, libc::SIG_DFL);
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::raise(signal);
    }
    std::process::exit(128 + signal)
}

/// Returns the signals that are fetched here: those that may be passed on, and SIGCHLD.
fn blocked() -> libc::sigset_t {
    let mut set = empty();
    for signal in PASSED_ON.into_iter().chain([libc::SIGCHLD]) {
        // SAFETY: the set is initialised, and the signal exists.
        unsafe { libc::sigaddset(&mut set, signal) };
    }
    set
}

fn empty() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises it, and cannot fail.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}
