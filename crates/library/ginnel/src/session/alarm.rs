//! What a thread sleeps on until the session has something to do.

use crate::connection::{Connection, wait_any};
use crate::descriptor::kept;
use crate::doorbell::private_event;
use crate::error::Error;
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The descriptors on which a thread sleeps until the session has something to do.
pub struct Alarm {
    /// Readable when there is something to do: it watches the socket and the timer.
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Readable as long as there are answers that waiting callers have not taken.
    answers: OwnedFd,
}

impl Alarm {
    pub fn new() -> Result<Self, Error> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map(kept)
            .map_err(Error::system("making a timer"))?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map(kept).map_err(Error::system("making an epoll"))?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(Error::system("watching a timer"))?;
        let answers = private_event().map_err(Error::system("making an eventfd"))?;
        Ok(Self { epoll, timer, answers })
    }

    /// Watches the daemon's socket for packets and, if it is full, also for room.
    pub fn watch(&self, connection: &Connection, full: bool) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, epoll::EventData::new_u64(0), events(full))
    }

    /// Changes what is watched for on a socket that is watched already.
    pub fn watch_again(&self, connection: &Connection, full: bool) -> Result<(), Errno> {
        epoll::modify(&self.epoll, connection, epoll::EventData::new_u64(0), events(full))
    }

    pub fn unwatch(&self, connection: &Connection) -> Result<(), Errno> {
        epoll::delete(&self.epoll, connection)
    }

    pub fn wait(&self, deadline: Instant) {
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN), PollFd::new(&self.answers, PollFlags::IN)];
        wait_any(&mut fds, Some(deadline));
    }

    /// Returns the descriptor that is readable when there is something to do.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Sets the timer to a time, or stops it.
    pub fn set_timer(&self, at: Option<Instant>) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = at.map_or(zero, |at| {
            // All zeros would stop the timer.
            let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
        });
        // Setting the timer also makes it unreadable.
        let once = Itimerspec { it_interval: zero, it_value: value };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }

    /// Says whether there are answers for waiting callers.
    pub fn show_answers(&self, show: bool) {
        let _ = match show {
            true => rustix::io::write(&self.answers, &1u64.to_ne_bytes()),
            false => rustix::io::read(&self.answers, &mut [0u8; 8]),
        };
    }
}

fn events(full: bool) -> epoll::EventFlags {
    let mut events = epoll::EventFlags::IN;
    events.set(epoll::EventFlags::OUT, full);
    events
}
