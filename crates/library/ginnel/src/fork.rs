//! `fork`: identifies processes, gives each process values of its own, and announces a child to the daemon.
//!
//! A child inherits the connections to the daemon. It never reads from them, because their packets belong to its
//! parent. The only packet that it sends over one is `JOIN`, from a handler that `fork` itself calls, so that the
//! daemon knows of the child before the parent can end.
#![allow(unsafe_code)] // `pthread_atfork`, and a descriptor by its number in the handler.

use crate::descriptor::kept;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::time::Timespec;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Once, OnceLock};

/// The number of forks between the process that first attached and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Identifies one process in a line of forks.
///
/// The generation distinguishes a child from its ancestors even if they have the same process ID in different
/// namespaces. The process ID distinguishes it where `fork` did not call its handlers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    generation: u32,
    pid: i32,
}

impl Process {
    pub fn current() -> Self {
        Self { generation: GENERATION.load(Ordering::Relaxed), pid: getpid().as_raw_nonzero().get() }
    }
}

/// A value that exists once per process. The child of a fork makes its own from its parent's at its first use.
pub(crate) struct PerProcess<T> {
    process: Process,
    value: T,
    child: OnceLock<Box<Self>>,
}

impl<T> PerProcess<T> {
    pub fn new(value: T) -> Self {
        Self { process: Process::current(), value, child: OnceLock::new() }
    }

    /// Returns this process's value; makes it from the parent's with `make` if there is none yet.
    pub fn get<E>(&self, make: impl FnOnce(&T) -> Result<T, E>) -> Result<&T, E> {
        let mut node = self;
        let me = Process::current();
        while node.process != me {
            node = match node.child.get() {
                Some(child) => child,
                None => {
                    let made = Box::new(Self::new(make(&node.value)?));
                    return Ok(&node.child.get_or_init(|| made).value);
                }
            };
        }
        Ok(&node.value)
    }

    /// Takes this process's value like [`PerProcess::get`], and drops those of the other processes.
    pub fn into_own<E>(self, make: impl FnOnce(&T) -> Result<T, E>) -> Result<T, E> {
        let (mut node, me) = (self, Process::current());
        while node.process != me {
            let Self { value, child, .. } = node;
            node = match child.into_inner() {
                Some(child) => *child,
                None => return make(&value),
            };
        }
        Ok(node.value)
    }

    /// Returns the value of the youngest process in this line of forks that has one in this memory; if no child has
    /// made one, that of the process that created this `PerProcess`.
    pub fn youngest(&self) -> &T {
        let mut node = self;
        while let Some(child) = node.child.get() {
            node = child;
        }
        &node.value
    }
}

/// The process that has opened an object.
pub(crate) struct Opener {
    process: Process,
    /// A pidfd, readable once the process has ended. `None` where the system has no pidfds; then the children assume
    /// that the process lives.
    ended: Option<OwnedFd>,
}

impl Opener {
    /// Returns the opener that stands for this process.
    pub fn current() -> Arc<Self> {
        static OPENERS: OnceLock<PerProcess<Arc<Opener>>> = OnceLock::new();
        let make = || {
            let ended = pidfd_open(getpid(), PidfdFlags::empty()).ok().map(kept);
            Arc::new(Self { process: Process::current(), ended })
        };
        let openers = OPENERS.get_or_init(|| PerProcess::new(make()));
        let Ok(opener) = openers.get(|_| Ok::<_, std::convert::Infallible>(make()));
        opener.clone()
    }

    /// Does the same as [`Opener::is_succeeded`] for frequent calls: it needs no system call in the process itself.
    #[inline]
    pub fn is_here_or_succeeded(&self) -> bool {
        self.process.generation == GENERATION.load(Ordering::Relaxed) || self.is_succeeded()
    }

    /// Returns whether this process is responsible for closing the object: it is the process that opened it, or that
    /// process has ended and left the object to its children.
    pub fn is_succeeded(&self) -> bool {
        if self.process == Process::current() {
            return true;
        }
        let Some(ended) = &self.ended else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// An entry of the list of connections over which children of this process join their parent's endpoint.
struct Slot {
    fd: AtomicI32,
    next: OnceLock<&'static Slot>,
}

const FREE: i32 = -1;
static FIRST: Slot = Slot { fd: AtomicI32::new(FREE), next: OnceLock::new() };

/// Keeps a connection in the list of those over which children join, until it is dropped.
pub(crate) struct Inheritance(&'static Slot);

impl Inheritance {
    pub fn of(fd: BorrowedFd<'_>) -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler is a function of this program, and calls nothing that is forbidden in the child of a
            // fork. The registration fails only if there is no memory; then children attach at their first use, if that
            // is in time.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let mut slot = &FIRST;
        // Slots are reused and never freed, because the handler walks the list without a lock.
        while slot.fd.compare_exchange(FREE, fd.as_raw_fd(), Ordering::Relaxed, Ordering::Relaxed).is_err() {
            slot = slot.next.get_or_init(|| {
                Box::leak(Box::new(Slot { fd: AtomicI32::new(FREE), next: OnceLock::new() }))
            });
        }
        Self(slot)
    }
}

impl Drop for Inheritance {
    fn drop(&mut self) {
        self.0.fd.store(FREE, Ordering::Relaxed);
    }
}

/// The handler that `fork` calls in the child. Other threads may have held any lock during the fork, so it takes no
/// lock and allocates nothing.
extern "C" fn in_child() {
    use ginnel_layout::wire::Kind;
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // The packet is only a header: kind, flags, and request number 0.
    let mut join = [0u8; 8];
    let [low, high] = Kind::JOIN.0.to_le_bytes();
    (join[0], join[1]) = (low, high);
    let mut next = Some(&FIRST);
    while let Some(slot) = next {
        let fd = slot.fd.load(Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: `join` has `join.len()` bytes. The descriptor may be stale if another thread closed it during the
            // fork; the call then fails. A full socket does not take the packet; then the open connection itself keeps
            // the endpoint alive.
            unsafe {
                libc::send(fd, join.as_ptr().cast(), join.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
        }
        next = slot.next.get().copied();
    }
}
