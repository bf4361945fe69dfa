//! An allocator for builds with debug assertions: it checks that no signal handler can interrupt this library while it allocates.
//!
//! A handler may leave the interrupted call for good (`longjmp`). If that call holds the allocator's lock, or is about to change what a
//! lock of the standard library protects, the program hangs at some later time. All such code allocates or frees now and then, so
//! one look at each allocation finds what no number of signals would.
#![allow(unsafe_code)] // An allocator.

use crate::process::{section, signals, thread};
use crate::system::confined::is_confined;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

/// The C library's allocator, which nothing of this library may call while handlers can interrupt it.
struct Guarded;

#[global_allocator]
static ALLOCATOR: Guarded = Guarded;

/// False until this library has been loaded. No handler jumps out of its constructors.
static IS_LOADED: AtomicBool = AtomicBool::new(false);

/// Checks from now on.
pub fn load() {
    IS_LOADED.store(true, Ordering::Relaxed);
}

fn check() {
    if !IS_LOADED.load(Ordering::Relaxed) || is_confined() || section::is_here() {
        return;
    }
    let kernels = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
    let all = signals::all() & !kernels;
    if signals::block(0) & all != all && IS_LOADED.swap(false, Ordering::Relaxed) {
        let place = std::backtrace::Backtrace::force_capture();
        eprintln!(
            "ginnel: thread {} allocates where a signal handler may jump away:\n{place}",
            thread::tid()
        );
        std::process::abort();
    }
}

// SAFETY: the C library's allocator does the work.
unsafe impl GlobalAlloc for Guarded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check();
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check();
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        check();
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        check();
        // SAFETY: the caller's promises are the same.
        unsafe { System.realloc(memory, layout, size) }
    }
}
