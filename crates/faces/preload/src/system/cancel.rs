//! Cancellation of threads (`pthread_cancel`).
//!
//! The calls of the program act on it where the kernel's do: at their beginning, before they have done anything, and while they sleep.
//! A thread that is cancelled runs the destructors of what it has begun, so locks and counts are left as after any other call. In
//! between, while a call moves bytes, the library makes its system calls in a way that does not act on it.
#![allow(unsafe_code)] // Calls of the C library, and system calls.

use crate::system::real;
use libc::{c_int, c_long, epoll_event, pollfd};

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While this exists, the thread is not cancelled, whatever it calls.
pub struct Disabled(c_int);

impl Disabled {
    pub fn new() -> Self {
        /// PTHREAD_CANCEL_DISABLE
        const DISABLE: c_int = 1;
        let mut before = 0;
        // SAFETY: `before` has room for the state.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Disabled {
    fn drop(&mut self) {
        // SAFETY: the state is one that the C library has returned.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}

/// Ends the thread if it is to be cancelled.
#[inline]
pub fn point() {
    // SAFETY: any thread may call it. The thread's stack is unwound, as in the functions that this library replaces.
    unsafe { pthread_testcancel() };
}

/// Makes a system call that does not act on cancellation, and does not wait.
unsafe fn call(number: c_long, arguments: [c_long; 6]) -> c_long {
    // SAFETY: the caller obeys the rules of the system call.
    unsafe { real::system_call(number, arguments) }
}

/// Sends without waiting.
pub fn send(fd: c_int, bytes: &[u8], flags: c_int) -> isize {
    let flags = flags | libc::MSG_DONTWAIT;
    let (at, len) = (bytes.as_ptr() as c_long, bytes.len() as c_long);
    // SAFETY: `bytes` has that many bytes to read, and there is no address.
    unsafe { call(libc::SYS_sendto, [fd.into(), at, len, flags.into(), 0, 0]) as isize }
}

/// Receives without waiting.
pub fn receive(fd: c_int, into: &mut [u8], flags: c_int) -> isize {
    let flags = flags | libc::MSG_DONTWAIT;
    let (at, len) = (into.as_mut_ptr() as c_long, into.len() as c_long);
    // SAFETY: `into` has room for that many bytes, and no address is asked for.
    unsafe { call(libc::SYS_recvfrom, [fd.into(), at, len, flags.into(), 0, 0]) as isize }
}

/// Receives a message without waiting. Its vectors have room for as many bytes as they say.
pub unsafe fn receive_message(fd: c_int, message: &mut libc::msghdr, flags: c_int) -> isize {
    let (at, flags) = (std::ptr::from_mut(message) as c_long, flags | libc::MSG_DONTWAIT);
    // SAFETY: the caller vouches for the vectors.
    unsafe { call(libc::SYS_recvmsg, [fd.into(), at, flags.into(), 0, 0, 0]) as isize }
}

/// Writes. The caller knows that there is room.
pub fn write(fd: c_int, bytes: &[u8]) -> isize {
    // SAFETY: `bytes` has that many bytes to read.
    unsafe {
        call(libc::SYS_write, [fd.into(), bytes.as_ptr() as c_long, bytes.len() as c_long, 0, 0, 0]) as isize
    }
}

/// Reads. The caller knows that there is something.
pub fn read(fd: c_int, into: &mut [u8]) -> isize {
    // SAFETY: `into` has room for that many bytes.
    unsafe {
        call(libc::SYS_read, [fd.into(), into.as_mut_ptr() as c_long, into.len() as c_long, 0, 0, 0]) as isize
    }
}

/// Returns the events of a descriptor without waiting.
pub fn poll(poll: &mut pollfd) -> c_int {
    let at = std::ptr::from_mut(poll) as c_long;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: one pollfd.
    let ready = unsafe { call(libc::SYS_poll, [at, 1, 0, 0, 0, 0]) };
    #[cfg(not(target_arch = "x86_64"))]
    let ready = {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: one pollfd and a time, and no signal mask.
        unsafe { call(libc::SYS_ppoll, [at, 1, &raw const none as c_long, 0, 0, 0]) }
    };
    ready as c_int
}

/// Returns the events of an epoll instance without waiting.
pub fn epoll(epoll: c_int, events: &mut [epoll_event]) -> c_int {
    let (at, count) = (events.as_mut_ptr() as c_long, events.len() as c_long);
    #[cfg(target_arch = "x86_64")]
    let number = libc::SYS_epoll_wait;
    #[cfg(not(target_arch = "x86_64"))]
    let number = libc::SYS_epoll_pwait;
    // SAFETY: `events` has room for that many events, and there is no signal mask.
    unsafe { call(number, [epoll.into(), at, count, 0, 0, 0]) as c_int }
}
