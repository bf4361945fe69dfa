//! Surviving SIGBUS: a file that is truncated under its mappings takes nobody along.
//!
//! The handler looks whether the fault lies in a mapping that we watch. If so it lays anonymous zero pages over the
//! whole of it and sets its flag; the faulting instruction then goes on, on zeros, and the library reports the
//! segment as broken at its next look. All else goes to whoever handled SIGBUS before.
//!
//! The table is read inside a signal handler, so it is a fixed array of atomics: no lock, no allocation. A slot may
//! change hands while a handler reads it, so each has a version (a seqlock): a handler must not put together the start
//! of one mapping and the length of the next. The slot it looks for cannot change, because whoever faults in a mapping
//! holds it.

use std::io;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

/// Most mappings that one process can have watched at a time.
const SLOTS: usize = 1024;

struct Watched {
    /// Even: stable. Odd: somebody is changing the slot.
    version: AtomicUsize,
    /// Start of the range; 0 while the slot is free.
    start: AtomicUsize,
    len: AtomicUsize,
    broken: AtomicPtr<AtomicBool>,
}

impl Watched {
    const fn free() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            broken: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Puts a range into the slot, or takes it out, if `now` is still its version and nobody else is at it.
    fn set(&self, now: usize, start: usize, len: usize, broken: *mut AtomicBool) -> bool {
        if self.version.compare_exchange(now, now | 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // ORDER guard.slot: the odd version before the words, the words before the even version.
        // Pairs with: `Watched::get`.
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.broken.store(broken, Ordering::Relaxed);
        self.version.store((now | 1).wrapping_add(1), Ordering::Release);
        true
    }

    /// Start, length and flag of one and the same mapping, if there is one.
    fn get(&self) -> Option<(usize, usize, *mut AtomicBool)> {
        // ORDER guard.slot: the version before the words, the words before the second look at the version.
        // Pairs with: `Watched::set`.
        let version = self.version.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let broken = self.broken.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let same = version & 1 == 0 && self.version.load(Ordering::Relaxed) == version;
        (same && start != 0).then_some((start, len, broken))
    }
}

static TABLE: [Watched; SLOTS] = [const { Watched::free() }; SLOTS];

/// A place in the table; gives it up when dropped.
pub(crate) struct Slot(&'static Watched);

impl Drop for Slot {
    fn drop(&mut self) {
        // Only the holder of a slot in use changes it, so this succeeds.
        self.0.set(self.0.version.load(Ordering::Relaxed), 0, 0, ptr::null_mut());
    }
}

/// Watches a range until the slot is dropped. `broken` must live at least as long as the slot.
pub(crate) fn watch(start: usize, len: usize, broken: *const AtomicBool) -> io::Result<Slot> {
    install()?;
    for slot in &TABLE {
        let version = slot.version.load(Ordering::Acquire);
        if version & 1 == 0
            && slot.start.load(Ordering::Relaxed) == 0
            && slot.set(version, start, len, broken.cast_mut())
        {
            return Ok(Slot(slot));
        }
    }
    Err(io::Error::other(format!("more than {SLOTS} segments mapped in one process")))
}

static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

fn install() -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| {
        // SAFETY: `sigaction` is a plain structure for which all zeros is a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        // SAFETY: as above.
        let mut previous: Box<libc::sigaction> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: both pointers are valid; the handler is async-signal-safe (atomics, mmap, sigaction only).
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut *previous) } != 0 {
            result = Err(io::Error::last_os_error());
            return;
        }
        // Leaked on purpose: a handler may look at it until the process ends.
        PREVIOUS.store(Box::leak(previous), Ordering::Release);
    });
    result
}

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a SA_SIGINFO handler a valid siginfo.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let Some((start, len, broken)) = slot.get() else { continue };
        if address < start || address - start >= len {
            continue;
        }
        // SAFETY: the range is a mapping of ours (the slot is given up before it is unmapped); laying zero pages over
        // it is what this handler is for. The raw call is async-signal-safe.
        let laid = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if laid == libc::MAP_FAILED {
            break;
        }
        // SAFETY: the flag lives as long as the slot is taken.
        unsafe { (*broken).store(true, Ordering::Relaxed) };
        return;
    }
    pass_on(signal, info, context);
}

/// Not ours: do what would have happened without us.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
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
