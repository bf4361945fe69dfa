//! Files that the kernel has at hand. To find them takes no lock of a folder, for which others may let the daemon wait as long as they
//! like. Whoever looks for a name that is not there waits for that lock.
//!
//! A tmpfs and a hugetlbfs have everything at hand that exists, and so have the folders above the place where one is mounted. Other file
//! systems have what is in use: the socket at which somebody listens, a file that somebody has open, and the folders above these. They may
//! have to read a symbolic link on the way, or the ACL of a folder, when it is passed for the first time.

use crate::length;
use rustix::fs::{self, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;

/// How often a name is looked for that seems not to be there. The kernel may miss one while others rename files or mount file systems.
const LOOKS: u32 = 16;

/// Opens a file if there is one with this name in its folder, and the name is at hand. The folder itself is looked up in any case if it is
/// not at hand: nobody but root may rename it or one above it.
pub fn open(path: &Path, flags: OFlags) -> Result<Option<OwnedFd>, Errno> {
    let look = || look(path, flags | OFlags::NOFOLLOW);
    let Some(folder) = path.parent() else { return Ok(None) };
    if let Some(file) = look()? {
        return Ok(Some(file));
    }
    // To find its `.` takes the permission to pass through it, as what is sought does.
    let (folder, flags) = (folder.join("."), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC);
    if self::look(&folder, flags)?.is_some() {
        return Ok(None);
    }
    match fs::open(&folder, flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        opened => opened.and_then(|_| look()),
    }
}

/// Opens a file if it is at hand, with all folders and symbolic links on the way. Waits for nobody.
pub fn look(path: &Path, flags: OFlags) -> Result<Option<OwnedFd>, Errno> {
    let flags = flags | OFlags::CLOEXEC;
    for _ in 0..LOOKS {
        match fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED) {
            Err(Errno::AGAIN) => {}
            Err(Errno::NOENT) => return Ok(None),
            // Linux before 5.12 cannot be asked like this, nor can one in a container that forbids it.
            Err(Errno::INVAL | Errno::NOSYS | Errno::PERM) => {
                return match fs::open(path, flags, Mode::empty()) {
                    Err(Errno::NOENT) => Ok(None),
                    opened => opened.map(Some),
                };
            }
            opened => return opened.map(Some),
        }
    }
    Ok(None)
}

/// Returns what is known about the file with this name, if there is one at hand.
pub fn stat(path: &Path) -> Option<fs::Stat> {
    fs::fstat(open(path, OFlags::PATH).ok()??).ok()
}

/// Returns the length of the file with this name in bytes; 0 if there is none at hand.
pub fn length(path: &Path) -> u64 {
    stat(path).map_or(0, |stat| length::of_stat(&stat))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use kit::wait::wait_until;
    use rustix::fs::{AtFlags, Timespec, Timestamps, utimensat};
    use std::os::unix::fs::MetadataExt;
    use std::path::PathBuf;

    /// Makes a folder with a file, and a symbolic link to the folder. Whoever passes through the link must note the time of that, for which
    /// the kernel needs more than what it has at hand.
    pub fn link_not_at_hand(dir: &Path) -> PathBuf {
        let (real, link) = (dir.join("real"), dir.join("link"));
        let _ = std::fs::remove_file(&link);
        std::fs::create_dir_all(&real).unwrap();
        std::fs::write(real.join("file"), "12").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let past = Timespec { tv_sec: 0, tv_nsec: 0 };
        let times = Timestamps { last_access: past, last_modification: past };
        utimensat(CWD, &link, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        // A time that is noted in the same tick as this change would be due again.
        let changed = |path: &Path| {
            std::fs::symlink_metadata(path).map(|data| (data.ctime(), data.ctime_nsec())).unwrap()
        };
        wait_until("the clock of the file system goes on", || {
            std::fs::write(dir.join("clock"), "").unwrap();
            changed(&dir.join("clock")) > changed(&link)
        });
        link
    }

    #[test]
    fn what_lies_behind_a_link_that_is_not_at_hand_is_found() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let link = link_not_at_hand(dir.path());
        kit::require!(look(&link.join("file"), OFlags::PATH).unwrap().is_none(), "no times of access");
        assert_eq!(length(&link.join("file")), 2);
        let link = link_not_at_hand(dir.path());
        assert!(stat(&link.join("none")).is_none());
        assert!(stat(&dir.path().join("none/file")).is_none());
    }
}
