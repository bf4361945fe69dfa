//! The program's memory, accessed by address.
#![allow(unsafe_code)] // These are pointers of the program, which is responsible for them.

use crate::pages;
use ginnel_shmem::Mapping;
use ginnel_verbs::program::ProgramMemory;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory of this process. A program that posts a request promises that its addresses are valid until the request has completed, and
/// that no one changes the bytes meanwhile (`ibv_post_send(3)`). Its registered pages may be shared memory, which peers can change.
pub struct ProcessMemory;

impl ProgramMemory<Mapping> for ProcessMemory {
    #[inline]
    fn copy_in(&self, from: u64, to: &Mapping, at: usize, len: usize, _is_last: bool) {
        // SAFETY: the program promises that the bytes exist. Each piece stores its own last word last, and the last piece of a message
        // is written after all others.
        unsafe { to.write_release_from(at, from as *const u8, len) }
    }

    #[inline]
    fn copy_out(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        // SAFETY: the program promises that there is room, and treats the destination as shared memory.
        unsafe { from.read_acquire_to(at, to as *mut u8, len) }
    }

    #[inline]
    fn get(&self, from: u64, into: &mut [u8]) {
        // SAFETY: the program promises that the bytes exist; the buffer belongs to this library.
        unsafe { ptr::copy_nonoverlapping(from as *const u8, into.as_mut_ptr(), into.len()) }
    }

    #[inline]
    fn put(&self, to: u64, bytes: &[u8]) {
        // SAFETY: the program promises that there is room, and treats the destination as shared memory; the bytes belong to this library.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
    }

    fn deliver(&self, from: &Mapping, at: usize, to: u64, len: usize) {
        // SAFETY: the program has registered this memory for such accesses, and it still exists. The program treats it as shared memory.
        unsafe { from.read_release_to(at, to as *mut u8, len) }
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64 {
        // SAFETY: the program has registered this memory for such accesses, and it still exists. The word is aligned, since `at` is a
        // multiple of eight.
        let word = unsafe { AtomicU64::from_ptr(at as *mut u64) };
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|found| found)
    }

    fn fetch_add(&self, at: u64, value: u64) -> u64 {
        // SAFETY: the program has registered this memory for such accesses, and it still exists. The word is aligned, since `at` is a
        // multiple of eight.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }.fetch_add(value, Ordering::AcqRel)
    }

    fn is_there(&self, at: u64, len: usize, is_written: bool) -> bool {
        let at = at as usize;
        let Some(end) = at.checked_add(len) else { return false };
        // A registration may protect the pages for a moment in order to move them.
        ginnel_shmem::populate(at..end, is_written)
            || pages::while_none_move(|| ginnel_shmem::populate(at..end, is_written))
    }
}
