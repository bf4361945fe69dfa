//! Programs that confine themselves with seccomp.
//!
//! A filter may kill a process for any system call that the program does not make itself. So from the moment when a program
//! installs a filter, this library makes only system calls that a program with a connection makes anyway: `read`, `write`,
//! `poll` and `close` on its sockets, and those that the C library needs for locks and clocks. Connections that have changed
//! over continue. The library reports no more connections and changes no more directions over, and rings neither grow nor
//! return to TCP.

use std::sync::atomic::{AtomicBool, Ordering};

static CONFINED: AtomicBool = AtomicBool::new(false);

/// Returns whether the program has confined itself.
#[inline]
pub fn is_confined() -> bool {
    CONFINED.load(Ordering::Relaxed)
}

/// Records that the program is about to confine itself (`true`), or that it has failed to (`false`).
pub fn set(confined: bool) {
    CONFINED.store(confined, Ordering::Relaxed);
    ginnel_shmem::leave_handlers_alone(confined);
}
