//! Surviving faults in mappings.
//!
//! *SIGBUS*: a file that is truncated under its mappings takes nobody along. The handler looks whether the fault lies in a
//! mapping that we watch. If so it lays anonymous zero pages over the whole of it and sets its flag; the faulting
//! instruction then goes on, on zeros, and the library reports the segment as broken at its next look.
//!
//! *SIGSEGV*, for mappings that ask for it: a store without the right goes nowhere. The handler lays a private copy over
//! the page that was to be written and sets the flag; the store then goes into the copy, and the library reports it.
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
//! The tables are read inside a signal handler, so they are fixed arrays of atomics: no lock, no allocation. A slot may
//! change hands while a handler reads it, so each has a version (a seqlock): a handler must not put together the start
//! of one mapping and the length of the next. The slot it looks for cannot change, because whoever faults in a mapping
//! holds it.

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};

/// Most mappings that one process can have watched at a time, of each kind. The kernel has a limit of about twice this for
/// all mappings.
const SLOTS: usize = 1 << 15;

struct Watched {
    /// Even: stable. Odd: somebody is changing the slot.
    version: AtomicUsize,
    /// Start of the range; 0 while the slot is free.
    start: AtomicUsize,
    len: AtomicUsize,
    /// In which a private copy may be laid over a part of it.
    page: AtomicUsize,
    flag: AtomicPtr<AtomicBool>,
}

/// What a handler needs to know of a mapping.
struct Range {
    start: usize,
    len: usize,
    page: usize,
    flag: *mut AtomicBool,
}

impl Range {
    const NONE: Self = Self { start: 0, len: 0, page: 0, flag: ptr::null_mut() };
}

impl Watched {
    const fn free() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            flag: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Puts a range into the slot, or takes it out, if `now` is still its version and nobody else is at it.
    fn set(&self, now: usize, range: &Range) -> bool {
        if self.version.compare_exchange(now, now | 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // ORDER guard.slot: the odd version before the words, the words before the even version.
        // Pairs with: `Watched::get`.
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.len.store(range.len, Ordering::Relaxed);
        self.page.store(range.page, Ordering::Relaxed);
        self.flag.store(range.flag, Ordering::Relaxed);
        self.version.store((now | 1).wrapping_add(1), Ordering::Release);
        true
    }

    /// All of one and the same mapping, if there is one.
    fn get(&self) -> Option<Range> {
        // ORDER guard.slot: the version before the words, the words before the second look at the version.
        // Pairs with: `Watched::set`.
        let version = self.version.load(Ordering::Acquire);
        let range = Range {
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            page: self.page.load(Ordering::Relaxed),
            flag: self.flag.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let same = version & 1 == 0 && self.version.load(Ordering::Relaxed) == version;
        (same && range.start != 0).then_some(range)
    }
}

/// Mappings of one kind, and who handled their signal before.
pub(crate) struct Table {
    signal: libc::c_int,
    slots: [Watched; SLOTS],
    /// Where to begin looking for a free slot.
    next: AtomicUsize,
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

/// Puts our handlers back where the program has replaced them.
pub(crate) fn look_after() {
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
            slots: [const { Watched::free() }; SLOTS],
            next: AtomicUsize::new(0),
            first: AtomicPtr::new(ptr::null_mut()),
            latest: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

/// Mappings whose file may be truncated.
pub(crate) static TRUNCATION: Table = Table::of(libc::SIGBUS);
/// Mappings in which forbidden stores are survived.
pub(crate) static STORES: Table = Table::of(libc::SIGSEGV);

/// A place in a table; gives it up when dropped.
pub(crate) struct Slot(&'static Watched);

impl Drop for Slot {
    fn drop(&mut self) {
        // Only the holder of a slot in use changes it, so this succeeds.
        self.0.set(self.0.version.load(Ordering::Relaxed), &Range::NONE);
    }
}

impl Table {
    /// Watches a range until the slot is dropped. `flag` must live at least as long as the slot.
    pub fn watch(
        &'static self,
        start: usize,
        len: usize,
        page: usize,
        flag: *const AtomicBool,
    ) -> io::Result<Slot> {
        self.install()?;
        let range = Range { start, len, page, flag: flag.cast_mut() };
        let first = self.next.load(Ordering::Relaxed);
        for n in (first..SLOTS).chain(0..first) {
            let slot = &self.slots[n];
            let version = slot.version.load(Ordering::Acquire);
            if version & 1 == 0 && slot.start.load(Ordering::Relaxed) == 0 && slot.set(version, &range) {
                self.next.store((n + 1) % SLOTS, Ordering::Relaxed);
                return Ok(Slot(slot));
            }
        }
        Err(io::Error::other(format!("more than {SLOTS} segments and blocks mapped in one process")))
    }

    fn is_installed(&self) -> bool {
        !self.first.load(Ordering::Relaxed).is_null()
    }

    /// Makes our handler the one that the kernel calls, if it is not.
    fn install(&self) -> io::Result<()> {
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

    /// The watched mapping that an address lies in.
    fn find(&self, address: usize) -> Option<Range> {
        let ranges = self.slots.iter().filter_map(Watched::get);
        let mut here = ranges.filter(|range| address >= range.start && address - range.start < range.len);
        here.next()
    }
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let table = if signal == STORES.signal { &STORES } else { &TRUNCATION };
    // SAFETY: the kernel hands a SA_SIGINFO handler a valid siginfo.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    let range = table.find(address);
    let survived = range.filter(|range| match signal == STORES.signal {
        true => code == SEGV_ACCERR && copy_page(range, address),
        false => lay(range),
    });
    match survived {
        // SAFETY: the flag lives as long as the slot is taken, and whoever faults in a mapping holds it.
        Some(range) => unsafe { (*range.flag).store(true, Ordering::Relaxed) },
        None => pass_on(table, signal, info, context),
    }
}

/// The mapping is there, and does not allow this.
const SEGV_ACCERR: libc::c_int = 2;

/// Lays zero pages over a mapping.
fn lay(range: &Range) -> bool {
    // SAFETY: the range is a mapping of ours (the slot is given up before it is unmapped); laying zero pages over it is what
    // this handler is for. The raw call is async-signal-safe.
    let laid = unsafe { anonymous(range.start as *mut libc::c_void, range.len, libc::MAP_FIXED) };
    laid != libc::MAP_FAILED
}

/// Lays a private copy over the page that an address lies in.
fn copy_page(range: &Range, address: usize) -> bool {
    let at = (address - range.start) / range.page * range.page;
    let (page, len) = ((range.start + at) as *mut libc::c_void, range.page.min(range.len - at));
    // SAFETY: as in `lay`; the copy reads a mapping that can be read, into one just made, which then takes its place.
    unsafe {
        let copy = anonymous(ptr::null_mut(), len, 0);
        if copy == libc::MAP_FAILED {
            return false;
        }
        ptr::copy_nonoverlapping(page.cast::<u8>().cast_const(), copy.cast::<u8>(), len);
        let moved = libc::mremap(copy, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, page);
        if moved == libc::MAP_FAILED {
            libc::munmap(copy, len);
        }
        moved != libc::MAP_FAILED
    }
}

/// Zero pages that can be written.
///
/// # Safety
///
/// With `MAP_FIXED`, what is mapped there must be the caller's.
unsafe fn anonymous(at: *mut libc::c_void, len: usize, flags: libc::c_int) -> *mut libc::c_void {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: as the caller says.
    unsafe { libc::mmap(at, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
}

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
