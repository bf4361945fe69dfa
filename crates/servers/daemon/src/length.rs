//! The length of a file, which the kernel has as a number with a sign.

use rustix::fs::{Stat, fstat};
use std::os::fd::AsFd;

/// Returns the length of a file in bytes; 0 if the kernel does not say.
pub fn of(file: impl AsFd) -> u64 {
    fstat(file).map_or(0, |stat| of_stat(&stat))
}

/// Returns the length that is among what is known about a file, in bytes.
pub fn of_stat(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}
