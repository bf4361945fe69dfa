//! How one half of a channel waits: mode, timeout, non-blocking use.

use crate::doorbell::{BorrowedEvent, WaitPoint};
use crate::error::Error;
use crate::inner::Inner;
use crate::ready::{Membership, ReadySet};
use ginnel_layout::board::Place;
use ginnel_ring::wait::{self, WaitMode, Watchable};
use ginnel_shmem::Mapping;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) struct Waiter {
    pub mode: WaitMode,
    pub timeout: Option<Duration>,
    pub nonblocking: bool,
    wait_point: WaitPoint,
    /// A non-blocking call has returned [`Error::WouldBlock`] and has left the doorbell armed for the caller's poll.
    armed: bool,
    /// The membership in a ready set that waits for this half.
    set: Option<Membership>,
    /// The number of operations that had to wait.
    pub waits: u64,
}

/// The deadline of one operation, however often it waits. It is determined at the first wait, so that an operation that
/// does not wait does not read the clock.
#[derive(Default)]
pub(crate) struct OperationDeadline(Option<Option<Instant>>);

/// The number of looks that takes a few hundred nanoseconds.
const FIRST_LOOKS: u32 = 256;

impl Waiter {
    pub fn new(mode: WaitMode, event: Option<BorrowedEvent>) -> Self {
        Self {
            mode,
            timeout: None,
            nonblocking: false,
            wait_point: WaitPoint::new(event),
            armed: false,
            set: None,
            waits: 0,
        }
    }

    /// Waits, as this half is configured, until `what` is ready or has changed. `until` is the deadline of the whole
    /// operation.
    pub fn wait<W: Watchable<Memory = Mapping>>(
        &mut self,
        what: &mut W,
        until: &mut OperationDeadline,
    ) -> Result<(), Error> {
        self.waits += 1;
        self.begin(what);
        if let Some(set) = &self.set {
            return if set.rest(what.watch()) { Err(Error::WouldBlock) } else { Ok(()) };
        }
        if self.nonblocking {
            return self.arm(what);
        }
        let deadline = match until.0 {
            // The ring had changed, but not enough for the operation. A peer could repeat that for ever, so check the
            // deadline.
            Some(deadline) if deadline.is_some_and(|d| Instant::now() >= d) => return Err(Error::TimedOut),
            Some(deadline) => deadline,
            // A deadline that the clock cannot represent means no deadline.
            None => *until.0.insert(self.timeout.and_then(|t| Instant::now().checked_add(t))),
        };
        match wait::wait(what, self.mode, &mut self.wait_point, deadline) {
            Ok(true) => {
                self.wait_point.rested();
                Ok(())
            }
            Ok(false) => Err(Error::TimedOut),
            Err(error) => Err(Error::io("sleeping on a doorbell")(error)),
        }
    }

    /// Leaves the doorbell armed, so that the file descriptor becomes readable when another attempt is worthwhile.
    fn arm<W: Watchable>(&mut self, what: &mut W) -> Result<(), Error> {
        self.wait_point.epoll().map_err(Error::io("making an epoll"))?;
        self.wait_point.drain();
        what.arm();
        if what.ready() {
            what.disarm();
            return Ok(());
        }
        self.armed = true;
        Err(Error::WouldBlock)
    }

    /// Disarms, at the start of each wait, what an earlier non-blocking call has left armed. Operations that need not
    /// wait leave it armed: at worst the peer rings once more, and the file descriptor becomes readable without need.
    pub fn begin<W: Watchable<Memory = Mapping>>(&mut self, what: &mut W) {
        if let Some(watch) = self.set.as_ref().and_then(Membership::wake) {
            what.unwatch(watch);
        }
        if self.armed {
            self.armed = false;
            what.disarm();
            self.wait_point.drain();
        }
    }

    /// Returns how often an operation may look at the ring before it waits in earnest. A peer that is running answers
    /// within these looks, and they cost less than [`Waiter::wait`].
    #[inline]
    pub fn looks(&self) -> u32 {
        if self.nonblocking || self.set.is_some() || self.mode == WaitMode::Interrupt {
            1
        } else {
            FIRST_LOOKS
        }
    }

    /// Lets a ready set wait for this half.
    pub fn register<W: Watchable<Memory = Mapping>>(
        &mut self,
        what: &mut W,
        endpoint: &Arc<Inner>,
        set: &ReadySet,
        key: u64,
    ) -> Result<(), Error> {
        self.deregister(what);
        let member = set.enter(endpoint, key)?;
        what.notify_at(member.place());
        self.set = Some(member);
        Ok(())
    }

    /// Takes this half out of its ready set.
    pub fn deregister<W: Watchable<Memory = Mapping>>(&mut self, what: &mut W) {
        self.begin(what);
        if self.set.take().is_some() {
            what.notify_at(Place::NONE);
        }
    }

    /// Returns a descriptor for poll and epoll that becomes readable after [`Error::WouldBlock`], once another attempt
    /// is worthwhile.
    pub fn fd(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.wait_point.epoll().map_err(Error::io("making an epoll"))?.ok_or(Error::System {
            what: "no file descriptor to wait on: this VM has no interrupts (see `ginnel status`)",
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }
}
