//! The kernel's clocks, read through the C library.
//!
//! A program may run where only the C library knows how to read a clock: under valgrind, the vDSO that the kernel announces is not
//! mapped, and code that looks for it by hand ends the program. `std::time` reads the same clock, but does not tell its value, which
//! is needed to store it in an atomic or to compare it with another process's.
#![allow(unsafe_code)] // clock_gettime(2), without what crates that avoid the C library do for it.

use std::time::Duration;

/// Returns CLOCK_MONOTONIC (clock_gettime(2)): all processes of a kernel, outside of time namespaces, read the same.
pub fn monotonic() -> Duration {
    read(libc::CLOCK_MONOTONIC)
}

/// Returns CLOCK_MONOTONIC as of the kernel's last tick. Ticks are a few milliseconds apart. The call costs less than [`monotonic`].
pub fn tick() -> Duration {
    read(libc::CLOCK_MONOTONIC_COARSE)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` has room for a time. The call keeps no reference to it.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    // These clocks begin at zero, and every kernel has them.
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn clocks_go_forward_as_those_of_the_standard_library() {
        let (began, before, ticked) = (Instant::now(), monotonic(), tick());
        std::thread::sleep(Duration::from_millis(30));
        let (between, after) = (monotonic() - before, tick());
        assert!(between >= Duration::from_millis(30) && between <= began.elapsed());
        assert!(after > ticked && after <= monotonic() && ticked <= before + between);
    }
}
