//! How one half of a channel waits: mode, timeout, non-blocking use.

use crate::doorbell::{Bed, BorrowedEvent};
use crate::error::Error;
use ginnel_ring::wait::{self, WaitMode, Waitable};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

pub(crate) struct Waiter {
    pub mode: WaitMode,
    pub timeout: Option<Duration>,
    pub nonblocking: bool,
    bed: Bed,
    /// A non-blocking call has said "not now" and left the doorbell armed for the caller's poll.
    armed: bool,
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
        Self { mode, timeout: None, nonblocking: false, bed: Bed::new(event), armed: false, waits: 0 }
    }

    /// Waits until `what` is ready or has changed, as this half is set up to wait. `term` is that of the whole operation.
    pub fn wait<W: Waitable>(&mut self, what: &mut W, term: &mut Term) -> Result<(), Error> {
        self.waits += 1;
        self.begin(what);
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
        match wait::wait(what, self.mode, &mut self.bed, deadline) {
            Ok(true) => {
                self.bed.rested();
                Ok(())
            }
            Ok(false) => Err(Error::TimedOut),
            Err(error) => Err(Error::io("sleeping on a doorbell")(error)),
        }
    }

    /// Leaves the doorbell armed, so that the file descriptor becomes readable when another try is worth it.
    fn arm<W: Waitable>(&mut self, what: &mut W) -> Result<(), Error> {
        self.bed.epoll().map_err(Error::io("making an epoll"))?;
        self.bed.drain();
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
    pub fn begin<W: Waitable>(&mut self, what: &mut W) {
        if self.armed {
            self.armed = false;
            what.disarm();
            self.bed.drain();
        }
    }

    /// How often an operation may look before it waits in earnest. A peer that is at work answers within them, and to
    /// see it there costs less than to see it in [`Waiter::wait`].
    #[inline]
    pub fn looks(&self) -> u32 {
        if self.nonblocking || self.mode == WaitMode::Interrupt { 1 } else { FIRST_LOOKS }
    }

    /// For poll and epoll: readable after [`Error::WouldBlock`], once another try is worth it.
    pub fn fd(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.bed.epoll().map_err(Error::io("making an epoll"))?.ok_or(Error::System {
            what: "no file descriptor to wait on: this VM has no interrupts (see `ginnel status`)",
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }
}
