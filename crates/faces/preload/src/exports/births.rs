//! Calls that make a process which shares this process's memory: `vfork`, and `clone` with some flags.
//!
//! Such a child closes its own descriptors but finds its parent's tables. The library recognises it by its process number,
//! which it must ask for with a system call. Most programs never make such a child. So this module records that a program has
//! made one, and the library asks for the number only then.
//!
//! This module does not see a process that the program makes with a system call instruction of its own. So its answer is used
//! only where a mistake costs little ([`crate::socket::Socket::is_plain`]).

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// True if the program has made a process that shares this one's memory, or one for which no fork handler runs. On processors
/// other than x86-64 the library does not see these calls, so it is always true there.
pub(super) static SHARED: AtomicBool = AtomicBool::new(!cfg!(target_arch = "x86_64"));

/// Returns whether this process may be a child that shares the memory of its parent.
#[inline]
pub fn may_be_child() -> bool {
    // Relaxed is enough: the parent stores the value before it makes the child, so the child reads it.
    SHARED.load(Ordering::Relaxed)
}

/// Resets the record in the child of a fork, which has memory of its own.
pub fn in_child() {
    SHARED.store(!cfg!(target_arch = "x86_64"), Ordering::Relaxed);
}

/// Defines functions that make a process. They also return in the child on their caller's stack, or take any number of
/// arguments. So these definitions call nothing, leave all registers unchanged, and jump to the C library's function.
macro_rules! births {
    ($($slot:ident: $($name:ident),* = $real:literal;)*) => {
        $(
            static $slot: AtomicPtr<c_void> = AtomicPtr::new(crate::real::missing as *mut c_void);

            $(
                #[cfg(target_arch = "x86_64")]
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                pub unsafe extern "C-unwind" fn $name() {
                    std::arch::naked_asm!(
                        "mov byte ptr [rip + {shared}], 1",
                        "jmp qword ptr [rip + {real}]",
                        shared = sym SHARED,
                        real = sym $slot,
                    )
                }
            )*
        )*

        /// Looks up the functions of the C library. Runs when this library is loaded.
        pub fn load() {
            $(crate::real::look_up(&$slot, $real);)*
        }
    };
}

births! {
    VFORK: vfork, __vfork = "vfork\0";
    CLONE: clone, __clone = "clone\0";
    FORK: _Fork = "_Fork\0";
}
