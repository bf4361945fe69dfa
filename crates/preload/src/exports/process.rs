//! fork and what follows.

use std::sync::atomic::{AtomicI32, Ordering};

/// The process whose tables these are.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Whether the tables are this process's: not in a child of `vfork`, which has its parent's memory.
pub fn owns_tables() -> bool {
    // SAFETY: it cannot fail.
    let process = unsafe { libc::getpid() };
    match OWNER.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: the handler is a function of this library, and calls nothing that is forbidden in a fork's child.
            unsafe { libc::pthread_atfork(Some(before), None, Some(in_child)) };
            OWNER.store(process, Ordering::Relaxed);
            true
        }
        owner => owner == process,
    }
}

/// `fork` calls it in the parent, before.
extern "C" fn before() {
    crate::family::before_fork();
}

/// `fork` calls it in the child, which has one thread and copies of the tables.
extern "C" fn in_child() {
    // SAFETY: it cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    crate::lock::forget_tid();
    crate::table::SOCKETS.free_in_child();
    crate::table::EPOLLS.free_in_child();
}
