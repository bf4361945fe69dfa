//! The numbers of this process and of its relatives.
#![allow(unsafe_code)] // Asks the kernel about processes.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// This process's number, cached because every call needs it.
pub static PROCESS: AtomicI32 = AtomicI32::new(0);

pub fn process() -> i32 {
    match PROCESS.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: it cannot fail.
            let process = unsafe { libc::getpid() };
            PROCESS.store(process, Ordering::Relaxed);
            process
        }
        process => process,
    }
}

/// True in a child in another PID namespace than its parent, and in its children. The numbers of relatives mean nothing there.
pub static IS_ABROAD: AtomicBool = AtomicBool::new(false);

/// Returns whether a process or a thread of this number may exist.
#[cold]
pub fn exists(number: i32) -> bool {
    if IS_ABROAD.load(Ordering::Relaxed) {
        return true;
    }
    let _errno = crate::system::errno::Kept::new();
    // SAFETY: signal 0 does nothing.
    unsafe { libc::kill(number, 0) == 0 || *libc::__errno_location() != libc::ESRCH }
}
