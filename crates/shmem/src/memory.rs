//! The access trait.

use std::io;
use std::os::fd::BorrowedFd;

/// Copies of at most this many bytes are done word by word with atomics where both offset and length are multiples
/// of eight; longer ones by `memcpy`.
pub const WORDWISE: usize = 64;

/// A run of memory that others may read and write at any time.
///
/// Offsets are counted from the start of the run. An offset outside it, or a misaligned word, is a bug of the caller
/// (never something that a peer can cause, because no offset comes from shared memory unchecked) and panics like a
/// slice index. Clones name the same memory.
pub trait SharedMemory: Clone {
    /// Bytes.
    fn len(&self) -> usize;

    /// True if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Loads without ordering.
    fn load_relaxed_u16(&self, at: usize) -> u16;
    /// Loads; what the writer did before its release store is seen afterwards.
    fn load_acquire_u16(&self, at: usize) -> u16;
    /// Stores without ordering.
    fn store_relaxed_u16(&self, at: usize, value: u16);
    /// Stores; everything done before is seen by whoever acquires this value.
    fn store_release_u16(&self, at: usize, value: u16);

    /// Loads without ordering.
    fn load_relaxed_u32(&self, at: usize) -> u32;
    /// Loads; what the writer did before its release store is seen afterwards.
    fn load_acquire_u32(&self, at: usize) -> u32;
    /// Stores without ordering.
    fn store_relaxed_u32(&self, at: usize, value: u32);
    /// Stores; everything done before is seen by whoever acquires this value.
    fn store_release_u32(&self, at: usize, value: u32);

    /// Loads without ordering.
    fn load_relaxed_u64(&self, at: usize) -> u64;
    /// Loads; what the writer did before its release store is seen afterwards.
    fn load_acquire_u64(&self, at: usize) -> u64;
    /// [`SharedSharedMemory::load_acquire_u64`], again and again while it says zero, at most `looks` times.
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
    /// Stores; everything done before is seen by whoever acquires this value.
    fn store_release_u64(&self, at: usize, value: u64);

    /// Puts `new` in the place of `old`; if something else is there, returns that. Acquires what is found, and releases what
    /// is put.
    fn compare_exchange_u64(&self, at: usize, old: u64, new: u64) -> Result<(), u64>;
    /// Puts `value` there and returns what was there. Acquires and releases.
    fn swap_u64(&self, at: usize, value: u64) -> u64;
    /// Sets the bits and returns the word before. Acquires and releases.
    fn fetch_or_u64(&self, at: usize, bits: u64) -> u64;
    /// Keeps only the bits and returns the word before. Acquires and releases.
    fn fetch_and_u64(&self, at: usize, bits: u64) -> u64;
    /// Adds, wrapping around at the word's end, and returns the word before. Acquires and releases.
    fn fetch_add_u32(&self, at: usize, value: u32) -> u32;
    /// Adds, wrapping around at the word's end, and returns the word before. Acquires and releases.
    fn fetch_add_u64(&self, at: usize, value: u64) -> u64;

    /// Orders all earlier stores of this thread before all its later loads, as seen by everybody (store-load fence).
    fn full_fence(&self);

    /// The same right behind an exchange of this thread's: a swap, an addition, or a compare-exchange that has put its word. Where the
    /// processor's exchanges are full fences themselves, this orders only what the compiler does.
    #[inline]
    fn fence_after_exchange(&self) {
        self.full_fence();
    }

    /// What was loaded before is not loaded later than what is loaded afterwards.
    #[inline]
    fn acquire_fence(&self) {
        self.full_fence();
    }

    /// Asks for the cache line at an offset, which is wanted soon. A hint: it reads nothing and orders nothing, and an offset that
    /// is not inside is ignored.
    #[inline]
    fn prefetch(&self, _at: usize) {}
    /// The same for a line that is stored to soon: others lose their copies of it now.
    #[inline]
    fn prefetch_to_store(&self, _at: usize) {}

    /// Copies out.
    fn read(&self, at: usize, into: &mut [u8]);
    /// Copies in.
    fn write(&self, at: usize, from: &[u8]);

    /// Copies in, and stores the last word after all else, with release: whoever sees its last byte, and acquires, sees all of
    /// the copy and everything done before. For readers that poll the last byte, as RDMA programs do. A message of several
    /// pieces is written with [`SharedSharedMemory::write`], and only its last piece with this.
    fn write_release(&self, at: usize, from: &[u8]);
    /// Copies out, and loads the last word before all else, with acquire: if it is what [`SharedSharedMemory::write_release`] stored, then so
    /// are all other bytes (or they are newer).
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

    /// Whether the memory has gone away (its file was truncated). Its bytes then read as zero and keep nothing.
    fn is_broken(&self) -> bool {
        false
    }

    /// Prepares this thread for the memory's going away: its signals must not be blocked. Each operation of a ring, a lock or a
    /// block begins with this; from a thread's second time on, it is one comparison.
    #[inline]
    fn attend(&self) {}

    /// Called by a side that is about to sleep: time for a look at what need not be looked at all the time (whether the
    /// program has replaced the handler of faults).
    fn before_sleep(&self) {}
}

/// Part of a mapping, handed to programs that want to work in place.
///
/// The peer may still write to it, so there is no reference to its bytes: copy with [`SharedSlice::read`] and
/// [`SharedSlice::write`], or take the raw pointer and its rules.
pub struct SharedSlice<'a, M: SharedMemory> {
    memory: &'a M,
    at: usize,
    len: usize,
}

// By hand, because a derived one would ask the same of `M`.
impl<M: SharedMemory> Clone for SharedSlice<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: SharedMemory> Copy for SharedSlice<'_, M> {}

impl<'a, M: SharedMemory> SharedSlice<'a, M> {
    /// The `len` bytes of `memory` from `at`. Panics if they are not inside.
    pub fn new(memory: &'a M, at: usize, len: usize) -> Self {
        assert!(at.checked_add(len).is_some_and(|end| end <= memory.len()), "slice outside its memory");
        Self { memory, at, len }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies out from `at`; returns how many bytes there were.
    pub fn read(&self, at: usize, into: &mut [u8]) -> usize {
        let n = into.len().min(self.len.saturating_sub(at));
        if n > 0 {
            self.memory.read(self.at + at, &mut into[..n]);
        }
        n
    }

    /// Copies in at `at`; returns how many bytes found room.
    pub fn write(&self, at: usize, from: &[u8]) -> usize {
        let n = from.len().min(self.len.saturating_sub(at));
        if n > 0 {
            self.memory.write(self.at + at, &from[..n]);
        }
        n
    }

    /// The bytes behind the first `n`. Panics if there are fewer.
    pub fn skip(&self, n: usize) -> Self {
        assert!(n <= self.len, "skipping more than there is");
        Self::new(self.memory, self.at + n, self.len - n)
    }

    /// The first `n` bytes. Panics if there are fewer.
    pub fn first(&self, n: usize) -> Self {
        assert!(n <= self.len, "taking more than there is");
        Self { len: n, ..*self }
    }

    /// All bytes, copied.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }
}

impl SharedSlice<'_, crate::Mapping> {
    /// Where the bytes lie. Whoever follows the pointer must use raw or atomic access (a peer may write at any time)
    /// and stop when the borrow behind this slice ends.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.pointer(self.at, self.len)
    }

    /// Copies all bytes to `at` of a mapping.
    #[inline]
    pub fn copy_to(&self, to: &crate::Mapping, at: usize) {
        self.memory.copy_to(self.at, to, at, self.len);
    }

    /// Fills all bytes from `at` of a mapping.
    #[inline]
    pub fn copy_from(&self, from: &crate::Mapping, at: usize) {
        from.copy_to(at, self.memory, self.at, self.len);
    }

    /// Calls `f` with one run of 32 bytes after the other, each word loaded once, and returns how many bytes there were in
    /// whole runs. For checksums: what was seen is what was summed. Panics if the slice is not aligned to 8.
    #[inline]
    pub fn stripes(&self, f: impl FnMut([u64; 4])) -> usize {
        self.memory.stripes(self.at, self.len, f)
    }

    /// Writes the bytes to a file or socket; the kernel copies straight from here. May write fewer.
    pub fn write_to(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.memory.write_to(self.at, self.len, fd)
    }

    /// Reads from a file or socket into the bytes; the kernel copies straight to here. Returns 0 at its end.
    pub fn read_from(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.memory.read_from(self.at, self.len, fd)
    }
}
