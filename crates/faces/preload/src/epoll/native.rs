//! The kernel's call.

use crate::system::errno::{Errno, Result, check};
use crate::system::{cancel, real};
use crate::waiting::limit;
use libc::{c_int, epoll_event};
use std::time::Duration;

/// The number of events that the kernel is asked for at a time.
const EVENTS: usize = 64;

/// Calls the kernel's `epoll_wait`, or `epoll_pwait` if there is a mask.
pub fn native(
    epoll: c_int,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<usize> {
    let milliseconds = limit::milliseconds(timeout);
    let count = c_int::try_from(events.len().min(1 << 20)).unwrap_or(EVENTS as c_int);
    // The caller may have collected events already, which must not get lost.
    if milliseconds == 0 && mask.is_null() {
        return check(cancel::epoll(epoll, &mut events[..count as usize]) as isize);
    }
    #[expect(unsafe_code, reason = "a call of the kernel")]
    // SAFETY: `events` has room for `count` events; the mask is the program's, or null.
    let n = unsafe {
        if mask.is_null() {
            real::epoll_wait(epoll, events.as_mut_ptr(), count, milliseconds)
        } else {
            real::epoll_pwait(epoll, events.as_mut_ptr(), count, milliseconds, mask)
        }
    };
    check(n as isize).map_err(|errno: Errno| errno)
}
