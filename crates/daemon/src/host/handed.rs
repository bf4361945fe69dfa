//! Descriptors of a segment's file for programs that are trusted with its bytes, and not with its size.
//!
//! Whoever maps a file for writing needs a descriptor that is open for writing, and with such a descriptor a file can be
//! truncated, which kills each QEMU that touches the missing pages. No mode and no flag of a file on a tmpfs prevents that
//! and lets it be mapped: immutable files can be truncated through descriptors, and append-only ones cannot be mapped. But a
//! descriptor that was opened under Landlock without the right to truncate never has it, whoever holds it (Linux 6.2). So
//! a thread that gives up this right opens the file, and ends.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreated, RulesetStatus,
};
use rustix::fs::{Mode, OFlags, open};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

/// Another descriptor of a file, with which it can be read, written and mapped, and not truncated. None if the kernel has no
/// such thing.
pub fn without_truncation(file: &OwnedFd) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let open = move || {
        let truncation = AccessFs::from_all(ABI::V3) & !AccessFs::from_all(ABI::V2);
        let rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(truncation)
            .and_then(|rules| rules.create())
            .and_then(RulesetCreated::restrict_self)
            .ok()?;
        if rules.ruleset != RulesetStatus::FullyEnforced {
            return None;
        }
        open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()
    };
    // What a thread gives up it never gets back.
    thread::scope(|scope| thread::Builder::new().spawn_scoped(scope, open).ok()?.join().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use rustix::io::Errno;
    use std::fs::File;

    #[test]
    fn it_maps_and_does_not_truncate() -> Result<(), Errno> {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let handed = without_truncation(&file.try_clone().unwrap().into());
        vmtest::require!(handed.is_some(), "no Landlock with the right to truncate (Linux 6.2)");
        let handed = handed.unwrap();
        let mapping = Mapping::of_file(&handed, 0, 1 << 20, Protection::ReadWrite).unwrap();
        mapping.write(4096, b"x");
        let handed = File::from(handed);
        assert!(handed.set_len(0).is_err() && handed.set_len(2 << 20).is_err());
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        // This thread, and the daemon's own descriptor, have lost nothing.
        file.set_len(4096).unwrap();
        Ok(())
    }
}
