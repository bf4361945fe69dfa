//! The program's memory, by address.
#![allow(unsafe_code)] // Pointers of the program, which answers for them.

use crate::pages;
use ginnel_shmem::Mapping;
use ginnel_verbs::program::Program;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// The process itself. A program that posts a request says that its addresses are valid until that is completed, and that nobody changes
/// the bytes meanwhile (`ibv_post_send(3)`); its registered pages may be shared memory, which others change.
pub struct Process;

impl Program<Mapping> for Process {
    #[inline]
    fn copy_in(&self, from: u64, to: &Mapping, at: usize, len: usize, _is_last: bool) {
        // SAFETY: the program says that its bytes are there. Each piece has its own last word last; the last piece of a message is written
        // after all others.
        unsafe { to.write_release_from(at, from as *const u8, len) }
    }

    #[inline]
    fn copy_out(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        // SAFETY: the program says that there is room, and takes what comes for shared memory.
        unsafe { from.read_acquire_to(at, to as *mut u8, len) }
    }

    #[inline]
    fn get(&self, from: u64, into: &mut [u8]) {
        // SAFETY: the program says that its bytes are there; the buffer is our own.
        unsafe { ptr::copy_nonoverlapping(from as *const u8, into.as_mut_ptr(), into.len()) }
    }

    #[inline]
    fn put(&self, to: u64, bytes: &[u8]) {
        // SAFETY: as in `copy_out`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
    }

    fn deliver(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        // SAFETY: the program has registered this memory for that, and it is still there. It takes it for shared memory.
        unsafe { from.read_release_to(at, to as *mut u8, len) }
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64 {
        // SAFETY: as in `deliver`; the word is aligned.
        let word = unsafe { AtomicU64::from_ptr(at as *mut u64) };
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|found| found)
    }

    fn fetch_add(&self, at: u64, value: u64) -> u64 {
        // SAFETY: as in `compare_exchange`.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }.fetch_add(value, Ordering::AcqRel)
    }

    fn is_there(&self, at: u64, len: usize, is_written: bool) -> bool {
        let at = at as usize;
        let Some(end) = at.checked_add(len) else { return false };
        // A registration may protect the pages for a moment, to move them.
        ginnel_shmem::populate(at..end, is_written)
            || pages::while_none_move(|| ginnel_shmem::populate(at..end, is_written))
    }
}
