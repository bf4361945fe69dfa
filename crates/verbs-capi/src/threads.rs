//! Whether the process has one thread, of which the locks are told.
#![allow(unsafe_code)] // A variable of the C library, looked up by its name.

use ginnel_verbs::lock;
use std::sync::Once;
use std::sync::atomic::AtomicU8;

/// From now on, the locks cost little while there is one thread. Old C libraries do not say it (glibc before 2.32).
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a lookup of a static name.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
        // SAFETY: if it is there it is a byte that lives as long as the process, and that only the C library changes.
        if let Some(is_alone) = unsafe { found.cast::<AtomicU8>().as_ref() } {
            lock::watch_threads(is_alone);
        }
    });
}
