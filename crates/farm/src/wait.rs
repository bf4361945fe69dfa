//! Waiting for many channels at once, by the one wait protocol.

use crate::error::Error;
use crate::link::Link;
use ginnel::{Listener, MessageChannel, WaitMode};
use ginnel_ring::wait::{self, Sleeper, Waitable};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What an event of the epoll is about.
const BELL: u64 = 0;
const DOOR: u64 = 1;
const TIMER: u64 = 2;

/// Naps where somebody has no interrupts.
const NAP: Duration = Duration::from_micros(500);

/// One epoll of all doorbells and all listeners.
///
/// Doorbells are edge-triggered and never read, because others may share them; a listener's is readable as long as somebody waits there.
pub(super) struct Watch {
    epoll: OwnedFd,
    /// For callers that wait on the epoll themselves.
    timer: OwnedFd,
    /// Doorbells that are watched.
    events: Vec<Arc<OwnedFd>>,
    /// Somebody of ours has no doorbell.
    naps: bool,
    /// Somebody waits at a listener.
    knocked: Cell<bool>,
    armed: bool,
}

impl Watch {
    pub fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("making an epoll"))?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(system("making a timer"))?;
        let watch =
            Self { epoll, timer, events: Vec::new(), naps: false, knocked: Cell::new(false), armed: false };
        watch.add(watch.timer.as_fd(), TIMER, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(watch)
    }

    /// Watches a listener, and the doorbell of its channels.
    pub fn door(&mut self, door: &Listener<MessageChannel>) -> Result<(), Error> {
        match door.event() {
            // Listeners of one endpoint have one.
            Some(event) if self.events.iter().any(|known| known.as_raw_fd() == event.as_raw_fd()) => {}
            Some(event) => {
                self.add(event.as_fd(), BELL, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
                self.events.push(event.clone());
            }
            None => self.naps = true,
        }
        match self.add(door.as_fd(), DOOR, epoll::EventFlags::IN) {
            Err(Error::Ginnel(ginnel::Error::System { source, .. }))
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                Ok(())
            }
            other => other,
        }
    }

    fn add(&self, fd: BorrowedFd<'_>, what: u64, flags: epoll::EventFlags) -> Result<(), Error> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(what), flags)
            .map_err(system("watching a doorbell"))
    }

    /// Whether somebody has been seen to wait at a listener since this was asked last.
    pub fn knocked(&self) -> bool {
        self.knocked.take()
    }

    /// Looks whether somebody waits at a listener.
    pub fn look(&self) -> Result<bool, Error> {
        self.collect(Some(Duration::ZERO)).map_err(looking)?;
        Ok(self.knocked())
    }

    /// Waits until one of these has something, or somebody comes, or for no reason.
    pub fn wait(
        &mut self,
        links: &mut [Link],
        mode: WaitMode,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let mut all = All { links, knocked: &self.knocked };
        let slept = wait::wait(&mut all, mode, &mut &*self, deadline);
        slept.map(drop).map_err(looking)
    }

    /// Leaves everything armed, so that the epoll becomes readable when something is to be done, or at the deadline. True if
    /// something is to be done already, and nothing is armed.
    pub fn arm(&mut self, links: &mut [Link], deadline: Option<Instant>) -> Result<bool, Error> {
        self.fd()?;
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)));
        let value = left.and_then(|left| Timespec::try_from(left).ok());
        // All zeros stop it.
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = Itimerspec { it_interval: never, it_value: value.unwrap_or(never) };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)
            .map_err(system("setting a timer"))?;
        // Forget the edges so far.
        self.collect(Some(Duration::ZERO)).map_err(looking)?;
        let mut all = All { links, knocked: &self.knocked };
        all.arm();
        if all.ready() {
            all.disarm();
            return Ok(true);
        }
        self.armed = true;
        Ok(false)
    }

    /// Takes back what was left armed.
    pub fn disarm(&mut self, links: &mut [Link]) {
        if std::mem::take(&mut self.armed) {
            All { links, knocked: &self.knocked }.disarm();
            // Somebody may have come meanwhile.
            self.knocked.set(true);
        }
    }

    /// The epoll, for callers that wait on it.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        if self.naps {
            return Err(Error::Ginnel(ginnel::Error::System {
                what: "no file descriptor to wait on: this VM has no interrupts (see `ginnel status`)",
                source: io::ErrorKind::Unsupported.into(),
            }));
        }
        Ok(self.epoll())
    }

    pub fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Waits for events, and takes note of them.
    fn collect(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let empty = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [empty; 64];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(count) => {
                if events[..count].iter().any(|event| event.data.u64() == DOOR) {
                    self.knocked.set(true);
                }
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| ginnel::Error::System { what, source: errno.into() }.into()
}

fn looking(error: io::Error) -> Error {
    ginnel::Error::System { what: "waiting for the workers' doorbells", source: error }.into()
}

impl Sleeper for &Watch {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let left = if self.naps { Some(left.map_or(NAP, |left| left.min(NAP))) } else { left };
        self.collect(left)
    }
}

/// All workers, and whoever comes, as one thing to wait for.
struct All<'l> {
    links: &'l mut [Link],
    knocked: &'l Cell<bool>,
}

impl Waitable for All<'_> {
    fn ready(&mut self) -> bool {
        self.knocked.get() || self.links.iter_mut().any(|link| link.receiver.waitable().ready())
    }
    fn glance(&self) -> bool {
        self.links.iter().any(|link| link.receiver.glance())
    }
    fn arm(&mut self) {
        self.links.iter_mut().for_each(|link| link.receiver.waitable().arm());
    }
    fn disarm(&mut self) {
        self.links.iter_mut().for_each(|link| link.receiver.waitable().disarm());
    }
}
