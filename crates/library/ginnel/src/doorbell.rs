//! Doorbells: waking a peer, and sleeping until a peer rings.

use crate::descriptor::kept;
use ginnel_ring::wait::Sleeper;
use ginnel_shmem::device::Registers;
use rustix::event::{EventfdFlags, PollFlags, epoll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The means to wake one peer.
pub(crate) enum Doorbell {
    /// An eventfd of the host. The daemon, QEMU and the other programs of the segment hold it too.
    Event(OwnedFd),
    /// The doorbell register of a guest's control device, and the value to store there.
    Register(Arc<Registers>, u32),
    /// The peer never sleeps on a doorbell.
    None,
}

impl Doorbell {
    /// Rings the doorbell: one system call on the host, one MMIO store in a guest. Does not block, whatever other
    /// holders of the eventfd do to it, unless the system refuses asynchronous I/O (see [`ginnel_doorbell::ring`]).
    pub fn ring(&self) {
        match self {
            Self::Event(event) => ginnel_doorbell::ring(event.as_fd()),
            Self::Register(registers, value) => registers.ring(*value),
            Self::None => {}
        }
    }
}

/// The place where one side of a channel sleeps: an edge-triggered epoll of its own on the endpoint's eventfd.
///
/// The eventfd belongs to a vector, which several channels, threads and even processes may share, so nobody reads it.
/// Each sleeper has its own epoll instead, and an edge reaches all of them. Sleeping costs one system call, and ringing
/// costs one. A ring that was meant for another sleeper on the same vector only costs a needless check.
pub(crate) struct WaitPoint {
    event: Option<BorrowedEvent>,
    epoll: Option<OwnedFd>,
    nap: Duration,
}

/// The endpoint's eventfd, shared by all its channels.
pub(crate) type BorrowedEvent = Arc<OwnedFd>;

/// Shortest and longest nap of a side without interrupts; each nap is twice as long as the one before.
const FIRST_NAP: Duration = Duration::from_micros(50);
const LAST_NAP: Duration = Duration::from_millis(1);

impl WaitPoint {
    pub fn new(event: Option<BorrowedEvent>) -> Self {
        Self { event, epoll: None, nap: FIRST_NAP }
    }

    /// Returns the epoll, which is created at the first call. `None` without interrupts.
    pub fn epoll(&mut self) -> io::Result<Option<BorrowedFd<'_>>> {
        let Some(event) = &self.event else { return Ok(None) };
        if self.epoll.is_none() {
            let fd = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(
                &fd,
                event,
                epoll::EventData::new_u64(0),
                epoll::EventFlags::IN | epoll::EventFlags::ET,
            )?;
            self.epoll = Some(fd);
        }
        Ok(self.epoll.as_ref().map(AsFd::as_fd))
    }

    /// Discards the rings that have come so far, so that the epoll becomes readable only for a new one.
    pub fn drain(&mut self) {
        if let Some(epoll) = &self.epoll {
            let _ = wait(epoll.as_fd(), Some(Duration::ZERO));
        }
    }

    /// Makes the next nap short again, because this side was woken by work.
    pub fn rested(&mut self) {
        self.nap = FIRST_NAP;
    }
}

fn wait(epoll: BorrowedFd<'_>, timeout: Option<Duration>) -> Result<usize, Errno> {
    let timeout = timeout.and_then(|t| rustix::event::Timespec::try_from(t).ok());
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 1];
    epoll::wait(epoll, &mut events, timeout.as_ref())
}

impl Sleeper for WaitPoint {
    fn sleep(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let nap = self.nap;
        match self.epoll()? {
            Some(epoll) => match wait(epoll, left) {
                Ok(_) | Err(Errno::INTR) => Ok(()),
                Err(errno) => Err(errno.into()),
            },
            None => {
                // This guest has no interrupts, so the only way is to check at intervals.
                std::thread::sleep(left.map_or(nap, |left| left.min(nap)));
                self.nap = (nap * 2).min(LAST_NAP);
                Ok(())
            }
        }
    }
}

/// Creates an eventfd for waking threads of this process.
pub(crate) fn private_event() -> rustix::io::Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(kept)
}

/// Returns whether the descriptor becomes readable before the deadline.
pub(crate) fn readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> bool {
    crate::connection::wait(fd, PollFlags::IN, deadline)
}
