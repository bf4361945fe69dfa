//! A namespace of an NVMe device, by its character device (`/dev/ng0n1`).

use super::iovecs::PAGE;
use crate::backend::alignment::{queue_limit, queue_word};
use crate::backend::commands::CommandLimits;
use crate::backend::{Failure, Image, ImageError, Op};
use ginnel_volume_control::config::{self, Direct};
use rustix::fs::{Advice, fadvise};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tracing::warn;

/// How long another program may keep the block device after its lock is free: the kernel closes a killed process's files one after another.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most blocks of a command: their number has 16 bits.
const BLOCKS_MAX: u64 = 1 << 16;

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
    limits: CommandLimits,
    polled: bool,
    read_only: bool,
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
        // The path may have any name; sysfs has the kernel's.
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
        let attribute =
            |file: &str| std::fs::read_to_string(sysfs.join(file)).ok().map(|word| word.trim().to_owned());
        // The page cache is not used, and nothing is written: this file is for the lock, the size, and flushes without a worker.
        let as_image = config::Disk {
            path: Some(block_device.clone()),
            direct: Direct::Off,
            read_only: true,
            iopoll: false,
            ..disk.clone()
        };
        let image = Image::open(&as_image, 0).map_err(|e| match e {
            ImageError::Image { path, what, .. } => {
                let fix = "let this process's user read the block device of the namespace too";
                ImageError::Image { path, what, fix }
            }
            other => other,
        })?;
        let is_same = image.file().metadata().is_ok_and(|meta| {
            let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
            attribute("dev") == Some(format!("{major}:{minor}"))
        });
        if !is_same {
            let what = format!("its block device is not {}", block_device.display());
            return Err(error(what, "see that /dev is made by the kernel (devtmpfs)"));
        }
        let Some(nsid) = attribute("nsid").and_then(|word| word.parse().ok()) else {
            return Err(error(
                "the kernel does not tell the number of the namespace".to_owned(),
                "write backend = \"file\"",
            ));
        };
        // What the kernel knows of metadata: none, or a format.
        let has_metadata = attribute("metadata_bytes").is_some_and(|bytes| bytes != "0")
            || attribute("integrity/format").is_some_and(|format| format != "none");
        if has_metadata {
            let what = "its blocks have metadata (protection information)".to_owned();
            return Err(error(what, "format it without, or write backend = \"file\""));
        }
        if attribute("queue/zoned").is_some_and(|zoned| zoned != "none") {
            return Err(error("is zoned, and a disk is not".to_owned(), "use another namespace"));
        }
        let block = image.sector().unwrap_or(4096);
        if block > u64::from(disk.sector) {
            let what = format!("has blocks of {block} bytes, and the disk has sectors of {}", disk.sector);
            return Err(error(what, "write sector = 4096"));
        }
        let rdev = image.file().metadata().map_err(|e| error(e.to_string(), CHECK))?.rdev();
        let limit = |name: &str| queue_limit(rdev, name);
        // A piece of memory that is not aligned lies in up to two pages more than its length says, and each page may be a segment.
        let segments = limit("max_segments").unwrap_or(3).max(3);
        let data = limit("max_hw_sectors_kb").unwrap_or(4).saturating_mul(1024);
        let data = data.min((segments - 2) * PAGE).min(BLOCKS_MAX * block);
        let whole = |bytes: u64| bytes / block * block;
        let limits = CommandLimits {
            block,
            segments,
            data: whole(data).max(block),
            discard: whole(limit("discard_max_bytes").unwrap_or(0).min(u64::from(u32::MAX) * block)),
            zeroes: whole(limit("write_zeroes_max_bytes").unwrap_or(0).min(BLOCKS_MAX * block)),
        };
        let has_poll_queues = queue_word(rdev, "io_poll").is_none_or(|word| word != "0");
        if disk.iopoll && !has_poll_queues {
            warn!(image = %path.display(), "its device has no queues to poll: continuing without iopoll");
        }
        Ok(Self {
            device,
            image,
            block_device,
            claim: OnceLock::new(),
            nsid,
            limits,
            polled: disk.iopoll && has_poll_queues,
            read_only: disk.read_only,
            path,
        })
    }

    /// Keeps everybody else from mounting the namespace, until the last copy of the descriptor is closed, and makes the kernel forget what
    /// its page cache has of it: commands do not go through that cache, so whatever lies there would be written later, or read by others.
    /// The caller must hold the lock. Whoever only reads keeps nobody from reading too.
    pub fn claim(&self) -> Result<(), ImageError> {
        let error = |what: String, fix| ImageError::Image { path: self.path.clone(), what, fix };
        if !self.read_only {
            let claim = self.exclusive().map_err(|e| {
                let what =
                    format!("its block device, {}, cannot be claimed: {e}", self.block_device.display());
                error(what, "unmount its file systems, and release it from swap, LVM, RAID and other volumes")
            })?;
            self.claim.get_or_init(|| claim);
        }
        let file = self.image.file();
        file.sync_all().map_err(|e| {
            error(
                format!("what others have written to it earlier cannot be made durable: {e}"),
                "see the kernel's log",
            )
        })?;
        fadvise(file, 0, None, Advice::DontNeed).map_err(|e| error(e.to_string(), "see the kernel's log"))
    }

    /// Opens the block device for nobody else but this process.
    fn exclusive(&self) -> io::Result<File> {
        let begin = Instant::now();
        loop {
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(libc::O_CLOEXEC | libc::O_EXCL);
            match options.open(&self.block_device) {
                // Nobody tells when a device is free.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && begin.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                opened => return opened,
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

    pub(super) fn limits(&self) -> CommandLimits {
        self.limits
    }

    /// Returns the result of an operation for which no command is needed, or for which there is none.
    #[inline]
    pub(super) fn answer(&self, op: Op) -> Option<Result<(), Failure>> {
        match op {
            Op::Discard { .. } if self.limits.discard == 0 => Some(Err(Failure::Unsupported)),
            Op::Discard { len: 0, .. } | Op::WriteZeroes { len: 0, .. } => Some(Ok(())),
            _ => None,
        }
    }

    /// Returns whether the device has a command that makes zeroes.
    pub(super) fn makes_zeroes(&self) -> bool {
        self.limits.zeroes > 0
    }

    /// Returns the path from the configuration.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Judges the result of a command that was tried, to do this.
    pub(super) fn judge(&self, what: &str, result: i32) -> io::Result<()> {
        let (why, fix) = match result {
            0 => return Ok(()),
            ..0 => {
                let error = io::Error::from_raw_os_error(-result);
                let fix = match -result {
                    libc::EACCES | libc::EPERM => {
                        "a process without CAP_SYS_ADMIN (root, without `user` and User=) may do that since Linux 6.2, if the device reports \
                         the command as supported and harmless (`nvme effects-log`)"
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
            "image {}: the NVMe command to {what} fails: {why}; {fix}, or write backend = \"file\" and path = \"{}\"",
            self.path.display(),
            self.block_device.display()
        )))
    }
}
