//! Keeps some of this process's descriptors for root and for VMs, so that no ordinary user can use up all of them.
//!
//! The kernel always gives the lowest free number. So a descriptor for an ordinary user whose number is among the last ones says
//! that all lower ones are in use, and it is closed again.

use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, AsRawFd};

/// The share of the descriptors that is kept, as a divisor, and the most that are kept.
const SHARE: u64 = 8;
const MOST: u64 = 4096;

/// Returns whether this descriptor is one of those that are kept for root and for VMs.
pub fn is_kept_for_root(fd: impl AsFd) -> bool {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    is_among_the_last(fd.as_fd().as_raw_fd().unsigned_abs().into(), limit)
}

fn is_among_the_last(number: u64, limit: u64) -> bool {
    number >= limit - (limit / SHARE).min(MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_numbers_are_kept() {
        assert!(!is_among_the_last(895, 1024) && is_among_the_last(896, 1024));
        assert!(!is_among_the_last(61_439, 65_536) && is_among_the_last(61_440, 65_536));
        assert!(!is_among_the_last(1 << 40, u64::MAX));
        assert!(is_among_the_last(7, 8));
    }
}
