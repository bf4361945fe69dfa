//! Where the data of a disk is stored.
//!
//! A [`Backend`] is opened once, before any thread starts, and all threads share it. Each worker makes its own
//! [`Stores`] of the backends, with the parts that belong to one thread: above all its io_uring.

mod alignment;
mod blkdiscard;
mod commands;
mod image;
mod passthrough;
mod ram;
pub(crate) mod uring;
mod vfio;
mod volatile;

use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::Mapping;
use ginnel_volume_control::config::{self, BackendKind};
pub use image::{Image, ImageError};
pub use passthrough::Namespace;
use passthrough::Passthrough;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;
use uring::Uring;
use vfio::Vfio;
pub use vfio::{Controllers, NvmeRange};
pub use volatile::Volatile;

/// An operation on a disk. Offsets and lengths are in bytes, and describe whole blocks inside the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads from the disk into the data buffers.
    Read {
        /// First byte on the disk.
        at: u64,
    },
    /// Writes the data buffers to the disk.
    Write {
        /// First byte on the disk.
        at: u64,
        /// Whether the data must be durable when the operation ends.
        through: bool,
    },
    /// Makes all operations durable that ended before it began.
    Flush,
    /// Releases a range whose contents are not needed any more.
    Discard {
        /// First byte on the disk.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Fills a range with zeros.
    WriteZeroes {
        /// First byte on the disk.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// Whether the space may be released.
        unmap: bool,
        /// Whether the zeros must be durable when the operation ends.
        through: bool,
    },
}

impl Op {
    /// Returns the operation's word in logs and statistics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Discard { .. } => "discard",
            Self::WriteZeroes { .. } => "write_zeroes",
        }
    }

    /// Returns the length of its range on the disk, if that is not the length of its data.
    pub fn span(self) -> Option<u64> {
        match self {
            Self::Discard { len, .. } | Self::WriteZeroes { len, .. } => Some(len),
            Self::Read { .. } | Self::Write { .. } | Self::Flush => None,
        }
    }

    /// Returns whether the operation must be durable, or makes earlier ones durable.
    #[inline]
    pub fn is_durable(self) -> bool {
        match self {
            Self::Write { through, .. } | Self::WriteZeroes { through, .. } => through,
            Self::Flush => true,
            Self::Read { .. } | Self::Discard { .. } => false,
        }
    }

    /// Returns the offset on the disk at which it begins.
    pub fn at(self) -> u64 {
        match self {
            Self::Read { at }
            | Self::Write { at, .. }
            | Self::Discard { at, .. }
            | Self::WriteZeroes { at, .. } => at,
            Self::Flush => 0,
        }
    }
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// The backend has no such operation.
    #[error("the backend cannot do that")]
    Unsupported,
    /// The image ends before the disk does.
    #[error("the image ends there: it was truncated after the volume had opened it")]
    Truncated,
    /// A system call or the disk has failed.
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// Data that was acknowledged earlier did not become durable, and may be lost.
    #[error("{}: earlier writes did not become durable", io::Error::from_raw_os_error(*.0))]
    Lost(i32),
    /// Data was lost earlier, and no operator has acknowledged that.
    #[error("earlier writes are lost, and `ginnel volume reset-errors` was not called since")]
    LostEarlier,
}

impl Failure {
    /// Returns the failure of a call that should have made earlier writes durable.
    fn lost(error: io::Error) -> Self {
        Self::Lost(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Where the data of one disk is stored, for all threads.
#[derive(Clone)]
pub enum Backend {
    /// A file or a block device.
    File(Arc<Image>),
    /// A namespace of an NVMe device, by passthrough.
    Passthrough(Arc<Namespace>),
    /// An NVMe device that this process drives.
    Vfio(Arc<NvmeRange>),
    /// Memory of this process.
    Ram(Mapping),
    /// Nowhere: writes are discarded, and reads do not change the buffers.
    Null,
    /// A file behind a write cache that a power cut empties.
    Volatile(Arc<Volatile>),
}

impl Backend {
    /// Opens the backend of a disk's configuration for this many workers. Returns its size in bytes too. `controllers` are those of the
    /// NVMe devices that disks of the volume share.
    pub fn open(
        disk: &config::Disk,
        workers: usize,
        controllers: &mut Controllers,
    ) -> Result<(Self, u64), ImageError> {
        Ok(match disk.backend {
            BackendKind::Ram => {
                let bytes = disk.size.unwrap_or(0);
                (Self::Ram(ram::new(bytes)?), bytes)
            }
            BackendKind::Null => (Self::Null, disk.size.unwrap_or(0)),
            BackendKind::File => {
                let image = Image::open(disk, workers)?;
                let bytes = disk.size.unwrap_or(image.bytes()?);
                (Self::File(Arc::new(image)), bytes)
            }
            BackendKind::UringCmd => {
                let namespace = Namespace::open(disk)?;
                let bytes = disk.size.unwrap_or(namespace.image().bytes()?);
                (Self::Passthrough(Arc::new(namespace)), bytes)
            }
            BackendKind::Vfio => {
                let range = NvmeRange::open(disk, workers, controllers)?;
                let bytes = disk.size.unwrap_or(range.room());
                (Self::Vfio(Arc::new(range)), bytes)
            }
            BackendKind::Volatile => {
                // Its copies are in memory of its own, which need not be aligned for direct I/O.
                let cached = config::Disk { direct: config::Direct::Off, ..disk.clone() };
                let image = Image::open(&cached, workers)?;
                let bytes = disk.size.unwrap_or(image.bytes()?);
                (Self::Volatile(Arc::new(Volatile::new(image, workers))), bytes)
            }
        })
    }

    /// Creates the image of a disk that needs one, if it does not exist.
    pub fn create(disk: &config::Disk) -> Result<(), ImageError> {
        match disk.backend {
            BackendKind::File | BackendKind::Volatile => Image::create(disk),
            BackendKind::UringCmd | BackendKind::Vfio | BackendKind::Ram | BackendKind::Null => Ok(()),
        }
    }

    /// Keeps others from using the image in ways that its lock does not exclude. The caller must hold that lock.
    pub fn claim(&self) -> Result<(), ImageError> {
        match self {
            Self::Passthrough(namespace) => namespace.claim(),
            Self::File(_) | Self::Vfio(_) | Self::Volatile(_) | Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// Returns whether the volume keeps the image from its start to its end, wherever its VM runs.
    pub fn is_kept(&self) -> bool {
        matches!(self, Self::Passthrough(_))
    }

    /// Starts the threads that a disk needs besides the workers, for at most `depth` requests at a time. Must be called
    /// before any request, by the thread that starts the workers, which is in the sandbox and not bound to a CPU.
    pub fn start(&self, depth: usize) -> io::Result<()> {
        match self {
            Self::File(image) => image.start_discarder(depth),
            Self::Passthrough(_) | Self::Vfio(_) | Self::Volatile(_) | Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// Makes the backend large enough for a disk of `bytes`, or with `None` finds out its current size. Returns the
    /// size in bytes. Blocks for as long as the file system takes.
    pub fn resize(&self, bytes: Option<u64>, now: u64) -> Result<u64, String> {
        match (self, bytes) {
            (Self::File(image), _) => image.resize(bytes).map_err(|e| e.to_string()),
            (Self::Passthrough(namespace), _) => namespace.image().resize(bytes).map_err(|e| e.to_string()),
            (Self::Vfio(range), _) => range.resize(bytes, now),
            (Self::Volatile(volatile), _) => volatile.image().resize(bytes).map_err(|e| e.to_string()),
            (Self::Null, Some(bytes)) => Ok(bytes),
            (Self::Ram(memory), Some(bytes)) if bytes <= ram::room(memory) => Ok(bytes),
            (Self::Ram(memory), Some(_)) => Err(format!(
                "a ram disk cannot grow beyond the {} bytes that it began with; restart the volume with another size",
                ram::room(memory)
            )),
            (_, None) => Ok(now),
        }
    }

    /// Makes all writes so far durable, without a worker. Blocks for as long as the disk takes.
    pub fn sync(&self) -> Result<(), Failure> {
        match self {
            Self::File(image) => image.file().sync_data().map_err(Failure::lost),
            // The kernel's own flush goes to the same device.
            Self::Passthrough(namespace) => namespace.image().file().sync_data().map_err(Failure::lost),
            Self::Vfio(range) => range.flush(),
            Self::Volatile(volatile) => volatile.sync(),
            Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// Takes all pending reports of lost data, so that no worker receives them. An error says that the disk still
    /// fails. Blocks for as long as the disk takes.
    pub fn take_errors(&self) -> io::Result<()> {
        match self {
            Self::File(image) => image.take_errors(),
            Self::Passthrough(namespace) => namespace.image().take_errors(),
            Self::Vfio(range) => range.flush().map_err(|failure| io::Error::other(failure.to_string())),
            Self::Volatile(volatile) => volatile.take_errors(),
            Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// Returns whether both lose what they have not written back at once, because they have one cache.
    pub fn shares_cache(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Vfio(one), Self::Vfio(other)) => one.is_beside(other),
            _ => false,
        }
    }

    /// Ends the use of a device that this process drives. All requests must be complete, and none can be started from now on. Blocks for
    /// as long as the device takes.
    pub fn end(&self) {
        if let Self::Vfio(range) = self {
            range.end();
        }
    }

    /// Returns the image, if the backend has one.
    pub fn image(&self) -> Option<&Image> {
        match self {
            Self::File(image) => Some(image),
            Self::Passthrough(namespace) => Some(namespace.image()),
            Self::Volatile(volatile) => Some(volatile.image()),
            Self::Vfio(_) | Self::Ram(_) | Self::Null => None,
        }
    }

    /// Returns whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        match self {
            Self::File(image) => image.is_direct(),
            Self::Passthrough(_) | Self::Vfio(_) => true,
            Self::Volatile(_) | Self::Ram(_) | Self::Null => false,
        }
    }
}

/// A worker's access to all disks. Belongs to one thread from [`Stores::enable`] on.
pub struct Stores {
    worker: usize,
    disks: Vec<Backend>,
    uring: Option<Uring>,
    passthrough: Option<Passthrough>,
    vfio: Option<Vfio>,
    /// The kernel writes to it when there are completions, while notifications are enabled ([`Stores::arm`]). The rings'
    /// own descriptors do not suffice: a completion that waits for its thread does not wake a poller of them (seen with
    /// Linux 6.18). `None` if no disk needs a ring.
    bell: Option<Arc<OwnedFd>>,
}

impl Stores {
    /// Creates the rings that the disks need for the worker of that number, because the sandbox does not allow
    /// creating any. Nothing can be started before [`Stores::enable`]. `held` stays open until all requests have ended,
    /// even if the process is killed.
    pub fn new(disks: &[Backend], worker: usize, held: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let files: Vec<_> = disks
            .iter()
            .map(|disk| match disk {
                Backend::File(image) => Some(image.clone()),
                _ => None,
            })
            .collect();
        let namespaces: Vec<_> = disks
            .iter()
            .map(|disk| match disk {
                Backend::Passthrough(namespace) => Some(namespace.clone()),
                _ => None,
            })
            .collect();
        let ranges: Vec<_> = disks
            .iter()
            .map(|disk| match disk {
                Backend::Vfio(range) => Some(range.clone()),
                _ => None,
            })
            .collect();
        let mut stores =
            Self { worker, disks: disks.to_vec(), uring: None, passthrough: None, vfio: None, bell: None };
        let (has_files, has_namespaces) =
            (files.iter().any(Option::is_some), namespaces.iter().any(Option::is_some));
        if has_files || has_namespaces {
            let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            if has_namespaces {
                stores.passthrough = Some(Passthrough::new(namespaces, held, bell.as_fd())?);
            }
            if has_files {
                stores.uring = Some(Uring::new(files, worker, held, bell.clone())?);
            }
            stores.bell = Some(bell);
        }
        if ranges.iter().any(Option::is_some) {
            stores.vfio = Some(Vfio::new(ranges, worker)?);
        }
        Ok(stores)
    }

    /// Enables the rings for the calling thread. No other thread can use them. Blocks until the devices that are used by passthrough have
    /// answered once.
    pub fn enable(&mut self) -> io::Result<()> {
        if let Some(uring) = &self.uring {
            uring.enable()?;
        }
        self.passthrough.as_mut().map_or(Ok(()), Passthrough::enable)
    }

    /// Begins an operation. Returns its result if it has ended already. Otherwise [`Stores::reap`] reports the end,
    /// with `id`, and until then `memory` must stay as it is. The kernel sees the operation at the next
    /// [`Stores::submit`].
    // Without "always", it is a call for each request since there are workers of two kinds.
    #[inline(always)]
    pub fn start(
        &mut self,
        id: u32,
        disk: u16,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
    ) -> Option<Result<(), Failure>> {
        match self.disks.get(usize::from(disk))? {
            Backend::Null => Some(Ok(())),
            Backend::Ram(disk) => Some(ram::perform(disk, op, data, memory)),
            Backend::Volatile(disk) => Some(disk.perform(self.worker, op, data, memory)),
            Backend::File(image) => {
                let uring = self.uring.as_mut()?;
                if let Op::Discard { .. } = op
                    && !image.can_discard()
                {
                    return Some(Err(Failure::Unsupported));
                }
                uring.start(id, disk, op, data, memory);
                None
            }
            Backend::Passthrough(_) => self.passthrough.as_mut()?.start(id, disk, op, data, memory),
            Backend::Vfio(_) => self.vfio.as_mut()?.start(id, disk, op, data, memory),
        }
    }

    /// Returns the disks that lose what they have not written back together with this one, which is the first of them.
    pub fn that_share_its_cache(&self, disk: u16) -> impl Iterator<Item = usize> {
        let one = usize::from(disk);
        let backend = self.disks.get(one);
        let shares = move |other: &Backend| backend.is_some_and(|backend| backend.shares_cache(other));
        let others = self.disks.iter().enumerate().filter(move |(n, other)| *n != one && shares(other));
        std::iter::once(one).chain(others.map(|(n, _)| n))
    }

    /// Returns the number of zero bytes that an operation makes the disk write, as far as that is known. A file system
    /// writes zeros if it has shown that it cannot create them otherwise; a block device may have to write all zeros
    /// that must not be unmapped.
    pub fn zeros_written(&self, disk: u16, op: Op) -> u64 {
        let Op::WriteZeroes { len, unmap, .. } = op else { return 0 };
        let writes = match self.disks.get(usize::from(disk)) {
            None | Some(Backend::Null) => false,
            Some(Backend::Ram(_) | Backend::Volatile(_)) => true,
            Some(Backend::File(image)) => {
                (image.is_block_device() && !unmap)
                    || self.uring.as_ref().is_some_and(|uring| uring.writes_zeros(disk))
            }
            Some(Backend::Passthrough(_)) => {
                self.passthrough.as_ref().is_some_and(|passthrough| passthrough.writes_zeros(disk))
            }
            Some(Backend::Vfio(_)) => self.vfio.as_ref().is_some_and(|vfio| vfio.writes_zeros(disk)),
        };
        if writes { len } else { 0 }
    }

    /// Hands the started operations to the kernel. Called once per turn.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        if let Some(uring) = &mut self.uring {
            uring.submit()?;
        }
        if let Some(passthrough) = &mut self.passthrough {
            passthrough.submit()?;
        }
        match &mut self.vfio {
            Some(vfio) => vfio.submit(),
            None => Ok(()),
        }
    }

    /// Calls `done` with the result of each operation that has ended.
    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(u32, Result<(), Failure>)) {
        if let Some(uring) = &mut self.uring {
            uring.reap(&mut done);
        }
        if let Some(passthrough) = &mut self.passthrough {
            passthrough.reap(&mut done);
        }
        if let Some(vfio) = &mut self.vfio {
            vfio.reap(done);
        }
    }

    /// Pins the guest's memory that requests will use from now on, if the configuration asks for that; `None` releases
    /// it. No request may be under way. Blocks while the kernel finds or allocates all pages of the memory.
    pub fn pin(&mut self, memory: Option<&Arc<GuestMemory<Mapping>>>) {
        if let Some(uring) = &mut self.uring {
            uring.pin(memory);
        }
        if let Some(vfio) = &mut self.vfio {
            vfio.attach(memory);
        }
    }

    /// Returns whether memory is pinned.
    pub fn is_pinned(&self) -> bool {
        self.uring.as_ref().is_some_and(Uring::is_pinned) || self.vfio.as_ref().is_some_and(Vfio::is_attached)
    }

    /// Returns whether memory must be pinned, whatever the configuration says.
    pub fn must_pin(&self) -> bool {
        self.vfio.is_some()
    }

    /// Returns the number of operations that have not ended.
    #[inline]
    pub fn pending(&self) -> u32 {
        self.uring.as_ref().map_or(0, Uring::pending)
            + self.passthrough.as_ref().map_or(0, Passthrough::pending)
            + self.vfio.as_ref().map_or(0, Vfio::pending)
    }

    /// Asks for a notification when an operation ends. Returns true if one has ended already, in which case the caller
    /// must not sleep.
    #[must_use = "a caller that sleeps on `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        let here = self.uring.as_mut().is_some_and(Uring::arm);
        let there = self.passthrough.as_mut().is_some_and(Passthrough::arm);
        here || there
    }

    /// Cancels the request for notifications.
    pub fn disarm(&mut self) {
        if let Some(uring) = &mut self.uring {
            uring.disarm();
        }
        if let Some(passthrough) = &mut self.passthrough {
            passthrough.disarm();
        }
    }

    /// Returns the eventfd that is written when an operation has ended, if notifications were asked for.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(|bell| bell.as_fd())
    }

    /// Returns whether completions must be polled, because no descriptor becomes readable for them.
    pub fn must_poll(&self) -> bool {
        self.uring.as_ref().is_some_and(Uring::must_poll)
            || self.passthrough.as_ref().is_some_and(Passthrough::must_poll)
            || self.vfio.as_ref().is_some_and(|vfio| vfio.pending() > 0)
    }
}
