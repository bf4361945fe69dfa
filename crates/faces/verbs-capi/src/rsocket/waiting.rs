//! Threads that sleep until an rsocket or an ordinary descriptor is ready.
//!
//! A thread that waits for a direction of a stream sleeps at the descriptor of its half, which becomes readable once after the half was
//! armed. The first thread that uses the half again consumes this readiness, and the other sleepers would miss it. So each sleeping
//! thread has a bell of its own, and puts it into the list of what it waits for. Each thread that changes something there rings the
//! bells in the list. So no wake-up is lost, and no thread wakes in vain unless several threads use the same half.
#![allow(unsafe_code)] // Descriptors are used by their numbers.

use super::direction::locked;
use super::table::generation;
use std::cell::RefCell;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Time between two polls of something that cannot wake a thread: a half in a VM without interrupts.
const NAP: Duration = Duration::from_millis(1);

/// A descriptor by which a thread is woken.
pub struct Bell(OwnedFd);

thread_local! {
    static OWN: RefCell<Option<(u32, Arc<Bell>)>> = const { RefCell::new(None) };
}

impl Bell {
    fn new() -> io::Result<Arc<Self>> {
        // SAFETY: the call takes numbers only, and returns a new descriptor or an error.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new.
        Ok(Arc::new(Self(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Returns the bell of this thread.
    pub fn own() -> Result<Arc<Self>, c_int> {
        let found = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            match &*own {
                Some((made, bell)) if *made == generation() => Ok(bell.clone()),
                _ => {
                    let bell = Self::new()?;
                    // After a fork, the earlier bell is shared with the parent.
                    *own = Some((generation(), bell.clone()));
                    Ok(bell)
                }
            }
        });
        // The thread is about to end, so this bell is not kept.
        found.unwrap_or_else(|_| Self::new()).map_err(|error| super::code(&error, libc::EMFILE))
    }

    fn ring(&self) {
        let one = 1_u64;
        // SAFETY: the eight bytes are a local variable. If the counter is full, the bell has already rung.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

/// Calls poll(2) until a point in time. Returns how many descriptors are ready.
pub fn poll(descriptors: &mut [libc::pollfd], until: Option<Instant>) -> Result<usize, c_int> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let left = left.map(|left| libc::timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let timeout = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the list and the time exist during the call.
    let found = unsafe {
        libc::ppoll(descriptors.as_mut_ptr(), descriptors.len() as libc::nfds_t, timeout, std::ptr::null())
    };
    usize::try_from(found).map_err(|_| super::code(&io::Error::last_os_error(), libc::ENOMEM))
}

/// What wakes a sleeping thread: its bell, and descriptors.
pub struct Wake {
    bell: Arc<Bell>,
    pub descriptors: Vec<libc::pollfd>,
    /// Whether it waits for something that cannot wake it, so that it has to poll from time to time.
    naps: bool,
}

impl Wake {
    /// Returns one with this thread's bell only.
    pub fn new() -> Result<Self, c_int> {
        Ok(Self { bell: Bell::own()?, descriptors: Vec::new(), naps: false })
    }

    /// Adds a descriptor that becomes readable. With `None`, the thread polls from time to time.
    pub fn add(&mut self, fd: Option<RawFd>) {
        match fd {
            Some(fd) => self.descriptors.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 }),
            None => self.naps = true,
        }
    }

    /// Sleeps until the bell rings, a descriptor is ready, or the deadline has passed. Fails if a signal comes first. Removes the
    /// descriptors.
    pub fn sleep(&mut self, deadline: Option<Instant>) -> Result<(), c_int> {
        let nap = std::mem::take(&mut self.naps).then(|| Instant::now() + NAP);
        let until = [deadline, nap].into_iter().flatten().min();
        let fd = self.bell.0.as_raw_fd();
        self.descriptors.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let found = poll(&mut self.descriptors, until);
        if self.descriptors.last().is_some_and(|bell| bell.revents != 0) {
            let mut count = 0_u64;
            // SAFETY: the eight bytes are a local variable.
            unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
        }
        self.descriptors.clear();
        found.map(drop)
    }
}

/// The bells of the threads that wait for a change of something.
#[derive(Default)]
pub struct Waiters {
    count: AtomicUsize,
    bells: Mutex<Vec<Arc<Bell>>>,
}

/// A thread that waits, until this value is dropped.
pub struct Entered<'a> {
    waiters: &'a Waiters,
    bell: Arc<Bell>,
}

impl Waiters {
    /// Adds the bell of this thread. The caller must check once more what it waits for before it sleeps.
    pub fn enter(&self, wake: &Wake) -> Entered<'_> {
        let mut bells = locked(&self.bells);
        bells.push(wake.bell.clone());
        // ORDER rsocket.waiters: the count is visible before the thread looks at the things that it waits for. Pairs with:
        // `Waiters::are_some`.
        self.count.store(bells.len(), Ordering::SeqCst);
        Entered { waiters: self, bell: wake.bell.clone() }
    }

    /// Returns whether any thread waits. The result is exact under the lock under which waiting threads check once more.
    #[inline]
    pub fn are_some(&self) -> bool {
        // ORDER rsocket.waiters: the change is visible before the load of the count. Pairs with: `Waiters::enter`.
        self.count.load(Ordering::SeqCst) > 0
    }

    /// Wakes all threads except the caller.
    #[inline]
    pub fn ring(&self, caller: Option<&Wake>) {
        if self.are_some() {
            let is_other = |bell: &&Arc<Bell>| !caller.is_some_and(|wake| Arc::ptr_eq(bell, &wake.bell));
            locked(&self.bells).iter().filter(is_other).for_each(|bell| bell.ring());
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut bells = locked(&self.waiters.bells);
        if let Some(at) = bells.iter().position(|bell| Arc::ptr_eq(bell, &self.bell)) {
            bells.swap_remove(at);
        }
        self.waiters.count.store(bells.len(), Ordering::SeqCst);
    }
}
