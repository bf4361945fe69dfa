//! Threads that sleep in `poll` for a connection that has not changed over, and that wait neither for bytes nor for room.
//!
//! The kernel wakes them for what happens to its connection. After the change, an end may be in the ring only. So they also sleep at an
//! event of this process, which comes with each connection that gets its rings.
#![allow(unsafe_code)] // An eventfd.

use crate::process::hidden;
use crate::system::errno::Kept;
use crate::system::real;
use libc::c_int;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering, fence};

/// The eventfd, or -1 if there is none yet.
static EVENT: AtomicI32 = AtomicI32::new(-1);
/// The number of such threads.
static SLEEPERS: AtomicU32 = AtomicU32::new(0);

/// A thread that is about to sleep, until it is awake or cancelled. It looks once more before it sleeps.
pub struct Sleeper {
    event: Option<c_int>,
}

impl Sleeper {
    pub fn begin() -> Self {
        let event = event();
        SLEEPERS.fetch_add(1, Ordering::Relaxed);
        // ORDER preload.early: either this thread sees that a connection has its rings, or the thread that brings them sees this one and
        // the event, because both write before they read. Pairs with: `joined`.
        fence(Ordering::SeqCst);
        Self { event }
    }

    /// Returns the eventfd, which the thread watches for edges, and which nobody reads; `None` if there cannot be one.
    pub fn event(&self) -> Option<c_int> {
        self.event
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // If a signal handler has forked, the child has reset the counter, and it must not go below zero.
        let _ = SLEEPERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

fn event() -> Option<c_int> {
    let known = EVENT.load(Ordering::Acquire);
    if known >= 0 {
        return Some(known);
    }
    let _errno = Kept::new();
    // SAFETY: the call takes numbers only.
    let new = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if new < 0 {
        return None;
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let new = hidden::hide(unsafe { OwnedFd::from_raw_fd(new) }).into_raw_fd();
    match EVENT.compare_exchange(-1, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Some(new),
        Err(other) => {
            // SAFETY: no other thread knows the number.
            unsafe { real::close(new) };
            Some(other)
        }
    }
}

/// Wakes these threads, because a connection has its rings.
pub fn joined() {
    // ORDER preload.early: see `Sleeper::begin`.
    fence(Ordering::SeqCst);
    let event = EVENT.load(Ordering::Acquire);
    if SLEEPERS.load(Ordering::Relaxed) > 0 && event >= 0 {
        let _errno = Kept::new();
        let one = 1_u64.to_ne_bytes();
        // SAFETY: an eventfd takes eight bytes.
        unsafe { real::write(event, one.as_ptr().cast(), one.len()) };
    }
}

/// Forgets the parent's event and threads in the child of a fork.
pub fn in_child() {
    SLEEPERS.store(0, Ordering::Relaxed);
    let event = EVENT.swap(-1, Ordering::Relaxed);
    if event >= 0 {
        // SAFETY: this library's own.
        unsafe { real::close(event) };
    }
}
