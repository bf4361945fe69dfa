//! The time that a call which waits for events may take.

use crate::system::errno::Result;
use libc::{c_int, pollfd};
use std::time::{Duration, Instant};

/// A system call that waits for events of descriptors. With a timeout of `None` it waits without a limit.
pub trait Native {
    fn poll(&mut self, fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize>;
    /// Returns whether the call lets signals come that the program blocks otherwise.
    fn sets_mask(&self) -> bool {
        false
    }
}

impl<F: FnMut(&mut [pollfd], Option<Duration>) -> Result<usize>> Native for F {
    fn poll(&mut self, fds: &mut [pollfd], timeout: Option<Duration>) -> Result<usize> {
        self(fds, timeout)
    }
}

/// How long a call of `poll` or `epoll_wait` may take; `None` is for ever. The clock is not read before the call is
/// about to wait, because most calls do not wait, and in some guests reading the clock is slow.
pub struct Limit {
    timeout: Option<Duration>,
    end: Option<Instant>,
}

impl Limit {
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, end: None }
    }

    /// Returns whether the call may not wait at all.
    pub fn is_zero(&self) -> bool {
        self.timeout == Some(Duration::ZERO)
    }

    /// Returns the time that is left, counted from the first call of this function.
    pub fn left(&mut self) -> Option<Duration> {
        let timeout = self.timeout?;
        if timeout.is_zero() {
            return Some(timeout);
        }
        let now = Instant::now();
        let Some(end) = self.end else {
            // The end is later than the clock can represent, so the call never times out.
            self.end = now.checked_add(timeout);
            return Some(timeout);
        };
        Some(end.saturating_duration_since(now))
    }

    /// Returns what is left after a call that has ended. The clock is not read if the call has not waited.
    pub fn rest(&mut self) -> Option<Duration> {
        if self.end.is_some() { self.left() } else { self.timeout }
    }
}

/// Converts a timeout for `poll`, rounded up so that the call does not end too early. A negative result means for
/// ever.
pub fn milliseconds(left: Option<Duration>) -> c_int {
    left.map_or(-1, |left| {
        let rest = u64::from(left.subsec_nanos()).div_ceil(1_000_000);
        left.as_secs().saturating_mul(1000).saturating_add(rest).min(c_int::MAX as u64) as c_int
    })
}
