//! What a volume is to be.

use std::path::PathBuf;
use std::time::Duration;

/// A volume.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// In messages, and in the names of its sockets.
    pub name: String,
    /// Where front ends connect.
    pub socket: PathBuf,
    /// What the guest sees.
    pub device: DeviceKind,
    /// One for a blk device, one for each unit of a scsi target.
    pub disks: Vec<Disk>,
    /// Request queues.
    pub queues: u16,
    /// The longest queue that is served, in descriptors.
    pub queue_size: u16,
    /// The most segments of data in a request.
    pub segments: u16,
    /// Threads that serve the queues, each its own.
    pub threads: u16,
    /// The CPU of each thread; none: the kernel's choice.
    pub cpus: Vec<u16>,
    /// How threads wait for work.
    pub wait: Wait,
}

/// What the guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// virtio-blk.
    Blk,
    /// virtio-scsi.
    Scsi,
}

/// One disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Where its bytes lie.
    pub backend: BackendKind,
    /// Bytes; `None`: as many as the file or block device has.
    pub size: Option<u64>,
    /// Bytes of a sector: 512 or 4096.
    pub block_size: u32,
    /// Refuses writes.
    pub read_only: bool,
    /// At most 20 bytes of ASCII.
    pub serial: String,
}

/// Where the bytes of a disk lie.
#[derive(Clone, Debug, PartialEq)]
pub enum BackendKind {
    /// A raw file or a block device.
    File {
        /// Its path.
        path: PathBuf,
        /// Past the page cache?
        direct: Direct,
        /// Asks the device for completions instead of waiting for its interrupts.
        iopoll: bool,
    },
    /// Memory of this process; gone with it. To measure, and for scratch.
    Ram,
    /// Nowhere: reads zeros, forgets writes. To measure.
    Null,
}

/// Whether a file is used past the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Direct {
    /// If the file system can; else it is said that it cannot.
    #[default]
    Auto,
    /// Or not at all.
    On,
    /// Through the page cache.
    Off,
}

/// How a thread waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Looks without end. Lowest latency; uses a CPU.
    Poll,
    /// Sleeps at once.
    Interrupt,
    /// Looks for as long as the budget after the last work, then sleeps.
    Adaptive(Duration),
}

impl Wait {
    /// About what a wake costs.
    pub const BUDGET: Duration = Duration::from_micros(100);
}
