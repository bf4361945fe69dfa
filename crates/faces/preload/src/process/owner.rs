//! Whose memory this is: a child of `vfork` runs in its parent's.
#![allow(unsafe_code)] // Asks the kernel for the number of this process.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The number of the process that owns the tables, or 0 before the library is loaded.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Makes this process the owner of the tables: the library has been loaded in it, or a fork has made it.
#[cfg_attr(test, expect(dead_code, reason = "only the exports call it"))]
pub fn own_tables() {
    // SAFETY: `getpid` cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    SHARES_MEMORY.store(!CAN_SEE_CHILDREN, Ordering::Relaxed);
}

/// Returns whether the tables are this process's own: it is no child of `vfork`, and none that was made without the library's notice.
pub fn owns_tables() -> bool {
    // SAFETY: `getpid` cannot fail.
    let process = unsafe { libc::getpid() };
    [0, process].contains(&OWNER.load(Ordering::Relaxed))
}

/// Other processors' calls that make processes are not interposed.
const CAN_SEE_CHILDREN: bool = cfg!(target_arch = "x86_64");

/// True if the program has made a process that shares this one's memory, or one for which no fork handler runs. Where the library does
/// not see that, it is always true.
pub static SHARES_MEMORY: AtomicBool = AtomicBool::new(!CAN_SEE_CHILDREN);

/// Returns whether this process may be a child that shares the memory of its parent.
#[inline]
#[cfg_attr(test, expect(dead_code, reason = "only the exports call it"))]
pub fn may_be_child() -> bool {
    // Relaxed is enough: the parent stores the value before it makes the child, so the child reads it.
    SHARES_MEMORY.load(Ordering::Relaxed)
}
