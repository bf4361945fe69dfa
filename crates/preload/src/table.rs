//! From descriptors to what they are.
//!
//! A descriptor of a TCP socket or of an epoll instance has an entry from the call that made it to the one that closes it. A number
//! without an entry is none of ours. Entries are found without a lock; what they point to is never freed, only used again.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::c_int;

use crate::epoll::Instance;
use crate::lock::Lock;
use crate::socket::Socket;

/// Descriptors with larger numbers are left alone.
const FDS: usize = 1 << 20;

/// Descriptors of one kind.
pub struct Table<T: 'static> {
    entries: [AtomicPtr<T>; FDS],
    free: Lock<Vec<&'static T>>,
    /// No larger number has had an entry.
    highest: AtomicUsize,
}

pub static SOCKETS: Table<Socket> = Table::new();
pub static EPOLLS: Table<Instance> = Table::new();

impl<T> Table<T> {
    const fn new() -> Self {
        Self {
            entries: [const { AtomicPtr::new(std::ptr::null_mut()) }; FDS],
            free: Lock::new(Vec::new()),
            highest: AtomicUsize::new(0),
        }
    }

    fn entry(&self, fd: c_int) -> Option<&AtomicPtr<T>> {
        self.entries.get(usize::try_from(fd).ok()?)
    }

    /// What a descriptor is.
    #[inline]
    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    pub fn get(&self, fd: c_int) -> Option<&'static T> {
        // ORDER table.entry: what the entry points to was made before. Pairs with: `Table::set`.
        let entry = self.entry(fd)?.load(Ordering::Acquire);
        // SAFETY: null, or from `set`, which takes only references that are valid for ever.
        unsafe { entry.as_ref() }
    }

    /// From now on this descriptor is that.
    pub fn set(&self, fd: c_int, what: &'static T) {
        if let Some(entry) = self.entry(fd) {
            self.highest.fetch_max(fd as usize, Ordering::Relaxed);
            // ORDER table.entry: what it points to is there. Pairs with: `Table::get`.
            entry.store(std::ptr::from_ref(what).cast_mut(), Ordering::Release);
        }
    }

    /// This descriptor is none of ours any more. Returns what it was, to one caller.
    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    pub fn take(&self, fd: c_int) -> Option<&'static T> {
        let entry = self.entry(fd)?;
        if entry.load(Ordering::Relaxed).is_null() {
            return None;
        }
        // SAFETY: as in `get`.
        unsafe { entry.swap(std::ptr::null_mut(), Ordering::AcqRel).as_ref() }
    }

    /// Memory that nobody uses, or new one. It may allocate.
    pub fn fresh(&self, make: impl FnOnce() -> T) -> &'static T {
        let free = self.free.lock().pop();
        free.unwrap_or_else(|| Box::leak(Box::new(make())))
    }

    /// Nobody finds it by a descriptor any more.
    pub fn release(&self, what: &'static T) {
        self.free.lock().push(what);
    }

    /// All numbers of a range that have an entry.
    pub fn used(&self, first: u32, last: u32) -> impl Iterator<Item = c_int> {
        let last = (last as usize).min(self.highest.load(Ordering::Relaxed));
        (first as usize..=last)
            .filter(|fd| !self.entries[*fd].load(Ordering::Relaxed).is_null())
            .map(|fd| fd as c_int)
    }

    /// The child of a fork has one thread.
    pub fn free_in_child(&self) {
        self.free.free_in_child();
    }
}

/// A descriptor that the kernel has just made is a TCP socket.
pub fn add_socket(fd: c_int) -> &'static Socket {
    forget(fd);
    let socket = SOCKETS.fresh(Socket::new);
    socket.begin(fd);
    SOCKETS.set(fd, socket);
    socket
}

/// A descriptor that the kernel has just made is an epoll instance.
pub fn add_epoll(fd: c_int) {
    forget(fd);
    let instance = EPOLLS.fresh(Instance::new);
    instance.begin(fd);
    EPOLLS.set(fd, instance);
}

/// `copy` names what `fd` does.
pub fn duplicate(fd: c_int, copy: c_int) {
    if fd == copy {
        return;
    }
    forget(copy);
    if let Some(socket) = SOCKETS.get(fd) {
        socket.fds.fetch_add(1, Ordering::Relaxed);
        SOCKETS.set(copy, socket);
    }
    if let Some(instance) = EPOLLS.get(fd) {
        instance.fds.fetch_add(1, Ordering::Relaxed);
        EPOLLS.set(copy, instance);
    }
}

/// The kernel has given this number to something else, or is about to close it.
pub fn forget(fd: c_int) {
    if let Some(socket) = SOCKETS.take(fd)
        && socket.fds.fetch_sub(1, Ordering::AcqRel) == 1
    {
        crate::change::close(socket, fd);
        SOCKETS.release(socket);
    }
    if let Some(instance) = EPOLLS.take(fd)
        && instance.fds.fetch_sub(1, Ordering::AcqRel) == 1
    {
        instance.close();
        EPOLLS.release(instance);
    }
}
