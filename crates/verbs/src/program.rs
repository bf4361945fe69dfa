//! The program's own memory.

use ginnel_shmem::Memory;

/// Bytes that were taken from the program when a request was posted. An address is an offset in them.
pub(crate) struct Kept<'a>(pub &'a [u8]);

impl<M: Memory> Program<M> for Kept<'_> {
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
}

/// Memory of the program, by address. The program answers for it that the addresses of its requests are valid until these are completed.
pub trait Program<M: Memory> {
    /// Copies `len` bytes of the program at `from` into shared memory. If they are the last of a message, their last word comes last, with
    /// release ([`Memory::write_release`]).
    fn copy_in(&self, from: u64, to: &M, at: usize, len: usize, is_last: bool);

    /// Copies `len` bytes of shared memory to the program's at `to`.
    fn copy_out(&self, from: &M, at: usize, to: u64, len: usize);

    /// Copies bytes of the program.
    fn get(&self, from: u64, into: &mut [u8]);

    /// Copies bytes to the program's.
    fn put(&self, to: u64, bytes: &[u8]);
}
