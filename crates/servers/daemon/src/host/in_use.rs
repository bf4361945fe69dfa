//! Whether anybody else has a file: opened, mapped, or in a message that nobody has received.
//!
//! The kernel tells this only to whoever asks for a write lease (`F_SETLEASE`): it grants one if the file has no open file description
//! other than the one that asks. A mapping keeps the description by which it was made, also when the descriptor is closed long since.
//!
//! Who has only pages of the file is not seen: pages that are pinned for a device or for `io_uring`, or lie in a pipe. They stay with the
//! pages. So a file whose pages anybody may have kept is removed, and another one is made in its place.
#![allow(unsafe_code)] // For commands of `fcntl` that no safe crate offers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `fcntl(2)`; not in the crate `libc`.
const F_SETSIG: libc::c_int = 10;

/// Nobody else has this file. Who opens it waits until this is dropped, but at most for `/proc/sys/fs/lease-break-time` (45 s).
#[derive(Debug)]
pub struct Alone<'a>(&'a File);

impl<'a> Alone<'a> {
    /// Returns `None` if others have the file.
    ///
    /// This process counts as another one if it has the file a second time, or a mapping of it. Copies of the descriptor do not count,
    /// also those of other processes. So `file` must have been opened for this, and must not have been passed on.
    ///
    /// The caller needs to own the file, or `CAP_LEASE`.
    pub fn with(file: &'a File) -> io::Result<Option<Self>> {
        // Whoever opens the file while there is a lease has a signal sent, by default SIGIO, which ends a process. SIGURG does not.
        set(file, F_SETSIG, libc::SIGURG)?;
        match set(file, libc::F_SETLEASE, libc::F_WRLCK) {
            Ok(()) => Ok(Some(Self(file))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        // This fails only if the kernel has taken the lease away.
        let _ = set(self.0, libc::F_SETLEASE, libc::F_UNLCK);
    }
}

/// Returns whether others have this file, under the conditions of [`Alone::with`].
pub fn others_have(file: &File) -> io::Result<bool> {
    Ok(Alone::with(file)?.is_none())
}

fn set(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<()> {
    // SAFETY: these commands take a number and no pointer, and the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::{Mapping, Protection};
    use std::io::{Read, Write};
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::{Path, PathBuf};
    use std::process::{Child, Stdio};
    use tempfile::TempDir;

    kit::program! {
        fn other() {
            let path = std::env::var("TEST_FILE").unwrap();
            let how = std::env::var("TEST_HOW").unwrap();
            let file = File::options().read(true).write(how != "reads").open(path).unwrap();
            let _mapping = (how == "maps").then(|| Mapping::of_file(&file, 0, 4096, Protection::ReadWrite).unwrap());
            let _file = (how != "maps").then_some(file);
            std::io::stdout().write_all(b"\n").unwrap();
            let _ = std::io::stdin().read(&mut [0]);
        }
    }

    fn start_other(path: &Path, how: &str) -> Child {
        let mut command = kit::program::command(other);
        command.env("TEST_FILE", path).env("TEST_HOW", how);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    }

    fn file() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("file");
        File::create(&path).unwrap().set_len(4096).unwrap();
        (folder, path)
    }

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    /// Waits until nobody else has the file: a process that another test has just started may have a copy of a descriptor of ours.
    fn wait_until_alone(path: &Path) {
        kit::wait::wait_until("nobody has the file", || !others_have(&open(path)).unwrap());
    }

    #[test]
    fn others_have_what_they_have_opened_or_mapped() {
        let (_folder, path) = file();
        wait_until_alone(&path);
        for how in ["reads", "writes", "maps"] {
            let mut child = start_other(&path, how);
            assert!(others_have(&open(&path)).unwrap(), "{how}");
            drop(child.stdin.take());
            child.wait().unwrap();
            wait_until_alone(&path);
        }
    }

    #[test]
    fn own_descriptions_and_mappings_count_and_copies_of_descriptors_do_not() {
        let (_folder, path) = file();
        wait_until_alone(&path);
        let file = open(&path);
        let copy = file.try_clone().unwrap();
        assert!(!others_have(&file).unwrap());
        let second = File::open(&path).unwrap();
        assert!(others_have(&file).unwrap());
        drop((copy, second));
        kit::wait::wait_until("the second one is closed", || !others_have(&file).unwrap());
        let mapping = Mapping::of_file(&file, 0, 4096, Protection::ReadWrite).unwrap();
        assert!(!others_have(&file).unwrap(), "it has the description that asks");
        drop(file);
        assert!(others_have(&open(&path)).unwrap());
        drop(mapping);
        wait_until_alone(&path);
    }

    #[test]
    fn who_opens_it_meanwhile_waits_and_ends_nobody() {
        let (_folder, path) = file();
        wait_until_alone(&path);
        let file = open(&path);
        let alone = Alone::with(&file).unwrap().unwrap();
        let mut options = File::options();
        let impatient = options.read(true).custom_flags(libc::O_NONBLOCK).open(&path);
        // The kernel has sent the signal, and this process lives.
        assert_eq!(impatient.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        drop(alone);
        options.open(&path).unwrap();
    }
}
