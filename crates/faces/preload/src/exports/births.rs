//! Calls that make a process: `vfork`, `clone`, `_Fork`, and `syscall` with their numbers.
//!
//! | the child has | |
//! |---|---|
//! | memory and descriptors of its own | what `fork` makes, but the C library runs no handlers. So this module does what they do |
//! | its parent's memory, and its parent waits until it executes a program (`vfork`) | it closes its own descriptors but finds its parent's tables |
//! | all of its parent's memory and descriptors, and is a thread | nothing is to be done |
//! | one of both | the tables would be wrong for one of the processes. So all connections return to TCP first, and the library takes no further ones |
//!
//! The library recognises a child of `vfork` by its process number, which it must ask for with a system call. Most programs never
//! make such a child. So this module records that a program has made one, and the library asks for the number only then.
//!
//! This module does not see a process that the program makes with a system call instruction of its own. So that record is used
//! only where a mistake costs little ([`crate::state::socket::Socket::is_plain`]).

use crate::exports::process;
use crate::process::owner::SHARES_MEMORY;
use crate::system::real;
use libc::{c_int, c_long};
use std::ffi::c_void;
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering};

static VFORK: AtomicPtr<c_void> = AtomicPtr::new(real::missing as *mut c_void);
static CLONE: AtomicPtr<c_void> = AtomicPtr::new(real::missing as *mut c_void);
static FORK: AtomicPtr<c_void> = AtomicPtr::new(real::missing as *mut c_void);

/// Looks up the functions of the C library. Runs when this library is loaded.
pub fn load() {
    real::look_up(&VFORK, "vfork\0");
    real::look_up(&CLONE, "clone\0");
    real::look_up(&FORK, "_Fork\0");
}

/// Defines a function that returns in the child on its caller's stack. So its definition calls nothing, leaves all registers
/// unchanged, and jumps to the C library's function.
macro_rules! vforks {
    ($($name:ident),*) => {$(
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            std::arch::naked_asm!(
                "mov byte ptr [rip + {shared}], 1",
                "jmp qword ptr [rip + {real}]",
                shared = sym SHARES_MEMORY,
                real = sym VFORK,
            )
        }
    )*};
}

vforks!(vfork, __vfork);

/// Makes a process like that of `fork`, but runs no handlers and takes no locks of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _Fork() -> libc::pid_t {
    type Fork = unsafe extern "C-unwind" fn() -> libc::pid_t;
    // SAFETY: the C library's function has this type.
    let fork = unsafe { transmute::<*mut c_void, Fork>(FORK.load(Ordering::Relaxed)) };
    // SAFETY: the function takes no argument.
    process::birth(|| c_long::from(unsafe { fork() })) as libc::pid_t
}

/// Returns whether a call with these flags makes a process with memory and descriptors of its own. Prepares for all other calls.
fn is_like_fork(flags: c_int) -> bool {
    if flags & libc::CLONE_THREAD != 0 {
        return false;
    }
    match (flags & (libc::CLONE_VM | libc::CLONE_FILES), flags & libc::CLONE_VFORK != 0) {
        (0, _) => return true,
        (libc::CLONE_VM, true) => {}
        _ => process::leave_connections(),
    }
    SHARES_MEMORY.store(true, Ordering::Relaxed);
    false
}

/// Does the same for `syscall` with the number of a call that makes a process. A child with a stack of its own would return there
/// without the frames of this library.
#[cfg(target_arch = "x86_64")]
pub(super) extern "C" fn is_like_fork_by_number(number: c_long, a: c_long, b: c_long) -> bool {
    /// Where the stack is in the arguments of `clone3`, and the length of their first version (`linux/sched.h`).
    const STACK: usize = 40;
    const LEN: c_long = 64;
    let (flags, stack) = match number {
        libc::SYS_fork => (0, 0),
        libc::SYS_vfork => (libc::CLONE_VM | libc::CLONE_VFORK, 0),
        libc::SYS_clone => (a as c_int, b),
        // The kernel refuses these.
        _ if a == 0 || b < LEN => return false,
        // SAFETY: the program passes so many bytes.
        _ => unsafe { (*(a as *const u64) as c_int, *((a as usize + STACK) as *const c_long)) },
    };
    if stack != 0 && flags & (libc::CLONE_VM | libc::CLONE_FILES) == 0 {
        process::leave_connections();
        SHARES_MEMORY.store(true, Ordering::Relaxed);
        return false;
    }
    is_like_fork(flags)
}

type Function = extern "C-unwind" fn(*mut c_void) -> c_int;
type Clone = unsafe extern "C-unwind" fn(
    Function,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// The C function has variable arguments. In the calling convention of this machine they lie where those of these functions lie.
macro_rules! clones {
    ($($name:ident),*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            function: Function,
            stack: *mut c_void,
            flags: c_int,
            argument: *mut c_void,
            parent_tid: *mut c_void,
            tls: *mut c_void,
            child_tid: *mut c_void,
        ) -> c_int {
            // SAFETY: the program obeys the rules of the function.
            unsafe { clone_process(function, stack, flags, argument, parent_tid, tls, child_tid) }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
clones!(clone, __clone);

/// Makes a process or a thread that runs a function on another stack.
unsafe fn clone_process(
    function: Function,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    struct Start(Function, *mut c_void);
    extern "C-unwind" fn start(at: *mut c_void) -> c_int {
        process::born();
        // SAFETY: the child has a copy of its parent's memory, where this lies.
        let Start(function, argument) = unsafe { at.cast::<Start>().read() };
        function(argument)
    }
    // SAFETY: the C library's function has this type.
    let clone = unsafe { transmute::<*mut c_void, Clone>(CLONE.load(Ordering::Relaxed)) };
    if !is_like_fork(flags) {
        // SAFETY: the program obeys the rules of the function.
        return unsafe { clone(function, stack, flags, argument, parent_tid, tls, child_tid) };
    }
    let mut words = Start(function, argument);
    let at = (&raw mut words).cast();
    // SAFETY: the program obeys the rules of the function, and `words` stays until the child, which gets a copy of it, has
    // been made.
    let call = || unsafe { clone(start, stack, flags, at, parent_tid, tls, child_tid) };
    process::birth(|| c_long::from(call())) as c_int
}
