//! From descriptors to what they are.
//!
//! A descriptor of a TCP socket or of an epoll instance has an entry from the call that made it to the one that closes it. A number
//! without an entry is none of ours. Entries are found without a lock; what they point to is never freed, only used again, and that only
//! when no call is in it any more ([`Call`]).
//!
//! While a thread closes a descriptor, or gives its number to another file, the entry is a mark of that thread. Between the connection's
//! end here and in the kernel, the number is neither the connection's nor anybody else's: another thread's call would read wake bytes of the
//! one, or send them to the other. So calls that come meanwhile wait for what the number will be, and this library's own calls of the
//! kernel on such a number ([`Using`]) have ended before.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use libc::c_int;

use crate::confined::is_confined;
use crate::epoll::Instance;
use crate::errno::{Errno, Kept, Result};
use crate::kernel;
use crate::lock::{self, Lock};
use crate::socket::{Socket, now};

/// Descriptors with larger numbers are left alone.
const FDS: usize = 1 << 20;

/// How long a call waits for a thread that is about to close its descriptor, in microseconds. That thread does not wait for anything by then, but
/// others may have its CPU, or a handler may have made it leave in the middle.
const REPLACING: u64 = 10_000_000;
/// How long a thread that closes a descriptor waits for those that use its number, in microseconds. None of them sleeps; but one may have
/// been made to leave in the middle.
const IN_USE: u64 = 1_000_000;

/// What an entry points to.
pub trait Entry {
    /// Calls that are in it.
    fn calls(&self) -> &AtomicU32;
}

/// A call of the program in what a descriptor is, or was when the call came. As long as there is one, the memory is not used again. (Of a call
/// that a handler has left for good, there is always one.)
pub struct Call<T: Entry + 'static>(&'static T);

impl<T: Entry> Call<T> {
    pub fn what(&self) -> &'static T {
        self.0
    }
}

impl<T: Entry> Drop for Call<T> {
    #[inline]
    fn drop(&mut self) {
        // ORDER table.calls: all that the call has done there. Pairs with: `Table::fresh`.
        self.0.calls().fetch_sub(1, Ordering::Release);
    }
}

/// This thread's mark in an entry: its number, and a bit that no address has.
fn own_mark<T>() -> *mut T {
    std::ptr::without_provenance_mut((lock::tid() as usize) << 1 | 1)
}

#[inline]
fn is_mark<T>(entry: *mut T) -> bool {
    entry.addr() & 1 != 0
}

/// Waits until the thread whose mark stands in an entry has replaced it. False if the kernel has closed the descriptor already (a close may
/// linger), if it is this thread, or if it takes too long; then the mark is taken away.
#[cold]
fn has_changed<T>(entry: &AtomicPtr<T>, mark: *mut T, fd: c_int) -> bool {
    let owner = (mark.addr() >> 1) as i32;
    if owner == lock::tid() {
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

/// Descriptors of one kind.
pub struct Table<T: 'static> {
    entries: [AtomicPtr<T>; FDS],
    free: Lock<Vec<&'static T>>,
    /// No larger number has had an entry.
    highest: AtomicUsize,
}

pub static SOCKETS: Table<Socket> = Table::new();
pub static EPOLLS: Table<Instance> = Table::new();

impl<T: Entry> Table<T> {
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
        if is_mark(entry) {
            return None;
        }
        // SAFETY: null, or from `set`, which takes only references that are valid for ever.
        unsafe { entry.as_ref() }
    }

    /// The same for a call that works with it. Waits while another thread replaces it.
    #[inline]
    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    pub fn call(&self, fd: c_int) -> Option<Call<T>> {
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
            // SAFETY: as in `get`.
            let what = unsafe { found.as_ref() }?;
            // ORDER table.calls: either this thread sees that the entry has changed, or whoever would use the memory again sees the
            // call, because both write before they read and all four are sequentially consistent. Pairs with: `Table::fresh`.
            what.calls().fetch_add(1, Ordering::SeqCst);
            let call = Call(what);
            if entry.load(Ordering::SeqCst) == found {
                return Some(call);
            }
        }
    }

    /// Whether a descriptor is that.
    #[inline]
    pub fn is(&self, fd: c_int, what: &'static T) -> bool {
        // ORDER table.using: see `Using::begin`.
        self.entry(fd).is_some_and(|entry| std::ptr::eq(entry.load(Ordering::SeqCst), what))
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
    pub fn take(&self, fd: c_int) -> Option<&'static T> {
        self.swap(fd, std::ptr::null_mut())
    }

    #[expect(unsafe_code, reason = "entries point to what is never freed")]
    fn swap(&self, fd: c_int, by: *mut T) -> Option<&'static T> {
        let entry = self.entry(fd)?;
        let mut found = entry.load(Ordering::Relaxed);
        while !found.is_null() && !is_mark(found) {
            // ORDER table.calls, table.using: see `Table::call` and `Using::begin`.
            match entry.compare_exchange(found, by, Ordering::SeqCst, Ordering::Relaxed) {
                // SAFETY: as in `get`.
                Ok(_) => return unsafe { found.as_ref() },
                Err(other) => found = other,
            }
        }
        None
    }

    /// Memory that nobody uses, or new one. It may allocate.
    pub fn fresh(&self, make: impl FnOnce() -> T) -> &'static T {
        let mut free = self.free.lock();
        // ORDER table.calls: see `Table::call`.
        let unused = free.iter().rposition(|what| what.calls().load(Ordering::SeqCst) == 0);
        let unused = unused.map(|i| free.swap_remove(i));
        drop(free);
        unused.unwrap_or_else(|| Box::leak(Box::new(make())))
    }

    /// Nobody finds it by a descriptor any more.
    pub fn release(&self, what: &'static T) {
        self.free.lock().push(what);
    }

    /// All numbers of a range that have an entry.
    pub fn used(&self, first: u32, last: u32) -> impl Iterator<Item = c_int> {
        let last = (last as usize).min(self.highest.load(Ordering::Relaxed));
        (first as usize..=last)
            .filter(|fd| {
                let entry = self.entries[*fd].load(Ordering::Relaxed);
                !entry.is_null() && !is_mark(entry)
            })
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

/// The kernel has given this number to something else.
pub fn forget(fd: c_int) {
    if let Some(socket) = SOCKETS.take(fd) {
        // Nobody may ask the kernel about the connection by this number.
        leave(socket, fd, -1);
    }
    forget_epoll(fd);
}

fn forget_epoll(fd: c_int) {
    if let Some(instance) = EPOLLS.take(fd)
        && instance.fds.fetch_sub(1, Ordering::AcqRel) == 1
    {
        instance.close();
        EPOLLS.release(instance);
    }
}

/// A socket is left by one of its numbers. If it was the last, the connection ends; `open` is the number by which it is still open.
fn leave(socket: &'static Socket, fd: c_int, open: c_int) {
    let is_last = socket.fds.fetch_sub(1, Ordering::AcqRel) == 1;
    if !is_last && socket.fd.load(Ordering::Relaxed) == fd {
        let is_of = |other: &c_int| SOCKETS.is(*other, socket);
        if let Some(other) = SOCKETS.used(0, u32::MAX).find(is_of) {
            socket.fd.store(other, Ordering::Relaxed);
        }
    }
    let until = now() + IN_USE;
    // ORDER table.using: see `Using::begin`.
    while socket.using.load(Ordering::SeqCst) != 0 && now() < until {
        if is_confined() { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
    if is_last {
        crate::change::close(socket, open);
        SOCKETS.release(socket);
    }
}

/// Makes a call of the kernel that closes a descriptor, or gives its number to another file.
pub fn replace<R>(fd: c_int, call: impl FnOnce() -> R) -> R {
    /// Takes the mark away, if there is nothing in its place: also if this thread is cancelled in the call.
    struct Mark(c_int);
    impl Drop for Mark {
        fn drop(&mut self) {
            if let Some(entry) = SOCKETS.entry(self.0) {
                let none = std::ptr::null_mut();
                let _ = entry.compare_exchange(own_mark(), none, Ordering::Release, Ordering::Relaxed);
            }
        }
    }
    let kept = Kept::new();
    let mark = SOCKETS.swap(fd, own_mark()).map(|socket| (Mark(fd), socket));
    if let Some((_, socket)) = &mark {
        leave(socket, fd, fd);
    }
    forget_epoll(fd);
    drop(kept);
    call()
}

/// A call of this library that moves bytes over a socket's descriptor, or changes it. It does not sleep. As long as there is one, the number is
/// not given to another file.
pub struct Using(&'static Socket);

impl Using {
    /// `None` if the number is not that socket's any more.
    pub fn begin(socket: &'static Socket, fd: c_int) -> Option<Self> {
        // ORDER table.using: either this thread sees that the entry has changed, or whoever closes the descriptor sees this thread,
        // because both write before they read and all four are sequentially consistent. Pairs with: `leave`.
        socket.using.fetch_add(1, Ordering::SeqCst);
        let using = Self(socket);
        (SOCKETS.is(fd, socket) || is_child_of_vfork()).then_some(using)
    }
}

/// Whether the tables are another process's, and the numbers that are used now are not in them.
#[cold]
fn is_child_of_vfork() -> bool {
    #[cfg(not(test))]
    let owns_tables = crate::exports::owns_tables();
    #[cfg(test)]
    let owns_tables = true;
    !owns_tables
}

impl Drop for Using {
    fn drop(&mut self) {
        // A child of a fork in a handler has begun to count anew.
        let _ = self.0.using.fetch_update(Ordering::Release, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// By which number a call goes on that has slept: the program may have closed the one by which it came. EBADF if there is none.
pub fn number(socket: &'static Socket, fd: c_int) -> Result<c_int> {
    let other = || Some(socket.fd.load(Ordering::Relaxed)).filter(|other| SOCKETS.is(*other, socket));
    if SOCKETS.is(fd, socket) { Ok(fd) } else { other().ok_or(Errno(libc::EBADF)) }
}

/// In the child of a fork: the threads that were in calls are its parent's.
pub fn in_child() {
    SOCKETS.free_in_child();
    EPOLLS.free_in_child();
    for fd in SOCKETS.used(0, u32::MAX) {
        if let Some(socket) = SOCKETS.get(fd) {
            socket.calls.store(0, Ordering::Relaxed);
            socket.using.store(0, Ordering::Relaxed);
        }
    }
}
