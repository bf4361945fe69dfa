//! Critical sections that a program enters with one call and leaves with another.
#![allow(unsafe_code)] // A lock that is given back by another function than took it, and the kernel's help for it.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Nobody is in the section.
const FREE: u32 = 0;
/// Somebody is.
const TAKEN: u32 = 1;
/// Somebody is, and others may sleep until it is left.
const AWAITED: u32 = 2;

/// How often the word is looked at before a thread sleeps.
const LOOKS: u32 = 100;

/// What only one thread at a time may touch. A guard of Rust's cannot outlive the call that made it, and this must cost nothing in a
/// process that has one thread, as most have that use it.
pub struct Section<T> {
    word: AtomicU32,
    /// Not zero while the process has one thread.
    is_alone: &'static AtomicU8,
    inner: UnsafeCell<T>,
}

/// Where the C library says whether the process has one thread (`__libc_single_threaded`, since glibc 2.32).
fn is_alone() -> &'static AtomicU8 {
    static UNKNOWN: AtomicU8 = AtomicU8::new(0);
    static FOUND: OnceLock<&AtomicU8> = OnceLock::new();
    FOUND.get_or_init(|| {
        // SAFETY: a lookup of a static name.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
        // SAFETY: if it is there it is a byte that lives as long as the process.
        unsafe { found.cast::<AtomicU8>().as_ref() }.unwrap_or(&UNKNOWN)
    })
}

impl<T> Section<T> {
    /// A section that nobody is in.
    pub fn new(inner: T) -> Self {
        Self { word: AtomicU32::new(FREE), is_alone: is_alone(), inner: UnsafeCell::new(inner) }
    }

    /// Waits until nobody is in it, and enters.
    #[inline]
    pub fn enter(&self) {
        let is_alone = self.is_alone.load(Ordering::Relaxed) != 0;
        if is_alone && self.word.load(Ordering::Relaxed) == FREE {
            // A thread that begins later sees this.
            self.word.store(TAKEN, Ordering::Relaxed);
        } else if self.word.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..LOOKS {
            if self.word.load(Ordering::Relaxed) == FREE {
                break;
            }
            spin_loop();
        }
        // From here on whoever leaves wakes somebody, though there may be nobody else.
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            self.futex(libc::FUTEX_WAIT, AWAITED);
        }
    }

    /// Leaves it.
    ///
    /// # Safety
    ///
    /// The caller is in it.
    #[inline]
    pub unsafe fn leave(&self) {
        let is_alone = self.is_alone.load(Ordering::Relaxed) != 0;
        if is_alone && self.word.load(Ordering::Relaxed) == TAKEN {
            self.word.store(FREE, Ordering::Release);
        } else if self.word.swap(FREE, Ordering::Release) == AWAITED {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.futex(libc::FUTEX_WAKE, 1);
    }

    fn futex(&self, operation: libc::c_int, value: u32) {
        let none = ptr::null::<libc::timespec>();
        // SAFETY: the word lives as long as this. Whatever the call says, the caller looks at the word again.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word.as_ptr(),
                operation | libc::FUTEX_PRIVATE_FLAG,
                value,
                none,
            );
        }
    }

    /// What is inside, for those who are in it.
    #[inline]
    pub fn inside(&self) -> *mut T {
        self.inner.get()
    }

    /// Enters it until the end of a block.
    #[inline]
    pub fn hold(&self) -> Held<'_, T> {
        self.enter();
        Held(self)
    }
}

/// Somebody is in a section.
pub struct Held<'a, T>(&'a Section<T>);

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: whoever made this has entered.
        unsafe { self.0.leave() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    struct Shared(Section<u64>);

    // SAFETY: what is inside is touched by whoever is in the section alone.
    unsafe impl Sync for Shared {}

    /// Enters and leaves so often, and counts.
    fn count(shared: &Shared, times: u64) {
        for i in 0..times {
            shared.0.enter();
            // SAFETY: inside.
            unsafe {
                let inside = shared.0.inside();
                let before = inside.read_volatile();
                if i % 100 == 0 {
                    thread::yield_now();
                }
                inside.write_volatile(before + 1);
                shared.0.leave();
            }
        }
    }

    #[test]
    fn one_thread_at_a_time_is_inside() {
        let shared = Shared(Section::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| count(&shared, 20_000));
            }
        });
        // SAFETY: nobody else is there.
        assert_eq!(unsafe { *shared.0.inside() }, 80_000);
        assert_eq!(shared.0.word.load(Ordering::Relaxed), FREE);
    }

    #[test]
    fn a_thread_that_begins_meanwhile_waits() {
        // As in a process that has one thread until here.
        static ALONE: AtomicU8 = AtomicU8::new(1);
        let shared = Shared(Section { is_alone: &ALONE, ..Section::new(0) });
        count(&shared, 3);
        shared.0.enter();
        ALONE.store(0, Ordering::Relaxed);
        thread::scope(|scope| {
            let other = scope.spawn(|| count(&shared, 1));
            thread::sleep(std::time::Duration::from_millis(20));
            assert!(!other.is_finished());
            // SAFETY: inside.
            unsafe {
                assert_eq!(*shared.0.inside(), 3);
                shared.0.leave();
            }
        });
        // SAFETY: nobody else is there.
        assert_eq!(unsafe { *shared.0.inside() }, 4);
    }

    #[test]
    fn a_block_holds_it() {
        let section = Section::new(());
        drop(section.hold());
        let held = section.hold();
        assert_eq!(section.word.load(Ordering::Relaxed), TAKEN);
        drop(held);
        assert_eq!(section.word.load(Ordering::Relaxed), FREE);
    }
}
