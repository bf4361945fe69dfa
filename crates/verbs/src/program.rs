//! The program's own memory.

use ginnel_shmem::SharedMemory;

/// Bytes that were taken from the program when a request was posted. An address is an offset in them.
pub(crate) struct Kept<'a>(pub &'a [u8]);

impl<M: SharedMemory> Program<M> for Kept<'_> {
    fn copy_in(&self, from: u64, to: &M, at: usize, len: usize, is_last: bool) {
        let bytes = &self.0[from as usize..][..len];
        if is_last { to.write_release(at, bytes) } else { to.write(at, bytes) }
    }

    fn get(&self, from: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[from as usize..][..into.len()]);
    }

    // Nothing is written to the bytes of an inline request.
    fn copy_out(&self, _: &M, _: usize, _: u64, _: usize) {}
    fn put(&self, _: u64, _: &[u8]) {}
    fn deliver(&self, _: &M, _: usize, _: u64, _: usize) {}
    fn compare_exchange(&self, _: u64, _: u64, _: u64) -> u64 {
        0
    }
    fn fetch_add(&self, _: u64, _: u64) -> u64 {
        0
    }
    fn is_there(&self, _: u64, _: usize, _: bool) -> bool {
        false
    }
}

/// Memory of the program, by address. The program answers for it that the addresses of its requests are valid until these are completed.
pub trait Program<M: SharedMemory> {
    /// Copies `len` bytes of the program at `from` into shared memory. If they are the last of a message, their last word comes last, with
    /// release ([`SharedSharedMemory::write_release`]).
    fn copy_in(&self, from: u64, to: &M, at: usize, len: usize, is_last: bool);

    /// Copies `len` bytes of shared memory to the program's at `to`.
    fn copy_out(&self, from: &M, at: usize, to: u64, len: usize);

    /// Copies bytes of the program.
    fn get(&self, from: u64, into: &mut [u8]);

    /// Copies bytes to the program's.
    fn put(&self, to: u64, bytes: &[u8]);

    /// Copies `len` bytes of shared memory to the program's at `to`, where it may be polling the last one of them: the last word comes last,
    /// with release.
    fn deliver(&self, from: &M, at: usize, to: u64, len: usize);

    /// Puts `new` in the place of the program's word at a multiple of eight, if that is `old`. What was there.
    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64;

    /// Adds to the program's word at a multiple of eight. What was there.
    fn fetch_add(&self, at: u64, value: u64) -> u64;

    /// Whether the program still has memory there that can be read, or written. It has promised that as long as the region is
    /// registered; a promise that it has broken must not end it in a thread of this library.
    fn is_there(&self, at: u64, len: usize, is_written: bool) -> bool;
}
