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
    /// A non-blocking call has said "not now" and left the doorbell armed for the caller's poll.
    armed: bool,
    /// The set that waits for this half.
    set: Option<Membership>,
    /// Waits that did not end at the first look.
    pub waits: u64,
}

/// When an operation ends at the latest, however often it waits. Known from its first wait on, so that one that need not wait
/// does not look at the clock.
#[derive(Default)]
pub(crate) struct Term(Option<Option<Instant>>);

/// A few hundred nanoseconds' worth.
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

    /// Waits until `what` is ready or has changed, as this half is set up to wait. `term` is that of the whole operation.
    pub fn wait<W: Watchable<Memory = Mapping>>(
        &mut self,
        what: &mut W,
        term: &mut Term,
    ) -> Result<(), Error> {
        self.waits += 1;
        self.begin(what);
        if let Some(set) = &self.set {
            return if set.rest(what.watch()) { Err(Error::WouldBlock) } else { Ok(()) };
        }
        if self.nonblocking {
            return self.arm(what);
        }
        let deadline = match term.0 {
            // What was waited for had changed, and yet was not enough. A peer could do that for ever.
            Some(deadline) if deadline.is_some_and(|d| Instant::now() >= d) => return Err(Error::TimedOut),
            Some(deadline) => deadline,
            // A timeout beyond what the clock can say is none.
            None => *term.0.insert(self.timeout.and_then(|t| Instant::now().checked_add(t))),
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

    /// Leaves the doorbell armed, so that the file descriptor becomes readable when another try is worth it.
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

    /// At the start of each wait: takes back what a non-blocking call has left armed. Operations that need not wait leave it:
    /// at worst the peer rings once more, and the file descriptor is readable for a try that was not worth it.
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

    /// How often an operation may look before it waits in earnest. A peer that is at work answers within them, and to
    /// see it there costs less than to see it in [`Waiter::wait`].
    #[inline]
    pub fn looks(&self) -> u32 {
        if self.nonblocking || self.set.is_some() || self.mode == WaitMode::Interrupt {
            1
        } else {
            FIRST_LOOKS
        }
    }

    /// Leaves the waiting to a set.
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

    /// Takes the waiting back.
    pub fn deregister<W: Watchable<Memory = Mapping>>(&mut self, what: &mut W) {
        self.begin(what);
        if self.set.take().is_some() {
            what.notify_at(Place::NONE);
        }
    }

    /// For poll and epoll: readable after [`Error::WouldBlock`], once another try is worth it.
    pub fn fd(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.wait_point.epoll().map_err(Error::io("making an epoll"))?.ok_or(Error::System {
            what: "no file descriptor to wait on: this VM has no interrupts (see `ginnel status`)",
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }
}
