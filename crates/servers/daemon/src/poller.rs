//! The epoll of the event loop: descriptors are added with a token, and `wait` returns the tokens of those that are ready.
//! Level-triggered, unless the descriptor is added with [`Poller::add_edge`]. [`becomes_readable`] waits for a single one.

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most events that one call fetches.
const MOST: usize = 1024;

/// One descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The token that was given to [`Poller::add`].
    pub token: u64,
    /// There is something to read, or the peer has gone.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
    /// The peer has gone, or the descriptor has an error.
    pub hung_up: bool,
}

/// The events to wait for. A hang-up is always waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Wait until there is something to read.
    pub read: bool,
    /// Wait until there is room to write.
    pub write: bool,
}

impl Interest {
    /// Wait only until there is something to read.
    pub const READ: Self = Self { read: true, write: false };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, self.read);
        flags.set(epoll::EventFlags::OUT, self.write);
        flags
    }
}

/// An epoll descriptor. Clones share it.
#[derive(Clone, Debug)]
pub struct Poller(Arc<OwnedFd>);

impl Poller {
    /// Makes an epoll that waits for nothing yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)))
    }

    /// Waits for `interest` on `fd` from now on.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), interest.flags())?)
    }

    /// Waits for the next time that there is something to read on `fd`, although earlier things are never read. For an eventfd, each
    /// ring is such a time.
    pub fn add_edge(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Changes the events to wait for on `fd`.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), interest.flags())?)
    }

    /// Stops waiting for `fd`. A descriptor that has been passed on to another process must be removed before it is closed,
    /// because epoll refers to the open file and not to the number.
    pub fn remove(&self, fd: impl AsFd) {
        // This fails only if the descriptor has not been added.
        let _ = epoll::delete(&self.0, fd);
    }

    /// Waits until something is ready, at most `timeout`, and replaces the contents of `ready` by at most `most` events (1024 if that is
    /// less). The next call fetches more.
    pub fn wait(&self, ready: &mut Vec<Ready>, most: usize, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let mut events = [MaybeUninit::uninit(); MOST];
        let events = match epoll::wait(&self.0, &mut events[..most.min(MOST)], timeout.as_ref()) {
            Ok((events, _)) => &*events,
            Err(Errno::INTR) => &[],
            Err(errno) => return Err(errno.into()),
        };
        ready.extend(events.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            let hung_up = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
            Ready {
                token: data.u64(),
                readable: hung_up || flags.contains(epoll::EventFlags::IN),
                writable: flags.contains(epoll::EventFlags::OUT),
                hung_up,
            }
        }));
        Ok(())
    }

    /// Waits until something is ready. A signal ends [`Poller::wait`], and the library's own processes end with one.
    #[cfg(test)]
    pub fn wait_until_ready(&self) -> Vec<Ready> {
        let mut ready = Vec::new();
        kit::wait::wait_until("an event", || {
            self.wait(&mut ready, 64, Some(Duration::from_secs(1))).unwrap();
            !ready.is_empty()
        });
        ready
    }
}

/// Waits until a descriptor is readable, without `until` as long as that takes. Returns whether it is.
pub fn becomes_readable(fd: BorrowedFd<'_>, until: Option<Instant>) -> bool {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let time = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], time.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}
