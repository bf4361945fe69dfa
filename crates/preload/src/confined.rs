//! Programs that confine themselves by seccomp.
//!
//! A filter may kill a process for any system call that the program does not make itself. So from the moment in which a program installs one,
//! this library makes only calls that a program with a connection makes anyway: `read`, `write`, `poll` and `close` on its sockets, and what the
//! C library needs for locks and clocks. What has changed over goes on; nothing is reported any more, nothing changes over, and rings neither
//! grow nor are left.

use std::sync::atomic::{AtomicBool, Ordering};

static CONFINED: AtomicBool = AtomicBool::new(false);

/// Whether the program has confined itself.
#[inline]
pub fn is_confined() -> bool {
    CONFINED.load(Ordering::Relaxed)
}

/// The program is about to confine itself, or has failed to.
pub fn set(confined: bool) {
    CONFINED.store(confined, Ordering::Relaxed);
    ginnel_shmem::leave_handlers_alone(confined);
}
