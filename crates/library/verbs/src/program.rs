//! Access to the program's own memory.

use ginnel_shmem::SharedMemory;

/// The bytes of an inline request, which were copied when it was posted. An address is an offset in these bytes.
pub(crate) struct InlineBytes<'a>(pub &'a [u8]);

impl<M: SharedMemory> ProgramMemory<M> for InlineBytes<'_> {
    fn copy_in(&self, from: u64, to: &M, at: usize, len: usize, is_last: bool) {
        let bytes = &self.0[from as usize..][..len];
        if is_last { to.write_release(at, bytes) } else { to.write(at, bytes) }
    }

    fn get(&self, from: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[from as usize..][..into.len()]);
    }

    // Only reads from an inline request are possible, so the methods that write do nothing.
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

/// The memory of the program, accessed by virtual address. The program must keep the addresses of a request valid until the request has
/// completed.
pub trait ProgramMemory<M: SharedMemory> {
    /// Copies `len` bytes of the program's memory from the address `from` to the offset `at` of shared memory. `is_last` says that they
    /// are the last bytes of a message: then the last word is stored last, with release ordering ([`SharedMemory::write_release`]).
    fn copy_in(&self, from: u64, to: &M, at: usize, len: usize, is_last: bool);

    /// Copies `len` bytes of shared memory to the program's memory at the address `to`.
    fn copy_out(&self, from: &M, at: usize, to: u64, len: usize);

    /// Reads bytes of the program's memory at the address `from`.
    fn get(&self, from: u64, into: &mut [u8]);

    /// Writes bytes to the program's memory at the address `to`.
    fn put(&self, to: u64, bytes: &[u8]);

    /// Copies `len` bytes of shared memory to the program's memory at the address `to`. The program may be polling the last byte, so the
    /// last word is stored last, with release ordering.
    fn deliver(&self, from: &M, at: usize, to: u64, len: usize);

    /// Replaces the word at `at`, a multiple of eight, by `new` if it equals `old`. Returns the earlier value.
    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> u64;

    /// Adds `value` to the word at `at`, a multiple of eight. Returns the earlier value.
    fn fetch_add(&self, at: u64, value: u64) -> u64;

    /// Returns whether the program has readable (or, with `is_written`, writable) memory at this address. The program promises this for
    /// as long as the region is registered. If it breaks the promise, an access by a thread of this library must not kill the process.
    fn is_there(&self, at: u64, len: usize, is_written: bool) -> bool;
}
