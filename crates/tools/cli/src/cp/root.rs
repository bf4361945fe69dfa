//! Folders whose contents are opened without leaving them.

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Flags of every open: it must not block, acquire a terminal, or reach a child process.
pub const SAFE: OFlags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
/// Flags to open a folder.
pub const FOLDER: OFlags = SAFE.union(OFlags::DIRECTORY);

/// How often an open is tried again. While another process renames folders on the path, the kernel cannot be sure to
/// stay inside, and fails.
const RACES: u32 = 1000;

/// Where the paths of users are looked up.
pub enum Root {
    /// On this machine, with the rights of the invoking user.
    Open,
    /// Below a folder: absolute paths and absolute symbolic links begin there, and `..` is refused.
    Confined(OwnedFd),
}

impl Root {
    /// Returns a root that is confined to a folder.
    pub fn at(path: &Path) -> Result<Self> {
        let folder = openat(CWD, path, FOLDER, Mode::empty())
            .with_context(|| format!("cannot serve {}", path.display()))?;
        Ok(Self::Confined(folder))
    }

    /// Opens the file at a path.
    pub fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        let shown = || super::frame::plain(path);
        // A descriptor with O_PATH cannot block, and openat2 does not accept the other flags for it.
        let flags = if flags.contains(OFlags::PATH) { flags | OFlags::CLOEXEC } else { flags | SAFE };
        let opened = match self {
            Self::Open => openat(CWD, os(path), flags, Mode::empty()),
            Self::Confined(folder) => {
                ensure!(
                    !path.split(|&b| b == b'/').any(|part| part == b".."),
                    "{:?}: `..` would lead out of the folder that is served",
                    shown()
                );
                let inside = &path[path.iter().position(|&b| b != b'/').unwrap_or(path.len())..];
                let inside = if inside.is_empty() { b"." } else { inside };
                let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
                confined(folder.as_fd(), inside, flags, resolve)
            }
        };
        opened.map_err(|errno| explain(errno, &shown()))
    }
}

/// Opens a file below a folder without following any symbolic link. An empty `path` is the folder itself.
pub fn open_below(folder: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    confined(folder, path, flags | SAFE, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
}

fn confined(
    folder: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    for _ in 0..RACES {
        match openat2(folder, os(path), flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// Returns the error of an open with an explanation.
pub fn explain(errno: Errno, shown: &str) -> anyhow::Error {
    let why = match errno {
        Errno::XDEV => "a symbolic link leads out of the folder".to_owned(),
        Errno::LOOP => "a symbolic link is in the way".to_owned(),
        Errno::NOSYS => "this kernel has no openat2(2); Linux 5.6 or later is needed".to_owned(),
        other => std::io::Error::from(other).to_string(),
    };
    anyhow::anyhow!("{shown}: {why}")
}

/// Returns the type of an open file. Fails for everything except files, folders and symbolic links.
pub fn kind_of(stat: &Stat, shown: &str) -> Result<FileType> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    let name = match kind {
        FileType::RegularFile | FileType::Directory | FileType::Symlink => return Ok(kind),
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "a special file",
    };
    bail!("{shown}: is {name}; only files, folders and symbolic links are copied")
}

/// Returns the status of an open file.
pub fn stat(fd: impl AsFd, shown: &str) -> Result<Stat> {
    fstat(fd).map_err(|errno| explain(errno, shown))
}

/// Returns a path for system calls.
pub fn os(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    #[test]
    fn nothing_leads_out_of_a_root() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("root");
        fs::create_dir_all(inside.join("etc")).unwrap();
        fs::write(dir.path().join("secret"), "outside").unwrap();
        fs::write(inside.join("etc/secret"), "inside").unwrap();
        fs::write(inside.join("secret"), "inside").unwrap();
        symlink("/etc/secret", inside.join("absolute")).unwrap();
        symlink("../secret", inside.join("up")).unwrap();
        symlink("../..", inside.join("upper")).unwrap();
        let root = Root::at(&inside).unwrap();
        let read = |path: &str| -> Result<String> {
            let mut text = String::new();
            fs::File::from(root.open(path.as_bytes(), OFlags::RDONLY)?).read_to_string(&mut text)?;
            Ok(text)
        };
        for path in ["etc/secret", "/etc/secret", "//etc/./secret", "absolute", "up"] {
            assert_eq!(read(path).unwrap(), "inside", "{path}");
        }
        for path in ["../secret", "etc/../../secret", "upper/secret/x", "nothing"] {
            assert!(read(path).is_err(), "{path}");
        }
        let Root::Confined(folder) = &root else { unreachable!("made above") };
        assert!(open_below(folder.as_fd(), b"etc/secret", OFlags::RDONLY).is_ok());
        assert!(open_below(folder.as_fd(), b"absolute", OFlags::RDONLY).is_err());
        assert!(open_below(folder.as_fd(), b"up", OFlags::RDONLY).is_err());
    }
}
