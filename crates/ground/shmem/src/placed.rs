//! Pages of the program that are moved into a file, in place.
//!
//! With this module, a program shares memory that it already has, and its pointers to the memory stay valid.
//! [`Mapping::place`] copies a range of the program's private pages to the pages of a file, and puts these in their place.
//! [`Placed::lift`] puts private pages with the range's content of that moment there again. Both keep the protection. They
//! make their system calls directly: a library that intercepts `mmap` (as MPI libraries do, to forget what is unmapped) does
//! not notice, and need not, since the program's range never disappears.
//!
//! # What other threads observe
//!
//! The new pages are filled elsewhere and then moved over the range by one `mremap`. For other threads, the exchange happens
//! at a single instant: no address of the range is ever unmapped, and a load finds the same bytes before and after it.
//!
//! **A store between the copy and the exchange is lost**, because it goes to the old page (with `place`), or only to the file
//! (with `lift`). Therefore nothing may store to the range during either call: no thread of this process, no system call of
//! another thread (`read` into the range), and no device that was told to write there. The same holds for atomic operations,
//! above all for locks: a lock that is taken meanwhile is free afterwards, and one that is released is taken again. A thread
//! that sleeps on a private futex in the range is not lost by the exchange, because such futexes are identified by their
//! address alone. Neither call allocates between the copy and the exchange, so the range may be part of the heap. This
//! thread's signals are blocked meanwhile, because their handlers may store.
//!
//! [`Mapping::place_among_threads`] is for callers that cannot rule out stores of other threads: it makes the threads that
//! store to the range sleep from the copy to the exchange. Then their stores go to the new pages, and none is lost. Writes by
//! a device are still lost.

use crate::areas::{self, Area, FileId, Maps, areas};
use crate::guard::{self, Watch};
use crate::hold::{Hold, Reach, SignalsBlocked};
use crate::{Mapping, SharedMemory};
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect,
    mremap_fixed, munmap,
};
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, mem};

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Pages of a file in the place of pages of the program. If this is dropped, the pages stay there, and are watched, until the
/// process ends; if the program unmaps them later, a few bytes are leaked.
#[must_use = "the pages stay in the file unless they are lifted"]
#[derive(Debug)]
pub struct Placed {
    start: NonNull<u8>,
    len: usize,
    file: FileId,
    offset: u64,
    /// Present until the pages are not watched any more.
    watch: Option<Watch>,
    arena: Mapping,
}

// SAFETY: the pointer refers to a range of addresses; the callers of unsafe functions are responsible for accesses to it.
unsafe impl Send for Placed {}
// SAFETY: threads that share it only read its fields; the callers of unsafe functions are responsible for accesses to the
// range.
unsafe impl Sync for Placed {}

impl Mapping {
    /// Moves the pages at `start` into `file`, at `offset`. The range keeps its bytes and its protection, and is then
    /// shared with all processes that map the file. The earlier bytes of the file there are overwritten. The whole range
    /// must be private memory of one protection, which allows loads; anything else is an error. `start`, `len` and `offset`
    /// are multiples of `page`, the unit in which the file can be mapped. This mapping must be of the same file. If the
    /// file is truncated, this mapping's [`SharedMemory::is_broken`] returns true, and the bytes of pages that are accessed
    /// afterwards are zero.
    ///
    /// After an error, the range is unchanged. (The kernel checks all its limits first. But if it then has no memory for its
    /// own data, in the middle of the exchange, the range is unmapped.)
    ///
    /// Advice for the old pages (`madvise`, `mlock`, a policy) does not hold for the new ones. After a fork, the child shares
    /// the new pages with its parent.
    ///
    /// # Safety
    ///
    /// - The caller may replace the range, and the range stays mapped, with the same protection, during the call.
    /// - During the call, nothing stores to the range: see the head of this file. Therefore the range has no part of the
    ///   stack of a running thread, including this one, and no part of this mapping's memory.
    /// - From now on, the range is shared memory. Code that uses it (also through references) must tolerate what other
    ///   processes, which may map the file, do to its bytes; [the crate's documentation](crate) says what that means for
    ///   Rust.
    pub unsafe fn place(
        &self,
        file: impl AsFd,
        offset: u64,
        start: NonNull<u8>,
        len: usize,
        page: usize,
    ) -> io::Result<Placed> {
        // SAFETY: the caller guarantees that it may replace the range, which stays mapped, and that nothing stores to it
        // during the call.
        unsafe { self.exchange(file.as_fd(), offset, start, len, page, None) }
    }

    /// Moves pages as [`Mapping::place`] does, while other threads may load from the range and store to it. A thread that
    /// stores to the range meanwhile sleeps until the new pages are there, and then stores to these.
    ///
    /// This needs userfaultfd (Linux 5.11). If it is forbidden (as container engines do), and for private pages of a file,
    /// the handler of SIGSEGV holds the threads instead (Linux 5.14, x86-64); then it is an error if a thread blocks that
    /// signal.
    ///
    /// The kernel's own stores are held only if this process may use userfaultfd for them: as root, with `CAP_SYS_PTRACE`,
    /// with rights to `/dev/userfaultfd`, or with `vm.unprivileged_userfaultfd = 1`. Otherwise, a system call of another
    /// thread that stores to the range meanwhile, such as `read`, may fail with `EFAULT`.
    ///
    /// # Safety
    ///
    /// As for [`Mapping::place`], except for stores by this process's threads. The range has no part of the stack of any
    /// thread (or of its signal stack), nor of its thread-local memory: this thread would sleep for ever, and for other
    /// threads the kernel itself stores there at moments when it cannot tolerate an error. No one unmaps pages of the range
    /// or discards their content (`MADV_DONTNEED`) meanwhile.
    pub unsafe fn place_among_threads(
        &self,
        file: impl AsFd,
        offset: u64,
        start: NonNull<u8>,
        len: usize,
        page: usize,
    ) -> io::Result<Placed> {
        // SAFETY: the caller guarantees that it may replace the range, which stays mapped and has no part of a stack or of
        // thread-local memory. Stores of other threads are held.
        unsafe { self.exchange(file.as_fd(), offset, start, len, page, Some(Reach::All)) }
    }

    /// Exchanges the pages. Stores of other threads are held as far as possible, but not farther than `others` says.
    ///
    /// # Safety
    ///
    /// As for `place`, or with `others` as for `place_among_threads`.
    pub(crate) unsafe fn exchange(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        start: NonNull<u8>,
        len: usize,
        page: usize,
        others: Option<Reach>,
    ) -> io::Result<Placed> {
        let at = start.as_ptr() as usize;
        let whole = (at | len).is_multiple_of(page) && offset.is_multiple_of(page as u64);
        let range = match at.checked_add(len) {
            Some(end) if len > 0 && page > 0 && page.is_multiple_of(4096) && whole => at..end,
            _ => return Err(invalid("the range does not consist of whole pages")),
        };
        let maps = Maps::open()?;
        let prot = private_protection(&maps, &range)?;

        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let new = unsafe { mmap(ptr::null_mut(), len, READ_WRITE, MapFlags::SHARED, file, offset) }?;
        let new = Temporary { start: new, len };
        let broken = AtomicBool::new(false);
        let watch = guard::TRUNCATION.watch(new.start as usize, len, page, READ_WRITE, &raw const broken)?;
        let new_at = new.start as usize;
        let Some(area) = maps.areas(new_at..new_at + len)?.into_iter().next() else {
            return Err(io::Error::other("the kernel does not say what has been mapped"));
        };
        // SAFETY: the pages are ours. Populating them shortens the sleep of others. If it fails, the copy finds out why.
        let _ = unsafe { madvise(new.start, len, Advice::LinuxPopulateWrite) };
        // The watch begins before the exchange, so that no fault is missed.
        let placed_watch = self.watch_also(at, len, page, prot)?;
        guard::attend();

        let signals = SignalsBlocked::new();
        // A range that cannot be stored to needs no hold.
        let hold = match others.filter(|_| prot.contains(ProtFlags::WRITE)) {
            None => None,
            Some(Reach::All) => Some(Hold::widest(range, prot)?),
            Some(reach) => Some(Hold::new(range, prot, reach)?),
        };
        // SAFETY: the kernel has just said that the range can be read; it stays as it is, and the caller may replace it.
        let exchanged = unsafe { copy_and_put(new, start, prot, hold, &signals, &broken) };
        drop(signals);
        exchanged?;
        if broken.load(Ordering::Relaxed) {
            return Err(invalid("the file ends before the end of the pages"));
        }
        drop(watch);
        Ok(Placed { start, len, file: area.file, offset, watch: Some(placed_watch), arena: self.clone() })
    }
}

/// Copies a range to new pages, and puts these in its place, unless their file has turned out to be broken. Allocates and
/// frees nothing: the allocator's own words may lie in the range, and with a hold, this thread would wait for itself.
///
/// # Safety
///
/// The range is as long as the new pages and can be read, and the caller may replace it. Without a hold, nothing stores to
/// it.
unsafe fn copy_and_put(
    new: Temporary,
    start: NonNull<u8>,
    prot: ProtFlags,
    mut hold: Option<Hold>,
    signals: &SignalsBlocked,
    broken: &AtomicBool,
) -> Result<(), Errno> {
    if let Some(hold) = &hold {
        hold.begin(signals)?;
    }
    // SAFETY: the caller guarantees that the range can be read and is as long as the new pages, which are another mapping.
    // Others only load from the range: the caller guarantees that too, or the hold ensures it.
    unsafe { ptr::copy_nonoverlapping(start.as_ptr(), new.start.cast(), new.len) };
    if broken.load(Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: the caller may replace the range.
    unsafe { new.put(start.as_ptr().cast(), prot) }?;
    if let Some(hold) = &mut hold {
        hold.replaced();
    }
    Ok(())
}

impl Placed {
    /// Returns the start of the range.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the length of the range in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false, since a range is never empty.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns whether the file was truncated.
    pub fn is_broken(&self) -> bool {
        self.arena.is_broken()
    }

    /// Returns whether the whole range still contains the pages that were placed there. A program may have unmapped it, or
    /// mapped something else.
    pub fn is_in_place(&self) -> io::Result<bool> {
        Ok(self.in_place(self.range())?.iter().map(Range::len).sum::<usize>() == self.len)
    }

    /// Returns the parts of a range, which may extend beyond these pages, that map the same file at the same distance between
    /// address and offset: that is, the pages of this and similar calls that are still in place.
    pub fn in_place(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let offset = self.distance().wrapping_add(range.start as u64);
        if areas::is_certainly(&range, self.file, offset) {
            return Ok(vec![range]);
        }
        Ok(self.present(range)?.into_iter().map(|area| area.at).collect())
    }

    /// Returns the distance from an address to its offset in the file.
    fn distance(&self) -> u64 {
        self.offset.wrapping_sub(self.start.as_ptr() as u64)
    }

    fn range(&self) -> Range<usize> {
        let start = self.start.as_ptr() as usize;
        start..start + self.len
    }

    /// Puts private pages in the place of the file's, with the present bytes of the range. Memory that the program itself has
    /// mapped there meanwhile stays. The protection that the program has set stays too, but must allow loads. After an error,
    /// some of the pages may have been replaced; the call may be repeated.
    ///
    /// # Safety
    ///
    /// As for [`Mapping::place`]: during the call, the mapping and the protection of the range do not change, and nothing in
    /// this process stores to it. Stores of others to the file meanwhile may or may not be included.
    pub unsafe fn lift(mut self) -> Result<(), (Self, io::Error)> {
        // SAFETY: the caller guarantees that the mapping and the protection of the range do not change during the call, and
        // that nothing in this process stores to it.
        match unsafe { self.put_back() } {
            Ok(()) => {
                self.watch.take();
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Forgets the pages, which the program has unmapped or replaced: from now on, a fault there is the program's own.
    pub fn abandon(mut self) {
        self.watch.take();
    }

    /// Returns the areas of a range that still map the file.
    fn present(&self, range: Range<usize>) -> io::Result<Vec<Area>> {
        let distance = self.distance();
        let mut areas = areas(range)?;
        areas.retain(|area| {
            let offset = distance.wrapping_add(area.at.start as u64);
            area.shared && area.file == self.file && area.offset == offset
        });
        Ok(areas)
    }

    /// # Safety
    ///
    /// As for [`Placed::lift`].
    unsafe fn put_back(&self) -> io::Result<()> {
        let areas = self.present(self.range())?;
        if areas.iter().any(|area| !area.prot.contains(ProtFlags::READ)) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the pages are not readable"));
        }
        guard::attend();
        for area in areas {
            let len = area.at.len();
            // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
            let new = unsafe { mmap_anonymous(ptr::null_mut(), len, READ_WRITE, MapFlags::PRIVATE) }?;
            let new = Temporary { start: new, len };
            let _signals = SignalsBlocked::new();
            // SAFETY: the kernel has just said that the area can be read, and it stays mapped, as the caller guarantees; it
            // is watched, and others may store to it (see the assumption in the crate's documentation). The other pages are
            // new, and replace what the caller has allowed to be replaced.
            unsafe {
                ptr::copy_nonoverlapping(area.start().cast::<u8>(), new.start.cast(), len);
                new.put(area.start(), area.prot)?;
            }
        }
        Ok(())
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            // The pages are still there. The flag that the handler sets at a fault must stay there, too.
            mem::forget(watch);
            mem::forget(self.arena.clone());
        }
    }
}

/// Pages that are being filled.
struct Temporary {
    start: *mut c_void,
    len: usize,
}

impl Temporary {
    /// Moves the pages over what is at `to`.
    ///
    /// # Safety
    ///
    /// The caller must be allowed to replace as many bytes at `to`.
    unsafe fn put(self, to: *mut c_void, prot: ProtFlags) -> Result<(), Errno> {
        let flags = MprotectFlags::from_bits_retain(prot.bits());
        // SAFETY: these pages are ours alone, and the caller may replace what they replace.
        unsafe {
            if prot != READ_WRITE {
                mprotect(self.start, self.len, flags)?;
            }
            mremap_fixed(self.start, self.len, self.len, MremapFlags::MAYMOVE, to)?;
        }
        // The pages are not at the old address any more, where other memory may be by now.
        mem::forget(self);
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // SAFETY: made by us, and not known to any other code.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// Returns the protection of a range. Fails unless the whole range is private memory of one protection, which allows loads.
fn private_protection(maps: &Maps, range: &Range<usize>) -> io::Result<ProtFlags> {
    let areas = maps.areas(range.clone())?;
    let Some(prot) = areas.first().map(|area| area.prot) else {
        return Err(invalid("the range is not mapped"));
    };
    if areas.iter().map(|area| area.at.len()).sum::<usize>() != range.len() {
        return Err(invalid("the range has holes"));
    }
    if areas.iter().any(|area| area.shared) {
        return Err(invalid("the range is shared memory already"));
    }
    if areas.iter().any(|area| area.prot != prot) || !prot.contains(ProtFlags::READ) {
        return Err(invalid("the range has more than one protection, or is not readable"));
    }
    Ok(prot)
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
