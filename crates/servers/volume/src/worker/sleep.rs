//! Where a worker sleeps until there is a kick, an order or a completion.
//!
//! Eventfds are watched edge-triggered and never read. Each write to one is an edge; reading it would be a useless
//! system call, on a descriptor that a front end can make blocking.

use super::queue::Queue;
use super::source::Source;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

const ORDERS: u64 = 0;
const COMPLETIONS: u64 = 1;
/// The first token of a queue.
const QUEUES: u64 = 16;

/// The largest number of events per wake-up.
const BATCH: usize = 32;

pub(super) struct Sleep {
    epoll: std::os::fd::OwnedFd,
}

impl Sleep {
    pub fn new(orders: BorrowedFd<'_>, completions: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, orders, epoll::EventData::new_u64(ORDERS), edge)?;
        if let Some(fd) = completions {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(COMPLETIONS), edge)?;
        }
        Ok(Self { epoll })
    }

    pub fn watch<S: Source>(&self, queue: &Queue<S>) -> io::Result<()> {
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        for kick in &queue.kicks {
            epoll::add(&self.epoll, kick, epoll::EventData::new_u64(QUEUES + queue.serial), edge)?;
        }
        Ok(())
    }

    pub fn forget<S: Source>(&self, queue: &Queue<S>) {
        for kick in &queue.kicks {
            // Fails only if the descriptor could not be watched.
            let _ = epoll::delete(&self.epoll, kick);
        }
    }

    /// Waits until there may be work, for at most `timeout`.
    pub fn sleep<S: Source>(&self, timeout: Option<Duration>, queues: &[Queue<S>]) -> io::Result<()> {
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
