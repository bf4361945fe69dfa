//! Where the bytes of a disk lie.
//!
//! A [`Backend`] is opened once, before any thread starts, and shared by all. Each worker makes its own [`Stores`] of
//! them, which holds what belongs to one thread: above all its io_uring.

mod alignment;
mod blkdiscard;
mod image;
mod ram;
pub(crate) mod uring;
mod volatile;

pub use image::{Image, ImageError};
pub use volatile::Volatile;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ginnel_shmem::Mapping;
use ginnel_virtqueue::{Buffer, GuestMemory};
use ginnel_volume_control::config::{self, BackendKind};
use thiserror::Error;

use uring::Uring;

/// What is to be done. Offsets and lengths are in bytes, whole blocks of the disk, and inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fills the data.
    Read {
        /// From where.
        at: u64,
    },
    /// Stores the data.
    Write {
        /// To where.
        at: u64,
        /// Must survive a power cut when it is done.
        through: bool,
    },
    /// All that was done before it began survives a power cut.
    Flush,
    /// What is there is not needed any more.
    Discard {
        /// From where.
        at: u64,
        /// How much.
        len: u64,
    },
    /// Zeros.
    WriteZeroes {
        /// From where.
        at: u64,
        /// How much.
        len: u64,
        /// The space may be given back.
        unmap: bool,
        /// Must survive a power cut when it is done.
        through: bool,
    },
}

impl Op {
    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Discard { .. } => "discard",
            Self::WriteZeroes { .. } => "write_zeroes",
        }
    }

    /// How much of the disk it is about, if that is not as much as it has data.
    pub fn span(self) -> Option<u64> {
        match self {
            Self::Discard { len, .. } | Self::WriteZeroes { len, .. } => Some(len),
            Self::Read { .. } | Self::Write { .. } | Self::Flush => None,
        }
    }

    /// Whether it must survive a power cut, or makes what was done before survive one.
    #[inline]
    pub fn is_durable(self) -> bool {
        match self {
            Self::Write { through, .. } | Self::WriteZeroes { through, .. } => through,
            Self::Flush => true,
            Self::Read { .. } | Self::Discard { .. } => false,
        }
    }

    /// Where on the disk it begins.
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

/// Why it was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// The backend has no such operation.
    #[error("the backend cannot do that")]
    Unsupported,
    /// The image ends before the disk does.
    #[error("the image ends there: it was truncated after the volume had opened it")]
    Truncated,
    /// The system says so.
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// What had been accepted earlier did not become durable, and may be gone.
    #[error("{}: earlier writes did not become durable", io::Error::from_raw_os_error(*.0))]
    Lost(i32),
    /// So it was earlier, and nobody has acknowledged that.
    #[error("earlier writes are lost, and `ginnel volume reset-errors` was not called since")]
    LostEarlier,
}

impl Failure {
    /// Of what should have made earlier writes durable.
    fn lost(error: io::Error) -> Self {
        Self::Lost(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Where the bytes of one disk lie, for all threads.
#[derive(Clone)]
pub enum Backend {
    /// A file or a block device.
    File(Arc<Image>),
    /// Memory of this process.
    Ram(Mapping),
    /// Nowhere.
    Null,
    /// A file behind a cache that a power cut empties.
    Volatile(Arc<Volatile>),
}

impl Backend {
    /// Opens what a disk's configuration names, for so many workers. Returns its size too.
    pub fn open(disk: &config::Disk, workers: usize) -> Result<(Self, u64), ImageError> {
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
            BackendKind::Volatile => {
                // Its copies are in memory of its own, wherever that lies.
                let cached = config::Disk { direct: config::Direct::Off, ..disk.clone() };
                let image = Image::open(&cached, workers)?;
                let bytes = disk.size.unwrap_or(image.bytes()?);
                (Self::Volatile(Arc::new(Volatile::new(image, workers))), bytes)
            }
        })
    }

    /// Makes the image of a disk that has one, if it is not there.
    pub fn create(disk: &config::Disk) -> Result<(), ImageError> {
        match disk.backend {
            BackendKind::File | BackendKind::Volatile => Image::create(disk),
            BackendKind::Ram | BackendKind::Null => Ok(()),
        }
    }

    /// Starts the threads that a disk needs beside the workers, for at most `depth` requests at a time. Before any request, on the
    /// thread that starts the workers: behind the sandbox, and bound to no processor.
    pub fn start(&self, depth: usize) -> io::Result<()> {
        match self {
            Self::File(image) => image.start_discarder(depth),
            Self::Volatile(_) | Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// Makes room for a disk of `bytes`, or tells what size it has become if `None`. Blocks for as long as the file system
    /// takes.
    pub fn resize(&self, bytes: Option<u64>, now: u64) -> Result<u64, String> {
        match (self, bytes) {
            (Self::File(image), _) => image.resize(bytes).map_err(|e| e.to_string()),
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

    /// Makes all durable that has been written, on behalf of no worker. Blocks for as long as the disk takes.
    pub fn sync(&self) -> Result<(), Failure> {
        match self {
            Self::File(image) => image.file().sync_data().map_err(Failure::lost),
            Self::Volatile(volatile) => volatile.sync(),
            Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// Takes away the reports of data that was lost up to now from all workers. An error says that the disk fails still. Blocks
    /// for as long as the disk takes.
    pub fn take_errors(&self) -> io::Result<()> {
        match self {
            Self::File(image) => image.take_errors(),
            Self::Volatile(volatile) => volatile.take_errors(),
            Self::Ram(_) | Self::Null => Ok(()),
        }
    }

    /// The image, if there is one.
    pub fn image(&self) -> Option<&Image> {
        match self {
            Self::File(image) => Some(image),
            Self::Volatile(volatile) => Some(volatile.image()),
            Self::Ram(_) | Self::Null => None,
        }
    }
}

/// A worker's way to all disks. Belongs to one thread from [`Stores::enable`] on.
pub struct Stores {
    worker: usize,
    disks: Vec<Backend>,
    uring: Option<Uring>,
}

impl Stores {
    /// Makes the rings that the disks need for the worker of that number; in the sandbox there is no way to make any. Nothing
    /// can be started before [`Stores::enable`]. `held` stays open until all that was begun has ended, also if the process is
    /// killed.
    pub fn new(disks: &[Backend], worker: usize, held: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let files: Vec<_> = disks
            .iter()
            .map(|disk| match disk {
                Backend::File(image) => Some(image.clone()),
                _ => None,
            })
            .collect();
        let uring = match files.iter().any(Option::is_some) {
            true => Some(Uring::new(files, worker, held)?),
            false => None,
        };
        Ok(Self { worker, disks: disks.to_vec(), uring })
    }

    /// Puts the rings into force, for the calling thread: only that may use them.
    pub fn enable(&self) -> io::Result<()> {
        self.uring.as_ref().map_or(Ok(()), Uring::enable)
    }

    /// Begins an operation. `Some`: it is done. `None`: [`Stores::reap`] will tell, with `id`; until then `memory` must stay
    /// as it is. Not seen by the kernel before [`Stores::submit`].
    #[inline]
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
        }
    }

    /// Bytes of zeros that an operation makes the disk write, as far as that is known: of a file system, once it has shown that it
    /// cannot make them; a block device may have to for all that must not be unmapped.
    pub fn zeros_written(&self, disk: u16, op: Op) -> u64 {
        let Op::WriteZeroes { len, unmap, .. } = op else { return 0 };
        let writes = match self.disks.get(usize::from(disk)) {
            None | Some(Backend::Null) => false,
            Some(Backend::Ram(_) | Backend::Volatile(_)) => true,
            Some(Backend::File(image)) => {
                (image.is_block_device() && !unmap)
                    || self.uring.as_ref().is_some_and(|uring| uring.writes_zeros(disk))
            }
        };
        if writes { len } else { 0 }
    }

    /// Hands what was started to the kernel. Once a turn.
    #[inline]
    pub fn submit(&mut self) -> io::Result<()> {
        match &mut self.uring {
            Some(uring) => uring.submit(),
            None => Ok(()),
        }
    }

    /// Calls `done` with all that has ended.
    #[inline]
    pub fn reap(&mut self, done: impl FnMut(u32, Result<(), Failure>)) {
        if let Some(uring) = &mut self.uring {
            uring.reap(done);
        }
    }

    /// The guest's memory that requests will be in from now on, if it is to be pinned; `None`: there is none any more. No
    /// request may be under way. Blocks for as long as the kernel takes to find, or make, all its pages.
    pub fn pin(&mut self, memory: Option<&Arc<GuestMemory<Mapping>>>) {
        if let Some(uring) = &mut self.uring {
            uring.pin(memory);
        }
    }

    /// Whether memory is pinned.
    pub fn is_pinned(&self) -> bool {
        self.uring.as_ref().is_some_and(Uring::is_pinned)
    }

    /// Operations that have not ended.
    #[inline]
    pub fn pending(&self) -> u32 {
        self.uring.as_ref().map_or(0, Uring::pending)
    }

    /// Asks to be told when something has ended. `true`: something has, do not sleep.
    #[must_use = "who sleeps on `true` may sleep for ever"]
    pub fn arm(&mut self) -> bool {
        self.uring.as_mut().is_some_and(Uring::arm)
    }

    /// Asks to be told nothing.
    pub fn disarm(&mut self) {
        if let Some(uring) = &mut self.uring {
            uring.disarm();
        }
    }

    /// An eventfd that is written when something has ended, if that was asked for.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.uring.as_ref().map(Uring::fd)
    }

    /// Whether completions must be asked for: nothing becomes readable.
    pub fn must_poll(&self) -> bool {
        self.uring.as_ref().is_some_and(Uring::must_poll)
    }
}
