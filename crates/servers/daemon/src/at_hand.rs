//! Files that the kernel has at hand. To find them takes no lock of their folder, for which others may let the daemon wait as long as they
//! like. Whoever looks for a name that is not there waits for that lock.
//!
//! A tmpfs and a hugetlbfs have everything at hand that exists. Other file systems have what was used lately.

use crate::length;
use rustix::fs::{self, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;

/// How often a name is looked for that seems not to be there. The kernel may miss one while others rename files.
const LOOKS: u32 = 16;

/// Opens a file if there is one with this name at hand.
pub fn open(path: &Path, flags: OFlags) -> Result<Option<OwnedFd>, Errno> {
    let Some((folder, name)) = path.parent().zip(path.file_name()) else { return Ok(None) };
    let folder = match fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        folder => folder?,
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..LOOKS {
        match fs::openat2(&folder, name, flags, Mode::empty(), ResolveFlags::CACHED) {
            Err(Errno::AGAIN) => {}
            Err(Errno::NOENT) => return Ok(None),
            // Linux before 5.12 cannot be asked like this, nor can one in a container that forbids it.
            Err(Errno::INVAL | Errno::NOSYS | Errno::PERM) => {
                return match fs::openat(&folder, name, flags, Mode::empty()) {
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
