//! Moves a program's pages into a file and back, while the program's pointers stay the same.
#![allow(unsafe_code)] // Pages are replaced under pointers.

use ginnel_shmem::{Mapping, Placed, Protection, SharedMemory};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use std::fs::File;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{io, thread};

const PAGE: usize = 4096;
const PAGES: usize = 16;
const LEN: usize = PAGES * PAGE;
const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Runs only one of these tests at a time. Some unmap a page of a range, and the whole range at their end; meanwhile no other
/// test may map anything there.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn arena() -> (File, Mapping) {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(LEN as u64).unwrap();
    let mapping = Mapping::of_file(&file, 0, LEN, Protection::ReadWrite).unwrap();
    (file, mapping)
}

/// Private pages of a program, each word of which contains its number.
struct Pages(NonNull<u8>);

// SAFETY: the pages are only used as atomics.
unsafe impl Sync for Pages {}

impl Pages {
    fn new() -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), LEN, READ_WRITE, MapFlags::PRIVATE) }.unwrap();
        let pages = Self(NonNull::new(start.cast()).unwrap());
        for n in 0..LEN / 8 {
            pages.word(8 * n).store(n as u64, Ordering::Relaxed);
        }
        pages
    }

    fn at(&self, at: usize) -> NonNull<u8> {
        // SAFETY: inside the pages.
        unsafe { self.0.add(at) }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: inside the pages, which stay mapped, aligned, and only used as atomics.
        unsafe { AtomicU64::from_ptr(self.at(at).as_ptr().cast()) }
    }

    fn get(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    fn set(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    fn is_as_made(&self, at: usize, len: usize) -> bool {
        (at / 8..(at + len) / 8).all(|n| self.get(8 * n) == n as u64)
    }

    fn protect(&self, at: usize, len: usize, flags: MprotectFlags) {
        // SAFETY: the pages belong to the test.
        unsafe { mprotect(self.at(at).as_ptr().cast(), len, flags) }.unwrap();
    }

    /// Places `len` bytes at `at` into a file at `offset`. No thread stores to them.
    fn place(&self, to: &(File, Mapping), offset: usize, at: usize, len: usize) -> io::Result<Placed> {
        // SAFETY: the pages belong to the test, which does not store to them meanwhile.
        unsafe { to.1.place(&to.0, offset as u64, self.at(at), len, PAGE) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used any more.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), LEN) };
    }
}

fn lift(placed: Placed) {
    // SAFETY: the pages belong to the test, which neither stores to them nor maps or protects them meanwhile.
    unsafe { placed.lift() }.map_err(|(_, error)| error).unwrap();
}

#[test]
fn pages_are_shared_while_they_are_placed() {
    let _alone = alone();
    let (pages, arena) = (Pages::new(), arena());
    let placed = pages.place(&arena, 8 * PAGE, 2 * PAGE, 3 * PAGE).unwrap();
    assert_eq!((placed.start(), placed.len()), (pages.at(2 * PAGE), 3 * PAGE));
    assert!(placed.is_in_place().unwrap() && pages.is_as_made(0, LEN));
    assert_eq!(arena.1.load_relaxed_u64(8 * PAGE + 8), (2 * PAGE / 8 + 1) as u64);
    assert_eq!((arena.1.load_relaxed_u64(8 * PAGE - 8), arena.1.load_relaxed_u64(11 * PAGE)), (0, 0));

    arena.1.store_relaxed_u64(8 * PAGE + 8, 77);
    pages.set(5 * PAGE - 8, 88);
    assert_eq!((pages.get(2 * PAGE + 8), arena.1.load_relaxed_u64(11 * PAGE - 8)), (77, 88));

    lift(placed);
    assert_eq!((pages.get(2 * PAGE + 8), pages.get(5 * PAGE - 8)), (77, 88));
    arena.1.store_relaxed_u64(8 * PAGE + 8, 1);
    pages.set(5 * PAGE - 8, 2);
    assert_eq!((pages.get(2 * PAGE + 8), arena.1.load_relaxed_u64(11 * PAGE - 8)), (77, 88));
    assert!(pages.is_as_made(0, 2 * PAGE) && pages.is_as_made(5 * PAGE, LEN - 5 * PAGE));
}

#[test]
fn the_protection_is_kept_in_both_directions() {
    let _alone = alone();
    let (pages, arena) = (Pages::new(), arena());
    pages.protect(0, PAGE, MprotectFlags::READ);
    // The kernel stores on behalf of the test. If the memory is not writable, that is an error and not a fault.
    let is_writable = |at| {
        // SAFETY: the kernel checks the address itself.
        let n = unsafe { libc::getrandom(pages.at(at).as_ptr().cast(), 8, 0) };
        n == 8
    };
    let placed = pages.place(&arena, 0, 0, PAGE).unwrap();
    assert!(!is_writable(0) && pages.is_as_made(0, LEN));
    lift(placed);
    assert!(!is_writable(0) && pages.is_as_made(0, LEN));

    // Protection that the program has set meanwhile is kept too.
    let placed = pages.place(&arena, 0, 4 * PAGE, 4 * PAGE).unwrap();
    pages.protect(5 * PAGE, PAGE, MprotectFlags::READ);
    lift(placed);
    assert!(pages.is_as_made(0, LEN));
    assert!(is_writable(4 * PAGE) && !is_writable(5 * PAGE) && is_writable(6 * PAGE));

    pages.protect(8 * PAGE, PAGE, MprotectFlags::empty());
    assert!(pages.place(&arena, 0, 8 * PAGE, PAGE).is_err(), "must not be read");
    pages.protect(8 * PAGE, PAGE, MprotectFlags::READ);
    assert!(pages.place(&arena, 0, 7 * PAGE, 2 * PAGE).is_err(), "two protections");
    assert!(pages.is_as_made(8 * PAGE, PAGE));
}

#[test]
fn memory_that_cannot_be_placed_stays_unchanged() {
    let _alone = alone();
    let (pages, arena) = (Pages::new(), arena());
    for (offset, at, len) in [(0, 8, PAGE), (8, 0, PAGE), (0, 0, PAGE + 8), (0, 0, 0), (0, 0, usize::MAX)] {
        assert!(pages.place(&arena, offset, at, len).is_err(), "{len} from {at} at {offset}");
    }
    for page in [0, 8, 2 << 20] {
        // SAFETY: the pages belong to the test, which does not store to them meanwhile.
        let odd = unsafe { arena.1.place(&arena.0, 0, pages.0, PAGE, page) };
        assert!(odd.is_err(), "in units of {page}");
    }
    assert!(pages.place(&arena, LEN - PAGE, 0, 2 * PAGE).is_err(), "the file is too short");
    let read_only =
        File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&arena.0))).unwrap();
    // SAFETY: the pages belong to the test, which does not store to them meanwhile.
    assert!(unsafe { arena.1.place(&read_only, 0, pages.0, PAGE, PAGE) }.is_err());
    assert!(!arena.1.is_broken() && pages.is_as_made(0, LEN));

    let placed = pages.place(&arena, 0, 0, PAGE).unwrap();
    assert!(pages.place(&arena, PAGE, 0, PAGE).is_err(), "shared already");
    assert!(pages.place(&arena, PAGE, 0, 2 * PAGE).is_err(), "shared in part");
    lift(placed);
    // SAFETY: the pages belong to the test, which does not use this one any more.
    unsafe { munmap(pages.at(PAGE).as_ptr().cast(), PAGE) }.unwrap();
    assert!(pages.place(&arena, 0, PAGE, PAGE).is_err(), "not mapped");
    assert!(pages.place(&arena, 0, 0, 3 * PAGE).is_err(), "a hole");
    assert!(pages.is_as_made(0, PAGE) && pages.is_as_made(2 * PAGE, LEN - 2 * PAGE));
}

#[test]
fn memory_that_the_program_has_mapped_meanwhile_stays() {
    let _alone = alone();
    let (pages, arena, other) = (Pages::new(), arena(), arena());
    let placed = pages.place(&arena, 0, 0, 8 * PAGE).unwrap();
    let fixed = MapFlags::FIXED;
    // SAFETY: the pages belong to the test.
    unsafe {
        let at = pages.at(PAGE).as_ptr().cast();
        mmap_anonymous(at, PAGE, READ_WRITE, MapFlags::PRIVATE | fixed).unwrap();
        let at = pages.at(3 * PAGE).as_ptr().cast();
        mmap(at, PAGE, READ_WRITE, MapFlags::SHARED | fixed, &other.0, 3 * PAGE as u64).unwrap();
        // Map another page of the same file.
        let at = pages.at(5 * PAGE).as_ptr().cast();
        mmap(at, PAGE, READ_WRITE, MapFlags::SHARED | fixed, &arena.0, 12 * PAGE as u64).unwrap();
        munmap(pages.at(7 * PAGE).as_ptr().cast(), PAGE).unwrap();
    }
    assert!(!placed.is_in_place().unwrap());
    lift(placed);
    for at in [0, 2, 4, 6].map(|n| n * PAGE) {
        assert!(pages.is_as_made(at, PAGE));
        arena.1.store_relaxed_u64(at, 99);
        assert!(pages.is_as_made(at, PAGE), "private again");
    }
    other.1.store_relaxed_u64(3 * PAGE, 33);
    arena.1.store_relaxed_u64(12 * PAGE, 55);
    assert_eq!((pages.get(PAGE), pages.get(3 * PAGE), pages.get(5 * PAGE)), (0, 33, 55));
}

#[test]
fn a_truncated_file_breaks_the_pages_and_nothing_else() {
    let _alone = alone();
    let (pages, arena) = (Pages::new(), arena());
    let placed = pages.place(&arena, 0, PAGE, 4 * PAGE).unwrap();
    arena.0.set_len(2 * PAGE as u64).unwrap();
    assert!(!placed.is_broken() && pages.is_as_made(PAGE, 2 * PAGE));
    assert_eq!(pages.get(3 * PAGE), 0);
    assert!(placed.is_broken() && arena.1.is_broken());
    assert!(pages.is_as_made(0, 3 * PAGE), "only the page that has gone away is replaced");
    pages.set(3 * PAGE, 5);
    lift(placed);
    assert!(pages.is_as_made(0, 3 * PAGE) && pages.is_as_made(5 * PAGE, LEN - 5 * PAGE));
    assert_eq!((pages.get(3 * PAGE), pages.get(4 * PAGE)), (5, 0));
}

#[test]
fn pages_outlive_what_is_dropped() {
    let _alone = alone();
    let (pages, arena) = (Pages::new(), arena());
    drop(pages.place(&arena, 0, 0, PAGE).unwrap());
    pages.place(&arena, 2 * PAGE, 2 * PAGE, PAGE).unwrap().abandon();
    let (file, mapping) = arena;
    drop(mapping);
    assert!(pages.is_as_made(0, LEN));
    file.set_len(0).unwrap();
    assert_eq!(pages.get(8), 0, "still watched");
    // The addresses must not be used again.
    std::mem::forget(pages);
}

#[test]
fn readers_notice_nothing() {
    let _alone = alone();
    let (pages, arena, stop) = (Pages::new(), arena(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut looks = 0u64;
                while !stop.load(Ordering::Relaxed) || looks == 0 {
                    assert!(pages.is_as_made(0, LEN));
                    looks += 1;
                }
            });
        }
        for round in 0..300 {
            let at = round % PAGES / 2 * PAGE;
            lift(pages.place(&arena, round % 8 * PAGE, at, 8 * PAGE).unwrap());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn many_pages_are_placed_one_by_one() {
    let _alone = alone();
    const MANY: usize = 2000;
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len((MANY * PAGE) as u64).unwrap();
    let arena = Mapping::of_file(&file, 0, MANY * PAGE, Protection::ReadWrite).unwrap();
    let pages = Mapping::anonymous(2 * MANY * PAGE).unwrap();
    let start = ginnel_shmem::SharedSlice::new(&pages, 0, 2 * MANY * PAGE).as_ptr();
    let place = |n: usize| {
        pages.store_relaxed_u64(2 * n * PAGE, n as u64 + 1);
        // SAFETY: inside the mapping, which belongs to the test; nothing stores to it meanwhile.
        unsafe {
            let at = NonNull::new(start.add(2 * n * PAGE)).unwrap();
            arena.place(&file, (n * PAGE) as u64, at, PAGE, PAGE).unwrap()
        }
    };
    let placed: Vec<_> = (0..MANY).map(place).collect();
    assert!((0..MANY).all(|n| arena.load_relaxed_u64(n * PAGE) == n as u64 + 1));
    placed.into_iter().for_each(lift);
    arena.zero(0, MANY * PAGE);
    assert!((0..MANY).all(|n| pages.load_relaxed_u64(2 * n * PAGE) == n as u64 + 1));
}
