//! The process that changes a segment's file. A program that has the file open can hold the lock of its inode for ever (a write whose
//! bytes never come), and each of these calls waits for that lock.

use super::in_use::Alone;
use crate::length;
use crate::spawned::end_with_parent;
use anyhow::Context as _;
use rustix::fs::{
    FallocateFlags, FileType, Gid, Mode, OFlags, Uid, fallocate, fchmod, fchown, fstat, ftruncate, open,
};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// The memory of a truncated file is allocated in pieces of this size, so that the file's lock is free in between. A multiple of all huge
/// pages that segments can have.
const PIECE: u64 = 16 << 20;

/// Arguments of `ginneld file`. Standard input is the file. The work is done in the order in which the options are here.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// The file, for messages.
    #[arg(long)]
    pub path: PathBuf,
    /// Make the file this long and allocate its memory, as long as others truncate it. Writes a byte to standard output each time that
    /// it has the length.
    #[arg(long)]
    pub restore: Option<u64>,
    /// Make the file this long if it is longer.
    #[arg(long)]
    pub shorten: Option<u64>,
    /// Allocate its memory from here.
    #[arg(long, requires = "allocate_to")]
    pub allocate_from: Option<u64>,
    /// Allocate its memory up to here.
    #[arg(long)]
    pub allocate_to: Option<u64>,
    /// Give it to this user.
    #[arg(long)]
    pub owner: Option<u32>,
    /// Give it to this group.
    #[arg(long)]
    pub group: Option<u32>,
    /// Set its mode, a decimal number.
    #[arg(long)]
    pub mode: Option<u32>,
    /// Remove its name.
    #[arg(long)]
    pub remove: bool,
    /// Remove the file with this path, whatever standard input is, unless others have it.
    #[arg(long)]
    pub remove_unused: bool,
}

impl Args {
    /// Returns the arguments of a command for this work.
    pub fn to_command_line(&self) -> Vec<OsString> {
        let numbers = [
            ("--restore", self.restore),
            ("--shorten", self.shorten),
            ("--allocate-from", self.allocate_from),
            ("--allocate-to", self.allocate_to),
            ("--owner", self.owner.map(u64::from)),
            ("--group", self.group.map(u64::from)),
            ("--mode", self.mode.map(u64::from)),
        ];
        let mut line: Vec<OsString> = vec!["file".into(), "--path".into(), self.path.clone().into()];
        for (option, number) in numbers {
            line.extend(number.into_iter().flat_map(|number| [option.into(), number.to_string().into()]));
        }
        line.extend(self.remove.then(|| "--remove".into()));
        line.extend(self.remove_unused.then(|| "--remove-unused".into()));
        line
    }
}

/// Does the work.
pub fn run(args: Args) -> anyhow::Result<()> {
    end_with_parent()?;
    let file = io::stdin();
    let path = args.path.display();
    if let Some(size) = args.restore {
        let tell = || {
            // If nobody listens, the daemon has gone.
            let _ = io::stdout().write_all(&[1]).and_then(|()| io::stdout().flush());
        };
        restore(file.as_fd(), size, tell).with_context(|| {
            format!("the memory of {path}, a part of which was taken away, cannot be allocated again: a QEMU that touches that part may die")
        })?;
    }
    if let Some(size) = args.shorten
        && length::of(&file) > size
    {
        ftruncate(&file, size)
            .with_context(|| format!("{path}, which somebody has made longer, cannot be cut"))?;
    }
    if let (Some(from), Some(to)) = (args.allocate_from, args.allocate_to) {
        allocate(file.as_fd(), from, to).with_context(|| {
            format!("the memory of {path} cannot be allocated (is its file system full?)")
        })?;
    }
    if args.owner.is_some() || args.group.is_some() {
        fchown(&file, args.owner.map(Uid::from_raw), args.group.map(Gid::from_raw)).with_context(|| {
            format!(
                "{path} cannot be given to its owner and group: run the daemon as root, or leave these out"
            )
        })?;
    }
    if let Some(mode) = args.mode {
        fchmod(&file, Mode::from_raw_mode(mode))
            .with_context(|| format!("the mode of {path} cannot be set: run the daemon as its owner"))?;
    }
    if args.remove {
        // Whoever waits for the file's lock while it removes the name holds the lock of the folder. So this waits for it first.
        if let Ok(stat) = fstat(&file)
            && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        {
            let _ = fchmod(&file, Mode::from_raw_mode(stat.st_mode & 0o7777));
        }
        match std::fs::remove_file(&args.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("{path} cannot be removed"));
            }
            _ => {}
        }
    }
    if args.remove_unused {
        remove_unused(&args.path).with_context(|| {
            format!("{path}, of which this daemon does not know who has it, can be neither examined nor removed (is CAP_LEASE missing, or fs.leases-enable 0?)")
        })?;
    }
    Ok(())
}

/// Removes a file unless others have it. Who opens it at this moment has a file without a name, as if he had come a moment earlier, and
/// nobody else will ever have its memory.
fn remove_unused(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(()),
        // Somebody else examines it in the same way.
        Err(Errno::AGAIN) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    match Alone::with(&file)? {
        Some(_alone) => std::fs::remove_file(path),
        None => Ok(()),
    }
}

/// Allocates memory with one call, which the kernel undoes if there is not enough.
fn allocate(file: BorrowedFd<'_>, from: u64, to: u64) -> Result<(), Errno> {
    loop {
        match fallocate(file, FallocateFlags::empty(), from, to - from) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Restores the size of a file, calls `has_size`, and then allocates its memory; repeats this as long as others truncate it.
fn restore(file: BorrowedFd<'_>, size: u64, has_size: impl Fn()) -> Result<(), Errno> {
    let (mut told, mut at) = (false, 0);
    while !told || at < size || length::of(file) < size {
        if !told || length::of(file) < size {
            if length::of(file) < size {
                ftruncate(file, size)?;
            }
            has_size();
            (told, at) = (true, 0);
        }
        let end = (at + PIECE).min(size);
        if at < end {
            allocate(file, at, end)?;
        }
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::fs::MetadataExt;

    const SIZE: u64 = PIECE + (4 << 20);

    #[test]
    fn a_file_truncated_meanwhile_is_restored_too() {
        let cut = tempfile::tempfile_in("/dev/shm").unwrap();
        let cuts = std::cell::Cell::new(0);
        let again = || {
            if cuts.replace(cuts.get() + 1) < 5 {
                cut.set_len(4096).unwrap();
            }
        };
        assert_eq!(restore(cut.as_fd(), SIZE, again), Ok(()));
        assert_eq!(cuts.get(), 6);
        let stat = cut.metadata().unwrap();
        assert_eq!((stat.len(), stat.blocks() * 512), (SIZE, SIZE));
    }

    #[test]
    fn the_command_line_says_what_to_do() {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            args: Args,
        }
        let args = Args {
            path: "/a b".into(),
            allocate_from: Some(7),
            allocate_to: Some(1 << 40),
            mode: Some(0o660),
            remove: true,
            remove_unused: true,
            ..Args::default()
        };
        let parsed = Cli::parse_from(args.to_command_line()).args;
        assert_eq!(format!("{parsed:?}"), format!("{args:?}"));
    }
}
