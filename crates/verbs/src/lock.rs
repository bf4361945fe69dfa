//! Locks within a process that cost next to nothing while it has one thread.
//!
//! Most programs that post requests have one thread. An uncontended lock of the standard library costs two atomic exchanges, and a
//! request with its completion takes three locks. While the process has one thread, plain stores do, and a thread that begins later
//! sees them.
//!
//! The type is that of the `lock_api` crate, whose guards this has, and whose `force_unlock` lets one call of C take a lock and another
//! one release it.
#![allow(unsafe_code)] // `lock_api` has the implementation promise that it excludes others.

use std::hint::spin_loop;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};

use lock_api::{GuardSend, RawMutex};
use rustix::thread::futex;

/// What only one thread at a time may touch.
pub type Lock<T> = lock_api::Mutex<RawLock, T>;

/// Holds a lock until it is dropped.
pub type Locked<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

/// Nobody holds the lock.
const FREE: u32 = 0;
/// Somebody does.
const TAKEN: u32 = 1;
/// Somebody does, and others may sleep until it is released.
const AWAITED: u32 = 2;

/// How often the word is looked at before a thread sleeps.
const LOOKS: u32 = 100;

/// A process that says nothing of its threads may have several.
static UNKNOWN: AtomicU8 = AtomicU8::new(0);

static IS_ALONE: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::from_ref(&UNKNOWN).cast_mut());

/// Names the byte that is not zero while the process has one thread: `__libc_single_threaded` of the GNU C library. Until somebody does,
/// the process is taken for one with several.
pub fn watch_threads(is_alone: &'static AtomicU8) {
    IS_ALONE.store(ptr::from_ref(is_alone).cast_mut(), Ordering::Relaxed);
}

#[inline]
fn is_alone() -> bool {
    // SAFETY: what it points to lives for ever and is not changed otherwise than by atomic stores: see `watch_threads` and `UNKNOWN`.
    let is_alone = unsafe { &*IS_ALONE.load(Ordering::Relaxed) };
    is_alone.load(Ordering::Relaxed) != 0
}

/// A lock without what it guards.
pub struct RawLock {
    word: AtomicU32,
}

// SAFETY: the word leaves `FREE` by a compare-exchange or a swap, or by a store while there is no other thread that could have changed it
// since the look before. In both cases it stays until the holder unlocks it.
unsafe impl RawMutex for RawLock {
    const INIT: Self = Self { word: AtomicU32::new(FREE) };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if is_alone() && self.word.load(Ordering::Relaxed) == FREE {
            self.word.store(TAKEN, Ordering::Relaxed);
        // ORDER verbs.lock: the release before what the next holder does. Pairs with: `RawLock::unlock`.
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
        // ORDER verbs.lock: what the holder did before the release. Pairs with: `RawLock::lock`, `RawLock::wait`.
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
        // From here on whoever releases it wakes somebody, though there may be nobody else.
        // ORDER verbs.lock: as in `RawLock::lock`.
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            // Whatever the call says, the word is looked at again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, AWAITED, None);
        }
    }

    #[cold]
    fn wake(&self) {
        // It fails only where there is no futex, and there nobody sleeps.
        let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};
    use std::thread;
    use std::time::Duration;

    /// The tests say how many threads there are, one after the other.
    static TURN: Mutex<()> = Mutex::new(());
    static ALONE: AtomicU8 = AtomicU8::new(0);

    /// Adds one so often, in two steps.
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
    fn one_thread_at_a_time_holds_it() {
        let counter = Lock::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| count(&counter, 20_000));
            }
        });
        assert_eq!(*counter.lock(), 80_000);
    }

    #[test]
    fn a_thread_that_begins_while_it_is_held_waits() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        watch_threads(&ALONE);
        ALONE.store(1, Ordering::Relaxed);
        let counter = Lock::new(0);
        count(&counter, 3);
        let held = counter.lock();
        ALONE.store(0, Ordering::Relaxed);
        thread::scope(|scope| {
            let other = scope.spawn(|| count(&counter, 1));
            // It has said that it is about to sleep.
            // SAFETY: only the word is looked at.
            while unsafe { counter.raw() }.word.load(Ordering::Relaxed) != AWAITED {
                assert!(!other.is_finished());
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(*held, 3);
            drop(held);
        });
        assert_eq!(*counter.lock(), 4);
        watch_threads(&UNKNOWN);
    }

    #[test]
    fn what_one_call_takes_another_one_releases() {
        let lock = Lock::new(7);
        std::mem::forget(lock.lock());
        assert!(lock.try_lock().is_none());
        // SAFETY: the forgotten guard holds it.
        unsafe { lock.force_unlock() };
        assert_eq!(lock.try_lock().map(|value| *value), Some(7));
    }
}
