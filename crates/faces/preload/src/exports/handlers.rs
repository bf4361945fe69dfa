//! `sigaction`, `signal` and their variants: the program's signal handlers (see [`crate::process::handlers`]).

use crate::process::handlers::{Handler, handle, handle_plainly, is_function};
use crate::process::owner::owns_tables;
use crate::process::{handlers, owner, settings};
use crate::system::real;
use libc::{c_int, sighandler_t};

/// Returns the place of a signal's handler, unless that handler is the kernel's own.
fn place(signal: c_int) -> Option<&'static Handler> {
    // A child of `vfork` has its parent's memory, but not its parent's handlers.
    let is_apart = owner::may_be_child() && !owns_tables();
    handlers::of(signal).filter(|_| settings::is_on() && !is_apart)
}

fn is_ours(function: usize) -> bool {
    [handle as *const () as usize, handle_plainly as *const () as usize].contains(&function)
}

/// Exchanges the action of a signal for faults, if the kernel has the handler of [`ginnel_shmem`] for it.
fn exchange(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let is_apart = owner::may_be_child() && !owns_tables();
    let is_fault = [libc::SIGSEGV, libc::SIGBUS].contains(&signal);
    (is_fault && !is_apart).then(|| ginnel_shmem::exchange_action(signal, new)).flatten()
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the program obeys the rules of the function: the pointer is null, or leads to an action.
    if let Some(before) = exchange(signal, unsafe { new.as_ref() }) {
        // SAFETY: the program obeys the rules of the function: the pointer is null, or leads to room for an action.
        if let Some(old) = unsafe { old.as_mut() } {
            *old = before;
        }
        return 0;
    }
    let place = place(signal);
    let (mut before, mut wrapped) = (place.map(Handler::now), None);
    // SAFETY: the program obeys the rules of the function: `new` is null or points to an action.
    if let (Some(place), Some(new)) = (place, unsafe { new.as_ref() })
        && is_function(new.sa_sigaction)
        && !is_ours(new.sa_sigaction)
    {
        before = Some(place.replace(new.sa_sigaction, new.sa_flags & libc::SA_SIGINFO != 0));
        let (sa_sigaction, sa_flags) = (handle as *const () as usize, new.sa_flags | libc::SA_SIGINFO);
        wrapped = Some(libc::sigaction { sa_sigaction, sa_flags, ..*new });
    }
    let new = wrapped.as_ref().map_or(new, std::ptr::from_ref);
    // SAFETY: `new` is null, the program's action or our `wrapped`; `old` is null or has room for an action.
    let result = unsafe { real::sigaction(signal, new, old) };
    // SAFETY: `old` is null, or the call above has filled it in.
    if let (0, Some((function, takes_info)), Some(old)) = (result, before, unsafe { old.as_mut() })
        && is_ours(old.sa_sigaction)
    {
        old.sa_sigaction = function;
        if !takes_info {
            old.sa_flags &= !libc::SA_SIGINFO;
        }
    }
    result
}

/// Installs a handler with a function of the C library, which determines the flags and the mask.
unsafe fn install(
    signal: c_int,
    function: sighandler_t,
    native: unsafe fn(c_int, sighandler_t) -> sighandler_t,
) -> sighandler_t {
    if let Some(before) = exchange(signal, None) {
        // SAFETY: the program passes a signal and a function by the rules of `native`.
        let old = unsafe { native(signal, function) };
        ginnel_shmem::look_after();
        return if old == libc::SIG_ERR { old } else { before.sa_sigaction };
    }
    // SAFETY: the program obeys the rules of `native`, which gets its arguments unchanged.
    let Some(place) = place(signal) else { return unsafe { native(signal, function) } };
    let is_handler = is_function(function) && !is_ours(function);
    let (before, _) = if is_handler { place.replace(function, false) } else { place.now() };
    let new = if is_handler { handle_plainly as *const () as usize } else { function };
    // SAFETY: `new` is the program's function, which obeys the rules of `native`, or our own handler.
    let old = unsafe { native(signal, new) };
    if is_handler {
        // SAFETY: zeros are a valid action, and both pointers are to actions.
        unsafe {
            let mut now: libc::sigaction = std::mem::zeroed();
            if real::sigaction(signal, std::ptr::null(), &raw mut now) == 0 && now.sa_sigaction == new {
                now.sa_sigaction = handle as *const () as usize;
                now.sa_flags |= libc::SA_SIGINFO;
                real::sigaction(signal, &raw const now, std::ptr::null_mut());
            }
        }
    }
    if is_ours(old) { before } else { old }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn signal(signal: c_int, function: sighandler_t) -> sighandler_t {
    if function != libc::SIG_ERR {
        // SAFETY: zeros are a valid action, and the set has room for the signal.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            (action.sa_sigaction, action.sa_flags) = (function, libc::SA_RESTART);
            libc::sigaddset(&raw mut action.sa_mask, signal);
            action
        };
        if let Some(before) = exchange(signal, Some(&action)) {
            return before.sa_sigaction;
        }
    }
    // SAFETY: the program obeys the rules of the function.
    unsafe { install(signal, function, real::signal) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __sysv_signal(signal: c_int, function: sighandler_t) -> sighandler_t {
    // SAFETY: the program obeys the rules of the function.
    unsafe { install(signal, function, real::__sysv_signal) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigset(signal: c_int, function: sighandler_t) -> sighandler_t {
    // SAFETY: the program obeys the rules of the function.
    unsafe { install(signal, function, real::sigset) }
}
