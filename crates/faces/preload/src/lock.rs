//! The lock of a direction of a socket.
//!
//! A thread holds the lock while it copies bytes, and never while it sleeps. The lock's word names the thread that holds it. If
//! a thread finds its own number there, it has left the call that took the lock without returning from it (`longjmp` out of a
//! signal handler), or it is in a signal handler that interrupted that call. In both cases the thread continues as the owner.
//! Each publish in a ring is one store, so the ring is consistent at every instruction.

use crate::confined::is_confined;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, Ordering};

/// The number of each thread, or 0 until the thread first asks for it. Every lock operation needs the number. So it lies in
/// static thread-local storage, among the variables of the libraries that were loaded at program start. A thread finds it there
/// without a function call, which the thread-local variables of a library that may be loaded later would need.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "a variable of a thread, in assembly")]
mod own {
    use std::arch::{asm, global_asm};

    global_asm!(
        ".pushsection .tbss.ginnel_preload_tid, \"awT\", @nobits",
        ".globl ginnel_preload_tid",
        ".hidden ginnel_preload_tid",
        ".type ginnel_preload_tid, @tls_object",
        ".size ginnel_preload_tid, 4",
        ".balign 4",
        "ginnel_preload_tid:",
        ".zero 4",
        ".popsection",
    );

    #[inline]
    pub fn get() -> i32 {
        let tid: i32;
        // SAFETY: the code only reads this thread's own variable.
        unsafe {
            asm!(
                "mov {at}, qword ptr [rip + ginnel_preload_tid@GOTTPOFF]",
                "mov {tid:e}, dword ptr fs:[{at}]",
                at = out(reg) _,
                tid = lateout(reg) tid,
                options(nostack, preserves_flags, readonly),
            );
        }
        tid
    }

    pub fn set(tid: i32) {
        // SAFETY: the code writes this thread's own variable, to which there are no references.
        unsafe {
            asm!(
                "mov {at}, qword ptr [rip + ginnel_preload_tid@GOTTPOFF]",
                "mov dword ptr fs:[{at}], {tid:e}",
                at = out(reg) _,
                tid = in(reg) tid,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod own {
    use std::cell::Cell;

    thread_local! {
        static TID: Cell<i32> = const { Cell::new(0) };
    }

    pub fn get() -> i32 {
        TID.get()
    }

    pub fn set(tid: i32) {
        TID.set(tid);
    }
}

/// Returns this thread's number (`gettid`).
#[inline]
pub fn tid() -> i32 {
    match own::get() {
        0 => {
            let tid = thread_number();
            own::set(tid);
            tid
        }
        tid => tid,
    }
}

#[cold]
#[expect(unsafe_code, reason = "gettid, which has no rules")]
fn thread_number() -> i32 {
    // SAFETY: `gettid` cannot fail.
    unsafe { libc::gettid() }
}

/// Returns whether this process has a thread with this number.
#[cold]
#[expect(unsafe_code, reason = "asks about a thread")]
pub fn is_alive(tid: i32) -> bool {
    // SAFETY: signal 0 only checks whether the thread exists.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) == 0 }
}

/// Forgets this thread's number. The only thread of a child process calls this, because its number differs from the parent
/// thread's.
pub fn forget_tid() {
    own::set(0);
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
        let me = tid();
        let mut looks = 0;
        // ORDER preload.lock: the new owner sees what the last owner did. Pairs with: `Guard::drop`.
        while let Err(owner) = self.owner.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if owner == me {
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
        Guard(self)
    }

    /// Frees the lock in the child of a fork. The child has one thread, so a thread that held the lock does not exist there.
    pub fn free_in_child(&self) {
        self.owner.store(0, Ordering::Relaxed);
    }
}

/// Proof that this thread holds the lock. The lock is released when the guard is dropped.
pub struct Guard<'a, T>(&'a Lock<T>);

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // ORDER preload.lock: publishes what this thread did under the lock. Pairs with: `Lock::lock`.
        self.0.owner.store(0, Ordering::Release);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[expect(unsafe_code, reason = "a lock hands out exclusive access")]
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[expect(unsafe_code, reason = "a lock hands out exclusive access")]
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and the guard is borrowed exclusively.
        unsafe { &mut *self.0.value.get() }
    }
}
