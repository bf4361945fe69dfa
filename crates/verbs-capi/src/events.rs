//! Events that programs wait for at a descriptor.
#![allow(unsafe_code)] // Functions of C.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Events, and a descriptor that is readable exactly as long as there are some.
pub struct Events<T> {
    fd: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> Events<T> {
    pub fn new() -> io::Result<Self> {
        // SAFETY: it takes numbers, and gives a new descriptor or an error.
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
        // SAFETY: eight bytes of our own. The count is far from its end, so this does not wait.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// The next event. Waits for it, unless the program has made the descriptor non-blocking. `give` is called before the object that it
    /// is about can be destroyed.
    pub fn take<R>(&self, give: impl Fn(T) -> R) -> io::Result<R> {
        loop {
            let mut count = 0_u64;
            // SAFETY: eight bytes of our own.
            if unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) } < 0 {
                return Err(io::Error::last_os_error());
            }
            // It may have been taken away meanwhile.
            let mut queue = self.queue();
            if let Some(event) = queue.pop_front() {
                return Ok(give(event));
            }
        }
    }

    /// Takes away those that nobody has been given, and returns them.
    pub fn remove(&self, is_gone: impl Fn(&T) -> bool) -> Vec<T> {
        let mut queue = self.queue();
        let (gone, left): (Vec<T>, Vec<T>) = queue.drain(..).partition(is_gone);
        queue.extend(left);
        for _ in &gone {
            let mut count = 0_u64;
            let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
            // SAFETY: eight bytes of our own. It does not wait: a thread that takes an event at the same time finds none, and waits again.
            unsafe { libc::preadv2(self.fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
        }
        gone
    }
}

/// Events of an object that the program has been given and has not acknowledged. The object cannot be destroyed before.
#[derive(Default)]
pub struct Unacknowledged {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Unacknowledged {
    fn count(&self) -> MutexGuard<'_, u32> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program is given an event.
    pub fn give(&self) {
        *self.count() += 1;
    }

    pub fn acknowledge(&self, events: u32) {
        let mut count = self.count();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    /// Waits until the program has acknowledged all.
    pub fn wait(&self) {
        let mut count = self.count();
        while *count > 0 {
            count = self.changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
