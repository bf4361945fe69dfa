//! A file that is being received: it is written in the target folder under a hidden name, and renamed when it is
//! complete.
//!
//! The hidden name is derived from the final one. So the next copy of the same file finds the part that an interrupted
//! copy has left, and continues it if both sides agree on its checksum.

use super::checksum::Checksum;
use super::frame::{RESUMABLE, plain};
use super::hidden_file::HiddenFile;
use super::root::{SAFE, explain, os};
use anyhow::{Context, Result, bail};
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, flock, fstat,
    ftruncate, futimens, openat, renameat, seek, statat,
};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The longest name of a file on Linux, in bytes.
const NAME_MAX: usize = 255;
/// How often a file that disappears while it is being opened is opened again.
const TRIES: u32 = 100;

/// An incomplete file.
pub struct Partial {
    file: File,
    hidden: HiddenFile,
    folder: Arc<OwnedFd>,
    name: Vec<u8>,
    /// The checksum of the file's content.
    pub sum: Checksum,
}

impl Partial {
    /// Begins the file `name` in `folder`. With `resume`, continues the part that an earlier copy has left.
    pub fn begin(folder: &Arc<OwnedFd>, name: &[u8], resume: bool) -> Result<Self> {
        let shown = plain(name);
        if let Ok(stat) = statat(folder, os(name), AtFlags::SYMLINK_NOFOLLOW)
            && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
        {
            bail!("{shown}: is a folder here, and a file cannot replace it; remove it first");
        }
        let hidden_name = hidden_name(name);
        for _ in 0..TRIES {
            let file = open_hidden(folder.as_fd(), &hidden_name).with_context(|| {
                format!("{shown}: its hidden file {} cannot be opened", plain(&hidden_name))
            })?;
            // A file system without locks is acceptable: two copies at once then end with a wrong checksum, not with a
            // wrong file.
            if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
                bail!("{shown}: another copy is writing it now; wait for its end");
            }
            // The previous holder of the lock may have renamed or removed the opened file.
            let (ours, named) = (fstat(&file), statat(folder, os(&hidden_name), AtFlags::SYMLINK_NOFOLLOW));
            match (ours, named) {
                (Ok(ours), Ok(named)) if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino) => {}
                _ => continue,
            }
            let hidden = HiddenFile::new(folder.clone(), hidden_name);
            let name = name.to_vec();
            let mut partial =
                Self { file: file.into(), hidden, folder: folder.clone(), name, sum: Checksum::new() };
            if resume {
                partial
                    .take_stock()
                    .with_context(|| format!("{shown}: reading the part that is here already"))?;
            } else {
                partial.restart()?;
            }
            return Ok(partial);
        }
        bail!("{shown}: another program keeps replacing {}", plain(&hidden_name))
    }

    /// Computes the checksum of the part that an earlier copy has left.
    fn take_stock(&mut self) -> Result<()> {
        let mut piece = vec![0; 256 << 10];
        let len = self.file.metadata()?.len();
        // The rest must begin at an offset that is suitable for direct writes and at which a stripe of the checksum
        // ends.
        let mut left = len - len % 4096;
        while left > 0 {
            let want = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            self.file.read_exact(&mut piece[..want])?;
            self.sum.add(&piece[..want]);
            left -= want as u64;
        }
        ftruncate(&self.file, self.sum.len())?;
        self.hidden.keep(self.sum.len() >= RESUMABLE);
        Ok(())
    }

    /// Discards the content.
    pub fn restart(&mut self) -> Result<()> {
        self.hidden.keep(false);
        self.sum = Checksum::new();
        ftruncate(&self.file, 0)?;
        seek(&self.file, rustix::fs::SeekFrom::Start(0))?;
        Ok(())
    }

    /// Returns the descriptor of the file, at the position of the next bytes.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Notes that the file has grown. A part that is long enough is kept for a later copy.
    pub fn grown(&self) {
        self.hidden.keep(self.sum.len() >= RESUMABLE);
    }

    /// Completes the file: sets its mode and time, and renames it.
    pub fn finish(self, mode: u32, modified: Timespec) -> Result<()> {
        let shown = || plain(&self.name);
        fchmod(&self.file, permissions(mode)).map_err(|e| explain(e, &shown()))?;
        futimens(&self.file, &times(modified)).map_err(|e| explain(e, &shown()))?;
        renameat(&self.folder, os(self.hidden.name()), &self.folder, os(&self.name))
            .map_err(|e| explain(e, &shown()))?;
        self.hidden.gone();
        Ok(())
    }
}

/// Opens the hidden file. Refuses one that does not belong to this user alone, because another user could have put it
/// there.
fn open_hidden(folder: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | SAFE;
    let file = openat(folder, os(name), flags, Mode::RUSR | Mode::WUSR).map_err(|errno| match errno {
        Errno::LOOP => anyhow::anyhow!("there is a symbolic link of that name"),
        other => std::io::Error::from(other).into(),
    })?;
    let stat = fstat(&file)?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !regular || stat.st_nlink > 1 || stat.st_uid != rustix::process::geteuid().as_raw() {
        bail!("there is a file of that name which is not this user's alone; remove it");
    }
    Ok(file)
}

/// Returns `.NAME.ginnel-part`, shortened if that would be too long.
pub fn hidden_name(name: &[u8]) -> Vec<u8> {
    const SUFFIX: &[u8] = b".ginnel-part";
    let room = NAME_MAX - 1 - SUFFIX.len();
    let stem = if name.len() <= room {
        name.to_vec()
    } else {
        let mut sum = Checksum::new();
        sum.add(name);
        let tail = format!("~{:016x}", sum.value());
        [&name[..room - tail.len()], tail.as_bytes()].concat()
    };
    [b".", stem.as_slice(), SUFFIX].concat()
}

/// Returns the permission bits that a copy keeps. The set-user-ID, set-group-ID and sticky bits are not copied: the
/// peer chooses them, and they would have another meaning here.
pub fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o777)
}

/// Returns times that set the modification time and leave the access time.
pub fn times(modified: Timespec) -> Timestamps {
    let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    Timestamps { last_access: omit, last_modification: modified }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, symlink};

    const TIME: Timespec = Timespec { tv_sec: 1_000_000_000, tv_nsec: 5 };

    fn folder(path: &std::path::Path) -> Arc<OwnedFd> {
        Arc::new(File::open(path).unwrap().into())
    }

    fn write(partial: &mut Partial, bytes: &[u8]) {
        (&partial.file).write_all(bytes).unwrap();
        partial.sum.add(bytes);
        partial.grown();
    }

    fn names(path: &std::path::Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "old").unwrap();
        let mut partial = Partial::begin(&folder(dir.path()), b"f", true).unwrap();
        write(&mut partial, b"new");
        assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"old");
        partial.finish(0o4640, TIME).unwrap();
        let meta = fs::metadata(dir.path().join("f")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.mtime(), meta.mtime_nsec()), (0o640, 1_000_000_000, 5));
        assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["f"]);
    }

    #[test]
    fn a_short_one_leaves_nothing_and_a_long_one_its_part() {
        let dir = tempfile::tempdir().unwrap();
        let mut partial = Partial::begin(&folder(dir.path()), b"f", true).unwrap();
        write(&mut partial, b"new");
        drop(partial);
        assert_eq!(names(dir.path()), [""; 0]);

        let mut partial = Partial::begin(&folder(dir.path()), b"f", true).unwrap();
        let bytes = vec![7; RESUMABLE as usize + 100];
        write(&mut partial, &bytes);
        drop(partial);
        assert_eq!(names(dir.path()), [".f.ginnel-part"]);

        let partial = Partial::begin(&folder(dir.path()), b"f", true).unwrap();
        let mut expected = Checksum::new();
        expected.add(&bytes[..RESUMABLE as usize]);
        assert_eq!((partial.sum.len(), partial.sum.value()), (RESUMABLE, expected.value()));
        drop(partial);
        let partial = Partial::begin(&folder(dir.path()), b"f", false).unwrap();
        assert_eq!(partial.sum.len(), 0);
    }

    #[test]
    fn one_copy_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = Partial::begin(&folder(dir.path()), b"f", true).unwrap();
        let error = Partial::begin(&folder(dir.path()), b"f", true).err().unwrap();
        assert!(error.to_string().contains("another copy"), "{error}");
        first.finish(0o600, TIME).unwrap();
        Partial::begin(&folder(dir.path()), b"f", true).unwrap();
    }

    #[test]
    fn traps_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("victim"), "precious").unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        symlink("victim", dir.path().join(".a.ginnel-part")).unwrap();
        fs::hard_link(dir.path().join("victim"), dir.path().join(".b.ginnel-part")).unwrap();
        for name in ["a", "b", "d"] {
            assert!(Partial::begin(&folder(dir.path()), name.as_bytes(), true).is_err(), "{name}");
        }
        assert_eq!(fs::read(dir.path().join("victim")).unwrap(), b"precious");
    }

    #[test]
    fn long_names_stay_within_the_limit_and_apart() {
        let (a, b) = ([b'x'; 255], [[b'x'; 254].as_slice(), b"y"].concat());
        assert!(hidden_name(&a).len() <= NAME_MAX && hidden_name(&a) != hidden_name(&b));
        assert_eq!(hidden_name(b"f"), b".f.ginnel-part");
    }
}
