//! Moves pages of the heap that contain the allocator's own words. Moving them must not allocate between the copy and the
//! exchange, or the allocator would lose what it has written meanwhile.
#![allow(unsafe_code)] // An allocator.

use ginnel_shmem::{Mapping, Placed, Protection};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;

/// A page in which an allocator keeps its data.
#[repr(align(4096))]
struct Page([AtomicU64; PAGE / 8]);

static BOOKS: Page = Page([const { AtomicU64::new(0) }; PAGE / 8]);
/// The number of calls while nothing is moved.
static CALLS: AtomicU64 = AtomicU64::new(0);

struct Counting;

fn count() {
    BOOKS.0[7].fetch_add(1, Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: it is the system's allocator, with a counter.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees that the layout's size is not zero.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller guarantees that `alloc` has returned the block, which is the system's, for this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A process that kills this one after a while. (A thread would allocate.)
struct Watchdog(libc::pid_t);

impl Watchdog {
    fn new() -> Self {
        // SAFETY: the child only makes system calls.
        unsafe {
            let parent = libc::getpid();
            let child = libc::fork();
            if child == 0 {
                libc::sleep(60);
                if libc::getppid() == parent {
                    libc::kill(parent, libc::SIGKILL);
                }
                libc::_exit(0);
            }
            assert!(child > 0);
            Self(child)
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // SAFETY: the child has not been waited for yet.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

fn main() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(PAGE as u64).unwrap();
    let mapping = Mapping::of_file(&file, 0, PAGE, Protection::ReadWrite).unwrap();
    let start = NonNull::from(&BOOKS).cast();
    let round = |what: &str, placed: io::Result<Placed>| {
        let Ok(placed) = placed else { panic!("{what}: {placed:?}") };
        let after = (BOOKS.0[7].load(Ordering::Relaxed), CALLS.load(Ordering::Relaxed));
        assert_eq!(after.0, after.1, "{what}: the allocator has lost what it had written");
        // SAFETY: the page is a static that contains only atomics; this program has one thread.
        unsafe { placed.lift() }.map_err(|(_, error)| error).unwrap();
        let after = (BOOKS.0[7].load(Ordering::Relaxed), CALLS.load(Ordering::Relaxed));
        assert_eq!(after.0, after.1, "{what}, back: the allocator has lost what it had written");
    };
    for _ in 0..10 {
        // SAFETY: the page is a static that contains only atomics. Only this program's one thread stores to it, when it
        // allocates, and it does not during the exchange.
        round("alone", unsafe { mapping.place(&file, 0, start, PAGE, PAGE) });
    }
    // A thread that allocates while its own stores are held would wait for ever.
    let watchdog = Watchdog::new();
    // SAFETY: the page is a static that contains only atomics, so it is no part of a stack or of thread-local memory, and
    // nothing unmaps it.
    match unsafe { mapping.place_among_threads(&file, 0, start, PAGE, PAGE) } {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        first => {
            round("among threads", first);
            // An error allocates too.
            file.set_len(0).unwrap();
            // SAFETY: the page is a static that contains only atomics, so it is no part of a stack or of thread-local memory,
            // and nothing unmaps it.
            assert!(unsafe { mapping.place_among_threads(&file, 0, start, PAGE, PAGE) }.is_err());
            let after = (BOOKS.0[7].load(Ordering::Relaxed), CALLS.load(Ordering::Relaxed));
            assert_eq!(after.0, after.1, "after an error");
        }
    }
    drop(watchdog);
    println!("test result: ok. 1 passed");
}
