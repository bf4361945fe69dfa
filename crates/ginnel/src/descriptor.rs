//! Descriptors of this crate in programs that do not know of it.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

/// Makes another descriptor of the same file, and closes the first one; or returns it as it is.
pub type Keep = fn(OwnedFd) -> OwnedFd;

static KEEP: OnceLock<Keep> = OnceLock::new();

/// From now on each descriptor that connections to the daemon need passes through `keep` first. For libraries that are loaded into
/// programs which close what they do not know, and expect the lowest numbers for their own descriptors. Only the first call counts.
pub fn keep_descriptors(keep: Keep) {
    let _ = KEEP.set(keep);
}

pub(crate) fn kept(fd: OwnedFd) -> OwnedFd {
    match KEEP.get() {
        Some(keep) => keep(fd),
        None => fd,
    }
}
