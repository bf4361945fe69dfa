//! The crate's file descriptors in programs that do not know about them.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

/// A function that moves a descriptor: it duplicates it, closes the original, and returns the duplicate. It may also
/// return the original unchanged.
pub type Keep = fn(OwnedFd) -> OwnedFd;

static KEEP: OnceLock<Keep> = OnceLock::new();

/// Passes each descriptor that connections to the daemon need through `keep`, from now on. Meant for libraries that are
/// loaded into programs which close unknown descriptors, or which expect to get the lowest numbers for their own. Only
/// the first call has an effect.
pub fn keep_descriptors(keep: Keep) {
    let _ = KEEP.set(keep);
}

pub(crate) fn kept(fd: OwnedFd) -> OwnedFd {
    match KEEP.get() {
        Some(keep) => keep(fd),
        None => fd,
    }
}
