//! Surviving SIGBUS: a file that is truncated under its mappings takes nobody along.
//!
//! The handler looks whether the fault lies in a mapping that we watch. If so it lays anonymous zero pages over the
//! whole of it and sets its flag; the faulting instruction then goes on, on zeros, and the library reports the
//! segment as broken at its next look. All else goes to whoever handled SIGBUS before.
//!
//! The table is read inside a signal handler, so it is a fixed array of atomics: no lock, no allocation.

use std::io;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Most mappings that one process can have watched at a time.
const SLOTS: usize = 1024;

struct Watched {
    /// Start of the range; 0 while the slot is free, 1 while it is being filled.
    start: AtomicUsize,
    len: AtomicUsize,
    broken: AtomicPtr<AtomicBool>,
}

static TABLE: [Watched; SLOTS] = [const {
    Watched {
        start: AtomicUsize::new(FREE),
        len: AtomicUsize::new(0),
        broken: AtomicPtr::new(ptr::null_mut()),
    }
}; SLOTS];
const FREE: usize = 0;
const FILLING: usize = 1;

/// A place in the table; gives it up when dropped.
pub(crate) struct Slot(&'static Watched);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.start.store(FREE, Ordering::Release);
    }
}

/// Watches a range until the slot is dropped. `broken` must live at least as long as the slot.
pub(crate) fn watch(start: usize, len: usize, broken: *const AtomicBool) -> io::Result<Slot> {
    install()?;
    for slot in &TABLE {
        if slot.start.compare_exchange(FREE, FILLING, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            slot.len.store(len, Ordering::Relaxed);
            slot.broken.store(broken.cast_mut(), Ordering::Relaxed);
            // ORDER guard.start: length and flag must be seen before the start. Pairs with: `handler`.
            slot.start.store(start, Ordering::Release);
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
        // ORDER guard.start. Pairs with: `watch`.
        let start = slot.start.load(Ordering::Acquire);
        if start <= FILLING || address < start || address - start >= slot.len.load(Ordering::Relaxed) {
            continue;
        }
        // SAFETY: the range is a mapping of ours (the slot is given up before it is unmapped); laying zero pages over
        // it is what this handler is for. The raw call is async-signal-safe.
        let laid = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                slot.len.load(Ordering::Relaxed),
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
        unsafe { (*slot.broken.load(Ordering::Relaxed)).store(true, Ordering::Relaxed) };
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
