//! Pages of the heap are moved while the allocator's own words lie in them: moving them allocates nothing between the copy and the
//! exchange, or the allocator would lose what it has written meanwhile.
#![allow(unsafe_code)] // An allocator.

use ginnel_shmem::{Mapping, Protection};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;

/// A page in which an allocator keeps its books.
#[repr(align(4096))]
struct Page([AtomicU64; PAGE / 8]);

static BOOKS: Page = Page([const { AtomicU64::new(0) }; PAGE / 8]);
/// The same number, where nothing is moved.
static CALLS: AtomicU64 = AtomicU64::new(0);

struct Counting;

fn count() {
    BOOKS.0[7].fetch_add(1, Ordering::Relaxed);
    CALLS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: it is the system's allocator, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller says.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(PAGE as u64).unwrap();
    let mapping = Mapping::of_file(&file, 0, PAGE, Protection::ReadWrite).unwrap();
    let start = NonNull::from(&BOOKS).cast();
    for round in 0..10 {
        // SAFETY: the page is a static, of atomics alone; this program has one thread.
        let placed = unsafe { mapping.place(&file, 0, start, PAGE, PAGE) }.unwrap();
        let after = (BOOKS.0[7].load(Ordering::Relaxed), CALLS.load(Ordering::Relaxed));
        assert_eq!(after.0, after.1, "round {round}: the allocator has lost what it had written");
        // SAFETY: as above.
        unsafe { placed.lift() }.map_err(|(_, error)| error).unwrap();
        let after = (BOOKS.0[7].load(Ordering::Relaxed), CALLS.load(Ordering::Relaxed));
        assert_eq!(after.0, after.1, "round {round}, back: the allocator has lost what it had written");
    }
    println!("test result: ok. 1 passed");
}
