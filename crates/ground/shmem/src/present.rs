//! Checks of whether memory of the program is mapped, and with which rights.

use crate::areas::areas;
use rustix::io::Errno;
use rustix::mm::{Advice, ProtFlags, madvise};
use std::io;
use std::ops::Range;

const PAGE: usize = 4096;

/// Returns the smallest range of whole pages that contains a range.
fn pages(range: Range<usize>) -> Option<Range<usize>> {
    Some(range.start / PAGE * PAGE..range.end.checked_next_multiple_of(PAGE)?)
}

/// Returns whether the whole range is mapped and can be read and, if `is_written`, be stored to. Another thread may change
/// that at any time.
pub fn is_mapped(range: Range<usize>, is_written: bool) -> io::Result<bool> {
    let Some(range) = pages(range) else { return Ok(false) };
    let wanted = if is_written { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let areas = areas(range.clone())?;
    let mapped = areas.iter().filter(|area| area.prot.contains(wanted)).map(|area| area.at.len());
    Ok(mapped.sum::<usize>() == range.len())
}

/// Returns whether the whole range is mapped, and is private memory of this process.
pub fn is_private(range: Range<usize>) -> io::Result<bool> {
    let areas = areas(range.clone())?;
    Ok(areas.iter().filter(|area| !area.shared).map(|area| area.at.len()).sum::<usize>() == range.len())
}

/// Checks the same as [`is_mapped`], directly before an access. Afterwards the pages are present, and an access faults only
/// if the program changes something meanwhile.
pub fn populate(range: Range<usize>, is_written: bool) -> bool {
    let Some(whole) = pages(range.clone()) else { return false };
    let advice = if is_written { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    // SAFETY: it faults pages in, as an access would, and does not change their content.
    match unsafe { madvise(std::ptr::with_exposed_provenance_mut(whole.start), whole.len(), advice) } {
        Ok(()) => true,
        // An access would get SIGBUS.
        Err(Errno::FAULT | Errno::HWPOISON) => false,
        // Kernels before Linux 5.14 do not know this advice, and it fails for memory of devices.
        Err(_) => is_mapped(range, is_written).unwrap_or(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, mmap, mmap_anonymous, mprotect, munmap};
    use std::ptr;

    #[test]
    fn mapped_memory_is_recognised() {
        let (len, rights) = (4 * PAGE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: new pages, at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::SHARED) }.unwrap();
        let at = start.expose_provenance();
        // SAFETY: pages of this test's own.
        unsafe {
            mprotect(start.byte_add(2 * PAGE), PAGE, MprotectFlags::READ).unwrap();
            mprotect(start.byte_add(3 * PAGE), PAGE, MprotectFlags::empty()).unwrap();
        }
        let both = |range: Range<usize>, is_written| {
            let range = at + range.start..at + range.end;
            let mapped = is_mapped(range.clone(), is_written).unwrap();
            assert_eq!(populate(range.clone(), is_written), mapped, "{range:x?}");
            mapped
        };
        assert!(both(0..2 * PAGE, true) && both(5..2 * PAGE - 5, true) && both(10..3 * PAGE, false));
        assert!(!both(0..2 * PAGE + 1, true) && !both(0..3 * PAGE + 1, false));
        assert!(!is_mapped(usize::MAX - 5..usize::MAX, false).unwrap());
        let own = vec![0_u8; 3 * PAGE];
        let own_at = own.as_ptr().expose_provenance().next_multiple_of(PAGE);
        assert!(is_private(own_at..own_at + PAGE).unwrap() && !is_private(at..at + PAGE).unwrap());
        // SAFETY: pages of this test's own, which it does not use any more.
        unsafe { munmap(start, len) }.unwrap();
    }

    #[test]
    fn pages_behind_the_end_of_a_file_are_not_there() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(PAGE as u64).unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new pages, at an address of the kernel's choice.
        let start = unsafe { mmap(ptr::null_mut(), 2 * PAGE, rights, MapFlags::SHARED, &file, 0) }.unwrap();
        let at = start.expose_provenance();
        assert!(populate(at..at + PAGE, true) && !populate(at..at + 2 * PAGE, true));
        // SAFETY: pages of this test's own.
        unsafe { munmap(start, 2 * PAGE) }.unwrap();
    }
}
