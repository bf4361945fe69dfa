//! The lock of this library.
//!
//! A thread holds the lock while it copies bytes, and never while it sleeps. Signal handlers of the program do not interrupt it
//! meanwhile ([`crate::process::section`]).
//!
//! The lock's word names the thread that holds it. If a thread finds its own number there, a handler that interrupts sections
//! nevertheless (for a fault, for example) is running, or has left the call that took the lock for good (`longjmp`). In both cases the
//! thread continues as the owner. Each publish in a ring is one store, so the ring is consistent at every instruction.

use crate::process::section::Section;
use crate::process::thread::tid;
use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, Ordering};

/// Returns whether this process has a thread with this number.
#[cold]
#[expect(unsafe_code, reason = "asks about a thread")]
pub fn is_alive(tid: i32) -> bool {
    let _errno = Kept::new();
    // SAFETY: signal 0 only checks whether the thread exists.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) == 0 }
}

/// A value that only one thread at a time can access.
pub struct Lock<T> {
    owner: AtomicI32,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that holds the lock accesses the value.
#[expect(unsafe_code, reason = "a lock hands out exclusive access")]
unsafe impl<T: Send> Sync for Lock<T> {}

/// The number of attempts after which a waiting thread begins to yield the CPU to others.
const LOOKS: u32 = 100;

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self { owner: AtomicI32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock. Threads hold it only briefly.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        let section = Section::begin();
        let me = tid();
        let mut looks = 0;
        // ORDER preload.lock: the new owner sees what the last owner did. Pairs with: `Guard::drop`.
        while let Err(owner) = self.owner.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if owner == me {
                section.replace_earlier();
                break;
            }
            looks += 1;
            if looks < LOOKS || is_confined() {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
                // The owner may be a thread of the parent of this process, or a cancelled thread.
                if looks.is_multiple_of(1000) && !is_alive(owner) {
                    let _ = self.owner.compare_exchange(owner, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
        }
        Guard { lock: self, _section: section }
    }

    /// Frees the lock in the child of a fork. The child has one thread, so a thread that held the lock does not exist there.
    pub fn free_in_child(&self) {
        self.owner.store(0, Ordering::Relaxed);
    }
}

/// Proof that this thread holds the lock. The lock is released when the guard is dropped, and the section ends after that.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
    _section: Section,
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // ORDER preload.lock: publishes what this thread did under the lock. Pairs with: `Lock::lock`.
        self.lock.owner.store(0, Ordering::Release);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[expect(unsafe_code, reason = "a lock hands out exclusive access")]
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[expect(unsafe_code, reason = "a lock hands out exclusive access")]
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and the guard is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}
