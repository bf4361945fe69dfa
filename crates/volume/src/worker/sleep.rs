//! Where a worker waits: for kicks, for its mail, for completions.
//!
//! Eventfds are watched for edges and never read: each write to one is an edge, and a read would be a call to the kernel
//! for nothing, on a descriptor that a front end can make block.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::queue::Queue;

const MAIL: u64 = 0;
const COMPLETIONS: u64 = 1;
/// Tokens of queues begin here.
const QUEUES: u64 = 16;

/// Descriptors looked at after one wake.
const BATCH: usize = 32;

pub(super) struct Sleep {
    epoll: std::os::fd::OwnedFd,
}

impl Sleep {
    pub fn new(mail: BorrowedFd<'_>, completions: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, mail, epoll::EventData::new_u64(MAIL), edge)?;
        if let Some(fd) = completions {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(COMPLETIONS), edge)?;
        }
        Ok(Self { epoll })
    }

    pub fn watch(&self, queue: &Queue) -> io::Result<()> {
        let Some(kick) = &queue.kick else { return Ok(()) };
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, kick, epoll::EventData::new_u64(QUEUES + queue.serial), edge)?)
    }

    pub fn forget(&self, queue: &Queue) {
        if let Some(kick) = &queue.kick {
            // Not there only if it could not be watched.
            let _ = epoll::delete(&self.epoll, kick);
        }
    }

    /// Waits until there may be something, at most `timeout`.
    pub fn sleep(&self, timeout: Option<Duration>, queues: &[Queue]) -> io::Result<()> {
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [none; BATCH];
        let n = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(n) => n,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        for event in &events[..n] {
            let data = event.data;
            let serial = data.u64().checked_sub(QUEUES);
            if let Some(queue) = serial.and_then(|serial| queues.iter().find(|q| q.serial == serial)) {
                queue.counters.kicks.add(1);
            }
        }
        Ok(())
    }
}
