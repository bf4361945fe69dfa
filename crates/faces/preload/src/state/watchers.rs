//! The epoll instances in which a program has a socket.

use crate::process::lock::Lock;
use crate::process::section::Scratch;
use libc::c_int;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU32, Ordering};

/// What watches sockets for the program: an epoll instance. It knows a socket by its descriptor.
pub trait Watcher<S>: Sync {
    /// The carrier of a direction has changed, or what the program is to be told of has.
    fn changed(&self, fd: c_int, socket: &'static S);
    /// A cache may answer for sockets in it from now on.
    fn serve(&self);
    /// Something has been queued for the socket. Returns false if a thread that waits for it would not notice.
    fn offer(&self, fd: c_int, socket: &'static S) -> bool;
    /// A call has reported that there is no room, and the program is to be told when there is some.
    fn without_room(&self, fd: c_int, socket: &'static S);
    /// The program is about to close this descriptor of the socket, which has others, or may have some elsewhere.
    fn closes(&'static self, fd: c_int, socket: &'static S);
    /// The socket has ended.
    fn forget(&self, fd: c_int, socket: &'static S);
}

/// The instances that watch a socket (`S`), each with the descriptor and whether the program has the socket in there.
pub struct Watchers<S: 'static>(Lock<List<S>>, AtomicU32);

/// A socket usually is in one instance, and a program with short connections adds each of them.
type List<S> = SmallVec<[Entry<S>; 1]>;
type Few<S> = SmallVec<[(&'static dyn Watcher<S>, c_int); 4]>;

struct Entry<S: 'static> {
    watcher: &'static dyn Watcher<S>,
    fd: c_int,
    is_active: bool,
}

impl<S> Entry<S> {
    fn is(&self, watcher: &dyn Watcher<S>, fd: c_int) -> bool {
        std::ptr::addr_eq(self.watcher, watcher) && self.fd == fd
    }
}

impl<S> Watchers<S> {
    pub fn new() -> Self {
        Self(Lock::new(List::new()), AtomicU32::new(0))
    }

    /// Returns whether the program has the socket in no instance.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.1.load(Ordering::Relaxed) == 0
    }

    pub fn add(&self, watcher: &'static dyn Watcher<S>, fd: c_int) {
        self.update(|list| list.push(Entry { watcher, fd, is_active: true }));
    }

    pub fn remove(&self, watcher: &dyn Watcher<S>, fd: c_int) {
        self.update(|list| list.retain(|other| !other.is(watcher, fd)));
    }

    pub fn set_active(&self, watcher: &dyn Watcher<S>, fd: c_int, is_active: bool) {
        self.update(|list| {
            list.iter_mut()
                .filter(|other| other.is(watcher, fd))
                .for_each(|other| other.is_active = is_active);
        });
    }

    fn update(&self, work: impl FnOnce(&mut List<S>)) {
        let mut list = self.0.lock();
        work(&mut list);
        self.1.store(list.iter().filter(|entry| entry.is_active).count() as u32, Ordering::Relaxed);
    }

    /// Makes all of them report the socket's events from here on, because one of its directions has changed over, or because there
    /// is news that the kernel does not tell them.
    pub fn changed(&self, socket: &'static S) {
        self.few().iter().for_each(|&(watcher, fd)| watcher.changed(fd, socket));
    }

    /// Records in all of them that a cache may answer for the socket from now on.
    pub fn serve(&self) {
        self.few().iter().for_each(|(watcher, _)| watcher.serve());
    }

    /// Notes that something has been queued for the socket. Returns false if a thread that waits for it would not notice.
    pub fn offer(&self, socket: &'static S) -> bool {
        self.few().iter().all(|&(watcher, fd)| watcher.offer(fd, socket))
    }

    /// Notes that a call is about to report that there is no room.
    pub fn without_room(&self, socket: &'static S) {
        self.few().iter().for_each(|&(watcher, fd)| watcher.without_room(fd, socket));
    }

    /// Returns a copy of the list. The copy is needed because instances take this list's lock while they hold their own. A signal
    /// handler may be what asks, so a list that is not long needs no memory.
    fn few(&self) -> Scratch<Few<S>> {
        Scratch::new(|| self.0.lock().iter().map(|entry| (entry.watcher, entry.fd)).collect())
    }

    /// Tells those that know the socket by this descriptor that the program is about to close it.
    pub fn closes(&self, fd: c_int, socket: &'static S) {
        let few = self.few();
        few.iter().filter(|(_, other)| *other == fd).for_each(|&(watcher, fd)| watcher.closes(fd, socket));
    }

    /// Forgets the socket when it ends, because the kernel removes it from its instances.
    pub fn close(&self, socket: &'static S) {
        if self.0.lock().is_empty() {
            return;
        }
        self.few().iter().for_each(|&(watcher, fd)| watcher.forget(fd, socket));
        self.clear();
    }

    /// Forgets all instances.
    pub fn clear(&self) {
        self.update(|list| list.clear());
    }
}
