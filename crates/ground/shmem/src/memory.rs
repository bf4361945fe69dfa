//! The trait for access to shared memory.

use std::io;
use std::os::fd::BorrowedFd;

/// Maximum bytes of a copy that is done word by word with atomics, if both offset and length are multiples of eight. Longer
/// or unaligned copies use `memcpy`.
pub const WORDWISE: usize = 64;

/// A range of memory that others may read and write at any time.
///
/// Offsets are counted from the start of the range. An offset outside the range, or a misaligned word, is a bug of the caller
/// and panics like a slice index. (A peer can never cause it, because offsets from shared memory are checked before use.)
/// Clones refer to the same memory.
pub trait SharedMemory: Clone {
    /// Returns the length in bytes.
    fn len(&self) -> usize;

    /// Returns whether the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Loads without ordering.
    fn load_relaxed_u16(&self, at: usize) -> u16;
    /// Loads with acquire ordering: everything that the writer did before its release store is visible afterwards.
    fn load_acquire_u16(&self, at: usize) -> u16;
    /// Stores without ordering.
    fn store_relaxed_u16(&self, at: usize, value: u16);
    /// Stores with release ordering: everything done before is visible to a reader that acquires this value.
    fn store_release_u16(&self, at: usize, value: u16);

    /// Loads without ordering.
    fn load_relaxed_u32(&self, at: usize) -> u32;
    /// Loads with acquire ordering: everything that the writer did before its release store is visible afterwards.
    fn load_acquire_u32(&self, at: usize) -> u32;
    /// Stores without ordering.
    fn store_relaxed_u32(&self, at: usize, value: u32);
    /// Stores with release ordering: everything done before is visible to a reader that acquires this value.
    fn store_release_u32(&self, at: usize, value: u32);

    /// Loads without ordering.
    fn load_relaxed_u64(&self, at: usize) -> u64;
    /// Loads with acquire ordering: everything that the writer did before its release store is visible afterwards.
    fn load_acquire_u64(&self, at: usize) -> u64;
    /// Repeats [`SharedMemory::load_acquire_u64`] while it returns zero, at most `looks` times.
    #[inline]
    fn await_acquire_u64(&self, at: usize, looks: u32) -> u64 {
        let mut value = self.load_acquire_u64(at);
        for _ in 1..looks {
            if value != 0 {
                break;
            }
            value = self.load_acquire_u64(at);
        }
        value
    }
    /// Stores without ordering.
    fn store_relaxed_u64(&self, at: usize, value: u64);
    /// Stores with release ordering: everything done before is visible to a reader that acquires this value.
    fn store_release_u64(&self, at: usize, value: u64);

    /// Replaces `old` by `new`. The error is the word that was there instead of `old`. Acquires the old word, and releases
    /// the new one.
    fn compare_exchange_u64(&self, at: usize, old: u64, new: u64) -> Result<(), u64>;
    /// Replaces the word by `value`, and returns the old word. Acquires and releases.
    fn swap_u64(&self, at: usize, value: u64) -> u64;
    /// Sets the bits, and returns the old word. Acquires and releases.
    fn fetch_or_u64(&self, at: usize, bits: u64) -> u64;
    /// Clears all other bits, and returns the old word. Acquires and releases.
    fn fetch_and_u64(&self, at: usize, bits: u64) -> u64;
    /// Adds, with wrap-around, and returns the old word. Acquires and releases.
    fn fetch_add_u32(&self, at: usize, value: u32) -> u32;
    /// Adds, with wrap-around, and returns the old word. Acquires and releases.
    fn fetch_add_u64(&self, at: usize, value: u64) -> u64;

    /// Orders all earlier stores of this thread before all its later loads, as seen by all others (store-load fence).
    fn full_fence(&self);

    /// Does the same as [`SharedMemory::full_fence`], directly after an exchange by this thread: a swap, an addition, or a
    /// successful compare-exchange. If the processor's exchanges are full fences themselves, this only restricts the
    /// compiler.
    #[inline]
    fn fence_after_exchange(&self) {
        self.full_fence();
    }

    /// Orders earlier loads before later loads and stores.
    #[inline]
    fn acquire_fence(&self) {
        self.full_fence();
    }

    /// Prefetches the cache line at an offset, for an access that will follow soon. This is a hint: it reads nothing and
    /// orders nothing, and an offset outside is ignored.
    #[inline]
    fn prefetch(&self, _at: usize) {}
    /// Prefetches the cache line at an offset for a store that will follow soon: others lose their copies of it now.
    #[inline]
    fn prefetch_to_store(&self, _at: usize) {}

    /// Copies bytes out of the memory.
    fn read(&self, at: usize, into: &mut [u8]);
    /// Copies bytes into the memory.
    fn write(&self, at: usize, from: &[u8]);

    /// Copies bytes into the memory, and stores the last word after everything else, with release. A reader that acquires the
    /// last byte sees the whole copy and everything done before. This is for readers that poll the last byte, as RDMA
    /// programs do. A message of several pieces is written with [`SharedMemory::write`], except its last piece.
    fn write_release(&self, at: usize, from: &[u8]);
    /// Copies bytes out of the memory, and loads the last word before everything else, with acquire. If this word is what
    /// [`SharedMemory::write_release`] stored, so are all other bytes (or they are newer).
    fn read_acquire(&self, at: usize, into: &mut [u8]);

    /// Copies `len` bytes to another memory, which may be the same one, without ordering.
    fn copy_into(&self, at: usize, to: &Self, to_at: usize, len: usize) {
        let mut bytes = [0; 64];
        for done in (0..len).step_by(bytes.len()) {
            let part = &mut bytes[..(len - done).min(64)];
            self.read(at + done, part);
            to.write(to_at + done, part);
        }
    }

    /// Returns whether the memory is gone (its file was truncated). Then its bytes read as zero, and stores have no lasting
    /// effect.
    fn is_broken(&self) -> bool {
        false
    }

    /// Prepares this thread for the loss of the memory: the thread must not block the signals for faults. Each operation of a
    /// ring, a lock or a block begins with this. From a thread's second call on, it is one comparison.
    #[inline]
    fn attend(&self) {}

    /// Checks what need not be checked all the time (whether the program has replaced the handler of faults). A side calls
    /// this when it is about to sleep.
    fn before_sleep(&self) {}
}

/// A part of a mapping, for programs that work in place.
///
/// The peer may still write to it, so there is no reference to its bytes. Copy with [`SharedSlice::read`] and
/// [`SharedSlice::write`], or use the raw pointer according to its rules.
pub struct SharedSlice<'a, M: SharedMemory> {
    memory: &'a M,
    at: usize,
    len: usize,
}

// Not derived, because a derived implementation would require that `M` is `Copy`.
impl<M: SharedMemory> Clone for SharedSlice<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: SharedMemory> Copy for SharedSlice<'_, M> {}

impl<'a, M: SharedMemory> SharedSlice<'a, M> {
    /// Returns the `len` bytes of `memory` from `at` on. Panics if they are not inside.
    pub fn new(memory: &'a M, at: usize, len: usize) -> Self {
        assert!(at.checked_add(len).is_some_and(|end| end <= memory.len()), "slice outside its memory");
        Self { memory, at, len }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes out, from `at` on. Returns how many bytes were copied.
    pub fn read(&self, at: usize, into: &mut [u8]) -> usize {
        let n = into.len().min(self.len.saturating_sub(at));
        if n > 0 {
            self.memory.read(self.at + at, &mut into[..n]);
        }
        n
    }

    /// Copies bytes in, from `at` on. Returns how many bytes were copied.
    pub fn write(&self, at: usize, from: &[u8]) -> usize {
        let n = from.len().min(self.len.saturating_sub(at));
        if n > 0 {
            self.memory.write(self.at + at, &from[..n]);
        }
        n
    }

    /// Returns the bytes after the first `n`. Panics if there are fewer than `n`.
    pub fn skip(&self, n: usize) -> Self {
        assert!(n <= self.len, "skipping more than there is");
        Self::new(self.memory, self.at + n, self.len - n)
    }

    /// Returns the first `n` bytes. Panics if there are fewer.
    pub fn first(&self, n: usize) -> Self {
        assert!(n <= self.len, "taking more than there is");
        Self { len: n, ..*self }
    }

    /// Returns a copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }
}

impl SharedSlice<'_, crate::Mapping> {
    /// Returns the address of the bytes. The caller must use raw or atomic access, because a peer may write at any time, and
    /// must not use the pointer after the borrow of this slice ends.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.pointer(self.at, self.len)
    }

    /// Copies all bytes to a mapping, at offset `at`.
    #[inline]
    pub fn copy_to(&self, to: &crate::Mapping, at: usize) {
        self.memory.copy_to(self.at, to, at, self.len);
    }

    /// Fills all bytes from a mapping, from offset `at` on.
    #[inline]
    pub fn copy_from(&self, from: &crate::Mapping, at: usize) {
        from.copy_to(at, self.memory, self.at, self.len);
    }

    /// Calls `f` with one group of 32 bytes after the other, loading each word once. Returns how many bytes the whole groups
    /// had. For checksums: the bytes that were seen are the bytes that were summed. Panics if the slice is not aligned to 8.
    #[inline]
    pub fn stripes(&self, f: impl FnMut([u64; 4])) -> usize {
        self.memory.stripes(self.at, self.len, f)
    }

    /// Writes the bytes to a file or socket; the kernel copies directly from the shared memory. Returns how many bytes were
    /// written, which may be fewer than all.
    pub fn write_to(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.memory.write_to(self.at, self.len, fd)
    }

    /// Reads from a file or socket into the bytes; the kernel copies directly into the shared memory. Returns 0 at the end of
    /// the file.
    pub fn read_from(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.memory.read_from(self.at, self.len, fd)
    }
}
