//! Pages of the program that are moved into a file, in place.
//!
//! So a program shares memory that it has already, without another pointer to it: [`Mapping::place`] copies a range of the
//! program's private pages to the pages of a file and puts these in their place, and [`Placed::lift`] puts private pages with what
//! the range has then there again. Both keep the protection, and make their system calls themselves: a library that watches
//! `mmap` (as MPI libraries do, to forget what is unmapped) is not told, since the program's range is there all the time.
//!
//! # What other threads see
//!
//! The new pages are filled somewhere else and then moved over the range by one `mremap`. To other threads the exchange is
//! a single instant: no address of the range is ever unmapped, and a load finds the bytes that were there, before or after it.
//!
//! **A store between the copy and the exchange is lost**, because it goes to the page that is given up (of `place`), or to the
//! file only (of `lift`). So nobody may store to the range during either call: no thread of this process, no system call that
//! another thread is in (`read` into the range), no device that has been told to write there. The same goes for atomic
//! operations, locks above all: what is locked or unlocked meanwhile is not any more, or is again. A thread that sleeps
//! on a private futex in the range is not lost by the exchange, because those are known by their address alone.
//! Neither call allocates between the copy and the exchange, so the range may be of the heap; and this thread's signals wait
//! meanwhile, because their handlers may store.
//!
//! [`Mapping::place_among_threads`] is for who cannot know that: it makes the threads that store to the range sleep from the copy to the
//! exchange. Their stores go to the new pages then, and none is lost. What a device has been told to write there still is.

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
use std::io;
use std::mem;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Pages of a file in the place of pages of the program. If this is dropped, they stay there, and are watched, until the
/// process ends; a program that then unmaps them leaves a few bytes behind.
#[must_use = "the pages stay in the file unless they are lifted"]
#[derive(Debug)]
pub struct Placed {
    start: NonNull<u8>,
    len: usize,
    file: FileId,
    offset: u64,
    /// There until the pages are not watched any more.
    watch: Option<Watch>,
    arena: Mapping,
}

// SAFETY: the pointer names a range of addresses; what is done there is up to the callers of unsafe functions.
unsafe impl Send for Placed {}
// SAFETY: as above.
unsafe impl Sync for Placed {}

impl Mapping {
    /// Moves the pages at `start` into `file`, at `offset`: the range has the same bytes and the same protection as before, and
    /// is shared with everybody who maps the file. What the file had there is overwritten. The range must be private memory
    /// throughout, all of one protection, which allows loads; anything else is an error. `start`, `len` and `offset` are multiples
    /// of `page`, in units of which the file can be mapped. This mapping, of the same file, is what [`SharedMemory::is_broken`] is
    /// said of if the file is truncated; the bytes of pages that are touched afterwards are then zero.
    ///
    /// After an error the range is what it was. (The kernel looks at all its limits first. If it then finds no memory for its own
    /// books, in the middle of the exchange, the range is unmapped.)
    ///
    /// What was advised for the old pages (`madvise`, `mlock`, a policy) does not hold for the new ones, and after a fork the
    /// child shares them with its parent.
    ///
    /// # Safety
    ///
    /// - The range is the caller's to replace, and stays mapped, with the same protection, during the call.
    /// - During the call nobody stores to it: see the top of this file. So it has no part of the stack of a running thread, this
    ///   one included, nor of this mapping's memory.
    /// - From now on it is shared memory. Whoever uses it (through references, too) must hold with what others, who
    ///   may map the file, do to its bytes; [the crate's documentation](crate) says what that means for Rust.
    pub unsafe fn place(
        &self,
        file: impl AsFd,
        offset: u64,
        start: NonNull<u8>,
        len: usize,
        page: usize,
    ) -> io::Result<Placed> {
        // SAFETY: as the caller says.
        unsafe { self.exchange(file.as_fd(), offset, start, len, page, None) }
    }

    /// As [`Mapping::place`], while other threads may load from the range and store to it: a thread that stores to it meanwhile sleeps
    /// until the new pages are there, and then stores to these.
    ///
    /// That takes userfaultfd (Linux 5.11). Where it is refused (as container engines do), and for private pages of a file, the
    /// handler of SIGSEGV holds the threads instead (Linux 5.14, x86-64); if a thread blocks that signal, this is an error.
    ///
    /// The kernel's own stores are held only if this process may use userfaultfd for them: as root, with `CAP_SYS_PTRACE`, with rights to
    /// `/dev/userfaultfd`, or with `vm.unprivileged_userfaultfd = 1`. For others, a system call of another thread that stores to
    /// the range meanwhile, such as `read`, may fail with `EFAULT`.
    ///
    /// # Safety
    ///
    /// As [`Mapping::place`], but for stores by this process's threads. The range has no part of the stack of any thread (or of its signal
    /// stack), nor of its thread-local memory: this thread would sleep for ever, and to others the kernel itself stores at moments when
    /// it takes no error. Nobody unmaps pages of the range or gives up what is on them (`MADV_DONTNEED`) meanwhile.
    pub unsafe fn place_among_threads(
        &self,
        file: impl AsFd,
        offset: u64,
        start: NonNull<u8>,
        len: usize,
        page: usize,
    ) -> io::Result<Placed> {
        // SAFETY: as the caller says.
        unsafe { self.exchange(file.as_fd(), offset, start, len, page, Some(Reach::All)) }
    }

    /// Stores of other threads are held, as far as possible and not farther than wanted.
    ///
    /// # Safety
    ///
    /// As `place`, or as `place_among_threads` with others.
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
            _ => return Err(invalid("the range is not of whole pages")),
        };
        let maps = Maps::open()?;
        let prot = private_protection(&maps, &range)?;

        // SAFETY: a new mapping at an address of the kernel's choice disturbs nobody.
        let new = unsafe { mmap(ptr::null_mut(), len, READ_WRITE, MapFlags::SHARED, file, offset) }?;
        let new = Temporary { start: new, len };
        let broken = AtomicBool::new(false);
        let watch = guard::TRUNCATION.watch(new.start as usize, len, page, READ_WRITE, &raw const broken)?;
        let new_at = new.start as usize;
        let Some(area) = maps.areas(new_at..new_at + len)?.into_iter().next() else {
            return Err(io::Error::other("the kernel does not say what has been mapped"));
        };
        // SAFETY: the pages are ours. It is so that others sleep less long; if it cannot be done, the copy finds out why.
        let _ = unsafe { madvise(new.start, len, Advice::LinuxPopulateWrite) };
        // From before the exchange on, so that no fault is missed.
        let placed_watch = self.watch_also(at, len, page, prot)?;
        guard::attend();

        let signals = SignalsBlocked::new();
        // A range that nobody can store to needs no hold.
        let hold = match others.filter(|_| prot.contains(ProtFlags::WRITE)) {
            None => None,
            Some(Reach::All) => Some(Hold::widest(range, prot)?),
            Some(reach) => Some(Hold::new(range, prot, reach)?),
        };
        // SAFETY: the range can be read, as the kernel has just said, stays as it is, and is the caller's to replace.
        let exchanged = unsafe { copy_and_put(new, start, prot, hold, &signals, &broken) };
        drop(signals);
        exchanged?;
        if broken.load(Ordering::Relaxed) {
            return Err(invalid("the file ends before the pages"));
        }
        drop(watch);
        Ok(Placed { start, len, file: area.file, offset, watch: Some(placed_watch), arena: self.clone() })
    }
}

/// Copies a range to new pages, and puts these in its place if their file has not turned out to be broken. Allocates and frees nothing: the
/// allocator's own words may lie in the range, and with a hold, this thread would wait for itself.
///
/// # Safety
///
/// The range is as long as the new pages, can be read, and is the caller's to replace. Without a hold nobody stores to it.
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
    // SAFETY: as the caller says; others only load from the range.
    unsafe { ptr::copy_nonoverlapping(start.as_ptr(), new.start.cast(), new.len) };
    if broken.load(Ordering::Relaxed) {
        return Ok(());
    }
    // SAFETY: the range is the caller's to replace.
    unsafe { new.put(start.as_ptr().cast(), prot) }?;
    if let Some(hold) = &mut hold {
        hold.replaced();
    }
    Ok(())
}

impl Placed {
    /// Where the range begins.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether the file was truncated.
    pub fn is_broken(&self) -> bool {
        self.arena.is_broken()
    }

    /// Whether the whole range still is what was placed there. A program may have unmapped it, or mapped something else.
    pub fn is_in_place(&self) -> io::Result<bool> {
        Ok(self.in_place(self.range())?.iter().map(Range::len).sum::<usize>() == self.len)
    }

    /// Which parts of a range, which may reach beyond these pages, map the same file at the same distance between address and offset:
    /// what is still in place of these pages, and of others that were placed so.
    pub fn in_place(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let offset = self.distance().wrapping_add(range.start as u64);
        if areas::is_certainly(&range, self.file, offset) {
            return Ok(vec![range]);
        }
        Ok(self.present(range)?.into_iter().map(|area| area.at).collect())
    }

    /// From an address to its offset.
    fn distance(&self) -> u64 {
        self.offset.wrapping_sub(self.start.as_ptr() as u64)
    }

    fn range(&self) -> Range<usize> {
        let start = self.start.as_ptr() as usize;
        start..start + self.len
    }

    /// Puts private pages in the place of the file's, with the bytes that the range has. What the program has mapped there
    /// itself meanwhile stays; the protection that it has set stays, too, but must allow loads. After an error some of the
    /// pages may have been put there; it may be tried again.
    ///
    /// # Safety
    ///
    /// As [`Mapping::place`]: during the call the range is mapped and protected as it is, and nobody in this process stores
    /// to it. What others store to the file meanwhile may or may not be seen.
    pub unsafe fn lift(mut self) -> Result<(), (Self, io::Error)> {
        // SAFETY: as the caller says.
        match unsafe { self.put_back() } {
            Ok(()) => {
                self.watch.take();
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Forgets the pages, which the program has unmapped or replaced: from now on a fault there is the program's.
    pub fn abandon(mut self) {
        self.watch.take();
    }

    /// What of the file is still there.
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
    /// As [`Placed::lift`].
    unsafe fn put_back(&self) -> io::Result<()> {
        let areas = self.present(self.range())?;
        if areas.iter().any(|area| !area.prot.contains(ProtFlags::READ)) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the pages must not be read"));
        }
        guard::attend();
        for area in areas {
            let len = area.at.len();
            // SAFETY: a new mapping at an address of the kernel's choice disturbs nobody.
            let new = unsafe { mmap_anonymous(ptr::null_mut(), len, READ_WRITE, MapFlags::PRIVATE) }?;
            let new = Temporary { start: new, len };
            let _signals = SignalsBlocked::new();
            // SAFETY: the area can be read, as the kernel has just said, and stays mapped, as the caller says; it is watched, and
            // others may store to it (see the assumption on top of the crate). The other was just made, and is replaced
            // where the caller has said that it may be.
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
            // The pages are still there. What the handler sets at a fault must be there, too.
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
    /// Moves them over what is at `to`.
    ///
    /// # Safety
    ///
    /// As many bytes at `to` must be the caller's to replace.
    unsafe fn put(self, to: *mut c_void, prot: ProtFlags) -> Result<(), Errno> {
        let flags = MprotectFlags::from_bits_retain(prot.bits());
        // SAFETY: these pages are nobody else's, and what they replace is the caller's.
        unsafe {
            if prot != READ_WRITE {
                mprotect(self.start, self.len, flags)?;
            }
            mremap_fixed(self.start, self.len, self.len, MremapFlags::MAYMOVE, to)?;
        }
        // They are not where they were: others may be.
        mem::forget(self);
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // SAFETY: made by us, and nobody else knows of them.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// The protection of a range, if it is private memory throughout and of one protection, which allows loads.
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
        return Err(invalid("the range is not of one protection, or must not be read"));
    }
    Ok(prot)
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}
