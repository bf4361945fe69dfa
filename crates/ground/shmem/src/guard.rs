//! Surviving faults in mappings.
//!
//! *SIGBUS*: the process survives if a mapped file is truncated. The handler checks whether the fault is in a mapping that is
//! watched. If so, it maps anonymous zero pages over the whole mapping and sets its flag. The faulting instruction then
//! continues, on zeros, and the library reports the segment as broken at its next look.
//!
//! *SIGSEGV*, for mappings that ask for it: a forbidden store has no effect. The handler maps a private copy over the page
//! and sets the flag; the store then goes into the copy, and the library reports it.
//!
//! A fault in the code that touches the program's memory ([`touch`]) says only that the memory is not there.
//!
//! The handler of SIGSEGV also holds stores of other threads while pages are moved, if userfaultfd cannot do so: see
//! [`hold`].
//!
//! All other faults go to the handler that the signal had before.
//!
//! # What this requires of the program
//!
//! The kernel kills a process that faults while the faulting thread blocks the signal, whatever the handler is. Therefore the
//! first operation of a thread on a ring, a lock or a block unblocks SIGBUS for this thread (some threads block all signals):
//! see [`attend`]. The same holds for SIGSEGV, once a mapping is watched for stores. A program that receives SIGBUS with
//! `sigwait` or a signalfd must not use the threads that work on segments for that, because they do not block it any more.
//!
//! A program that installs its own handler later replaces this library's handler. The library notices this, and installs its
//! handler on top of the program's, when a file is mapped, at a thread's first operation, and before a side sleeps if it has
//! not looked for [`INTERVAL`]. Then a fault in other memory goes to the program's handler and, if that handler passes it on to
//! this library, to the handler that the signal had before both.
//!
//! The process does not survive, because a library does not learn of these situations:
//! - a fault in a thread that has blocked the signal again after its first operation;
//! - a fault between the moment when another handler is installed and the next of the occasions above, unless that handler
//!   passes on faults that it does not know. A program that only polls reaches only the first two occasions;
//! - a fault through a raw pointer (`SharedSlice::as_ptr`) or a slice, in a thread that has done no operation.
//!
//! The handler looks the ranges up without locks or allocation, and takes the same time for one range as for a hundred
//! thousand (see `index`). A mapping is one range, whatever parts of it there are.

mod actions;
mod index;
#[cfg(all(loom, test))]
mod model;

use crate::{hold, touch};
use index::{Entered, Index};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed, munmap};
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{self, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, io, ptr};

/// The index covers addresses of 57 bits, which is the maximum of processors.
const BITS: u32 = 9;
const LEVELS: u32 = 5;
const PAGE_BITS: u32 = 12;

/// What a handler needs to know about a range.
#[derive(Clone, Copy)]
struct Watched {
    /// Bytes that are replaced at a time: the whole range, or the page that contains an address.
    unit: usize,
    prot: ProtFlags,
    flag: *const AtomicBool,
}

type Range = index::Range<Watched>;

// SAFETY: the flag is only used as an atomic, and lives as long as its range is watched.
unsafe impl Send for Watched {}
// SAFETY: a shared `Watched` reads its flag only with atomic operations, while its range is watched.
unsafe impl Sync for Watched {}

impl Range {
    /// Returns start and length of the unit that contains an address.
    fn unit_at(&self, address: usize) -> (*mut c_void, usize) {
        let unit = self.value.unit;
        let at = (address - self.start) / unit * unit;
        ((self.start + at) as *mut c_void, unit.min(self.len - at))
    }
}

/// The ranges of one kind, and the earlier handlers of their signal.
pub(crate) struct Table {
    signal: libc::c_int,
    ranges: Index<Watched>,
    /// The handler that the signal had before ours; null until ours is installed.
    first: AtomicPtr<libc::sigaction>,
    /// The handler that the signal had when ours was last installed on top.
    latest: AtomicPtr<libc::sigaction>,
    /// Whether the program has set the latest action by [`exchange_action`]. Then none of its handlers knows this library's.
    is_exchanged: AtomicBool,
}

/// Only one handler is installed at a time.
static INSTALLING: Mutex<()> = Mutex::new(());

/// Number of the kinds of fault that are handled. A thread is prepared for all if it has seen this number.
static KINDS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static PREPARED: Cell<u32> = const { Cell::new(0) };
}

/// Prepares this thread for the watched faults: it must not block their signals. This is one comparison, except at a thread's
/// first call.
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
    if LEFT_ALONE.load(Ordering::Relaxed) {
        return;
    }
    look_after();
    for table in [&TRUNCATION, &STORES] {
        if table.is_installed() {
            table.unblock();
        }
    }
}

/// If true, the signal handlers are not checked or replaced.
static LEFT_ALONE: AtomicBool = AtomicBool::new(false);

/// Sets whether signal handlers are left alone from now on. If so, the library does not check whether the program has
/// replaced its handlers. This is for programs that may not make such system calls any more, because of a seccomp filter.
pub fn leave_handlers_alone(leave: bool) {
    attend();
    LEFT_ALONE.store(leave, Ordering::Relaxed);
}

/// Installs this library's handlers again where the program has replaced them. The library does that by itself on some occasions; a
/// library that sees the program's calls of `sigaction` can do it at once.
pub fn look_after() {
    if LEFT_ALONE.load(Ordering::Relaxed) {
        return;
    }
    for table in [&TRUNCATION, &STORES] {
        if table.is_installed() {
            // It succeeded before, so it should succeed again. If it fails, this occasion is missed.
            let _ = table.install();
        }
    }
}

/// The time that passes between two looks before sleeps. Each look asks the kernel, and a thread may sleep for each message.
const INTERVAL: Duration = Duration::from_millis(10);

/// Does the same for a side that is about to sleep, if nobody has done so for a while.
pub(crate) fn look_after_at_times() {
    /// When it was last done, in milliseconds.
    static LOOKED: AtomicU64 = AtomicU64::new(0);
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` has room for a time. This clock, which every kernel has, costs no system call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    let now = time.tv_sec.unsigned_abs() * 1000 + time.tv_nsec.unsigned_abs() / 1_000_000;
    let looked = LOOKED.load(Ordering::Relaxed);
    if looked == 0 || now.saturating_sub(looked) >= INTERVAL.as_millis() as u64 {
        LOOKED.store(now, Ordering::Relaxed);
        look_after();
    }
}

/// Does what `sigaction` does, for a library that takes the place of the C library's, if the kernel has this library's handler for the
/// signal: returns the program's action and sets another one, of which the handler learns. The kernel calls this library's handler all the
/// time. Allocates nothing, and takes no lock. Returns `None` if the handler is not there; then the call is the kernel's.
pub fn exchange_action(signal: libc::c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let table =
        [&TRUNCATION, &STORES].into_iter().find(|table| table.signal == signal && table.is_installed())?;
    if !matches!(table.replaced(), Ok(None)) {
        return None;
    }
    let kept = new.map(|new| actions::keep(*new));
    let old = match kept {
        Some(kept) => {
            table.is_exchanged.store(true, Ordering::Relaxed);
            table.latest.swap(kept, Ordering::AcqRel)
        }
        None => table.latest.load(Ordering::Acquire),
    };
    // SAFETY: it was kept by `actions::keep`.
    let old = *unsafe { old.as_ref() }?;
    if let Some(new) = new {
        let action = actions::above(new, handler as *const () as usize);
        // SAFETY: the pointer is valid; the handler is async-signal-safe.
        unsafe { sigaction(signal, &raw const action, ptr::null_mut()) };
    }
    Some(old)
}

/// Sets the actions that a program which this process executes inherits: signals that this program ignores.
pub fn leave_ignored() {
    for table in [&TRUNCATION, &STORES].into_iter().filter(|table| table.is_installed()) {
        // SAFETY: null, or kept by `actions::keep`.
        let latest = unsafe { table.latest.load(Ordering::Acquire).as_ref() };
        if let Some(latest) = latest.filter(|latest| latest.sa_sigaction == libc::SIG_IGN) {
            // SAFETY: the pointer is valid, and there is no handler.
            unsafe { sigaction(table.signal, latest, ptr::null_mut()) };
        }
    }
}

/// The C library's `sigaction`.
pub type Sigaction =
    unsafe extern "C" fn(libc::c_int, *const libc::sigaction, *mut libc::sigaction) -> libc::c_int;

static SIGACTION: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Makes this library install its handlers with this function. This is for a library that takes the place of the C library's.
pub fn install_handlers_with(function: Sigaction) {
    SIGACTION.store(function as *mut c_void, Ordering::Release);
}

/// Calls `sigaction`.
///
/// # Safety
///
/// The pointers are null or valid, and the new action's handler is async-signal-safe.
unsafe fn sigaction(
    signal: libc::c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> libc::c_int {
    let function = SIGACTION.load(Ordering::Acquire);
    let function: Sigaction = match function.is_null() {
        true => libc::sigaction,
        // SAFETY: it comes from `install_handlers_with`, which takes only functions of this type.
        false => unsafe { std::mem::transmute::<*mut c_void, Sigaction>(function) },
    };
    // SAFETY: the caller guarantees it.
    unsafe { function(signal, new, old) }
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
            is_exchanged: AtomicBool::new(false),
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
    /// Always there until this is dropped.
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
    /// Watches a range until the result is dropped. At a fault, the unit of `unit` bytes that contains the address is
    /// replaced by pages with this protection. `flag` must live at least as long as the result.
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

    #[inline]
    pub fn is_installed(&self) -> bool {
        !self.first.load(Ordering::Relaxed).is_null()
    }

    /// Makes the kernel call our handler, if it does not.
    pub fn install(&self) -> io::Result<()> {
        if self.replaced()?.is_none() {
            return Ok(());
        }
        let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(present) = self.replaced()? else { return Ok(()) };
        let is_first = !self.is_installed();
        self.latest.store(actions::keep(present), Ordering::Release);
        self.is_exchanged.store(false, Ordering::Relaxed);
        if is_first {
            // Leaked on purpose: a handler may read it until the process ends.
            self.first.store(Box::leak(Box::new(present)), Ordering::Release);
        }
        let action = actions::above(&present, handler as *const () as usize);
        // SAFETY: the pointer is valid; the handler is async-signal-safe (atomics, mmap, mremap, copies, sigaction).
        if unsafe { sigaction(self.signal, &raw const action, ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if is_first {
            // From now on each thread has another signal to unblock.
            KINDS.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the handler that the kernel calls instead of ours, if there is one.
    fn replaced(&self) -> io::Result<Option<libc::sigaction>> {
        // SAFETY: `sigaction` is a plain structure for which all zeros is a valid value.
        let mut present: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is valid; nothing is changed.
        if unsafe { sigaction(self.signal, ptr::null(), &raw mut present) } != 0 {
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

extern "C-unwind" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let table = if signal == STORES.signal { &STORES } else { &TRUNCATION };
    // SAFETY: the kernel passes a valid siginfo to a SA_SIGINFO handler.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    // A signal that a process has sent is no fault.
    if code <= 0 {
        return pass_on(table, signal, info, context);
    }
    if touch::survive(context) {
        return;
    }
    if signal == STORES.signal && code == SEGV_ACCERR && hold::is_survived(address, is_store(context)) {
        return;
    }
    let range = table.ranges.find(address);
    let survived = range.filter(|range| match signal == STORES.signal {
        true => code == SEGV_ACCERR && copy_page(range, address),
        false => lay(range, address),
    });
    match survived {
        // SAFETY: the flag lives as long as the range is watched, and code that faults in a mapping keeps the mapping alive.
        Some(range) => unsafe { (*range.value.flag).store(true, Ordering::Relaxed) },
        None => pass_on(table, signal, info, context),
    }
}

/// Returns whether the faulting instruction was a store, if the kernel says so.
fn is_store(context: *mut libc::c_void) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        const WRITE: i64 = 2;
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: the kernel passes a valid context of its own to a SA_SIGINFO handler.
        unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0 }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        false
    }
}

/// Fault code: the address is mapped, but the access is not allowed.
const SEGV_ACCERR: libc::c_int = 2;

/// Maps zero pages over the unit that contains an address.
fn lay(range: &Range, address: usize) -> bool {
    let (at, len) = range.unit_at(address);
    // SAFETY: the range is ours (it is not watched any more before it is unmapped), and mapping zero pages over it is the
    // purpose of this handler. rustix makes the system call itself: it does not call the program's `mmap`, and `errno` does
    // not change.
    unsafe { mmap_anonymous(at, len, range.value.prot, FRESH | MapFlags::FIXED) }.is_ok()
}

/// Maps a private copy over the unit that contains an address.
fn copy_page(range: &Range, address: usize) -> bool {
    let (at, len) = range.unit_at(address);
    // SAFETY: the range is ours (it is not watched any more before it is unmapped) and can be read, since only stores to it
    // are forbidden. The unit is copied to a new mapping of its length, which then takes its place. rustix makes the system
    // calls itself, so `errno` does not change.
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

/// Flags for private zero pages.
const FRESH: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Value that we write into the `si_errno` of a fault (which the kernel leaves 0) while we pass it on. It identifies the
/// fault if the program's handler passes it back to us, and so prevents an endless loop.
const HANDED_ON: libc::c_int = 0x676e;

/// Does with a fault in other memory what would have happened without this library.
fn pass_on(table: &Table, signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo of its own, on this thread's stack, to a SA_SIGINFO handler.
    let errno = unsafe { &raw mut (*info).si_errno };
    // SAFETY: `errno` points into this handler's siginfo, which the kernel has filled in.
    let again = unsafe { errno.read() } == HANDED_ON;
    let to = if again { &table.first } else { &table.latest };
    let known = to.load(Ordering::Acquire);
    // SAFETY: null, or an action that is never freed: `install` leaks it, or `actions::keep` keeps it.
    if let Some(action) = unsafe { known.as_ref() }.copied()
        && action.sa_sigaction != libc::SIG_DFL
        && action.sa_sigaction != libc::SIG_IGN
    {
        // A handler for one time. Whoever replaces it calls it.
        if action.sa_flags & libc::SA_RESETHAND != 0 {
            let default = actions::keep(libc::sigaction { sa_sigaction: libc::SIG_DFL, ..action });
            if to.compare_exchange(known, default, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                return pass_on(table, signal, info, context);
            }
        }
        // SAFETY: the program registered this address as a handler. One that takes only the number ignores the other arguments.
        let call: extern "C-unwind" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(action.sa_sigaction) };
        let marks = !table.is_exchanged.load(Ordering::Relaxed);
        if marks {
            // SAFETY: `errno` points into this handler's siginfo, which lies on this thread's stack and may be written.
            unsafe { errno.write(HANDED_ON) };
        }
        call(signal, info, context);
        if marks {
            // SAFETY: the siginfo lies in this handler's frame, which stays until the handler returns.
            unsafe { errno.write(if again { HANDED_ON } else { 0 }) };
        }
        return;
    }
    // SAFETY: the kernel passes a valid siginfo to a SA_SIGINFO handler.
    let is_sent = unsafe { (*info).si_code } <= 0;
    // SAFETY: null, or an action that is never freed: `install` leaks it, or `actions::keep` keeps it.
    let is_ignored =
        unsafe { to.load(Ordering::Acquire).as_ref() }.is_some_and(|to| to.sa_sigaction == libc::SIG_IGN);
    if is_sent && is_ignored {
        return;
    }
    // SAFETY: this restores the default action. A fault's instruction faults again at once, a signal that was sent is sent again, and the
    // process ends as it would have without this library. The information is the kernel's.
    unsafe {
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        sigaction(signal, &raw const default, ptr::null_mut());
        if is_sent {
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), libc::gettid(), signal, info);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const GIB: usize = 1 << 30;

    /// Returns a table of the test's own, for a signal that is never raised.
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
        // Each range has one to seven pages, with a hole behind it.
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
    fn a_range_entered_before_the_old_one_is_removed_is_found() {
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
    fn invalid_ranges_are_refused() {
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
