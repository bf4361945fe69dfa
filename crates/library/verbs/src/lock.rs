//! Locks within a process that cost almost nothing while the process has one thread.
//!
//! Most programs that post requests have one thread. An uncontended lock of the standard library costs two atomic exchanges, and a
//! request with its completion takes three locks. While the process has one thread, plain stores suffice, and a thread that starts later
//! sees them.
//!
//! The lock implements the traits of the `lock_api` crate. It has that crate's guards, and its `force_unlock` allows one C call to take
//! a lock and another C call to release it.
#![allow(unsafe_code)] // `lock_api` makes the implementation promise mutual exclusion.

use lock_api::{GuardSend, RawMutex};
use rustix::thread::futex;
use std::hint::spin_loop;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};

/// A value that only one thread at a time may access.
pub type Lock<T> = lock_api::Mutex<RawLock, T>;

/// A guard that holds a lock until it is dropped.
pub type Locked<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

/// No thread holds the lock.
const FREE: u32 = 0;
/// One thread holds the lock.
const TAKEN: u32 = 1;
/// One thread holds the lock, and others may be sleeping until it is released.
const AWAITED: u32 = 2;

/// How often a waiting thread looks at the word before it sleeps.
const LOOKS: u32 = 100;

/// The default: a process of which nothing is known may have several threads.
static UNKNOWN: AtomicU8 = AtomicU8::new(0);

static IS_ALONE: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::from_ref(&UNKNOWN).cast_mut());

/// Sets the byte that is non-zero while the process has one thread: `__libc_single_threaded` of the GNU C library. Until this is called,
/// the process is assumed to have several threads.
pub fn watch_threads(is_alone: &'static AtomicU8) {
    IS_ALONE.store(ptr::from_ref(is_alone).cast_mut(), Ordering::Relaxed);
}

#[inline]
fn is_alone() -> bool {
    // SAFETY: the pointer refers to a static, which lives for ever and is changed by atomic stores only: see `watch_threads` and
    // `UNKNOWN`.
    let is_alone = unsafe { &*IS_ALONE.load(Ordering::Relaxed) };
    is_alone.load(Ordering::Relaxed) != 0
}

/// The lock word, without the value that it protects.
pub struct RawLock {
    word: AtomicU32,
}

// SAFETY: the word leaves `FREE` by a compare-exchange or a swap, or by a store while there is no other thread that could have changed
// it since it was loaded. In each case it stays taken until the holder unlocks it.
unsafe impl RawMutex for RawLock {
    const INIT: Self = Self { word: AtomicU32::new(FREE) };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if is_alone() && self.word.load(Ordering::Relaxed) == FREE {
            self.word.store(TAKEN, Ordering::Relaxed);
        // ORDER verbs.lock: the previous holder's release comes before the next holder's accesses. Pairs with: `RawLock::unlock`.
        } else if self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        // ORDER verbs.lock: as in `RawLock::lock`.
        self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        // ORDER verbs.lock: the holder's accesses are visible before the release. Pairs with: `RawLock::lock`, `RawLock::wait`.
        if is_alone() && self.word.load(Ordering::Relaxed) == TAKEN {
            self.word.store(FREE, Ordering::Release);
        } else if self.word.swap(FREE, Ordering::Release) == AWAITED {
            self.wake();
        }
    }
}

impl RawLock {
    #[cold]
    fn wait(&self) {
        for _ in 0..LOOKS {
            if self.word.load(Ordering::Relaxed) == FREE {
                break;
            }
            spin_loop();
        }
        // From here on, the releasing thread calls `wake`, even if there is no other waiting thread.
        // ORDER verbs.lock: as in `RawLock::lock`.
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            // The result does not matter, because the loop looks at the word again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, AWAITED, None);
        }
    }

    #[cold]
    fn wake(&self) {
        // The call fails only where there are no futexes, and there no thread sleeps.
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};
    use std::thread;

    /// Makes the tests that set the number of threads run one after the other.
    static TURN: Mutex<()> = Mutex::new(());
    static ALONE: AtomicU8 = AtomicU8::new(0);

    /// Increments the counter `times` times, each time in two steps.
    fn count(counter: &Lock<u64>, times: u64) {
        for i in 0..times {
            let mut counter = counter.lock();
            let before = *counter;
            if i % 100 == 0 {
                thread::yield_now();
            }
            *counter = before + 1;
        }
    }

    #[test]
    fn only_one_thread_at_a_time_holds_the_lock() {
        let counter = Lock::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| count(&counter, 20_000));
            }
        });
        assert_eq!(*counter.lock(), 80_000);
    }

    #[test]
    fn a_thread_that_starts_while_the_lock_is_held_waits() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        watch_threads(&ALONE);
        ALONE.store(1, Ordering::Relaxed);
        let counter = Lock::new(0);
        count(&counter, 3);
        let held = counter.lock();
        ALONE.store(0, Ordering::Relaxed);
        thread::scope(|scope| {
            let other = scope.spawn(|| count(&counter, 1));
            kit::wait::wait_until("the other thread to announce that it is about to sleep", || {
                assert!(!other.is_finished());
                // SAFETY: the raw lock is only read.
                unsafe { counter.raw() }.word.load(Ordering::Relaxed) == AWAITED
            });
            assert_eq!(*held, 3);
            drop(held);
        });
        assert_eq!(*counter.lock(), 4);
        watch_threads(&UNKNOWN);
    }

    #[test]
    fn a_lock_taken_by_one_call_can_be_released_by_another() {
        let lock = Lock::new(7);
        std::mem::forget(lock.lock());
        assert!(lock.try_lock().is_none());
        // SAFETY: the forgotten guard holds it.
        unsafe { lock.force_unlock() };
        assert_eq!(lock.try_lock().map(|value| *value), Some(7));
    }
}
