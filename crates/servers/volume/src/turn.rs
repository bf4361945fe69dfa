//! Makes the processes of one volume run one after another: the next one starts to serve only when the kernel has
//! finished all requests of the last one.
//!
//! Direct writes can continue for some time after the process that requested them was killed. If its successor repeated
//! them meanwhile, and then wrote newer data, the old writes could reach the disk last. The lock of an image keeps the
//! successor out, but not with `lock = false`, and not if two device nodes are the same disk. So each process also
//! locks a file beside its socket, and its io_urings hold that open file: the kernel closes it when the last request
//! has ended. The file stays.

use crate::sockets;
use ginnel_config::Problem;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::warn;

/// The interval at which a waiting process checks whether its predecessor has gone.
const AGAIN: Duration = Duration::from_millis(20);

/// The lock that this process holds while it may have requests under way.
#[derive(Debug)]
pub struct Turn {
    file: File,
    path: PathBuf,
}

impl Turn {
    /// Waits up to `patience` for the predecessor at this socket. Fails at once if the predecessor is alive and serves
    /// the socket, which `is_served` finds out.
    pub fn take(
        socket: &Path,
        patience: Duration,
        is_served: impl Fn(&Path) -> bool,
    ) -> Result<Self, Problem> {
        let path = path(socket);
        let failed =
            |e: io::Error| Problem::new(path.display(), e, "remove it, or choose a path that can be written");
        sockets::make_folder(socket)?;
        let begin = Instant::now();
        let mut told = false;
        loop {
            let mut options = OpenOptions::new();
            options.write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            // Where the folder is sticky, the kernel refuses to open another user's file if it could be made (fs.protected_regular).
            let file = match options.open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => match options.create_new(true).open(&path) {
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                    made => made.map_err(failed)?,
                },
                opened => opened.map_err(failed)?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // An operator may remove the file, and earlier versions do so at their end. So it may be one that was just removed.
                Ok(()) if is_there(&file, &path) => return Ok(Self { file, path }),
                Ok(()) => continue,
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            if begin.elapsed() >= patience || is_served(socket) {
                let what = "another process of this volume has not ended";
                let fix = "stop it first, or wait until its disk has answered";
                return Err(Problem::new(socket.display(), what, fix));
            }
            if !told {
                let seconds = patience.as_secs();
                warn!(
                    "the kernel has not finished the requests of the last process: waiting up to {seconds} seconds"
                );
                told = true;
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Returns whether a process of the volume at this socket is there, or the kernel has not finished its requests.
    pub fn is_taken(socket: &Path) -> bool {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path(socket));
        file.is_ok_and(|file| flock(file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK))
    }

    /// Returns the open file. Whatever the successor must wait for holds a copy of it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Opens the file a second time. The copy does not hold the lock, but whoever has it can see by `flock(2)` whether somebody
    /// does. `None` if the file is not there any more.
    ///
    /// # Errors
    ///
    /// Those of `open(2)`.
    pub fn witness(&self) -> io::Result<Option<File>> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&self.path)?;
        Ok(is_there(&self.file, &self.path).then_some(file))
    }

    /// Gives the turn up at once. All requests must be complete: the kernel may close its copies of the file later.
    pub fn end(self) {
        if let Err(error) = flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }
}

/// Returns the path of the lock of the volume at this socket.
fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

fn is_there(file: &File, path: &Path) -> bool {
    let identity = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    match (file.metadata(), path.symlink_metadata()) {
        (Ok(open), Ok(there)) => identity(open) == identity(there),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sub/v.sock");
        assert!(!Turn::is_taken(&socket));
        let first = Turn::take(&socket, Duration::ZERO, sockets::is_served).unwrap();
        assert!(Turn::is_taken(&socket));
        let error = Turn::take(&socket, Duration::ZERO, sockets::is_served).unwrap_err().to_string();
        assert!(error.contains("has not ended"), "{error}");
        // A copy that the kernel holds for a process that has ended.
        let copy = first.file().try_clone().unwrap();
        drop(first);
        assert!(Turn::is_taken(&socket));
        Turn::take(&socket, Duration::ZERO, sockets::is_served).unwrap_err();
        drop(copy);
        // A process that another test is starting at this moment has a copy of the descriptor until its program runs.
        let next = Turn::take(&socket, Duration::from_secs(30), sockets::is_served).unwrap();
        let witness = next.witness().unwrap().unwrap();
        assert_eq!(flock(&witness, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
        // The kernel may still have its copy.
        let copy = next.file().try_clone().unwrap();
        next.end();
        let next = Turn::take(&socket, Duration::ZERO, sockets::is_served).unwrap();
        drop(copy);
        // As an operator does, or an earlier version at its end.
        std::fs::remove_file(socket.with_file_name("v.sock.lock")).unwrap();
        assert!(!Turn::is_taken(&socket) && next.witness().is_err());
        Turn::take(&socket, Duration::ZERO, sockets::is_served).unwrap();
    }

    #[test]
    fn a_live_process_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("v.sock");
        let _first = Turn::take(&socket, Duration::ZERO, sockets::is_served).unwrap();
        let _serves = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // An hour would be too long for any test.
        Turn::take(&socket, Duration::from_secs(3600), sockets::is_served).unwrap_err();
    }
}
