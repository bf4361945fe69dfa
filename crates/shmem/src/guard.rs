//! Surviving faults in mappings.
//!
//! *SIGBUS*: a file that is truncated under its mappings takes nobody along. The handler looks whether the fault lies in a
//! mapping that we watch. If so it lays anonymous zero pages over the whole of it and sets its flag; the faulting
//! instruction then goes on, on zeros, and the library reports the segment as broken at its next look.
//!
//! *SIGSEGV*, for mappings that ask for it: a store without the right goes nowhere. The handler lays a private copy over
//! the page that was to be written and sets the flag; the store then goes into the copy, and the library reports it.
//!
//! It also holds stores of other threads while pages are moved, where userfaultfd cannot: see [`hold`].
//!
//! All else goes to whoever handled the signal before.
//!
//! # What this needs of the program
//!
//! The kernel kills a process that faults while the faulting thread blocks the signal, whatever the handler is. A thread
//! that blocks SIGBUS (as threads do that block all signals) therefore has it unblocked by its first operation on a ring,
//! a lock or a block: see [`attend`]. SIGSEGV likewise, once a mapping is watched for stores. A program that receives
//! SIGBUS with `sigwait` or a signalfd must do so without our threads' help: there, it is not blocked any more.
//!
//! A program that installs its own handler later replaces ours. That is noticed, and ours is put on top of it, when a file
//! is mapped, by a thread's first operation, and before a side sleeps. A fault that is not ours then goes to the program's
//! handler, and if that hands it on to us, to whoever handled the signal before both.
//!
//! Not survived, because nobody tells a library of it:
//! - a fault in a thread that has blocked the signal again after its first operation;
//! - a fault between the moment when another handler is installed and the next of the occasions above, unless that handler
//!   hands on what it does not know. A program that only polls reaches none of them but the first two;
//! - a fault of a raw pointer (`SharedSlice::as_ptr`) or of a slice in a thread that has done no operation.
//!
//! The ranges are looked up inside a signal handler: without locks or allocation, and in the same time for one as for a hundred
//! thousand (see `index`). A mapping is one range, whatever parts of it there are.

mod index;
#[cfg(all(loom, test))]
mod model;

use crate::hold;
use index::{Entered, Index};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};
use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr;
use std::sync::atomic::{self, AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The index covers addresses of 57 bits, which is what processors have.
const BITS: u32 = 9;
const LEVELS: u32 = 5;
const PAGE_BITS: u32 = 12;

/// What a handler needs to know of a range.
#[derive(Clone, Copy)]
struct Watched {
    /// What is replaced at a time: all of it, or the page that an address lies in.
    unit: usize,
    prot: ProtFlags,
    flag: *const AtomicBool,
}

type Range = index::Range<Watched>;

// SAFETY: the flag is only ever used as an atomic, and lives as long as its range is watched.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

impl Range {
    /// The unit that an address lies in.
    fn unit_at(&self, address: usize) -> (*mut c_void, usize) {
        let unit = self.value.unit;
        let at = (address - self.start) / unit * unit;
        ((self.start + at) as *mut c_void, unit.min(self.len - at))
    }
}

/// Ranges of one kind, and who handled their signal before.
pub(crate) struct Table {
    signal: libc::c_int,
    ranges: Index<Watched>,
    /// Who handled the signal before us; null until we do.
    first: AtomicPtr<libc::sigaction>,
    /// Who handled it when we last put our handler on top.
    latest: AtomicPtr<libc::sigaction>,
}

/// One handler is installed at a time.
static INSTALLING: Mutex<()> = Mutex::new(());

/// How many kinds of fault are handled: what a thread must have seen to be prepared for all.
static KINDS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static PREPARED: Cell<u32> = const { Cell::new(0) };
}

/// Prepares this thread for the faults that are watched: the signals must not be blocked. One comparison, but for a thread's
/// first time.
#[inline]
pub(crate) fn attend() {
    let kinds = KINDS.load(Ordering::Relaxed);
    if PREPARED.get() != kinds {
        prepare(kinds);
    }
}

#[cold]
fn prepare(kinds: u32) {
    PREPARED.set(kinds);
    look_after();
    for table in [&TRUNCATION, &STORES] {
        if table.is_installed() {
            table.unblock();
        }
    }
}

/// The handlers stay as they are.
static LEFT_ALONE: AtomicBool = AtomicBool::new(false);

/// Says whether signal handlers are left alone from now on: nobody looks whether the program has replaced those of this library. For programs
/// that may make no such calls any more, because of a seccomp filter.
pub fn leave_handlers_alone(leave: bool) {
    LEFT_ALONE.store(leave, Ordering::Relaxed);
}

/// Puts our handlers back where the program has replaced them.
pub(crate) fn look_after() {
    if LEFT_ALONE.load(Ordering::Relaxed) {
        return;
    }
    for table in [&TRUNCATION, &STORES] {
        if table.is_installed() {
            // It has been done before, so it can be done; and if not, then this occasion has passed.
            let _ = table.install();
        }
    }
}

impl Table {
    const fn of(signal: libc::c_int) -> Self {
        Self {
            signal,
            ranges: Index {
                root: AtomicPtr::new(ptr::null_mut()),
                readers: AtomicUsize::new(0),
                retired: AtomicPtr::new(ptr::null_mut()),
            },
            first: AtomicPtr::new(ptr::null_mut()),
            latest: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

/// Mappings whose file may be truncated.
pub(crate) static TRUNCATION: Table = Table::of(libc::SIGBUS);
/// Mappings in which forbidden stores are survived.
pub(crate) static STORES: Table = Table::of(libc::SIGSEGV);

/// A range that is watched until this is dropped.
pub(crate) struct Watch {
    table: &'static Table,
    /// There until it is dropped.
    entered: Option<Entered<Watched>>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(entered) = self.entered.take() {
            self.table.ranges.remove(entered);
        }
    }
}

impl Table {
    /// Watches a range until the answer is dropped. At a fault, the run of `unit` bytes that it lies in is replaced, by pages with
    /// this protection. `flag` must live at least as long as the answer.
    pub fn watch(
        &'static self,
        start: usize,
        len: usize,
        unit: usize,
        prot: ProtFlags,
        flag: *const AtomicBool,
    ) -> io::Result<Watch> {
        self.install()?;
        let entered = self.ranges.enter(start, len, Watched { unit: unit.max(1), prot, flag })?;
        Ok(Watch { table: self, entered: Some(entered) })
    }

    fn is_installed(&self) -> bool {
        !self.first.load(Ordering::Relaxed).is_null()
    }

    /// Makes our handler the one that the kernel calls, if it is not.
    pub fn install(&self) -> io::Result<()> {
        if self.replaced()?.is_none() {
            return Ok(());
        }
        let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(present) = self.replaced()? else { return Ok(()) };
        let is_first = !self.is_installed();
        // Leaked on purpose: a handler may look at it until the process ends. A program installs few.
        let present = Box::leak(Box::new(present));
        self.latest.store(present, Ordering::Release);
        if is_first {
            self.first.store(present, Ordering::Release);
        }
        // SAFETY: `sigaction` is a plain structure for which all zeros is a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        // SAFETY: the pointer is valid; the handler is async-signal-safe (atomics, mmap, mremap, copies, sigaction).
        if unsafe { libc::sigaction(self.signal, &raw const action, ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if is_first {
            // From now on each thread has another signal to unblock.
            KINDS.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// What the kernel calls in place of our handler.
    fn replaced(&self) -> io::Result<Option<libc::sigaction>> {
        // SAFETY: `sigaction` is a plain structure for which all zeros is a valid value.
        let mut present: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is valid; nothing is changed.
        if unsafe { libc::sigaction(self.signal, ptr::null(), &raw mut present) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((present.sa_sigaction != handler as *const () as usize).then_some(present))
    }

    /// Lets this thread receive the signal.
    fn unblock(&self) {
        // SAFETY: `sigset_t` is plain, `sigemptyset` makes it a valid set, and the pointers are valid. Neither call can fail:
        // the signal exists.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, self.signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut());
        }
    }
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let table = if signal == STORES.signal { &STORES } else { &TRUNCATION };
    // SAFETY: the kernel hands a SA_SIGINFO handler a valid siginfo.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    if signal == STORES.signal && code == SEGV_ACCERR && hold::is_survived(address, is_store(context)) {
        return;
    }
    let range = table.ranges.find(address);
    let survived = range.filter(|range| match signal == STORES.signal {
        true => code == SEGV_ACCERR && copy_page(range, address),
        false => lay(range, address),
    });
    match survived {
        // SAFETY: the flag lives as long as the range is watched, and whoever faults in a mapping holds it.
        Some(range) => unsafe { (*range.value.flag).store(true, Ordering::Relaxed) },
        None => pass_on(table, signal, info, context),
    }
}

/// Whether a fault's instruction was to store, where the kernel says so.
fn is_store(context: *mut libc::c_void) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        const WRITE: i64 = 2;
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: the kernel hands a SA_SIGINFO handler a valid context of its own.
        unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0 }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        false
    }
}

/// The mapping is there, and does not allow this.
const SEGV_ACCERR: libc::c_int = 2;

/// Lays zero pages over the unit that an address lies in.
fn lay(range: &Range, address: usize) -> bool {
    let (at, len) = range.unit_at(address);
    // SAFETY: the range is ours (it is not watched any more before it is unmapped); laying zero pages over it is what this
    // handler is for. rustix makes the system call itself: not the program's `mmap`, and `errno` stays what it was.
    unsafe { mmap_anonymous(at, len, range.value.prot, FRESH | MapFlags::FIXED) }.is_ok()
}

/// Lays a private copy over the unit that an address lies in.
fn copy_page(range: &Range, address: usize) -> bool {
    let (at, len) = range.unit_at(address);
    // SAFETY: as in `lay`; the copy reads a mapping that can be read, into one just made, which then takes its place.
    unsafe {
        let Ok(copy) = mmap_anonymous(ptr::null_mut(), len, range.value.prot, FRESH) else { return false };
        ptr::copy_nonoverlapping(at.cast::<u8>().cast_const(), copy.cast::<u8>(), len);
        let moved = mremap_fixed(copy, len, len, MremapFlags::MAYMOVE, at).is_ok();
        if !moved {
            let _ = munmap(copy, len);
        }
        moved
    }
}

/// Zero pages that are nobody else's.
const FRESH: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// What we write into the `si_errno` of a fault (which the kernel leaves 0) while we hand it on: so we know it again when
/// the program's handler hands it back to us, and do not go round in circles.
const HANDED_ON: libc::c_int = 0x676e;

/// Not ours: do what would have happened without us.
fn pass_on(table: &Table, signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a SA_SIGINFO handler a valid siginfo of its own, on this thread's stack.
    let errno = unsafe { &raw mut (*info).si_errno };
    // SAFETY: as above.
    let again = unsafe { errno.read() } == HANDED_ON;
    let to = if again { &table.first } else { &table.latest };
    // SAFETY: null or a leaked box of `install`.
    if let Some(to) = unsafe { to.load(Ordering::Acquire).as_ref() }
        && to.sa_sigaction != libc::SIG_DFL
        && to.sa_sigaction != libc::SIG_IGN
    {
        if to.sa_flags & libc::SA_SIGINFO != 0 {
            // SAFETY: the program registered this address as a handler of this signature.
            let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(to.sa_sigaction) };
            // SAFETY: as above.
            unsafe { errno.write(HANDED_ON) };
            call(signal, info, context);
            // SAFETY: as above.
            unsafe { errno.write(if again { HANDED_ON } else { 0 }) };
        } else {
            // SAFETY: as above.
            let call: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(to.sa_sigaction) };
            call(signal);
        }
        return;
    }
    // SAFETY: restoring the default action; the instruction faults again at once and the process ends as it would
    // have without us.
    unsafe {
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const default, ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const GIB: usize = 1 << 30;

    /// A table of the test's own, for a signal that nobody raises.
    macro_rules! table {
        () => {{
            static TABLE: Table = Table::of(libc::SIGURG);
            &TABLE
        }};
    }

    fn watch(table: &'static Table, start: usize, len: usize, unit: usize) -> Watch {
        static FLAG: AtomicBool = AtomicBool::new(false);
        table.watch(start, len, unit, ProtFlags::READ, &raw const FLAG).unwrap()
    }

    fn found(table: &Table, address: usize) -> Option<(usize, usize)> {
        table.ranges.find(address).map(|range| (range.start, range.len))
    }

    #[test]
    fn a_hundred_thousand_ranges_are_told_apart() {
        let table = table!();
        let base = 0x7000_0000_0000;
        // Of one to seven pages, with a hole behind each.
        let place = |n: usize| (base + n * 8 * PAGE, (1 + n % 7) * PAGE);
        let mut watches: Vec<_> =
            (0..100_000).map(|n| Some(watch(table, place(n).0, place(n).1, PAGE))).collect();
        let check = |n: usize, is_there: bool| {
            let (start, len) = place(n);
            let expected = is_there.then_some((start, len));
            assert_eq!(found(table, start), expected, "{n}");
            assert_eq!(found(table, start + len - 1), expected, "{n}");
            assert_eq!(found(table, start + len), None, "{n}");
        };
        (0..100_000).for_each(|n| check(n, true));
        (0..100_000).step_by(3).for_each(|n| watches[n] = None);
        (0..100_000).for_each(|n| check(n, n % 3 != 0));
    }

    #[test]
    fn ranges_of_all_lengths_are_found_to_their_last_byte() {
        let lens = [1, 8, PAGE, 3 * PAGE + 8, 2 << 20, (2 << 20) + PAGE, GIB, 3 * GIB + 5 * PAGE, 600 * GIB];
        for len in lens {
            for start in [PAGE, 2 << 20, GIB, 0x7fff_ffff_f000, (1 << 47) - (2 << 20), 5 * GIB - PAGE] {
                let table = table!();
                let watched = watch(table, start, len, len);
                let end = start + len;
                let spots = [start, start + len / 2, start + len / 3, end - 1];
                assert!(
                    spots.iter().all(|at| found(table, *at) == Some((start, len))),
                    "{len} at {start:#x}"
                );
                for outside in [start - 1, end, start ^ (1 << 50), 0, usize::MAX] {
                    assert_eq!(found(table, outside), None, "{outside:#x} beside {len} at {start:#x}");
                }
                drop(watched);
                assert!(spots.iter().all(|at| found(table, *at).is_none()), "{len} at {start:#x}");
            }
        }
    }

    #[test]
    fn who_comes_again_before_the_other_has_left_is_found() {
        let table = table!();
        let stale = watch(table, GIB, 2 << 20, PAGE);
        let again = watch(table, GIB + PAGE, PAGE, PAGE);
        assert_eq!(found(table, GIB + PAGE), Some((GIB + PAGE, PAGE)));
        let all = watch(table, GIB, 2 << 20, PAGE);
        drop(stale);
        assert_eq!(found(table, GIB), Some((GIB, 2 << 20)));
        drop(again);
        assert_eq!(found(table, GIB + PAGE), Some((GIB, 2 << 20)));
        drop(all);
        assert_eq!(found(table, GIB), None);
    }

    #[test]
    fn what_is_no_range_is_refused() {
        let table = table!();
        for (start, len) in [(GIB, 0), (usize::MAX - 7, 8), (usize::MAX, 2), (1 << 57, PAGE), (0, usize::MAX)]
        {
            let refused = table.watch(start, len, PAGE, ProtFlags::READ, ptr::null());
            assert!(refused.is_err(), "{len} at {start:#x}");
        }
    }

    #[test]
    fn the_unit_of_an_address_ends_with_its_range() {
        let watched = Watched { unit: 2 * PAGE, prot: ProtFlags::READ, flag: ptr::null() };
        let range = Range { start: GIB, len: 3 * PAGE, value: watched };
        assert_eq!(range.unit_at(GIB + PAGE), (GIB as *mut c_void, 2 * PAGE));
        assert_eq!(range.unit_at(GIB + 2 * PAGE + 9), ((GIB + 2 * PAGE) as *mut c_void, PAGE));
    }
}
