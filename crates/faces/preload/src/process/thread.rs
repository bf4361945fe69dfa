//! What this library keeps for each thread.
//!
//! Every lock operation needs it. So it lies in static thread-local storage, among the variables of the libraries that were loaded
//! at program start. A thread finds it there without a function call, which the thread-local variables of a library that may be
//! loaded later would need, and which a signal handler could not make.

pub use own::with;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The variables of one thread. Only that thread and its signal handlers use them; they are atomics because a handler may run
/// between any two instructions. They begin as zeros.
#[repr(C, align(8))]
pub struct Thread {
    /// The thread's number, or 0 until it is first asked for.
    tid: AtomicI32,
    /// For [`crate::process::section`]: how many sections the thread is in, and where its stack ended when it entered the first one.
    pub sections: AtomicUsize,
    /// Whether signals are blocked until the thread leaves its sections, and the mask that it has then.
    pub is_postponed: AtomicBool,
    pub mask: AtomicU64,
    /// How many handlers of the program this library has called.
    handled: AtomicU32,
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "variables of a thread, in assembly")]
mod own {
    use super::Thread;
    use std::arch::{asm, global_asm};

    global_asm!(
        ".pushsection .tbss.ginnel_preload_thread, \"awT\", @nobits",
        ".globl ginnel_preload_thread",
        ".hidden ginnel_preload_thread",
        ".type ginnel_preload_thread, @tls_object",
        ".size ginnel_preload_thread, {size}",
        ".balign 8",
        "ginnel_preload_thread:",
        ".zero {size}",
        ".popsection",
        size = const size_of::<Thread>(),
    );

    /// Calls a function with this thread's variables.
    #[inline]
    pub fn with<R>(call: impl FnOnce(&Thread) -> R) -> R {
        let at: *const Thread;
        // SAFETY: the code computes the address of this thread's variables. (The word at `fs:0` is the thread pointer.)
        unsafe {
            asm!(
                "mov {at}, qword ptr fs:[0]",
                "add {at}, qword ptr [rip + ginnel_preload_thread@GOTTPOFF]",
                at = out(reg) at,
                options(nostack, readonly),
            );
        }
        // SAFETY: the variables exist as long as the thread does, which runs `call`. They are atomics, for which zeros are valid.
        call(unsafe { &*at })
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod own {
    use super::*;

    thread_local! {
        static OWN: Thread = const {
            Thread {
                tid: AtomicI32::new(0),
                sections: AtomicUsize::new(0),
                is_postponed: AtomicBool::new(false),
                mask: AtomicU64::new(0),
            }
        };
    }

    /// Calls a function with this thread's variables.
    pub fn with<R>(call: impl FnOnce(&Thread) -> R) -> R {
        OWN.with(call)
    }
}

/// Returns this thread's number (`gettid`).
#[inline]
pub fn tid() -> i32 {
    with(|own| match own.tid.load(Ordering::Relaxed) {
        0 => {
            let tid = thread_number();
            own.tid.store(tid, Ordering::Relaxed);
            tid
        }
        tid => tid,
    })
}

#[cold]
#[expect(unsafe_code, reason = "gettid, which has no rules")]
fn thread_number() -> i32 {
    // SAFETY: `gettid` cannot fail.
    unsafe { libc::gettid() }
}

/// Returns how many handlers of the program have been called in this thread. (Modulo a large number.)
#[inline]
pub fn handled() -> u32 {
    with(|own| own.handled.load(Ordering::Relaxed))
}

/// Notes that another one is called.
pub fn note_handler() {
    // A handler that interrupts this one between the two accesses only hides itself.
    with(|own| own.handled.store(own.handled.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed));
}

/// Resets the variables of the only thread of a child process, whose number differs from the parent thread's.
pub fn in_child() {
    with(|own| {
        own.tid.store(0, Ordering::Relaxed);
        own.sections.store(0, Ordering::Relaxed);
    });
}

/// Returns whether this process has no other thread.
#[expect(unsafe_code, reason = "the C library's word for it")]
pub fn is_only() -> bool {
    unsafe extern "C" {
        static __libc_single_threaded: std::ffi::c_char;
    }
    // SAFETY: a byte, which other threads do not write once there are some.
    unsafe { (&raw const __libc_single_threaded).read_volatile() != 0 }
}
