//! The actions that the program has set for the signals of faults, below this library's handlers.
//!
//! They lie in fixed memory, because a program may set one in a signal handler that has interrupted the allocator. An action is not
//! changed once others may see it. Its memory is used again only after many further ones, by when nobody looks at it any more.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of actions in memory at a time.
const SLOTS: usize = 256;

struct Slots([UnsafeCell<MaybeUninit<libc::sigaction>>; SLOTS]);

// SAFETY: each slot is written by the one thread that has taken its number, before others get its address.
unsafe impl Sync for Slots {}

static ACTIONS: Slots = Slots([const { UnsafeCell::new(MaybeUninit::uninit()) }; SLOTS]);
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Keeps an action. The result is valid until so many further ones have been kept.
pub fn keep(action: libc::sigaction) -> *mut libc::sigaction {
    let slot = &ACTIONS.0[NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS];
    // SAFETY: no other thread has this number, and readers of the action that was here are done with it.
    unsafe { (*slot.get()).write(action) }
}

/// Returns the default action.
pub fn default() -> libc::sigaction {
    // SAFETY: `sigaction` is a plain structure for which all zeros is a valid value, and zeros stand for the default action.
    unsafe { std::mem::zeroed() }
}

/// Returns the action of the kernel while the program has this one: this library's handler, which is called as the program's would be.
pub fn above(program: &libc::sigaction, handler: usize) -> libc::sigaction {
    let mut action = default();
    action.sa_sigaction = handler;
    let is_function = ![libc::SIG_DFL, libc::SIG_IGN].contains(&program.sa_sigaction);
    if is_function {
        let as_it = libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_NODEFER;
        action.sa_flags = libc::SA_SIGINFO | program.sa_flags & as_it;
        action.sa_mask = program.sa_mask;
    } else {
        // A signal that is ignored interrupts nothing, as far as the kernel can do that.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART;
    }
    action
}
