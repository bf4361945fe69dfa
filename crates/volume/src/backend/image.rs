//! Raw files and block devices.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ginnel_volume_control::config::{self, Direct};
use thiserror::Error;
use tracing::{info, warn};

use super::alignment::{self, Alignment};
use super::blkdiscard::Discarder;
use super::uring;

/// Why a disk cannot be opened, or resized.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The image.
    #[error("image {}: {what}; {fix}", path.display())]
    Image {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What helps.
        fix: &'static str,
    },
    /// A ram disk.
    #[error("no memory for a ram disk of {bytes} bytes: {why}; choose a smaller one")]
    Memory {
        /// Its size.
        bytes: u64,
        /// What the kernel says.
        why: String,
    },
}

/// An open image.
///
/// It is opened once for each worker, and once more. Linux reports data that it could not write back once to each open file
/// description; if workers shared one, the first that asked would take the report away from the others.
#[derive(Debug)]
pub struct Image {
    /// The first one carries the lock, and is no worker's.
    files: Vec<File>,
    path: PathBuf,
    direct: bool,
    iopoll: bool,
    align: Alignment,
    is_file: bool,
    /// Of a block device.
    sector: Option<u64>,
    /// It is a file, or a device that has discards.
    can_discard: bool,
    /// Of a block device whose discards io_uring cannot do.
    discarder: Option<Discarder>,
    /// As the configuration has it.
    size: Option<u64>,
    read_only: bool,
}

impl Image {
    /// Makes the file of a disk, without any bytes, if it is not there. It gets its size when it is locked. Nothing is made
    /// below `/dev`, where a file is mistaken for a device that has not come yet, and is gone at the next boot.
    pub fn create(disk: &config::Disk) -> Result<(), ImageError> {
        let path = disk.path.clone().unwrap_or_default();
        if path.symlink_metadata().is_ok() {
            return Ok(());
        }
        let error = |what: String, fix| ImageError::Image { path: path.clone(), what, fix };
        let failed = |e: io::Error| error(format!("cannot be made: {e}"), "look at the path");
        if disk.size.is_none() || disk.read_only {
            let what = "is not there, and cannot be made: it has no size, or is read-only".to_owned();
            return Err(error(what, "write a size, and no read-only"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().map_err(failed)?;
        if folder.starts_with("/dev") {
            let what = "is no device, and files are not made there".to_owned();
            return Err(error(what, "see to it that the device is there first"));
        }
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            // Somebody else was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map(|_| info!(image = %path.display(), "made a new image")).map_err(failed),
        }
    }

    /// Opens the image of a disk for so many workers.
    pub fn open(disk: &config::Disk, workers: usize) -> Result<Self, ImageError> {
        let path = disk.path.clone().unwrap_or_default();
        let error = |what: String, fix| ImageError::Image { path: path.clone(), what, fix };
        let open = |flags: i32| {
            OpenOptions::new()
                .read(true)
                .write(!disk.read_only)
                .custom_flags(flags | libc::O_CLOEXEC)
                .open(&path)
        };
        let (file, direct) = match disk.direct {
            Direct::Off => (open(0), false),
            Direct::On => (open(libc::O_DIRECT), true),
            Direct::Auto => match open(libc::O_DIRECT) {
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => (open(0), false),
                other => (other, true),
            },
        };
        let file = file.map_err(|e| {
            let fix = match e.raw_os_error() {
                Some(libc::EINVAL) => "the file system has no direct I/O: write direct = \"auto\" or \"off\"",
                Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
                    "give this process's user the right to it, or write read-only = true"
                }
                Some(libc::ENOENT) => {
                    "see that its file system is mounted, or its device there; to make a new file, start once with --create"
                }
                _ => "look at the path",
            };
            error(format!("cannot be opened: {e}"), fix)
        })?;
        let identity = |file: &File| file.metadata().map_err(|e| error(e.to_string(), "look at the path"));
        let opened = identity(&file)?;
        let kind = opened.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(error("is neither a file nor a block device".to_owned(), "name one of them"));
        }
        let is_file = kind.is_file();
        let sector = if is_file { None } else { rustix::fs::ioctl_blksszget(&file).ok().map(u64::from) };
        let mut image = Self {
            files: vec![file],
            path: path.clone(),
            direct,
            iopoll: disk.iopoll,
            align: Alignment::NONE,
            is_file,
            sector: sector.filter(|bytes| bytes.is_power_of_two()),
            can_discard: is_file || alignment::queue_limit(opened.rdev(), "discard_max_bytes") != Some(0),
            discarder: None,
            size: disk.size,
            read_only: disk.read_only,
        };
        if !is_file && !disk.read_only && image.can_discard && !uring::can_discard(image.file()) {
            image.discarder = Some(Discarder::default());
            info!(image = %path.display(), "io_uring has no discard here (Linux 6.12): a thread makes them");
        }
        if direct {
            let why = match Alignment::of(image.file()) {
                Some(align) if align.offset <= disk.sector as usize => {
                    image.align = align;
                    None
                }
                Some(Alignment { offset, .. }) => {
                    let what = format!("direct I/O is in units of {offset} bytes here");
                    Some((
                        format!("{what}, and the disk has sectors of {}", disk.sector),
                        "write sector = 4096",
                    ))
                }
                None => Some(("has no direct I/O".to_owned(), "use another file system")),
            };
            if let Some((what, fix)) = why {
                if disk.direct == Direct::On {
                    return Err(error(format!("{what}; {fix}"), "or write direct = \"off\""));
                }
                warn!(image = %path.display(), "{what}: through the page cache; {fix}, or write direct = \"off\"");
                image.files[0] = open(0).map_err(|e| error(e.to_string(), "look at the path"))?;
                image.direct = false;
            }
        } else if disk.direct == Direct::Auto {
            warn!(image = %path.display(), "the file system has no direct I/O: through the page cache");
        }
        for _ in 0..workers {
            let again = open(if image.direct { libc::O_DIRECT } else { 0 })
                .map_err(|e| error(format!("cannot be opened once more: {e}"), "look at the path"))?;
            let other = identity(&again)?;
            if (other.dev(), other.ino()) != (opened.dev(), opened.ino()) {
                let what = "was replaced by another file while it was opened".to_owned();
                return Err(error(what, "start the volume again"));
            }
            image.files.push(again);
        }
        let bytes = image.bytes()?;
        if disk.size.is_none() && bytes < u64::from(disk.sector) {
            return Err(error(format!("has only {bytes} bytes"), "make it larger, or write a size"));
        }
        Ok(image)
    }

    /// Gives a file the size that its disk is to have, if it is smaller. For who has the lock.
    pub fn fit(&self) -> Result<(), ImageError> {
        let Some(size) = self.size else { return Ok(()) };
        if !self.read_only {
            self.grow(size)?;
        }
        match self.bytes()? {
            bytes if bytes < size => {
                let fix = "make it larger, or write a smaller size";
                Err(self.error(format!("has only {bytes} bytes"), fix))
            }
            _ => Ok(()),
        }
    }

    /// As it is now.
    pub fn bytes(&self) -> Result<u64, ImageError> {
        // Also right for block devices.
        let end = self.file().seek(SeekFrom::End(0));
        end.map_err(|e| self.error(format!("has no size: {e}"), "look at the device"))
    }

    /// Makes a file at least that long. Never cuts it.
    fn grow(&self, bytes: u64) -> Result<(), ImageError> {
        if self.is_file && self.bytes()? < bytes {
            self.file().set_len(bytes).map_err(|e| {
                self.error(format!("cannot grow to {bytes} bytes: {e}"), "see what limits it")
            })?;
        }
        Ok(())
    }

    /// The size that a disk may have from now on. A file grows if need be; a block device is as large as it is.
    pub fn resize(&self, bytes: Option<u64>) -> Result<u64, ImageError> {
        let Some(bytes) = bytes else { return self.bytes() };
        self.grow(bytes)?;
        let have = self.bytes()?;
        if have < bytes {
            return Err(self.error(format!("has only {have} bytes"), "make the device larger first"));
        }
        Ok(bytes)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file that is no worker's, for its lock.
    pub fn file(&self) -> &File {
        &self.files[0]
    }

    /// The open file of a worker.
    pub(super) fn file_of(&self, worker: usize) -> &File {
        &self.files[1 + worker]
    }

    /// Makes durable what can be, and takes the kernel's reports of what cannot away from all workers. An error says that the
    /// image fails still. Blocks for as long as the disk takes.
    pub fn take_errors(&self) -> io::Result<()> {
        for file in &self.files {
            // An old failure is reported now, and a lasting one again below.
            let _ = file.sync_data();
        }
        self.files.iter().try_for_each(File::sync_data)
    }

    /// Whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether completions are to be polled from the device.
    pub fn is_iopoll(&self) -> bool {
        self.iopoll && self.direct
    }

    /// Bytes of a sector, of a block device.
    pub(super) fn sector(&self) -> Option<u64> {
        self.sector
    }

    /// Whether a discard may be tried.
    pub(super) fn can_discard(&self) -> bool {
        self.can_discard
    }

    /// Who makes discards, if io_uring cannot.
    #[inline]
    pub(super) fn discarder(&self) -> Option<&Discarder> {
        self.discarder.as_ref()
    }

    /// See [`Backend::start`](super::Backend::start).
    pub(super) fn start_discarder(&self, depth: usize) -> io::Result<()> {
        match &self.discarder {
            Some(discarder) => discarder.start(self.file().try_clone()?, depth),
            None => Ok(()),
        }
    }

    /// Whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        !self.is_file
    }

    /// Whether a run of memory can be used as it is.
    #[inline]
    pub(super) fn is_aligned(&self, address: usize, len: usize) -> bool {
        address & (self.align.memory - 1) == 0 && len & (self.align.offset - 1) == 0
    }

    fn error(&self, what: String, fix: &'static str) -> ImageError {
        ImageError::Image { path: self.path.clone(), what, fix }
    }
}
