//! Mapping DAX devices in processes without transparent huge pages.
//!
//! The kernel maps a DAX device in pages of 2 MiB. A process that has disabled such pages (`PR_SET_THP_DISABLE`; Redis does
//! by default) gets SIGBUS for its first access to each of them (Linux 6.1, `hugepage_vma_check`). Pages that are already
//! mapped stay. Therefore this module enables huge pages for the process, touches all pages of the mapping once, and disables
//! huge pages again.

use crate::{Mapping, SharedMemory};
use rustix::fs::FileType;
use std::os::fd::AsFd;

/// A page of a DAX device.
const PAGE: usize = 2 << 20;

/// Touches all pages of a new mapping of `file`, if that is necessary.
pub fn fault_in(mapping: &Mapping, file: impl AsFd) {
    let is_device = rustix::fs::fstat(file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice);
    if !is_device || !is_disabled() {
        return;
    }
    disable(false);
    for at in (0..mapping.len()).step_by(PAGE) {
        // `black_box` keeps the compiler from leaving out a load whose value is not used.
        let word = std::hint::black_box(mapping.load_relaxed_u64(at));
        if !mapping.is_read_only() {
            // A store that changes nothing, even if others write there at the same time. (The compiler would leave out an
            // addition of zero.)
            let _ = mapping.compare_exchange_u64(at, word, word);
        }
    }
    disable(true);
}

fn is_disabled() -> bool {
    // SAFETY: the call takes no pointers. It returns 0 or 1.
    unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0_u64, 0_u64, 0_u64, 0_u64) == 1 }
}

fn disable(on: bool) {
    // SAFETY: the call takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, u64::from(on), 0_u64, 0_u64, 0_u64) };
}
