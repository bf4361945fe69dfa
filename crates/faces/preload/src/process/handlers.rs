//! The program's signal handlers.
//!
//! The kernel gets a handler of this library in place of each handler of the program, and that one calls the program's. If the signal
//! has come in a [`section`] of this library, it is postponed until the thread leaves its sections. The mask, the
//! flags and the stack of the handler are the kernel's business as before, because a postponed signal is sent again.
//!
//! These handlers are the kernel's own, and interrupt a section too: those for faults, because the thread cannot go on before they
//! have run; and those that the program installs by system calls of its own, or with `GINNEL_SOCKETS=off`. A program that has confined
//! itself ([`crate::system::confined`]) may not be able to send itself a signal, so its signals are not postponed.
#![allow(unsafe_code)] // Calls the program's handlers.

use crate::process::signals::FAULTS;
use crate::process::thread::Thread;
use crate::process::{section, signals, thread};
use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use crate::system::real;
use libc::{c_int, siginfo_t, ucontext_t};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The most that a signal's number can be.
const LAST: usize = 64;

/// The program's handler of a signal.
pub struct Handler {
    /// The address of the function, or 0 until there is one. While the kernel has none or another one, it is of no use.
    function: AtomicUsize,
    /// Whether the function takes three arguments (SA_SIGINFO).
    takes_info: AtomicBool,
}

static HANDLERS: [Handler; LAST + 1] =
    [const { Handler { function: AtomicUsize::new(0), takes_info: AtomicBool::new(false) } }; LAST + 1];

/// Returns the place of a signal's handler, unless that handler is the kernel's own.
pub fn of(signal: c_int) -> Option<&'static Handler> {
    let is_ours =
        (1..=libc::SIGSYS).contains(&signal) || (libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal);
    let is_synchronous = FAULTS.contains(&signal) || signal == libc::SIGABRT;
    let handler = HANDLERS.get(usize::try_from(signal).ok()?)?;
    (is_ours && !is_synchronous).then_some(handler)
}

/// Returns whether an action is to call a function.
pub fn is_function(action: usize) -> bool {
    // SIG_DFL, SIG_IGN, SIG_ERR and SIG_HOLD are small numbers, as unsigned or as signed ones.
    (action as isize) > 2
}

impl Handler {
    /// Replaces the function. The caller tells the kernel afterwards, so a signal never finds none. Returns the earlier ones.
    pub fn replace(&self, function: usize, takes_info: bool) -> (usize, bool) {
        let had_info = self.takes_info.swap(takes_info, Ordering::Relaxed);
        (self.function.swap(function, Ordering::Relaxed), had_info)
    }

    /// Returns the function, and whether it takes three arguments.
    pub fn now(&self) -> (usize, bool) {
        (self.function.load(Ordering::Relaxed), self.takes_info.load(Ordering::Relaxed))
    }
}

/// What the kernel calls in place of a handler.
pub extern "C-unwind" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let is_postponed = thread::with(|own| {
        // SAFETY: these are the arguments that the kernel passes.
        unsafe {
            section::is_inside(own, stack_end(context.cast())) && postpone(own, signal, info, context.cast())
        }
    });
    if !is_postponed {
        call(signal, info, context);
    }
}

/// The same while an action is being installed that does not ask for information about the signal yet.
pub extern "C-unwind" fn handle_plainly(signal: c_int) {
    call(signal, std::ptr::null_mut(), std::ptr::null_mut());
}

fn call(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let function = usize::try_from(signal).ok().and_then(|signal| HANDLERS.get(signal));
    let function = function.map_or(0, |handler| handler.function.load(Ordering::Relaxed));
    if function != 0 {
        thread::note_handler();
        // SAFETY: the program has said that this is a handler. One that takes only the number ignores what else is in the registers.
        let function: extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void) =
            unsafe { std::mem::transmute(function) };
        function(signal, info, context);
    }
}

/// Sends a signal again, and blocks all signals until the thread leaves its sections. Returns false if that is impossible.
///
/// # Safety
///
/// The arguments are those of a signal handler that the kernel has called.
#[cold]
unsafe fn postpone(own: &Thread, signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) -> bool {
    if is_confined() {
        return false;
    }
    let _errno = Kept::new();
    let all = signals::all();
    // With SA_NODEFER, the signal would come at once.
    let before = signals::block(all);
    // SAFETY: `info` is what the kernel has said about the signal.
    if unsafe { signals::queue(signal, info) } != 0 {
        signals::set_mask(before);
        return false;
    }
    install_again(signal);
    // SAFETY: the context is the kernel's. When the handler returns, the kernel takes the mask from there, which is one word there.
    let mask = unsafe { (&raw mut (*context).uc_sigmask).cast::<u64>() };
    // SAFETY: the word is in the kernel's context, which stays until the handler returns.
    own.mask.store(unsafe { mask.read() }, Ordering::Relaxed);
    own.is_postponed.store(true, Ordering::Relaxed);
    // SAFETY: the word is in the kernel's context, which nobody else uses until the handler returns.
    unsafe { mask.write(mask.read() | all) };
    true
}

/// Installs a handler again that the kernel has removed because it is for one time (SA_RESETHAND).
fn install_again(signal: c_int) {
    // SAFETY: `now` has room for an action, and zeros are a valid one. The action that is installed is the one that was there.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        let is_known = real::sigaction(signal, std::ptr::null(), &raw mut now) == 0;
        if is_known && now.sa_flags & libc::SA_RESETHAND != 0 && now.sa_sigaction == libc::SIG_DFL {
            now.sa_sigaction = handle as *const () as usize;
            real::sigaction(signal, &raw const now, std::ptr::null_mut());
        }
    }
}

/// Returns where the stack of the interrupted thread ends.
///
/// # Safety
///
/// The context is the one of a signal handler that the kernel has called.
unsafe fn stack_end(context: *const ucontext_t) -> usize {
    // SAFETY: the kernel has filled in the registers.
    #[cfg(target_arch = "x86_64")]
    return unsafe { (*context).uc_mcontext.gregs[libc::REG_RSP as usize] as usize };
    // SAFETY: the kernel has filled in the registers, which stay until the handler returns.
    #[cfg(target_arch = "aarch64")]
    return unsafe { (*context).uc_mcontext.sp as usize };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = context;
        0
    }
}
