//! Addresses at which no program has memory.
//!
//! The kernel says EFAULT for memory that is not there. This library reads and writes the program's memory itself, so it says that only
//! for addresses that are never valid: those in the first page, such as null, and those that are not the program's, such as -1. At all
//! others, the program gets SIGSEGV.

/// The size of the first page, which a program cannot map (`vm.mmap_min_addr`).
const FIRST: usize = 4096;

/// The end of the addresses that a program can have, on processors with the largest addresses. Addresses of other architectures may
/// have tags in their high bits.
const END: usize = if cfg!(target_arch = "x86_64") { 1 << 56 } else { usize::MAX };

/// The most bytes that the kernel moves in one call (MAX_RW_COUNT).
const MOST: usize = 0x7fff_f000;

/// Returns whether an address lies in the first page. The kernel says EFAULT when it copies.
#[inline]
pub fn is_low<T>(at: *const T) -> bool {
    at.addr() < FIRST
}

/// Returns whether memory goes beyond what a program can have. The kernel says EFAULT before it does anything else.
#[inline]
pub fn is_beyond<T>(at: *const T, len: usize) -> bool {
    at.addr().saturating_add(len.min(MOST)) > END
}

/// Returns whether either is so for a structure.
#[inline]
pub fn is_nowhere<T>(at: *const T) -> bool {
    is_low(at) || is_beyond(at, size_of::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_program_is_somewhere() {
        let (local, heap) = (0_u64, Box::new(0_u64));
        assert!(!is_nowhere(&raw const local) && !is_nowhere(&raw const *heap));
        assert!(!is_beyond((&raw const local).cast::<u8>(), usize::MAX), "the kernel cuts the length");
    }

    #[test]
    fn null_and_minus_one_are_nowhere() {
        for at in [0, 8, FIRST - 1] {
            assert!(is_low(std::ptr::without_provenance::<u8>(at)), "{at:#x}");
        }
        if cfg!(target_arch = "x86_64") {
            for at in [usize::MAX, usize::MAX - 4095, 1 << 60, END] {
                assert!(is_beyond(std::ptr::without_provenance::<u8>(at), 1), "{at:#x}");
            }
        }
    }
}
