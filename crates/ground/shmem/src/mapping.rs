//! A real mapping, of a file's pages or of anonymous ones.

use crate::copy::{self, wordwise};
use crate::fault_in::fault_in;
use crate::guard;
use crate::memory::SharedMemory;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

/// The file system type that `fstatfs` reports for hugetlbfs.
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x958458f6;

/// The accesses for which a mapping may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Loads only; a store would fault.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// Mapped memory, or a part of it. Clones and parts share the mapping, which is unmapped when the last of them is dropped.
#[derive(Clone)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Equal to `len`, or 0 if stores are forbidden, so that one comparison checks both.
    writable: usize,
    whole: Arc<Whole>,
}

struct Whole {
    start: NonNull<u8>,
    len: usize,
    broken: AtomicBool,
    guard: OnceLock<guard::Watch>,
    /// A forbidden store was tried.
    denied: AtomicBool,
    stores: OnceLock<guard::Watch>,
}

// SAFETY: the pointer refers to a mapping that lives as long as `whole`; all access to it is through atomics and raw copies,
// which any thread may do.
unsafe impl Send for Mapping {}
// SAFETY: threads that share it access the mapping through atomics and raw copies only, and the fields do not change.
unsafe impl Sync for Mapping {}
// SAFETY: `start` is only passed to the guard and to system calls, which any thread may make. The mapping lives as long as
// this value, and any thread may drop the watches.
unsafe impl Send for Whole {}
// SAFETY: threads that share it change the flags by atomics, set each watch at most once through its `OnceLock`, and only pass
// `start` on.
unsafe impl Sync for Whole {}

impl Drop for Whole {
    fn drop(&mut self) {
        // The guard must forget the range before the kernel can give it to another mapping.
        self.guard.take();
        self.stores.take();
        // SAFETY: `start` and `len` are of a mapping that this value made and that is not used any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, shared. If the file is truncated later, the process survives: see
    /// [`SharedMemory::is_broken`]. The first such mapping installs a SIGBUS handler, which passes on faults in other memory.
    /// A thread that blocks the signal must call [`SharedMemory::attend`] before it accesses the mapping.
    pub fn of_file(file: impl AsFd, offset: u64, len: usize, protection: Protection) -> io::Result<Self> {
        let prot = match protection {
            Protection::Read => ProtFlags::READ,
            Protection::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let start = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, offset) }?;
        let mapping = Self::wrap(start.cast(), len, true, protection)?;
        fault_in(&mapping, file);
        Ok(mapping)
    }

    /// Maps parts of files one behind the other, shared, as one contiguous mapping. Each part is a file, an offset in it and a
    /// length, both of them multiples of 4096. An empty list is an error, and so is a file on hugetlbfs.
    ///
    /// This is for areas that are contiguous only in the addresses of a device, such as a queue behind an IOMMU. If any of the
    /// files is truncated later, the whole mapping counts as broken: see [`Mapping::of_file`].
    pub fn joined<F: AsFd>(parts: &[(F, u64, usize)]) -> io::Result<Self> {
        let total = parts.iter().try_fold(0_usize, |sum, (_, _, len)| sum.checked_add(*len));
        let Some(total) = total.filter(|total| *total > 0) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the parts have no bytes, or too many"));
        };
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        // Owns the range from here on, so that an error below unmaps all of it.
        let whole = Self::wrap(start.cast(), total, true, Protection::ReadWrite)?;
        let mut at = 0;
        for (file, offset, len) in parts {
            // The kernel extends a mapping of hugetlbfs to whole huge pages, over what lies behind it.
            if rustix::fs::fstatfs(file)?.f_type == HUGETLBFS_MAGIC {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "memory of huge pages cannot be joined",
                ));
            }
            // SAFETY: `at` and `len` lie inside the range that was reserved above, since their sum is at most `total`.
            let place = unsafe { start.cast::<u8>().add(at) };
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the mapping replaces only pages of the range that was reserved above, since the kernel refuses an address
            // that is not at a page, and extends a length only to the end of a page; and nobody has used them yet.
            unsafe { mmap(place.cast(), *len, prot, MapFlags::SHARED | MapFlags::FIXED, file, *offset) }?;
            at += len;
        }
        Ok(whole)
    }

    /// Returns private memory, zeroed; for tests, and for rings within one process.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        Self::wrap(start.cast(), len, false, Protection::ReadWrite)
    }

    fn wrap(start: *mut u8, len: usize, guarded: bool, protection: Protection) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mmap returned null"))?;
        if !len.is_multiple_of(8) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a mapping's length is a multiple of eight",
            ));
        }
        let whole = Arc::new(Whole {
            start,
            len,
            broken: AtomicBool::new(false),
            guard: OnceLock::new(),
            denied: AtomicBool::new(false),
            stores: OnceLock::new(),
        });
        if guarded {
            let (at, prot) = (start.as_ptr() as usize, ProtFlags::READ | ProtFlags::WRITE);
            let watch = guard::TRUNCATION.watch(at, len, len, prot, &raw const whole.broken)?;
            // The value is new, so the guard is not set yet.
            let _ = whole.guard.set(watch);
            guard::attend();
        }
        let writable = if protection == Protection::Read { 0 } else { len };
        Ok(Self { start, len, writable, whole })
    }

    /// Returns the `len` bytes from `at` on. `None` if they are not all inside, or if `at` is not a multiple of eight.
    pub fn part(&self, at: usize, len: usize) -> Option<Self> {
        let end = at.checked_add(len)?;
        if end > self.len || !at.is_multiple_of(8) {
            return None;
        }
        // SAFETY: `at` is within the mapping, as just checked.
        let start = unsafe { self.start.add(at) };
        let writable = if self.is_read_only() { 0 } else { len };
        Some(Self { start, len, writable, whole: self.whole.clone() })
    }

    /// Returns whether this mapping forbids stores. To store nevertheless is a bug of the caller, like an access outside of
    /// the mapping, and panics.
    pub fn is_read_only(&self) -> bool {
        self.writable == 0 && self.len > 0
    }

    /// Zeroes `len` bytes from `at` on.
    pub fn zero(&self, at: usize, len: usize) {
        let to = self.pointer_below(self.writable, at, len);
        // SAFETY: inside the mapping, as just checked.
        unsafe { std::ptr::write_bytes(to, 0, len) };
    }

    /// Copies `len` bytes from `at` of this mapping to `to_at` of another, without an intermediate copy in private memory. A
    /// peer may write to either meanwhile; see the assumption in the crate's documentation.
    #[inline]
    pub fn copy_to(&self, at: usize, to: &Self, to_at: usize, len: usize) {
        let (from, to) = (self.pointer(at, len), to.pointer_below(to.writable, to_at, len));
        // SAFETY: both ranges are inside their mappings, as just checked; they may overlap if the mappings are the same.
        unsafe { std::ptr::copy(from, to, len) };
    }

    /// Writes as [`SharedMemory::write_release`] does, from memory that may be shared too: the last word is stored after
    /// everything else, with release.
    ///
    /// # Safety
    ///
    /// `from` must be valid for loads of `len` bytes. Others may store to these bytes meanwhile (see the assumption in the
    /// crate's documentation). They may overlap with what is written.
    #[inline]
    pub unsafe fn write_release_from(&self, at: usize, from: *const u8, len: usize) {
        let to = self.pointer_below(self.writable, at, len);
        // SAFETY: `to` is inside the mapping, as just checked; the caller guarantees `from`.
        unsafe { copy::store_release(to, from, len) };
    }

    /// Reads as [`SharedMemory::read_acquire`] does, into memory that may be shared too: the last word is loaded before
    /// everything else, with acquire.
    ///
    /// # Safety
    ///
    /// `into` must be valid for stores of `len` bytes, to which there is no reference. Others may access them meanwhile, if
    /// they treat them as shared memory too. They may overlap with what is read.
    #[inline]
    pub unsafe fn read_acquire_to(&self, at: usize, into: *mut u8, len: usize) {
        let from = self.pointer(at, len);
        // SAFETY: `from` is inside the mapping, as just checked; the caller guarantees `into`.
        unsafe { copy::load_acquire(into, from, len) };
    }

    /// Copies out to memory that may be shared too, and stores the last word there after everything else, with release. This
    /// is for a reader that polls the last byte there.
    ///
    /// # Safety
    ///
    /// As [`Mapping::read_acquire_to`].
    #[inline]
    pub unsafe fn read_release_to(&self, at: usize, into: *mut u8, len: usize) {
        let from = self.pointer(at, len);
        // SAFETY: `from` is inside the mapping, as just checked; the caller guarantees `into`.
        unsafe { copy::store_release(into, from, len) };
    }

    /// Asks the kernel for huge pages, if it has them for this kind of memory. This is a hint: nothing else changes.
    pub fn prefer_huge_pages(&self) {
        // SAFETY: advice about our own mapping, which does not change its content.
        let _ = unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
    }

    /// Keeps the whole mapping from children that this process forks: they do not have it. This fails only if the kernel has no memory
    /// for its own structures, and then they have it.
    pub fn keep_from_children(&self) {
        let whole = &self.whole;
        // SAFETY: advice about our own mapping, which does not change its content, nor anything in this process.
        let _ = unsafe { madvise(whole.start.as_ptr().cast(), whole.len, Advice::LinuxDontFork) };
    }

    /// Forbids stores to the whole mapping from now on, for all its users in this process: stores will fault.
    pub fn forbid_stores(&self) -> io::Result<()> {
        let whole = &self.whole;
        // SAFETY: the range is our own mapping, and there is no Rust reference to its bytes.
        unsafe { mprotect(whole.start.as_ptr().cast(), whole.len, MprotectFlags::READ) }?;
        Ok(())
    }

    /// Takes the memory away from all users in this process: they read zeros, and their stores reach no one else.
    pub fn detach(&self) -> io::Result<()> {
        let (whole, prot) = (&self.whole, ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range is our own mapping, and stays mapped. There is no Rust reference to its bytes, other than to
        // atomics, which may change at any time.
        unsafe { mmap_anonymous(whole.start.as_ptr().cast(), whole.len, prot, flags) }?;
        Ok(())
    }

    /// Makes the process survive forbidden stores to the mapping from now on. Such a store goes into a private copy of its
    /// page (in units of `page` bytes, in which the mapping can be split), and [`Mapping::take_denied`] reports it. The first
    /// such mapping installs a SIGSEGV handler, which passes on faults in other memory.
    pub fn guard_stores(&self, page: usize) -> io::Result<()> {
        let whole = &self.whole;
        if whole.stores.get().is_none() {
            let (at, prot) = (whole.start.as_ptr() as usize, ProtFlags::READ | ProtFlags::WRITE);
            let watch = guard::STORES.watch(at, whole.len, page, prot, &raw const whole.denied)?;
            // If another thread was faster, its watch is enough.
            let _ = whole.stores.set(watch);
            guard::attend();
        }
        Ok(())
    }

    /// Returns whether the process has survived a forbidden store since the last call. If so, maps the pages of `file` at
    /// `offset`, of which this is a mapping, again, for loads.
    pub fn take_denied(&self, file: impl AsFd, offset: u64) -> io::Result<bool> {
        let whole = &self.whole;
        if !whole.denied.load(Ordering::Relaxed) || !whole.denied.swap(false, Ordering::Relaxed) {
            return Ok(false);
        }
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the range is our own mapping, and stays mapped. There is no Rust reference to its bytes, other than to
        // atomics, which may change at any time.
        unsafe { mmap(whole.start.as_ptr().cast(), whole.len, prot, flags, file, offset) }?;
        Ok(true)
    }

    /// Watches another range that contains pages of the same file: if one of them is lost, it is replaced, and the memory is
    /// broken. The range must not be watched longer than this mapping lives.
    pub(crate) fn watch_also(
        &self,
        at: usize,
        len: usize,
        page: usize,
        prot: ProtFlags,
    ) -> io::Result<guard::Watch> {
        guard::TRUNCATION.watch(at, len, page, prot, &raw const self.whole.broken)
    }

    /// Declares the memory broken, for all its users in this process.
    pub fn mark_broken(&self) {
        self.whole.broken.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn pointer(&self, at: usize, len: usize) -> *mut u8 {
        self.pointer_below(self.len, at, len)
    }

    /// Returns the address of `len` bytes at offset `at`. `limit` is `len`, or `writable` for stores.
    #[inline]
    fn pointer_below(&self, limit: usize, at: usize, len: usize) -> *mut u8 {
        assert!(at.saturating_add(len) <= limit, "access outside the mapping, or a store to a read-only one");
        // SAFETY: `at` is within the mapping, as just checked: `limit` is at most its length.
        unsafe { self.start.as_ptr().add(at) }
    }

    #[inline]
    fn word16(&self, limit: usize, at: usize) -> &AtomicU16 {
        assert!(
            at.rotate_right(1) < limit / 2,
            "word outside the mapping, or misaligned, or a store to a read-only one"
        );
        // SAFETY: inside the mapping (whose start is a multiple of eight) and aligned, as just checked, and accessed by this
        // crate only with atomics. It lives as long as `self`.
        unsafe { AtomicU16::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    #[inline]
    fn word32(&self, limit: usize, at: usize) -> &AtomicU32 {
        // One comparison, here and below: after the rotation, a misaligned offset is a huge one. Under emulation, a branch
        // costs more than what it protects.
        assert!(
            at.rotate_right(2) < limit / 4,
            "word outside the mapping, or misaligned, or a store to a read-only one"
        );
        // SAFETY: inside the mapping (whose start and length are multiples of eight), aligned, and accessed by this crate
        // only with atomics. It lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    #[inline]
    fn word64(&self, limit: usize, at: usize) -> &AtomicU64 {
        assert!(
            at.rotate_right(3) < limit / 8,
            "word outside the mapping, or misaligned, or a store to a read-only one"
        );
        // SAFETY: inside the mapping (whose start is a multiple of eight) and aligned, as just checked, and accessed by this
        // crate only with atomics. It lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    #[inline]
    pub(crate) fn stripes(&self, at: usize, len: usize, mut f: impl FnMut([u64; 4])) -> usize {
        let words = self.pointer(at, len).cast::<u64>();
        assert!(words.is_aligned(), "misaligned words");
        let stripes = len / 32;
        for stripe in 0..stripes {
            // SAFETY: inside the mapping, as `pointer` has checked for all `len` bytes; aligned; accessed atomically.
            f(std::array::from_fn(|i| unsafe {
                AtomicU64::from_ptr(words.add(4 * stripe + i)).load(Ordering::Relaxed)
            }));
        }
        32 * stripes
    }

    pub(crate) fn write_to(&self, at: usize, len: usize, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let p = self.pointer(at, len);
        // SAFETY: the kernel reads `len` bytes inside the mapping; if they are gone, it reports EFAULT.
        let n = unsafe { libc::write(fd.as_raw_fd(), p.cast(), len) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    pub(crate) fn read_from(&self, at: usize, len: usize, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let p = self.pointer(at, len);
        // SAFETY: the kernel writes at most `len` bytes inside the mapping; if they are gone, it reports EFAULT.
        let n = unsafe { libc::read(fd.as_raw_fd(), p.cast(), len) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The content is left out, since it belongs to others too.
        f.debug_struct("Mapping").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

impl SharedMemory for Mapping {
    #[inline]
    fn len(&self) -> usize {
        self.len
    }
    #[inline]
    fn load_relaxed_u16(&self, at: usize) -> u16 {
        self.word16(self.len, at).load(Ordering::Relaxed)
    }
    #[inline]
    fn load_acquire_u16(&self, at: usize) -> u16 {
        self.word16(self.len, at).load(Ordering::Acquire)
    }
    #[inline]
    fn store_relaxed_u16(&self, at: usize, value: u16) {
        self.word16(self.writable, at).store(value, Ordering::Relaxed);
    }
    #[inline]
    fn store_release_u16(&self, at: usize, value: u16) {
        self.word16(self.writable, at).store(value, Ordering::Release);
    }
    #[inline]
    fn load_relaxed_u32(&self, at: usize) -> u32 {
        self.word32(self.len, at).load(Ordering::Relaxed)
    }
    #[inline]
    fn load_acquire_u32(&self, at: usize) -> u32 {
        self.word32(self.len, at).load(Ordering::Acquire)
    }
    #[inline]
    fn store_relaxed_u32(&self, at: usize, value: u32) {
        self.word32(self.writable, at).store(value, Ordering::Relaxed);
    }
    #[inline]
    fn store_release_u32(&self, at: usize, value: u32) {
        self.word32(self.writable, at).store(value, Ordering::Release);
    }
    #[inline]
    fn load_relaxed_u64(&self, at: usize) -> u64 {
        self.word64(self.len, at).load(Ordering::Relaxed)
    }
    #[inline]
    fn load_acquire_u64(&self, at: usize) -> u64 {
        self.word64(self.len, at).load(Ordering::Acquire)
    }
    #[inline]
    fn await_acquire_u64(&self, at: usize, looks: u32) -> u64 {
        let word = self.word64(self.len, at);
        let mut left = i64::from(looks);
        loop {
            let value = word.load(Ordering::Acquire);
            left -= 1;
            // One branch per look: the sign bits are all ones once no look is left.
            if value | ((left - 1) >> 63) as u64 != 0 {
                return value;
            }
        }
    }
    #[inline]
    fn store_relaxed_u64(&self, at: usize, value: u64) {
        self.word64(self.writable, at).store(value, Ordering::Relaxed);
    }
    #[inline]
    fn store_release_u64(&self, at: usize, value: u64) {
        self.word64(self.writable, at).store(value, Ordering::Release);
    }
    #[inline]
    fn compare_exchange_u64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        let word = self.word64(self.writable, at);
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }
    #[inline]
    fn swap_u64(&self, at: usize, value: u64) -> u64 {
        self.word64(self.writable, at).swap(value, Ordering::AcqRel)
    }
    #[inline]
    fn fetch_or_u64(&self, at: usize, bits: u64) -> u64 {
        self.word64(self.writable, at).fetch_or(bits, Ordering::AcqRel)
    }
    #[inline]
    fn fetch_and_u64(&self, at: usize, bits: u64) -> u64 {
        self.word64(self.writable, at).fetch_and(bits, Ordering::AcqRel)
    }
    #[inline]
    fn fetch_add_u32(&self, at: usize, value: u32) -> u32 {
        self.word32(self.writable, at).fetch_add(value, Ordering::AcqRel)
    }
    #[inline]
    fn fetch_add_u64(&self, at: usize, value: u64) -> u64 {
        self.word64(self.writable, at).fetch_add(value, Ordering::AcqRel)
    }
    #[inline]
    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
    #[inline]
    fn acquire_fence(&self) {
        fence(Ordering::Acquire);
    }
    #[inline]
    fn fence_after_exchange(&self) {
        // Intel SDM, volume 3, 9.2.3.9: neither loads nor stores pass a locked instruction.
        if cfg!(target_arch = "x86_64") {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    #[inline]
    fn prefetch(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        if at < self.len {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: inside the mapping; a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.start.as_ptr().add(at).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    #[inline]
    fn prefetch_to_store(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        if at < self.writable {
            // The compiler's own intrinsic fetches the line for reading, unless it knows the processor.
            // SAFETY: inside the mapping; the instruction never faults, changes no byte, and does nothing on processors
            // without it (AMD64 Architecture Programmer's Manual, volume 3, PREFETCHW).
            unsafe {
                let line = self.start.as_ptr().add(at);
                std::arch::asm!("prefetchw [{line}]", line = in(reg) line, options(nostack, preserves_flags));
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        let from = self.pointer(at, into.len());
        if wordwise(at, into.len()) {
            for (i, chunk) in into.chunks_exact_mut(8).enumerate() {
                // SAFETY: inside the mapping, as `pointer` has checked for the whole range; aligned, since the mapping's
                // start and `at` are; accessed atomically.
                let word = unsafe { AtomicU64::from_ptr(from.cast::<u64>().add(i)) };
                chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            return;
        }
        // SAFETY: both ranges have `into.len()` bytes, and `into` is private memory, so they do not overlap. That a peer may
        // write to the source meanwhile is the assumption in the crate's documentation.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    #[inline]
    fn write(&self, at: usize, from: &[u8]) {
        let to = self.pointer_below(self.writable, at, from.len());
        if wordwise(at, from.len()) {
            for (i, bytes) in from.as_chunks::<8>().0.iter().enumerate().rev() {
                // SAFETY: inside the mapping, as `pointer_below` has checked for the whole range; aligned, since the mapping's
                // start and `at` are; accessed atomically.
                let word = unsafe { AtomicU64::from_ptr(to.cast::<u64>().add(i)) };
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            return;
        }
        // SAFETY: both ranges have `from.len()` bytes. They do not overlap, because nothing is stored to `from` while it is
        // borrowed. That a peer may access the destination meanwhile is the assumption in the crate's documentation.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    #[inline]
    fn write_release(&self, at: usize, from: &[u8]) {
        // SAFETY: `from` is valid for loads.
        unsafe { self.write_release_from(at, from.as_ptr(), from.len()) };
    }

    #[inline]
    fn read_acquire(&self, at: usize, into: &mut [u8]) {
        // SAFETY: `into` is valid for stores, and no one else stores to it.
        unsafe { self.read_acquire_to(at, into.as_mut_ptr(), into.len()) };
    }

    fn copy_into(&self, at: usize, to: &Self, to_at: usize, len: usize) {
        let from = self.pointer(at, len);
        // SAFETY: `from` is inside the mapping, as just checked, and is treated as shared memory, as `to` is.
        unsafe { to.write_release_from(to_at, from, len) };
    }

    #[inline]
    fn is_broken(&self) -> bool {
        self.whole.broken.load(Ordering::Relaxed)
    }
    #[inline]
    fn attend(&self) {
        guard::attend();
    }
    fn before_sleep(&self) {
        if self.whole.guard.get().is_some() {
            guard::look_after_at_times();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn file(len: u64) -> File {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn joined_parts_are_contiguous_and_shared() {
        let (first, second) = (file(3 << 12), file(2 << 12));
        let joined =
            Mapping::joined(&[(&first, 2 << 12, 4096), (&second, 0, 4096), (&first, 0, 4096)]).unwrap();
        assert_eq!(joined.len(), 3 << 12);
        joined.write(4090, b"across the border");
        let one = Mapping::of_file(&first, 2 << 12, 4096, Protection::Read).unwrap();
        let two = Mapping::of_file(&second, 0, 4096, Protection::Read).unwrap();
        let mut bytes = [0; 17];
        one.read(4090, &mut bytes[..6]);
        two.read(0, &mut bytes[6..]);
        assert_eq!(&bytes, b"across the border");
        drop(joined);
        two.read(0, &mut bytes[6..]);

        assert!(Mapping::joined::<&File>(&[]).is_err());
        assert!(Mapping::joined(&[(&first, 0, 4096), (&second, 1, 4096)]).is_err(), "not at a page");
        assert!(Mapping::joined(&[(&first, 0, 100), (&second, 0, 4096)]).is_err(), "behind a part of a page");
        assert!(Mapping::joined(&[(&first, 0, usize::MAX), (&second, 0, 4096)]).is_err());
    }

    #[test]
    fn a_joined_file_may_be_truncated() {
        let (first, second) = (file(4096), file(4096));
        let joined = Mapping::joined(&[(&first, 0, 4096), (&second, 0, 4096)]).unwrap();
        joined.store_relaxed_u64(0, 1);
        second.set_len(0).unwrap();
        assert_eq!(joined.load_relaxed_u64(4096), 0);
        assert!(joined.is_broken());
    }

    #[test]
    fn two_mappings_of_a_file_are_one_memory() {
        let file = file(8192);
        let a = Mapping::of_file(&file, 0, 8192, Protection::ReadWrite).unwrap();
        let b = Mapping::of_file(&file, 4096, 4096, Protection::ReadWrite).unwrap();
        a.store_release_u64(4096 + 64, 7);
        assert_eq!(b.load_acquire_u64(64), 7);
        for len in [1, 7, 8, 24, 64, 65, 1000] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8 ^ 0x5a).collect();
            a.write(4096 + 200, &bytes);
            let mut back = vec![0; len];
            b.read(200, &mut back);
            assert_eq!(back, bytes);
        }
    }

    #[test]
    fn children_do_not_get_a_mapping_that_is_kept_from_them() {
        let (file, other) = (file(8192), file(4096));
        let kept = Mapping::of_file(&file, 0, 8192, Protection::ReadWrite).unwrap();
        let shared = Mapping::of_file(&other, 0, 4096, Protection::ReadWrite).unwrap();
        kept.keep_from_children();
        // The kernel shows "dc" (do not copy) in the flags of such a mapping.
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let is_kept = |mapping: &Mapping| {
            let head = format!("{:x}-", mapping.start.as_ptr().addr());
            let lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
            let flags = lines.map(str::trim_end).find(|line| line.starts_with("VmFlags:")).unwrap();
            flags.split(' ').any(|flag| flag == "dc")
        };
        assert!(is_kept(&kept) && !is_kept(&shared), "{smaps}");
        kept.store_release_u64(0, 7);
        assert_eq!(kept.load_acquire_u64(0), 7);
    }

    #[test]
    fn bytes_go_from_mapping_to_mapping() {
        let (a, b) = (Mapping::anonymous(8192).unwrap(), Mapping::anonymous(4096).unwrap());
        a.prefer_huge_pages();
        a.write(100, b"from here to there");
        a.copy_to(100, &b, 4000, 18);
        let mut back = [0; 18];
        b.read(4000, &mut back);
        assert_eq!(&back, b"from here to there");
        b.copy_to(4000, &b, 4001, 17);
        b.read(4000, &mut back);
        assert_eq!(&back, b"ffrom here to ther");
        let outside = std::panic::catch_unwind(|| a.copy_to(8000, &b, 0, 200));
        assert!(outside.is_err());
    }

    #[test]
    fn words_are_changed_as_they_stand() {
        let m = Mapping::anonymous(4096).unwrap();
        assert_eq!(m.swap_u64(8, 0b1100), 0);
        assert_eq!(m.fetch_or_u64(8, 0b0011), 0b1100);
        assert_eq!(m.fetch_and_u64(8, 0b0110), 0b1111);
        assert_eq!(m.compare_exchange_u64(8, 0b1111, 9), Err(0b0110));
        assert_eq!(m.compare_exchange_u64(8, 0b0110, 9), Ok(()));
        assert_eq!(m.load_acquire_u64(8), 9);
        assert_eq!(m.fetch_add_u64(8, u64::MAX), 9);
        assert_eq!(m.fetch_add_u64(8, u64::MAX - 7), 8);
        assert_eq!(m.fetch_add_u64(8, 1), 0, "wraps around");
        assert_eq!(m.fetch_add_u32(12, u32::MAX), 0);
        assert_eq!(m.fetch_add_u32(12, 2), u32::MAX, "wraps around");
        assert_eq!((m.load_relaxed_u32(8), m.load_relaxed_u32(12)), (1, 1), "the word beside it stays");
    }

    #[test]
    fn no_addition_is_lost() {
        let m = Mapping::anonymous(4096).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        m.fetch_add_u64(64, 3);
                        m.fetch_add_u32(72, 5);
                    }
                });
            }
        });
        assert_eq!((m.load_relaxed_u64(64), m.load_relaxed_u32(72)), (120_000, 200_000));
    }

    #[test]
    fn stripes_are_the_words_in_order() {
        let m = Mapping::anonymous(4096).unwrap();
        let bytes: Vec<u8> = (0..107u8).collect();
        m.write(8, &bytes);
        let mut seen = Vec::new();
        let slice = crate::SharedSlice::new(&m, 0, 115).skip(8);
        let n = slice.stripes(|words| seen.extend(words.iter().flat_map(|w| w.to_le_bytes())));
        assert_eq!((n, seen.as_slice()), (96, &bytes[..96]));
        assert_eq!(slice.skip(107).len(), 0);
    }

    #[test]
    fn a_truncated_file_breaks_the_mapping_and_nothing_else() {
        let (gone, kept) = (file(1 << 20), file(4096));
        let a = Mapping::of_file(&gone, 0, 1 << 20, Protection::ReadWrite).unwrap();
        let b = Mapping::of_file(&kept, 0, 4096, Protection::ReadWrite).unwrap();
        a.store_relaxed_u32(0, 1);
        b.store_relaxed_u32(0, 2);
        gone.set_len(0).unwrap();
        assert!(!a.is_broken());
        assert_eq!(a.load_relaxed_u32(0), 0, "reads as zero");
        assert!(a.is_broken() && !b.is_broken());
        a.store_relaxed_u32(512 << 10, 3);
        let mut bytes = [1; 100];
        a.read(999, &mut bytes);
        assert_eq!(bytes, [0; 100]);
        assert_eq!(b.load_relaxed_u32(0), 2);
    }

    #[test]
    fn parts_are_checked() {
        let m = Mapping::anonymous(4096).unwrap();
        assert!(
            m.part(4096, 0).is_some()
                && m.part(4000, 104).is_none()
                && m.part(4, 8).is_none()
                && m.part(usize::MAX, 2).is_none()
        );
    }

    #[test]
    fn a_store_to_a_read_only_mapping_panics_and_does_not_fault() {
        let file = file(8192);
        let writer = Mapping::of_file(&file, 0, 8192, Protection::ReadWrite).unwrap();
        let reader = Mapping::of_file(&file, 0, 8192, Protection::Read).unwrap();
        assert!(
            reader.is_read_only() && reader.part(64, 64).unwrap().is_read_only() && !writer.is_read_only()
        );
        writer.store_release_u64(64, 7);
        let stores: [fn(&Mapping); 15] = [
            |m| m.store_relaxed_u16(0, 1),
            |m| m.store_release_u16(0, 1),
            |m| m.store_relaxed_u32(0, 1),
            |m| m.store_release_u32(0, 1),
            |m| m.store_relaxed_u64(0, 1),
            |m| m.store_release_u64(0, 1),
            |m| m.compare_exchange_u64(0, 1, 1).unwrap(),
            |m| _ = m.swap_u64(0, 1),
            |m| _ = m.fetch_or_u64(0, 1),
            |m| _ = m.fetch_and_u64(0, 1),
            |m| _ = m.fetch_add_u32(0, 1),
            |m| _ = m.fetch_add_u64(0, 1),
            |m| m.write_release(0, &[1; 8]),
            |m| m.write(0, &[1; 8]),
            |m| m.write(0, &[1; 999]),
        ];
        for (n, store) in stores.iter().enumerate() {
            let tried = std::panic::catch_unwind(|| store(&reader));
            let text =
                tried.unwrap_err().downcast::<&str>().map_or_else(|_| String::new(), |t| t.to_string());
            assert!(text.contains("read-only"), "store {n}: {text:?}");
        }
        assert_eq!(reader.part(64, 8).unwrap().load_acquire_u64(0), 7);
        let error =
            crate::SharedSlice::new(&reader, 0, 8).read_from(File::open("/dev/zero").unwrap().as_fd());
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn a_forbidden_store_has_no_effect_and_is_reported() {
        let file = file(3 * 4096);
        let owner = Mapping::of_file(&file, 0, 3 * 4096, Protection::ReadWrite).unwrap();
        owner.store_relaxed_u64(4096, 7);
        owner.store_relaxed_u64(8192, 8);
        for page in [4096, 2 << 20] {
            let reader = Mapping::of_file(&file, 0, 3 * 4096, Protection::Read).unwrap();
            reader.guard_stores(page).unwrap();
            assert!(!reader.take_denied(&file, 0).unwrap());
            let word = reader.pointer(4096, 8).cast::<u64>();
            // SAFETY: inside the mapping, aligned, accessed atomically.
            unsafe { AtomicU64::from_ptr(word).store(99, Ordering::Relaxed) };
            assert_eq!((owner.load_relaxed_u64(4096), owner.load_relaxed_u64(8192)), (7, 8));
            assert_eq!(
                (reader.load_relaxed_u64(4096), reader.load_relaxed_u64(8192)),
                (99, 8),
                "its own copy"
            );
            assert!(reader.take_denied(&file, 0).unwrap() && !reader.take_denied(&file, 0).unwrap());
            assert_eq!(reader.load_relaxed_u64(4096), 7);
        }
    }

    #[test]
    fn rights_can_be_taken_from_a_mapping() {
        let file = file(8192);
        let owner = Mapping::of_file(&file, 0, 8192, Protection::ReadWrite).unwrap();
        let other = Mapping::of_file(&file, 0, 8192, Protection::ReadWrite).unwrap();
        other.guard_stores(4096).unwrap();
        other.store_relaxed_u64(0, 1);
        other.forbid_stores().unwrap();
        other.store_relaxed_u64(0, 2);
        assert_eq!(owner.load_relaxed_u64(0), 1);
        assert!(other.take_denied(&file, 0).unwrap());
        other.detach().unwrap();
        assert_eq!(other.load_relaxed_u64(0), 0);
        other.store_relaxed_u64(0, 3);
        assert_eq!(owner.load_relaxed_u64(0), 1);
        owner.zero(0, 8);
        assert_eq!(owner.load_relaxed_u64(0), 0);
    }

    #[test]
    #[should_panic = "outside the mapping"]
    fn outside_is_refused() {
        Mapping::anonymous(4096).unwrap().load_relaxed_u32(4096);
    }
}
