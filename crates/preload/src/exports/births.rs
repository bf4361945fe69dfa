//! Calls that make a process which has this one's memory: `vfork`, and `clone` as the program likes.
//!
//! Such a child closes descriptors of its own, and finds its parent's tables. It is told apart by its process's number, which takes a
//! system call. Most programs never make one, so it is noted here that they have, and the number is asked for only then.
//!
//! What cannot be seen here is a process that the program makes by an instruction of its own. So this says enough only where a mistake
//! costs little ([`crate::socket::Socket::is_plain`]).

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// A process that has this one's memory has been made, or one that no handler knows of. Elsewhere that is not seen.
pub(super) static SHARED: AtomicBool = AtomicBool::new(!cfg!(target_arch = "x86_64"));

/// Whether this may be another process than the one whose memory this is.
#[inline]
pub fn may_be_child() -> bool {
    // The child reads what its parent has written before it was made.
    SHARED.load(Ordering::Relaxed)
}

/// The child of a fork has memory of its own.
pub fn in_child() {
    SHARED.store(!cfg!(target_arch = "x86_64"), Ordering::Relaxed);
}

/// Such functions return in the child on their caller's stack, or take any number of arguments. So nothing is called here, and all registers
/// stay as they are.
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

        /// Finds the C library's. Runs when the library is loaded.
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
