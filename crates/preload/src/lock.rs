//! The lock of a direction of a socket.
//!
//! It is held for a copy, never while sleeping. The word names the thread that holds it. A thread that finds itself there has left
//! the call that took the lock without returning from it (`longjmp` out of a signal handler), or is in a signal handler that
//! interrupted it: it goes on. Each publish in a ring is one store, so the ring is whole at every instruction.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::confined::is_confined;

/// The number of each thread, once it was asked for. Every lock needs it, so it lies where threads have the variables of what the program began
/// with: it is found without a call, which those of a library that may come later need.
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
        // SAFETY: reads this thread's variable.
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
        // SAFETY: writes this thread's variable, of which there are no references.
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

/// This thread's number.
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
    // SAFETY: it cannot fail.
    unsafe { libc::gettid() }
}

/// Whether there is a thread of this number in this process.
#[cold]
#[expect(unsafe_code, reason = "asks about a thread")]
pub fn is_alive(tid: i32) -> bool {
    // SAFETY: signal 0 does nothing.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, 0) == 0 }
}

/// The thread has another number: it is the only one of a child.
pub fn forget_tid() {
    own::set(0);
}

/// Something that one thread at a time works on.
pub struct Lock<T> {
    owner: AtomicI32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the thread that holds the lock.
#[expect(unsafe_code, reason = "a lock hands out exclusive access")]
unsafe impl<T: Send> Sync for Lock<T> {}

/// How often the word is looked at before others are let onto the CPU.
const LOOKS: u32 = 100;

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self { owner: AtomicI32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock, which nobody holds for long.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        let me = tid();
        let mut looks = 0;
        // ORDER preload.lock: what the last owner did. Pairs with: `Guard::drop`.
        while let Err(owner) = self.owner.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed) {
            if owner == me {
                break;
            }
            looks += 1;
            if looks < LOOKS || is_confined() {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
                // A thread of the parent of this process, or one that was cancelled.
                if looks.is_multiple_of(1000) && !is_alive(owner) {
                    let _ = self.owner.compare_exchange(owner, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
        }
        Guard(self)
    }

    /// The child of a fork has one thread: whoever else held the lock is not there.
    pub fn free_in_child(&self) {
        self.owner.store(0, Ordering::Relaxed);
    }
}

/// The lock is held.
pub struct Guard<'a, T>(&'a Lock<T>);

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // ORDER preload.lock: what was done under the lock. Pairs with: `Lock::lock`.
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
