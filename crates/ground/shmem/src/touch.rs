//! Memory of the program that may not be there.
//!
//! The kernel says EFAULT for memory that is not there, that may not be written, or whose file is too short by now. A library that
//! reads and writes the program's memory in the kernel's place gets a signal instead. So it touches one byte of each page first, with
//! the code in this module. If that faults, the handler of this crate lets the code go on at its end, which says so.
//!
//! The pages may change after they were touched, because another thread unmaps them or truncates a file. Then the program gets the
//! signal.

use crate::guard::{self, STORES, TRUNCATION};
use std::io;

/// Prepares this process: from now on, touching memory that is not there does no harm. Until then, all memory counts as there.
pub fn prepare() -> io::Result<()> {
    TRUNCATION.install()?;
    STORES.install()?;
    guard::attend();
    Ok(())
}

/// Returns whether that has been done.
#[inline]
pub fn is_prepared() -> bool {
    STORES.is_installed()
}

/// Returns whether `len` bytes can be read.
#[inline]
pub fn can_read(at: *const u8, len: usize) -> bool {
    touch(at, len, code::read)
}

/// Returns whether `len` bytes can be written. Writes some of them, with the values that it has just read: the caller is about to
/// write all of them.
#[inline]
pub fn can_write(at: *mut u8, len: usize) -> bool {
    touch(at, len, code::write)
}

#[inline]
fn touch(at: *const u8, len: usize, code: unsafe extern "C" fn(*const u8, *const u8) -> u32) -> bool {
    if len == 0 || !STORES.is_installed() {
        return true;
    }
    guard::attend();
    // SAFETY: a fault in this code is survived, because the handlers are installed and this thread does not block their signals (if it has
    // blocked them since, the kernel ends the program, as at any such fault). What
    // `code::write` writes is memory that the caller may write.
    unsafe { code(at, at.wrapping_add(len - 1)) == 0 }
}

#[cfg(target_arch = "x86_64")]
mod code {
    use std::arch::naked_asm;

    /// The length of the instruction with which the functions below begin.
    const LOAD: i64 = 3;

    /// Takes the first and the last address, and touches a byte of each page. Returns 0, or 1 if it has faulted.
    #[unsafe(naked)]
    pub unsafe extern "C" fn read(first: *const u8, last: *const u8) -> u32 {
        naked_asm!(
            "2:",
            "movzx eax, byte ptr [rdi]",
            "and rdi, -4096",
            "add rdi, 4096",
            "cmp rdi, rsi",
            "jbe 2b",
            "xor eax, eax",
            "ret",
        )
    }

    /// Does the same, and writes what it has read.
    #[unsafe(naked)]
    pub unsafe extern "C" fn write(first: *const u8, last: *const u8) -> u32 {
        naked_asm!(
            "2:",
            "movzx eax, byte ptr [rdi]",
            "mov byte ptr [rdi], al",
            "and rdi, -4096",
            "add rdi, 4096",
            "cmp rdi, rsi",
            "jbe 2b",
            "xor eax, eax",
            "ret",
        )
    }

    /// Ends one of them that has faulted.
    #[unsafe(naked)]
    unsafe extern "C" fn fault() -> u32 {
        naked_asm!("mov eax, 1", "ret")
    }

    /// Lets the code go on at its end if a fault is its own. Returns false if it is not. For a signal handler.
    pub fn survive(context: *mut libc::c_void) -> bool {
        let (read, write) = (read as *const () as i64, write as *const () as i64);
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: the kernel passes a valid context of its own to a SA_SIGINFO handler, and so does a handler that passes a fault on.
        let rip = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
        let is_ours = [read, write, write + LOAD].contains(rip);
        if is_ours {
            *rip = fault as *const () as i64;
        }
        is_ours
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod code {
    /// All memory counts as there.
    pub unsafe extern "C" fn read(_: *const u8, _: *const u8) -> u32 {
        0
    }

    pub use read as write;

    pub fn survive(_: *mut libc::c_void) -> bool {
        false
    }
}

pub(crate) use code::survive;

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

    const PAGE: usize = 4096;

    fn pages(n: usize) -> *mut u8 {
        // SAFETY: new memory.
        unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                n * PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .unwrap()
        .cast()
    }

    #[test]
    fn memory_that_is_not_there_is_noticed() {
        prepare().unwrap();
        let start = pages(3);
        // SAFETY: the test's own pages, to which nothing refers.
        unsafe {
            mprotect(start.add(PAGE).cast(), PAGE, MprotectFlags::READ).unwrap();
            munmap(start.add(2 * PAGE).cast(), PAGE).unwrap();
        }
        let at = |offset: usize| start.wrapping_add(offset);
        assert!(can_read(start, 2 * PAGE) && can_write(start, PAGE));
        assert!(can_read(at(2 * PAGE - 1), 1) && !can_read(at(2 * PAGE - 1), 2));
        assert!(can_write(at(PAGE - 1), 1) && !can_write(at(PAGE - 1), 2) && !can_write(at(PAGE), 1));
        assert!(!can_read(start, 3 * PAGE) && !can_read(std::ptr::null(), 1));
        assert!(can_read(std::ptr::null(), 0));
    }

    #[test]
    fn what_is_written_stays_what_it_was() {
        prepare().unwrap();
        let start = pages(2);
        // SAFETY: the test's own pages.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, 2 * PAGE) };
        bytes.iter_mut().zip(1..).for_each(|(byte, n): (&mut u8, u32)| *byte = n as u8);
        let before = bytes.to_vec();
        assert!(can_write(bytes.as_mut_ptr(), bytes.len()));
        assert_eq!(bytes, before);
    }

    #[test]
    fn a_file_that_is_too_short_is_noticed() {
        prepare().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE as u64).unwrap();
        // SAFETY: a new mapping.
        let start: *mut u8 =
            unsafe { mmap(std::ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED, &file, 0) }
                .unwrap()
                .cast();
        assert!(can_read(start, PAGE));
        file.set_len(0).unwrap();
        assert!(!can_read(start, PAGE));
    }
}
