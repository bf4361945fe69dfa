//! The table of descriptors, which leads from a descriptor to its socket or epoll instance.
//!
//! A descriptor of a TCP socket or of an epoll instance has an entry from the call that creates it to the call that closes it. A
//! number without an entry does not concern this library. Entries are found without a lock. The objects that they point to are
//! never freed, but used again, and that only when no call uses them any more ([`Lease`]).
//!
//! While a thread closes a descriptor, or gives its number to another file, the entry is a mark of that thread. Between the connection's
//! end in this library and its end in the kernel, the number must belong neither to the connection nor to another file: a call of another
//! thread would read wake bytes from the one, or send them to the other. So calls that come meanwhile wait until it is clear what the
//! number refers to, and this library's own system calls on such a number ([`super::sockets::Using`]) have ended before.

use crate::process::lock::Lock;
use crate::process::{lock, thread};
use crate::system::clock::now;
use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use crate::system::kernel;
use libc::c_int;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// The library leaves descriptors with larger numbers alone.
const FDS: usize = 1 << 20;

/// How long a call waits for a thread that is about to close its descriptor, in microseconds. That thread does not wait for
/// anything by then, but other threads may have its CPU, or a signal handler may have made it leave the call in the middle.
const REPLACING: u64 = 10_000_000;

/// An object that entries of the table point to.
pub trait Entry {
    /// Returns the counter of the calls that use the object.
    fn calls(&self) -> &AtomicU32;
}

/// A call of the program that uses the object to which a descriptor refers, or referred when the call came. While such a call
/// exists, the memory is not used again. (A call that a signal handler has left for good exists for ever.)
pub struct Lease<T: Entry + 'static>(&'static T);

impl<T: Entry> Lease<T> {
    pub fn what(&self) -> &'static T {
        self.0
    }
}

impl<T: Entry> Drop for Lease<T> {
    #[inline]
    fn drop(&mut self) {
        // ORDER table.calls: releases everything that the call has done with the object. Pairs with: `Table::fresh`.
        self.0.calls().fetch_sub(1, Ordering::Release);
    }
}

/// Returns this thread's mark in an entry: its thread ID, and a bit that no address has.
pub fn own_mark<T>() -> *mut T {
    std::ptr::without_provenance_mut((thread::tid() as usize) << 1 | 1)
}

#[inline]
fn is_mark<T>(entry: *mut T) -> bool {
    entry.addr() & 1 != 0
}

/// Waits until the thread whose mark stands in an entry has replaced it. Returns false if the kernel has closed the descriptor
/// already (a close may linger), if the mark is this thread's own, or if the wait takes too long or that thread is dead; in the
/// last case, removes the mark.
#[cold]
fn has_changed<T>(entry: &AtomicPtr<T>, mark: *mut T, fd: c_int) -> bool {
    let owner = (mark.addr() >> 1) as i32;
    if owner == thread::tid() {
        return false;
    }
    let _errno = Kept::new();
    let until = now() + REPLACING;
    loop {
        for _ in 0..1000 {
            if entry.load(Ordering::Acquire) != mark {
                return true;
            }
            if is_confined() { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if kernel::poll_now(fd, 0) & libc::POLLNVAL != 0 {
            return false;
        }
        if now() >= until || !is_confined() && !lock::is_alive(owner) {
            let none = std::ptr::null_mut();
            let _ = entry.compare_exchange(mark, none, Ordering::Relaxed, Ordering::Relaxed);
            return false;
        }
    }
}

/// The descriptors of one kind.
pub struct Table<T: 'static> {
    entries: [AtomicPtr<T>; FDS],
    free: Lock<Vec<&'static T>>,
    /// The highest number that has had an entry.
    highest: AtomicUsize,
}

impl<T: Entry> Table<T> {
    pub const fn new() -> Self {
        Self {
            entries: [const { AtomicPtr::new(std::ptr::null_mut()) }; FDS],
            free: Lock::new(Vec::new()),
            highest: AtomicUsize::new(0),
        }
    }

    pub fn entry(&self, fd: c_int) -> Option<&AtomicPtr<T>> {
        self.entries.get(usize::try_from(fd).ok()?)
    }

    /// Returns the object to which a descriptor refers.
    #[inline]
    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    pub fn get(&self, fd: c_int) -> Option<&'static T> {
        // ORDER table.entry: acquires the object, which was created before the entry. Pairs with: `Table::set`.
        let entry = self.entry(fd)?.load(Ordering::Acquire);
        if is_mark(entry) {
            return None;
        }
        // SAFETY: the pointer is null, or comes from `set`, which takes only references that are valid for ever.
        unsafe { entry.as_ref() }
    }

    /// Returns the same object for a call that uses it. Waits while another thread replaces the entry.
    #[inline]
    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    pub fn call(&self, fd: c_int) -> Option<Lease<T>> {
        let entry = self.entry(fd)?;
        loop {
            // ORDER table.entry: see `Table::get`.
            let found = entry.load(Ordering::Acquire);
            if is_mark(found) {
                if has_changed(entry, found, fd) {
                    continue;
                }
                return None;
            }
            // SAFETY: the pointer is null, or comes from `set`, which takes only references that are valid for ever.
            let what = unsafe { found.as_ref() }?;
            // ORDER table.calls: either this thread sees that the entry has changed, or the thread that would use the memory again
            // sees the call, because both write before they read and all four accesses are sequentially consistent. Pairs with:
            // `Table::fresh`.
            what.calls().fetch_add(1, Ordering::SeqCst);
            let call = Lease(what);
            if entry.load(Ordering::SeqCst) == found {
                return Some(call);
            }
        }
    }

    /// Returns whether a descriptor refers to this object.
    #[inline]
    pub fn is(&self, fd: c_int, what: &T) -> bool {
        // ORDER table.using: see `Using::begin`.
        self.entry(fd).is_some_and(|entry| std::ptr::eq(entry.load(Ordering::SeqCst), what))
    }

    /// Returns whether this thread is about to close the number.
    #[cold]
    pub fn is_closed_by_this_thread(&self, fd: c_int) -> bool {
        self.entry(fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == own_mark())
    }

    /// Makes a descriptor refer to this object.
    pub fn set(&self, fd: c_int, what: &'static T) {
        if let Some(entry) = self.entry(fd) {
            self.highest.fetch_max(fd as usize, Ordering::Relaxed);
            // ORDER table.entry: releases the object, which is complete. Pairs with: `Table::get`.
            entry.store(std::ptr::from_ref(what).cast_mut(), Ordering::Release);
        }
    }

    /// Removes a descriptor's entry. Returns the object to which it referred, to one caller only.
    pub fn take(&self, fd: c_int) -> Option<&'static T> {
        self.swap(fd, std::ptr::null_mut())
    }

    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    pub fn swap(&self, fd: c_int, by: *mut T) -> Option<&'static T> {
        let entry = self.entry(fd)?;
        let mut found = entry.load(Ordering::Relaxed);
        while !found.is_null() && !is_mark(found) {
            // ORDER table.calls, table.using: see `Table::call` and `Using::begin`.
            match entry.compare_exchange(found, by, Ordering::SeqCst, Ordering::Relaxed) {
                // SAFETY: the pointer is neither null nor a mark, so it comes from `set`, which takes only references that are
                // valid for ever.
                Ok(_) => return unsafe { found.as_ref() },
                Err(other) => found = other,
            }
        }
        None
    }

    /// Returns an object that no call uses, or a new one. May allocate.
    pub fn fresh(&self, make: impl FnOnce() -> T) -> &'static T {
        let mut free = self.free.lock();
        // ORDER table.calls: see `Table::call`.
        let unused = free.iter().rposition(|what| what.calls().load(Ordering::SeqCst) == 0);
        let unused = unused.map(|i| free.swap_remove(i));
        drop(free);
        unused.unwrap_or_else(|| Box::leak(Box::new(make())))
    }

    /// Allows an object to be used again, because no descriptor leads to it any more.
    pub fn release(&self, what: &'static T) {
        self.free.lock().push(what);
    }

    /// Returns all numbers of a range that have an entry.
    pub fn used(&self, first: u32, last: u32) -> impl Iterator<Item = c_int> {
        let last = (last as usize).min(self.highest.load(Ordering::Relaxed));
        (first as usize..=last)
            .filter(|fd| {
                let entry = self.entries[*fd].load(Ordering::Relaxed);
                !entry.is_null() && !is_mark(entry)
            })
            .map(|fd| fd as c_int)
    }

    /// Frees the lock in the child of a fork, which has only one thread.
    pub fn free_in_child(&self) {
        self.free.free_in_child();
    }
}
