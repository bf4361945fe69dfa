//! An epoll instance of the program.

use crate::epoll::hot::State;
use crate::epoll::registration;
use crate::epoll::watch::Watch;
use crate::process::lock::{Guard, Lock};
use crate::state::socket::Socket;
use crate::state::watchers::Watcher;
use crate::waiting::points;
use libc::c_int;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

/// A bit of [`Instance::sleeping`]. It is set once a thread waits for the instance in `poll` or in another epoll instance. Such a
/// thread does not report when it is awake again, so from then on the instance always counts as having a sleeper.
const WATCHED: u32 = 1 << 31;

/// An epoll instance.
pub struct Instance {
    /// The number of descriptors of this process that refer to the instance.
    pub fds: AtomicU32,
    pub(super) fd: AtomicI32,
    /// The number of the program's calls that are using this instance.
    calls: AtomicU32,
    /// The number of its sockets that the kernel does not carry alone.
    pub(super) joined: AtomicU32,
    /// The number of threads that sleep in the kernel, or are about to, and the [`WATCHED`] bit.
    pub(super) sleeping: AtomicU32,
    /// The number of threads that sleep in the kernel, or are about to, without having looked at any socket.
    pub(super) unaware: AtomicU32,
    /// True if it contains, or has contained, sockets whose gets this process answers or may answer.
    pub(super) is_served: AtomicBool,
    /// True if the program has added a socket with EPOLLONESHOT.
    pub(super) has_once: AtomicBool,
    pub(super) state: Lock<State>,
}

impl crate::state::table::Entry for Instance {
    fn calls(&self) -> &AtomicU32 {
        &self.calls
    }
}

impl Instance {
    pub fn new() -> Self {
        let state = State {
            watches: HashMap::default(),
            hot: Vec::new(),
            answered: Vec::new(),
            calls: 0,
            asked: None,
            is_kernel_first: false,
            sleeps: 0,
            failures: 0,
            told: 0,
            most: None,
            once: HashMap::default(),
            bells: points::Events::new(),
        };
        Self {
            fds: AtomicU32::new(0),
            fd: AtomicI32::new(-1),
            calls: AtomicU32::new(0),
            joined: AtomicU32::new(0),
            sleeping: AtomicU32::new(0),
            unaware: AtomicU32::new(0),
            is_served: AtomicBool::new(false),
            has_once: AtomicBool::new(false),
            state: Lock::new(state),
        }
    }

    /// Resets the instance for another descriptor.
    pub fn begin(&self, fd: c_int) {
        self.fd.store(fd, Ordering::Relaxed);
        self.sleeping.store(0, Ordering::Relaxed);
        self.unaware.store(0, Ordering::Relaxed);
        self.is_served.store(false, Ordering::Relaxed);
        self.has_once.store(false, Ordering::Relaxed);
        self.fds.store(1, Ordering::Relaxed);
    }

    /// Clears the instance when its last descriptor is closed.
    pub fn close(&'static self) {
        let mut state = self.state.lock();
        for (fd, mut watch) in state.watches.drain() {
            watch.rise();
            watch.socket.watchers.remove(self, fd);
        }
        state.hot.clear();
        state.answered.clear();
        state.once.clear();
        points::unwatch(&mut state.bells);
        self.joined.store(0, Ordering::Relaxed);
    }

    /// Returns whether it contains sockets that the kernel does not carry alone.
    #[inline]
    pub fn has_joined(&self) -> bool {
        self.joined.load(Ordering::Acquire) > 0 || self.is_served()
    }

    /// Returns how many events this library may report for it at once, as far as is known now.
    pub fn most_reported(&self) -> usize {
        if self.is_served() { usize::MAX } else { self.joined.load(Ordering::Acquire) as usize }
    }

    /// Returns whether a cache may answer for sockets in it.
    pub(super) fn is_served(&self) -> bool {
        // ORDER epoll.served: see `Instance::sleep_unaware`.
        self.is_served.load(Ordering::SeqCst)
    }

    /// Returns whether all threads that sleep for the instance look again by the clock. Those that wait for it in `poll`, or in another
    /// instance, do not.
    pub(super) fn sleeps_by_clock(&self) -> bool {
        self.sleeping.load(Ordering::Relaxed) & WATCHED == 0
    }

    /// Returns whether something that the program waits for is ready.
    pub fn is_ready(&self) -> bool {
        self.has_joined() && self.state.lock().collect(&mut [], true) > 0
    }

    /// Makes all peers wake this side, because the caller is about to wait in `poll`.
    pub fn arm(&self) {
        if self.has_joined() {
            self.sleeping.fetch_or(WATCHED, Ordering::Relaxed);
            self.state.lock().arm(self.fd.load(Ordering::Relaxed), false);
        }
    }

    /// Notes that a thread is about to wait for this instance with `poll`. Returns whether it contains sockets that the kernel does
    /// not carry alone. If it does not, the thread sleeps in the kernel, and would not notice anything that is queued meanwhile.
    pub fn is_polled(&self) -> bool {
        // ORDER epoll.served: see `Instance::serve`.
        self.sleeping.fetch_or(WATCHED, Ordering::SeqCst);
        self.has_joined()
    }

    /// Notes that another instance watches this one. A thread that waits there sleeps in the kernel, and knows nothing of rings.
    pub(super) fn is_watched(&self) {
        self.sleeping.fetch_or(WATCHED, Ordering::Relaxed);
        self.hand_over(self.fd.load(Ordering::Relaxed), self.state.lock());
    }

    /// Handles the wake-up of a thread. If no other thread sleeps, peers need not wake this side for hot sockets.
    pub(super) fn rise(&self, state: &mut State) {
        if self.sleeping.load(Ordering::Relaxed) == 0 {
            state.rise();
        }
    }

    /// Prepares the return of a thread to the program. Other threads that sleep have to be woken for later events, and for those
    /// that the returning thread did not report.
    pub(super) fn hand_over(&self, epoll: c_int, mut state: Guard<'_, State>) {
        if self.sleeping.load(Ordering::Relaxed) == 0 {
            return;
        }
        let by_clock = self.sleeps_by_clock();
        state.arm(epoll, by_clock);
        let untold = state.untold();
        drop(state);
        if let Some(fd) = untold {
            registration::register(epoll, fd);
        }
    }
}

impl Watcher<Socket> for Instance {
    fn changed(&self, fd: c_int, socket: &'static Socket) {
        self.take_over(self.fd.load(Ordering::Relaxed), fd, socket);
    }

    /// Records that a cache may answer for a socket in it from now on.
    fn serve(&self) {
        let _state = self.state.lock();
        // ORDER epoll.served: either a thread that is about to sleep sees the flag, or the thread that offers an answer sees the
        // sleeper, because both write before they read and all four accesses are sequentially consistent. Pairs with:
        // `Instance::sleep_unaware`, `Instance::is_polled`, `Instance::offer`.
        self.is_served.store(true, Ordering::SeqCst);
    }

    /// Notes that something has been queued for a socket. Returns false if a thread that waits for the socket here would not
    /// notice.
    fn offer(&self, fd: c_int, socket: &'static Socket) -> bool {
        let mut state = self.state.lock();
        // ORDER epoll.served: see `Instance::serve`.
        if self.sleeping.load(Ordering::SeqCst) > 0 || self.unaware.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let Some(watch) = state.watches.get_mut(&fd).filter(|watch| watch.is_of(socket)) else { return true };
        // Such an event must be reported only once. The kernel and this library can both report it, and neither knows what the
        // other has reported.
        if watch.events & (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32 != 0 {
            return false;
        }
        watch.edge.set_due();
        if !state.answered.contains(&fd) {
            state.answered.push(fd);
        }
        true
    }

    fn without_room(&self, fd: c_int, socket: &'static Socket) {
        let mut state = self.state.lock();
        let output = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
        let is_asked = |watch: &Watch| {
            watch.is_joined && watch.is_of(socket) && !watch.is_silent() && watch.events & output != 0
        };
        let Some(watch) = state.watches.get(&fd).filter(|watch| is_asked(watch)) else { return };
        if watch.armed.is_for_room() {
            return;
        }
        // From now on, threads look at the socket, and have the peer wake them when they sleep. The count is read under the lock, under
        // which a thread that is about to sleep has looked.
        state.heat(fd);
        let somebody_sleeps = self.sleeping.load(Ordering::Relaxed) > 0;
        drop(state);
        if somebody_sleeps {
            registration::register(self.fd.load(Ordering::Relaxed), fd);
        }
    }

    /// The kernel's registration of a socket that the program has removed would stay until the last descriptor is closed, and another one
    /// of the socket that gets this number could not be added.
    fn closes(&'static self, fd: c_int, socket: &'static Socket) {
        self.take_out_entirely(self.fd.load(Ordering::Relaxed), fd, socket);
    }

    fn forget(&self, fd: c_int, socket: &'static Socket) {
        self.remove(fd, Some(socket));
    }
}
