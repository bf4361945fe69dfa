//! Descriptors of a segment's file for programs that may write its bytes but must not change its size.
//!
//! A program that maps a file for writing needs a descriptor that is open for writing. With such a descriptor it can truncate the
//! file, which kills each QEMU that touches the missing pages. No mode and no flag of a file on a tmpfs prevents that and still
//! allows mapping: immutable files can be truncated through descriptors, and append-only files cannot be mapped. But a descriptor
//! that was opened under Landlock without the right to truncate never has that right, in whichever process (Linux 6.2). So a
//! thread that has given up this right opens the file, and then ends.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreated, RulesetStatus,
};
use rustix::fs::{Mode, OFlags, open};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

/// Opens a file again so that it can be read, written and mapped, but not truncated. Returns `None` if the kernel does not
/// support that.
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
    // A thread never gets a right back that it has given up.
    thread::scope(|scope| thread::Builder::new().spawn_scoped(scope, open).ok()?.join().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection, SharedMemory};
    use rustix::io::Errno;
    use std::fs::File;

    kit::test_that_skips_are_seen!();

    #[test]
    fn a_handed_descriptor_can_map_and_cannot_truncate() -> Result<(), Errno> {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let handed = without_truncation(&file.try_clone().unwrap().into());
        kit::require!(handed.is_some(), "no Landlock with the right to truncate (Linux 6.2)");
        let handed = handed.unwrap();
        let mapping = Mapping::of_file(&handed, 0, 1 << 20, Protection::ReadWrite).unwrap();
        mapping.write(4096, b"x");
        let handed = File::from(handed);
        assert!(handed.set_len(0).is_err() && handed.set_len(2 << 20).is_err());
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        // This thread and the daemon's own descriptor have kept all rights.
        file.set_len(4096).unwrap();
        Ok(())
    }
}
