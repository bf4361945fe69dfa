//! Images: raw files and block devices.

use super::alignment::{self, Alignment};
use super::blkdiscard::Discarder;
use super::uring;
use ginnel_volume_control::config::{self, Direct};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use thiserror::Error;
use tracing::{info, warn};

/// Why a disk cannot be opened or resized.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The image is missing or unsuitable.
    #[error("image {}: {what}; {fix}", path.display())]
    Image {
        /// Path of the image.
        path: PathBuf,
        /// The problem.
        what: String,
        /// The remedy.
        fix: &'static str,
    },
    /// An NVMe device cannot be driven.
    #[error("NVMe device {address}: {why}")]
    Nvme {
        /// Its PCI address.
        address: String,
        /// The problem, and the remedy.
        why: String,
    },
    /// There is not enough memory for a ram disk.
    #[error("no memory for a ram disk of {bytes} bytes: {why}; choose a smaller one")]
    Memory {
        /// Size of the disk.
        bytes: u64,
        /// The error of the kernel.
        why: String,
    },
}

/// An open image.
///
/// The file is opened once for each worker, and once more. Linux reports data that it could not write back once to each
/// open file description. If workers shared one, the first that asks would receive the report instead of the others.
#[derive(Debug)]
pub struct Image {
    /// The first file carries the lock, and belongs to no worker.
    files: Vec<File>,
    path: PathBuf,
    direct: bool,
    iopoll: bool,
    align: Alignment,
    is_file: bool,
    /// The sector size of a block device.
    sector: Option<u64>,
    /// Whether it is a file, or a device that supports discards.
    can_discard: bool,
    /// Makes the discards on a block device where io_uring cannot.
    discarder: Option<Discarder>,
    /// The size in the configuration.
    size: Option<u64>,
    read_only: bool,
}

impl Image {
    /// Creates the file of a disk, without any bytes, if it does not exist. The file gets its size when it is locked.
    /// No file is created below `/dev`: it would be mistaken for a device that has not appeared yet, and would be lost
    /// at the next boot.
    pub fn create(disk: &config::Disk) -> Result<(), ImageError> {
        let path = disk.path.clone().unwrap_or_default();
        if path.symlink_metadata().is_ok() {
            return Ok(());
        }
        let error = |what: String, fix| ImageError::Image { path: path.clone(), what, fix };
        let failed = |e: io::Error| error(format!("cannot be created: {e}"), "check the path");
        if disk.size.is_none() || disk.read_only {
            let what = "does not exist, and cannot be created: it has no size, or is read-only".to_owned();
            return Err(error(what, "write a size, and no read-only"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().map_err(failed)?;
        if folder.starts_with("/dev") {
            let what = "is not a device, and volumes create no files there".to_owned();
            return Err(error(what, "make sure that the device exists first"));
        }
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map(|_| info!(image = %path.display(), "created a new image")).map_err(failed),
        }
    }

    /// Opens the image of a disk for this many workers.
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
                    "give this process's user access to it, or write read-only = true"
                }
                Some(libc::ENOENT) => {
                    "check that its file system is mounted, or its device exists; to create a new file, start once with --create"
                }
                _ => "check the path",
            };
            error(format!("cannot be opened: {e}"), fix)
        })?;
        let identity = |file: &File| file.metadata().map_err(|e| error(e.to_string(), "check the path"));
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
            info!(image = %path.display(), "io_uring cannot discard here (needs Linux 6.12): a thread does it");
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
                image.files[0] = open(0).map_err(|e| error(e.to_string(), "check the path"))?;
                image.direct = false;
            }
        } else if disk.direct == Direct::Auto {
            warn!(image = %path.display(), "the file system has no direct I/O: through the page cache");
        }
        for _ in 0..workers {
            let again = open(if image.direct { libc::O_DIRECT } else { 0 })
                .map_err(|e| error(format!("cannot be opened once more: {e}"), "check the path"))?;
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

    /// Grows a file to the size of its disk, if it is smaller. The caller must hold the lock.
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

    /// Returns the current size in bytes.
    pub fn bytes(&self) -> Result<u64, ImageError> {
        // Seeking also works for block devices.
        let end = self.file().seek(SeekFrom::End(0));
        end.map_err(|e| self.error(format!("has no size: {e}"), "look at the device"))
    }

    /// Grows a file to at least this length. Never shortens it.
    fn grow(&self, bytes: u64) -> Result<(), ImageError> {
        if self.is_file && self.bytes()? < bytes {
            self.file().set_len(bytes).map_err(|e| {
                self.error(format!("cannot grow to {bytes} bytes: {e}"), "see what limits it")
            })?;
        }
        Ok(())
    }

    /// Returns the size in bytes that a disk may have from now on. A file grows if necessary; a block device cannot
    /// grow.
    pub fn resize(&self, bytes: Option<u64>) -> Result<u64, ImageError> {
        let Some(bytes) = bytes else { return self.bytes() };
        self.grow(bytes)?;
        let have = self.bytes()?;
        if have < bytes {
            return Err(self.error(format!("has only {have} bytes"), "make the device larger first"));
        }
        Ok(bytes)
    }

    /// Returns the path from the configuration.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open file that belongs to no worker, for the lock.
    pub fn file(&self) -> &File {
        &self.files[0]
    }

    /// Returns the open file of a worker.
    pub(super) fn file_of(&self, worker: usize) -> &File {
        &self.files[1 + worker]
    }

    /// Writes back what can be written, and takes the kernel's reports of lost data, so that no worker receives them.
    /// An error says that the image still fails. Blocks for as long as the disk takes.
    pub fn take_errors(&self) -> io::Result<()> {
        for file in &self.files {
            // An old failure is reported here; one that persists is reported again below.
            let _ = file.sync_data();
        }
        self.files.iter().try_for_each(File::sync_data)
    }

    /// Returns whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns whether completions must be polled from the device.
    pub fn is_iopoll(&self) -> bool {
        self.iopoll && self.direct
    }

    /// Returns the sector size of a block device, in bytes.
    pub(super) fn sector(&self) -> Option<u64> {
        self.sector
    }

    /// Returns whether a discard may be tried.
    pub(super) fn can_discard(&self) -> bool {
        self.can_discard
    }

    /// Returns the thread for discards, if io_uring cannot make them.
    #[inline]
    pub(super) fn discarder(&self) -> Option<&Discarder> {
        self.discarder.as_ref()
    }

    /// Starts the thread for discards, if one is needed. See [`Backend::start`](super::Backend::start).
    pub(super) fn start_discarder(&self, depth: usize) -> io::Result<()> {
        match &self.discarder {
            Some(discarder) => discarder.start(self.file().try_clone()?, depth),
            None => Ok(()),
        }
    }

    /// Returns whether the image is a block device.
    pub fn is_block_device(&self) -> bool {
        !self.is_file
    }

    /// Returns whether a run of memory can be used without a copy.
    #[inline]
    pub(super) fn is_aligned(&self, address: usize, len: usize) -> bool {
        address & (self.align.memory - 1) == 0 && len & (self.align.offset - 1) == 0
    }

    fn error(&self, what: String, fix: &'static str) -> ImageError {
        ImageError::Image { path: self.path.clone(), what, fix }
    }
}
