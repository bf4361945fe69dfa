//! The **finder**: a process that looks up a path for the daemon, where others may hold the lock of a folder on the way.
//!
//! What it finds, the kernel has at hand after that. If it takes long, it is killed, and not waited for. It is the daemon without `exec`,
//! see `forked`.
#![allow(unsafe_code)] // A process without `exec`.

use crate::at_hand;
use crate::forked::{Abandoned, Forked, name, part_from_daemon};
use crate::namer::Unnamed;
use crate::patience::Patience;
use crate::spawned::becomes_readable;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Opens a file to be connected to, also through symbolic links: whoever makes these finds out no more than by a socket of his own, because
/// the daemon speaks only to the process that it expects there.
const TO_CONNECT: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// The daemon's side of the finder.
#[derive(Debug)]
pub struct Finder {
    patience: Patience,
    /// What is looked up by those that may be held up.
    abandoned: Vec<(PathBuf, Abandoned)>,
}

impl Default for Finder {
    fn default() -> Self {
        Self { patience: Patience::meanwhile(), abandoned: Vec::new() }
    }
}

impl Finder {
    /// Finds a file, to be connected to. Waits only if the kernel does not have it at hand, and for a short time.
    pub fn find(&mut self, path: &Path) -> Result<OwnedFd, Unnamed> {
        let look = || at_hand::look(path, TO_CONNECT).map_err(io::Error::from);
        if let Some(found) = look()? {
            return Ok(found);
        }
        self.abandoned.retain(|(_, finder)| !finder.is_buried());
        let begin = Instant::now();
        let left = self.patience.left(begin);
        if left.is_zero() || self.abandoned.iter().any(|(of, _)| of == path) {
            return Err(Unnamed::Held);
        }
        let finder = start(path)?;
        let has_ended = becomes_readable(finder.ended(), Some(begin + left));
        self.patience.waited(begin.elapsed());
        if !has_ended {
            self.abandoned.push((path.to_owned(), finder.abandon()));
            return Err(Unnamed::Held);
        }
        // A file system that never has its files at hand, as some network file systems, looks the same.
        Ok(look()?.ok_or(io::Error::from(Errno::NOENT))?)
    }
}

fn start(path: &Path) -> io::Result<Forked> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `part_from_daemon`, `name` and `open` of a C string only make system calls: they use no allocator, no lock and no log.
    unsafe {
        Forked::start(|| {
            part_from_daemon(&[]);
            name(c"ginneld-finder");
            let _ = open(path.as_c_str(), TO_CONNECT, Mode::empty());
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::at_hand::tests::link_not_at_hand;
    use std::time::Duration;

    #[test]
    fn what_lies_behind_a_link_that_is_not_at_hand_is_found() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let link = link_not_at_hand(dir.path());
        kit::require!(at_hand::look(&link.join("file"), TO_CONNECT).unwrap().is_none(), "no times of access");
        let mut finder = Finder::default();
        let found = |finder: &mut Finder, name| finder.find(&link.join(name)).map(|_| ());
        assert!(found(&mut finder, "file").is_ok());
        assert!(
            matches!(found(&mut finder, "none"), Err(Unnamed::Failed(error)) if error.kind() == io::ErrorKind::NotFound)
        );
        assert!(finder.abandoned.is_empty());
        // One whose time is over waits for nobody.
        let link = link_not_at_hand(dir.path());
        finder.patience = Patience::new(Duration::ZERO, 0);
        assert!(matches!(finder.find(&link.join("file")), Err(Unnamed::Held)));
    }
}
