//! A namespace of an NVMe device, by its character device (`/dev/ng0n1`).

use super::flight::Limits;
use crate::backend::alignment::{queue_limit, queue_word};
use crate::backend::{Failure, Image, ImageError, Op};
use ginnel_volume_control::config::{self, Direct};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long another program may keep the block device after its lock is free: the kernel closes a killed process's files one after another.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most blocks of a Write Zeroes command: its number of blocks has 16 bits.
const ZEROES_MAX: u64 = 1 << 16;

/// The smallest page of a kernel.
const PAGE: u64 = 4096;

/// An open namespace.
#[derive(Debug)]
pub struct Namespace {
    device: File,
    path: PathBuf,
    /// The block device of the same namespace. It carries the lock, and knows the size.
    image: Image,
    block_device: PathBuf,
    /// The block device, opened so that nobody else can mount it.
    claim: OnceLock<File>,
    nsid: u32,
    limits: Limits,
    /// Whether the device has a volatile write cache.
    has_cache: bool,
    polled: bool,
}

impl Namespace {
    /// Opens the namespace of a disk.
    pub fn open(disk: &config::Disk) -> Result<Self, ImageError> {
        let path = disk.path.clone().unwrap_or_default();
        let error = |what: String, fix| ImageError::Image { path: path.clone(), what, fix };
        const CHECK: &str = "name the character device of a namespace, such as /dev/ng0n1";
        let device = OpenOptions::new()
            .read(true)
            .write(!disk.read_only)
            .custom_flags(libc::O_CLOEXEC)
            .open(&path)
            .map_err(|e| {
                let fix = match e.raw_os_error() {
                    Some(libc::EACCES | libc::EPERM) => "give this process's user access to it",
                    _ => CHECK,
                };
                error(format!("cannot be opened: {e}"), fix)
            })?;
        let opened = device.metadata().map_err(|e| error(e.to_string(), CHECK))?;
        if !opened.file_type().is_char_device() {
            return Err(error("is no character device, which uring-cmd needs".to_owned(), CHECK));
        }
        // Its own name may be any, and is the kernel's below sysfs.
        let (major, minor) = (libc::major(opened.rdev()), libc::minor(opened.rdev()));
        let place = Path::new("/sys/dev/char").join(format!("{major}:{minor}"));
        let name = place.canonicalize().ok();
        let name =
            name.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        let subsystem = place.join("subsystem").canonicalize().unwrap_or_default();
        let Some(number) = name.strip_prefix("ng").filter(|_| subsystem.ends_with("nvme-generic")) else {
            return Err(error("is no namespace of an NVMe device".to_owned(), CHECK));
        };
        let block_device = Path::new("/dev").join(format!("nvme{number}"));
        let sysfs = Path::new("/sys/block").join(format!("nvme{number}"));
        let word =
            |file: &str| std::fs::read_to_string(sysfs.join(file)).ok().map(|word| word.trim().to_owned());
        // The page cache is not used, and nothing is written: this file is for the lock, the size, and flushes without a worker.
        let as_image = config::Disk {
            path: Some(block_device.clone()),
            direct: Direct::Off,
            read_only: true,
            iopoll: false,
            ..disk.clone()
        };
        let image = Image::open(&as_image, 0)?;
        let is_same = image.file().metadata().is_ok_and(|meta| {
            let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
            word("dev") == Some(format!("{major}:{minor}"))
        });
        if !is_same {
            let what = format!("its block device is not {}", block_device.display());
            return Err(error(what, "see that /dev is made by the kernel (devtmpfs)"));
        }
        let Some(nsid) = word("nsid").and_then(|word| word.parse().ok()) else {
            return Err(error(
                "the kernel does not tell the number of the namespace".to_owned(),
                "write backend = \"file\"",
            ));
        };
        // What the kernel knows of metadata: none, or a format.
        let has_metadata = word("metadata_bytes").is_some_and(|bytes| bytes != "0")
            || word("integrity/format").is_some_and(|format| format != "none");
        if has_metadata {
            let what = "its blocks have metadata (protection information)".to_owned();
            return Err(error(what, "format it without, or write backend = \"file\""));
        }
        if word("queue/zoned").is_some_and(|zoned| zoned != "none") {
            return Err(error("is zoned, and a disk is not".to_owned(), "use another namespace"));
        }
        let block = image.sector().unwrap_or(4096);
        if block > u64::from(disk.sector) {
            let what = format!("has blocks of {block} bytes, and the disk has sectors of {}", disk.sector);
            return Err(error(what, "write sector = 4096"));
        }
        let number = image.file().metadata().map_err(|e| error(e.to_string(), CHECK))?.rdev();
        let limit = |name: &str| queue_limit(number, name);
        // Memory that is not aligned has a page more than its length says, and each page may be a segment of its own.
        let segments = limit("max_segments").unwrap_or(2).max(2) - 1;
        let data = limit("max_hw_sectors_kb").unwrap_or(4).saturating_mul(1024).min(segments * PAGE);
        let whole = |bytes: u64| bytes / block * block;
        let limits = Limits {
            block,
            data: whole(data).max(block),
            discard: whole(limit("discard_max_bytes").unwrap_or(0).min(u64::from(u32::MAX) * block)),
            zeroes: whole(limit("write_zeroes_max_bytes").unwrap_or(0).min(ZEROES_MAX * block)),
        };
        Ok(Self {
            device,
            image,
            block_device,
            claim: OnceLock::new(),
            nsid,
            limits,
            has_cache: queue_word(number, "write_cache").is_none_or(|word| word != "write through"),
            polled: disk.iopoll,
            path,
        })
    }

    /// Keeps everybody else from mounting the namespace, until the last copy of the descriptor is closed. The caller must hold the lock.
    pub fn claim(&self) -> Result<(), ImageError> {
        let begin = Instant::now();
        loop {
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(libc::O_CLOEXEC | libc::O_EXCL);
            match options.open(&self.block_device) {
                Ok(file) => {
                    self.claim.get_or_init(|| file);
                    return Ok(());
                }
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && begin.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(e) => {
                    let what =
                        format!("its block device, {}, cannot be claimed: {e}", self.block_device.display());
                    let fix =
                        "unmount its file systems, and release it from swap, LVM, RAID and other volumes";
                    return Err(ImageError::Image { path: self.path.clone(), what, fix });
                }
            }
        }
    }

    /// Returns the block device of the namespace, which carries the lock.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Returns whether completions are polled from the device.
    pub(super) fn is_polled(&self) -> bool {
        self.polled
    }

    pub(super) fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Returns the files that must stay open until all requests have ended.
    pub(super) fn kept(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(self.image.file()), self.claim.get()].into_iter().flatten().map(AsFd::as_fd)
    }

    #[inline]
    pub(super) fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Returns the length of a logical block, in bytes.
    pub(super) fn block(&self) -> u64 {
        self.limits.block
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the result of an operation for which no command is needed, or for which there is none.
    #[inline]
    pub(super) fn answer(&self, op: Op) -> Option<Result<(), Failure>> {
        match op {
            Op::Flush if !self.has_cache => Some(Ok(())),
            Op::Discard { .. } if self.limits.discard == 0 => Some(Err(Failure::Unsupported)),
            Op::Discard { len: 0, .. } | Op::WriteZeroes { len: 0, .. } => Some(Ok(())),
            _ => None,
        }
    }

    /// Judges the result of a read that was tried.
    pub(super) fn judge(&self, result: i32) -> io::Result<()> {
        let (why, fix) = match result {
            0 => return Ok(()),
            ..0 => {
                let error = io::Error::from_raw_os_error(-result);
                let fix = match -result {
                    libc::EACCES | libc::EPERM => {
                        "before Linux 6.2, only a process with CAP_SYS_ADMIN may do that (root, without `user` and User=)"
                    }
                    libc::EOPNOTSUPP | libc::ENOTTY => "this needs Linux 5.19 or later",
                    _ => "see the kernel's log",
                };
                (error.to_string(), fix)
            }
            _ => {
                (format!("the device answers with status {result:#x}"), "see whether `nvme read` can read it")
            }
        };
        Err(io::Error::other(format!(
            "image {}: an NVMe command to read its first block fails: {why}; {fix}, or write backend = \"file\" and path = \"{}\"",
            self.path.display(),
            self.block_device.display()
        )))
    }
}
