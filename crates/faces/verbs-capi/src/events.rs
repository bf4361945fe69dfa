//! Events for which programs wait at a file descriptor.
#![allow(unsafe_code)] // Calls C functions.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A queue of events, with a descriptor that is readable exactly while the queue is not empty.
pub struct Events<T> {
    fd: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> Events<T> {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes numbers only, and returns a new descriptor or an error.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, queue: Mutex::default() })
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_empty(&self) -> bool {
        self.queue().is_empty()
    }

    pub fn push(&self, event: T) {
        let mut queue = self.queue();
        queue.push_back(event);
        let one = 1_u64;
        // SAFETY: the eight bytes are a local variable. The counter is far from its maximum, so the call does not block.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// Takes the next event. Blocks until there is one, unless the program has made the descriptor non-blocking. Calls `give` under the
    /// queue's lock, so that the object of the event cannot be destroyed before that.
    pub fn take<R>(&self, give: impl Fn(T) -> R) -> io::Result<R> {
        loop {
            let mut count = 0_u64;
            // SAFETY: the eight bytes are a local variable.
            if unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) } < 0 {
                return Err(io::Error::last_os_error());
            }
            // The event may have been removed meanwhile.
            let mut queue = self.queue();
            if let Some(event) = queue.pop_front() {
                return Ok(give(event));
            }
        }
    }

    /// Removes the queued events for which `is_gone` returns true, and returns them.
    pub fn remove(&self, is_gone: impl Fn(&T) -> bool) -> Vec<T> {
        let mut queue = self.queue();
        let (gone, left): (Vec<T>, Vec<T>) = queue.drain(..).partition(is_gone);
        queue.extend(left);
        for _ in &gone {
            let mut count = 0_u64;
            let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
            // SAFETY: the eight bytes are a local variable. The call does not block. If another thread takes an event at the same time,
            // that thread finds the queue empty, and waits again.
            unsafe { libc::preadv2(self.fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
        }
        gone
    }
}

/// The number of events of an object that the program has received and not acknowledged yet. The object must not be destroyed before.
#[derive(Default)]
pub struct Unacknowledged {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Unacknowledged {
    fn count(&self) -> MutexGuard<'_, u32> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an event that is given to the program.
    pub fn give(&self) {
        *self.count() += 1;
    }

    pub fn acknowledge(&self, events: u32) {
        let mut count = self.count();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    /// Blocks until the program has acknowledged all events.
    pub fn wait(&self) {
        let mut count = self.count();
        while *count > 0 {
            count = self.changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
