//! Memory of the program that is not there, for which the kernel says EFAULT.
//!
//! This library reads and writes the program's memory in the kernel's place. Before it does so, it touches a byte of each page in a way
//! that survives a fault ([`ginnel_shmem::touch`]). If another thread takes the memory away after that, the program gets the signal.

use crate::system::confined::is_confined;
use crate::system::errno::Kept;
use ginnel_shmem::touch;
use std::sync::atomic::{AtomicBool, Ordering};

/// The end of the addresses that a program can have, on processors with the largest addresses. Addresses of other architectures may
/// have tags in their high bits.
const END: usize = if cfg!(target_arch = "x86_64") { 1 << 56 } else { usize::MAX };

/// The most bytes that the kernel moves in one call (MAX_RW_COUNT).
const MOST: usize = 0x7fff_f000;

/// The size of the first page, which a program cannot map (`vm.mmap_min_addr`).
const FIRST: usize = 4096;

/// Prepares this process, once it has something on which this library makes calls in the kernel's place.
pub fn prepare() {
    static IS_PREPARED: AtomicBool = AtomicBool::new(false);
    if !is_confined() && !IS_PREPARED.swap(true, Ordering::Relaxed) {
        let _errno = Kept::new();
        // If it fails, bad pointers end the program.
        let _ = touch::prepare();
    }
}

/// Returns whether this process is prepared. If not, it has nothing on which this library makes calls, so pointers are the kernel's to
/// follow.
#[inline]
pub fn is_prepared() -> bool {
    touch::is_prepared() || cfg!(not(target_arch = "x86_64"))
}

/// Returns whether memory goes beyond what a program can have. The kernel says EFAULT before it does anything else.
#[inline]
pub fn is_beyond<T>(at: *const T, len: usize) -> bool {
    at.addr().saturating_add(len.min(MOST)) > END
}

/// Returns whether so many bytes can be read.
#[inline]
pub fn can_read<T>(at: *const T, len: usize) -> bool {
    len == 0 || at.addr() >= FIRST && !is_beyond(at, len) && touch::can_read(at.cast(), len)
}

/// Returns whether so many bytes can be written. The caller is about to write all of them.
#[inline]
pub fn can_write<T>(at: *mut T, len: usize) -> bool {
    len == 0 || at.addr() >= FIRST && !is_beyond(at, len) && touch::can_write(at.cast(), len)
}

/// Returns whether a structure can be read.
#[inline]
pub fn is_there<T>(at: *const T) -> bool {
    can_read(at, size_of::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_program_is_there() {
        let (mut local, heap) = (0_u64, Box::new(0_u64));
        assert!(is_there(&raw const local) && is_there(&raw const *heap) && can_write(&raw mut local, 8));
        assert!(!is_beyond((&raw const local).cast::<u8>(), usize::MAX), "the kernel cuts the length");
    }

    #[test]
    fn null_and_minus_one_are_not_there() {
        for at in [0, 8, FIRST - 1] {
            assert!(!can_read(std::ptr::without_provenance::<u8>(at), 1), "{at:#x}");
        }
        if cfg!(target_arch = "x86_64") {
            for at in [usize::MAX, usize::MAX - 4095, 1 << 60, END] {
                assert!(is_beyond(std::ptr::without_provenance::<u8>(at), 1), "{at:#x}");
            }
        }
    }
}
