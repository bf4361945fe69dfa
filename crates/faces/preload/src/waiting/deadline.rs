//! The time at which a call that moves bytes gives up.

use crate::system::errno::{Errno, Result};
use crate::system::kernel;
use libc::c_int;
use std::time::{Duration, Instant};

/// The time at which a call of the program ends at the latest. It is fixed when the call begins to wait, however often the call is woken.
///
/// Most calls wait at most once, and then most of them only look at the ring, or sleep in a call of the kernel that knows the time. So
/// neither the clock is read nor the kernel asked before this is needed.
#[derive(Default)]
pub struct Deadline {
    has_waited: bool,
    begun: Option<Instant>,
    end: Option<Option<Instant>>,
}

impl Deadline {
    /// Notes that the call waits now. Fails if it has waited before and the deadline has passed.
    pub fn waits(&mut self, fd: c_int, option: c_int) -> Result<()> {
        match std::mem::replace(&mut self.has_waited, true) {
            true => self.left(fd, option).map(drop),
            false => Ok(()),
        }
    }

    /// Notes that the call sleeps now. Returns whether this is the first time, so that all of the time is left.
    pub fn sleeps(&mut self) -> bool {
        let is_first = self.begun.is_none();
        self.begun.get_or_insert_with(Instant::now);
        is_first
    }

    /// Returns the time that is left, or an error if the deadline has passed.
    pub fn left(&mut self, fd: c_int, option: c_int) -> Result<Option<Duration>> {
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let end = *self
            .end
            .get_or_insert_with(|| kernel::timeout(fd, option).and_then(|time| begun.checked_add(time)));
        let Some(end) = end else { return Ok(None) };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Errno(libc::EAGAIN)) } else { Ok(Some(left)) }
    }
}
