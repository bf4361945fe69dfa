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
//! The tables are read inside a signal handler, so they are fixed arrays of atomics: no lock, no allocation. A slot may
//! change hands while a handler reads it, so each has a version (a seqlock): a handler must not put together the start
//! of one mapping and the length of the next. The slot it looks for cannot change, because whoever faults in a mapping
//! holds it.

use std::io;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

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
    install: Once,
    previous: AtomicPtr<libc::sigaction>,
}

impl Table {
    const fn of(signal: libc::c_int) -> Self {
        Self {
            signal,
            slots: [const { Watched::free() }; SLOTS],
            next: AtomicUsize::new(0),
            install: Once::new(),
            previous: AtomicPtr::new(ptr::null_mut()),
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

    fn install(&'static self) -> io::Result<()> {
        let mut result = Ok(());
        self.install.call_once(|| {
            // SAFETY: `sigaction` is a plain structure for which all zeros is a valid value.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            // SAFETY: as above.
            let mut previous: Box<libc::sigaction> = Box::new(unsafe { std::mem::zeroed() });
            // SAFETY: both pointers are valid; the handler is async-signal-safe (atomics, mmap, mremap, copies, sigaction).
            if unsafe { libc::sigaction(self.signal, &raw const action, &raw mut *previous) } != 0 {
                result = Err(io::Error::last_os_error());
                return;
            }
            // Leaked on purpose: a handler may look at it until the process ends.
            self.previous.store(Box::leak(previous), Ordering::Release);
        });
        result
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

/// Not ours: do what would have happened without us.
fn pass_on(table: &Table, signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = table.previous.load(Ordering::Acquire);
    // SAFETY: null or the leaked box of `install`.
    if let Some(previous) = unsafe { previous.as_ref() }
        && previous.sa_sigaction != libc::SIG_DFL
        && previous.sa_sigaction != libc::SIG_IGN
    {
        if previous.sa_flags & libc::SA_SIGINFO != 0 {
            // SAFETY: the program registered this address as a handler of this signature.
            let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(previous.sa_sigaction) };
            call(signal, info, context);
        } else {
            // SAFETY: as above.
            let call: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(previous.sa_sigaction) };
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
