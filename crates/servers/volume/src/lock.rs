//! Locks on an image, by which volumes and QEMUs exclude each other.
//!
//! The locks are those of QEMU's `file-posix` driver (block/file-posix.c, `raw_apply_lock_bytes` and
//! `raw_check_lock_bytes`): shared locks of open file descriptions on single bytes. A lock on byte 100 + i says "I use
//! permission i"; one on byte 200 + i says "nobody else may use it". Every program takes its locks first and then looks
//! for conflicts, so of two that start at the same time at most one succeeds; the other releases its locks. The locks
//! end with the last descriptor of the open file, and therefore with the process.
#![allow(unsafe_code)] // fcntl with F_OFD_* is in no safe wrapper that we have.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};
use thiserror::Error;
use tracing::warn;

/// The first of the bytes that say which permissions the holder uses.
const USES: i64 = 100;
/// The first of the bytes that say which permissions others must not use.
const FORBIDS: i64 = 200;

// Permissions, as QEMU numbers them (include/block/block-common.h, BLK_PERM_*).
const CONSISTENT_READ: u8 = 0;
const WRITE: u8 = 1;
const RESIZE: u8 = 3;
const ALL: std::ops::Range<u8> = 0..5;

/// The interval between two attempts of [`lock`].
const AGAIN: Duration = Duration::from_millis(20);

/// How long [`lock`] waits before it logs a warning.
const SILENT: Duration = Duration::from_secs(6);

/// What the holder of a lock does with the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The holder reads. Others may read too, but not write.
    Read,
    /// The holder reads and writes. Others may neither read nor write.
    Write,
}

impl Use {
    fn uses(self) -> &'static [u8] {
        match self {
            Self::Read => &[CONSISTENT_READ],
            Self::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        }
    }

    /// Returns the permissions that others must not use. While there is a reader, others must not write; while there is a
    /// writer, others must not rely on the contents either.
    fn forbids(self) -> &'static [u8] {
        match self {
            Self::Read => &[WRITE, RESIZE],
            Self::Write => &[CONSISTENT_READ, WRITE, RESIZE],
        }
    }
}

/// Why an image could not be locked.
#[derive(Debug, Error)]
pub enum LockError {
    /// Another program has locked it.
    #[error("image {path} is in use {how}{who}: stop that program first, or serve a copy")]
    InUse {
        /// The path of the image.
        path: String,
        /// How the other program uses it.
        how: &'static str,
        /// The processes that have it open, as far as that can be seen; begins with a space, or is empty.
        who: String,
    },
    /// The file system does not support locks.
    #[error("image {path} cannot be locked: {cause}; if nobody else uses it, write lock = false")]
    Impossible {
        /// The path of the image.
        path: String,
        /// The error of the kernel.
        cause: io::Error,
    },
}

/// Locks an open image until the last copy of its descriptor is closed. Retries for `patience`, because the files of a
/// killed process may stay open for a short time. `path` appears in messages.
pub fn lock(file: &File, path: &Path, want: Use, patience: Duration) -> Result<(), LockError> {
    lock_or_name(file, path, want, patience, who)
}

/// Does the same as [`lock`]; `who` finds out which processes have the image open. That means a look at all processes,
/// so `who` is called only for a message.
fn lock_or_name(
    file: &File,
    path: &Path,
    want: Use,
    patience: Duration,
    who: impl Fn(&File) -> String,
) -> Result<(), LockError> {
    let begin = Instant::now();
    let mut told = false;
    loop {
        let result = take(file, want).and_then(|()| contradiction(file, want));
        if !matches!(result, Ok(None)) {
            unlock(file);
        }
        if how(&result).is_none() || begin.elapsed() >= patience {
            return judge(result, path, || who(file));
        }
        if !told && begin.elapsed() > SILENT {
            if let Err(error) = judge(result, path, || who(file)) {
                warn!("{error}; trying again for {} seconds", patience.as_secs());
            }
            told = true;
        }
        std::thread::sleep(AGAIN);
    }
}

/// Returns the error that [`lock`] would return now. Takes no lock, so no other program is refused because of it.
pub fn look(file: &File, path: &Path, want: Use) -> Result<(), LockError> {
    judge(contradiction(file, want), path, || who(file))
}

/// Returns how another program uses the image, if the result of an attempt says that one does.
fn how(result: &io::Result<Option<&'static str>>) -> Option<&'static str> {
    match result {
        Ok(how) => *how,
        // Another program holds an exclusive lock. QEMU takes none, but others may.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Some("exclusively")
        }
        Err(_) => None,
    }
}

fn judge(
    result: io::Result<Option<&'static str>>,
    path: &Path,
    who: impl FnOnce() -> String,
) -> Result<(), LockError> {
    let how = how(&result);
    let path = || path.display().to_string();
    match (how, result) {
        (Some(how), _) => Err(LockError::InUse { path: path(), how, who: who() }),
        (None, Ok(_)) => Ok(()),
        (None, Err(cause)) => Err(LockError::Impossible { path: path(), cause }),
    }
}

fn take(file: &File, want: Use) -> io::Result<()> {
    for &bit in want.uses() {
        set(file, libc::F_RDLCK, USES + i64::from(bit), 1)?;
    }
    for &bit in want.forbids() {
        set(file, libc::F_RDLCK, FORBIDS + i64::from(bit), 1)?;
    }
    Ok(())
}

/// Returns the use by another program that conflicts with `want`.
fn contradiction(file: &File, want: Use) -> io::Result<Option<&'static str>> {
    for &bit in want.uses() {
        if is_locked_by_others(file, FORBIDS + i64::from(bit))? {
            return Ok(Some(if bit == CONSISTENT_READ { "by a writer" } else { "by others" }));
        }
    }
    for &bit in want.forbids() {
        if is_locked_by_others(file, USES + i64::from(bit))? {
            return Ok(Some(if bit == CONSISTENT_READ { "by a reader" } else { "by a writer" }));
        }
    }
    Ok(None)
}

/// Releases the lock, for all copies of the descriptor. The caller must not read or write the image afterwards.
pub fn unlock(file: &File) {
    let bits = i64::from(ALL.end);
    for first in [USES, FORBIDS] {
        // Releasing one's own lock does not fail in a way that could be handled.
        let _ = set(file, libc::F_UNLCK, first, bits);
    }
}

fn set(file: &File, kind: i32, start: i64, length: i64) -> io::Result<()> {
    let range = range(kind, start, length);
    // SAFETY: the descriptor is open, and F_OFD_SETLK reads a struct flock.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn is_locked_by_others(file: &File, byte: i64) -> io::Result<bool> {
    // An exclusive lock would conflict with every lock of another program.
    let mut range = range(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open, and F_OFD_GETLK reads and writes a struct flock.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut range) };
    if done == 0 { Ok(i32::from(range.l_type) != libc::F_UNLCK) } else { Err(io::Error::last_os_error()) }
}

fn range(kind: i32, start: i64, length: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: length,
        // Must be zero for locks of open file descriptions.
        l_pid: 0,
    }
}

/// Returns the processes that have the image open, as far as they are visible to this one. The kernel does not say
/// which process holds a lock of an open file description.
fn who(file: &File) -> String {
    let Ok(image) = file.metadata() else { return String::new() };
    let mut holders = Vec::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if pid == std::process::id() {
            continue;
        }
        let open = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let has = open
            .filter_map(|fd| std::fs::metadata(fd.path()).ok())
            .any(|file| (file.dev(), file.ino()) == (image.dev(), image.ino()));
        if has {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            holders.push(format!("process {pid} ({})", name.trim()));
        }
    }
    if holders.is_empty() { String::new() } else { format!(" (it is open in {})", holders.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn image() -> tempfile::NamedTempFile {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        image
    }

    fn try_lock(file: &File, path: &Path, want: Use) -> Result<(), LockError> {
        lock(file, path, want, Duration::ZERO)
    }

    #[test]
    fn one_writer_or_many_readers() {
        let image = image();
        let path = image.path();
        let (first, second, third) = (open(path), open(path), open(path));
        look(&second, path, Use::Write).unwrap();
        try_lock(&first, path, Use::Write).unwrap();
        look(&first, path, Use::Write).unwrap();
        assert!(matches!(look(&second, path, Use::Read), Err(LockError::InUse { .. })));
        for want in [Use::Write, Use::Read] {
            let error = try_lock(&second, path, want).unwrap_err().to_string();
            assert!(error.contains("in use") && error.contains(path.to_str().unwrap()), "{error}");
        }
        drop(first);
        try_lock(&second, path, Use::Read).unwrap();
        try_lock(&third, path, Use::Read).unwrap();
        assert!(matches!(try_lock(&open(path), path, Use::Write), Err(LockError::InUse { .. })));
    }

    #[test]
    fn a_refused_lock_leaves_nothing_behind() {
        let image = image();
        let path = image.path();
        let (reader, writer) = (open(path), open(path));
        try_lock(&reader, path, Use::Read).unwrap();
        try_lock(&writer, path, Use::Write).unwrap_err();
        drop(reader);
        // The refused writer still has the file open.
        try_lock(&open(path), path, Use::Write).unwrap();
        drop(writer);
    }

    #[test]
    fn holders_are_looked_for_only_where_they_are_named() {
        let image = image();
        let path = image.path();
        let (first, second) = (open(path), open(path));
        try_lock(&first, path, Use::Write).unwrap();
        let looks = std::cell::Cell::new(0);
        let who = |_: &File| {
            looks.set(looks.get() + 1);
            " (it is open in test)".to_owned()
        };
        let refused = lock_or_name(&second, path, Use::Write, 10 * AGAIN, who).unwrap_err().to_string();
        assert!(refused.contains("open in test"), "{refused}");
        // One look is for the error. A second one is for the warning, which is logged only if the lock took long.
        assert!(looks.get() <= 2, "{} times", looks.get());
    }

    #[test]
    fn a_lock_that_goes_soon_is_waited_for() {
        let image = image();
        let path = image.path().to_owned();
        let first = open(&path);
        try_lock(&first, &path, Use::Write).unwrap();
        let (second, at) = (open(&path), path.clone());
        let waiter = std::thread::spawn(move || lock(&second, &at, Use::Write, Duration::from_secs(30)));
        drop(first);
        waiter.join().unwrap().unwrap();
    }

    /// QEMU's block layer, with the image open for reading or writing, and its locks.
    struct Daemon(Child);

    impl Daemon {
        fn start(image: &Path, read_only: bool, socket: &Path) -> Result<Self, String> {
            let blockdev = format!(
                "driver=file,node-name=f,filename={},read-only={},locking=on",
                image.display(),
                if read_only { "on" } else { "off" }
            );
            let export = format!(
                "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={},writable={}",
                socket.display(),
                if read_only { "off" } else { "on" }
            );
            let mut child = Command::new("qemu-storage-daemon")
                // In this order, the monitor sends its greeting after the image was opened.
                .args(["--blockdev", &blockdev, "--export", &export])
                .args(["--chardev", "stdio,id=q", "--monitor", "chardev=q"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("qemu-storage-daemon is part of the tests' set-up (scripts/setup)");
            let mut greeting = String::new();
            BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut greeting).unwrap();
            if greeting.contains("QMP") {
                return Ok(Self(child));
            }
            let output = child.wait_with_output().unwrap();
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    impl Drop for Daemon {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn qemu_and_a_volume_keep_each_other_out() {
        let image = image();
        let path = image.path();
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("q");

        // The volume has the image: QEMU is refused.
        let volume = open(path);
        try_lock(&volume, path, Use::Write).unwrap();
        let error = Daemon::start(path, false, &socket).err().expect("QEMU opened a locked image");
        assert!(error.contains("lock"), "{error}");
        drop(volume);

        // QEMU has the image: the volume is refused, and the error names QEMU.
        let qemu = Daemon::start(path, false, &socket).unwrap();
        let volume = open(path);
        for want in [Use::Write, Use::Read] {
            let error = try_lock(&volume, path, want).unwrap_err().to_string();
            assert!(error.contains("qemu-storage-d") && error.contains(&qemu.0.id().to_string()), "{error}");
        }
        drop(qemu);
        try_lock(&volume, path, Use::Write).unwrap();
    }
}
