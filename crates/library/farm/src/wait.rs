//! Waiting for all workers and for new ones at the same time.

use crate::error::Error;
use crate::worker_channel::WorkerChannel;
use ginnel::{Endpoint, Listener, MessageChannel, MessageReceiver, ReadySet, WaitMode};
use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Keys in the set that belong to no channel.
const DOOR: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// The set of all workers' receivers, all listeners, and a timer.
pub(super) struct Watch {
    set: ReadySet,
    /// The set's descriptor, for callers that wait on it themselves.
    timer: OwnedFd,
    /// The key of the next channel.
    next: u64,
    /// The keys that were reported last.
    keys: Vec<u64>,
    /// An endpoint has no interrupts.
    naps: bool,
    /// A worker waits at a listener.
    knocked: bool,
}

impl Watch {
    pub fn new() -> Result<Self, Error> {
        let mut set = ReadySet::new()?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(system("making a timer"))?;
        set.watch(&timer, TIMER)?;
        Ok(Self { set, timer, next: 0, keys: Vec::new(), naps: false, knocked: false })
    }

    /// Watches a listener of this endpoint.
    pub fn door(&mut self, endpoint: &Endpoint, door: &Listener<MessageChannel>) -> Result<(), Error> {
        self.set.watch(door, DOOR)?;
        self.naps |= !endpoint.has_interrupts();
        Ok(())
    }

    /// Adds this receiver to the set. Returns the key of its channel, which is greater than all earlier keys.
    pub fn enter(&mut self, receiver: &mut MessageReceiver) -> Result<u64, ginnel::Error> {
        let key = self.next;
        receiver.register(&self.set, key)?;
        self.next += 1;
        Ok(key)
    }

    /// Returns whether a worker has been seen at a listener since the last call.
    pub fn knocked(&mut self) -> bool {
        std::mem::take(&mut self.knocked)
    }

    /// Notes which channels have something, and whether a worker has come. Does not wait.
    pub fn look(&mut self, channels: &mut [WorkerChannel]) -> Result<(), Error> {
        self.set.wait(&mut self.keys, Some(Duration::ZERO))?;
        self.note(channels)
    }

    /// Waits until an idle channel has something or a worker comes. May also return for no reason.
    pub fn wait(
        &mut self,
        channels: &mut [WorkerChannel],
        mode: WaitMode,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        self.set.set_mode(mode);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        self.set.wait(&mut self.keys, left)?;
        self.note(channels)
    }

    /// Leaves everything armed, so that the set's descriptor becomes readable when there is something to do, or at
    /// the deadline. Returns true, and leaves nothing armed, if there is something to do already.
    pub fn arm(&mut self, deadline: Option<Instant>) -> Result<bool, Error> {
        self.fd()?;
        self.set_timer(deadline)?;
        Ok(self.set.arm()?)
    }

    /// The descriptor of the set, for callers that wait on it.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        if self.naps {
            return Err(Error::Ginnel(ginnel::Error::System {
                what: "no file descriptor to wait on: this VM has no interrupts (see `ginnel status`)",
                source: io::ErrorKind::Unsupported.into(),
            }));
        }
        Ok(self.set.as_fd())
    }

    /// Records the keys that were reported. A channel's key is reported once: the channel remembers it until it has
    /// nothing more.
    fn note(&mut self, channels: &mut [WorkerChannel]) -> Result<(), Error> {
        let mut rang = false;
        for key in &self.keys {
            match *key {
                DOOR => self.knocked = true,
                TIMER => rang = true,
                // Keys ascend, so the keys of removed channels are not found.
                key => {
                    if let Ok(n) = channels.binary_search_by_key(&key, |channel| channel.key) {
                        channels[n].awake = true;
                    }
                }
            }
        }
        // Stop the timer. Otherwise the set would report it again and again.
        if rang { self.set_timer(None) } else { Ok(()) }
    }

    fn set_timer(&self, deadline: Option<Instant>) -> Result<(), Error> {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)));
        let value = left.and_then(|left| Timespec::try_from(left).ok());
        // All zeros stop the timer.
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = Itimerspec { it_interval: never, it_value: value.unwrap_or(never) };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)
            .map(drop)
            .map_err(system("setting a timer"))
    }
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| ginnel::Error::System { what, source: errno.into() }.into()
}
