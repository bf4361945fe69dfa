//! `fork`: which process this is, what each process has of its own, and what a child says at its birth.
//!
//! A child inherits the connections to the daemon. It never reads them, because their packets belong to its parent. The only
//! thing that it sends over one is `JOIN`, from the handler that `fork` itself calls: so the daemon knows the child before the
//! parent can end.
#![allow(unsafe_code)] // `pthread_atfork`, and a descriptor by its number in the handler.

use crate::descriptor::kept;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::time::Timespec;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Once, OnceLock};

/// Forks between the process that first attached and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// One process of a line of forks.
///
/// The generation tells a child from its parents even if they have the same number in different namespaces; the number
/// tells it where `fork` did not call its handlers.
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

/// A value of which each process has its own. The child of a fork makes it from its parent's at its first use.
pub(crate) struct PerProcess<T> {
    process: Process,
    value: T,
    child: OnceLock<Box<Self>>,
}

impl<T> PerProcess<T> {
    pub fn new(value: T) -> Self {
        Self { process: Process::current(), value, child: OnceLock::new() }
    }

    /// This process's value, which is made of its parent's if there is none yet.
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

    /// The same, and gives up those of other processes.
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

    /// The value of the process that made this one, or of its youngest descendant that has one here.
    pub fn youngest(&self) -> &T {
        let mut node = self;
        while let Some(child) = node.child.get() {
            node = child;
        }
        &node.value
    }
}

/// The process that has opened something.
pub(crate) struct Opener {
    process: Process,
    /// Readable when it has ended. Absent where the system does not offer it: then its children take it for alive.
    ended: Option<OwnedFd>,
}

impl Opener {
    /// This process.
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

    /// The same for what is done often, and without a system call in the process itself.
    #[inline]
    pub fn is_here_or_succeeded(&self) -> bool {
        self.process.generation == GENERATION.load(Ordering::Relaxed) || self.is_succeeded()
    }

    /// Whether what it has opened is closed by this process: it is this process, or it has ended and left it to its children.
    pub fn is_succeeded(&self) -> bool {
        if self.process == Process::current() {
            return true;
        }
        let Some(ended) = &self.ended else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// A descriptor over which children of this process join their parent's endpoint.
struct Slot {
    fd: AtomicI32,
    next: OnceLock<&'static Slot>,
}

const FREE: i32 = -1;
static FIRST: Slot = Slot { fd: AtomicI32::new(FREE), next: OnceLock::new() };

/// A connection is in the list of those over which children join, as long as this lives.
pub(crate) struct Inheritance(&'static Slot);

impl Inheritance {
    pub fn of(fd: BorrowedFd<'_>) -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler is a function of this program, and calls nothing that is forbidden in a fork's child.
            // Fails only for want of memory; then children attach at their first use, if that is in time.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let mut slot = &FIRST;
        // Slots are used again and never freed, because the handler walks the list without a lock.
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

/// `fork` calls it in the child, where other threads may have held any lock: it takes none, and allocates nothing.
extern "C" fn in_child() {
    use ginnel_layout::wire::Kind;
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // A header: kind, flags, request number 0.
    let mut join = [0u8; 8];
    let [low, high] = Kind::JOIN.0.to_le_bytes();
    (join[0], join[1]) = (low, high);
    let mut next = Some(&FIRST);
    while let Some(slot) = next {
        let fd = slot.fd.load(Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: `join` has the bytes. The number may be stale if another thread closed it during the fork; the call
            // then fails. A full socket does not take it; the open connection itself then keeps the endpoint.
            unsafe {
                libc::send(fd, join.as_ptr().cast(), join.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
        }
        next = slot.next.get().copied();
    }
}
