//! Interrupts system calls that block for as long as a program likes, by a timer that sends a signal to one thread. A wait that
//! ignores signals goes on.
#![allow(unsafe_code)] // For a timer that sends a signal to one thread, which no safe crate offers.

use std::io;
use std::time::Duration;

/// How often a call that blocks is interrupted.
const PATIENCE: Duration = Duration::from_millis(1);

thread_local! {
    static INTERRUPTER: Option<Interrupter> = Interrupter::new().ok();
}

/// Makes a system call that may close something that a program has sent. If it blocks on that, a timer interrupts it after about
/// a millisecond.
pub fn interrupted<T>(call: impl FnOnce() -> T) -> T {
    let interrupt = |every| INTERRUPTER.with(|timer| timer.iter().for_each(|timer| timer.set(every)));
    interrupt(PATIENCE);
    let result = call();
    interrupt(Duration::ZERO);
    result
}

/// A timer that interrupts the blocking calls of the thread that made it.
#[derive(Debug)]
struct Interrupter(libc::timer_t);

const SIGNAL: libc::c_int = libc::SIGALRM;

impl Interrupter {
    /// Makes a timer for this thread. It does nothing yet.
    fn new() -> io::Result<Self> {
        // SAFETY: the handler does nothing.
        unsafe { signal_hook::low_level::register(SIGNAL, || ()) }?;
        // SAFETY: zeros are a valid event and a valid set of signals, which the calls below fill. The event names this thread,
        // and the timer does not outlive it.
        unsafe {
            let mut signals: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut signals);
            libc::sigaddset(&raw mut signals, SIGNAL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, std::ptr::null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_THREAD_ID, SIGNAL);
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = std::ptr::null_mut();
            match libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) {
                0 => Ok(Self(timer)),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// Sets the interval of the interruptions, from now on; zero stops them.
    fn set(&self, every: Duration) {
        let time = libc::timespec {
            tv_sec: every.as_secs() as libc::time_t,
            tv_nsec: every.subsec_nanos() as libc::c_long,
        };
        let times = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the timer exists, and the times outlive the call.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
    }
}

impl Drop for Interrupter {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and is not used after this.
        unsafe { libc::timer_delete(self.0) };
    }
}
