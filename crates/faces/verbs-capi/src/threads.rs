//! Tells the locks of `ginnel_verbs` whether the process has only one thread.
#![allow(unsafe_code)] // Looks up a variable of the C library by its name.

use ginnel_verbs::lock;
use std::sync::Once;
use std::sync::atomic::AtomicU8;

/// Makes these locks cheap while the process has one thread. C libraries before glibc 2.32 do not provide this information.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a lookup of a static name.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
        // SAFETY: if the variable exists, it is a byte that lives as long as the process, and only the C library changes it.
        if let Some(is_alone) = unsafe { found.cast::<AtomicU8>().as_ref() } {
            lock::watch_threads(is_alone);
        }
    });
}
