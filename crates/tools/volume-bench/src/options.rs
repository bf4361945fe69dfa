//! The options of a connection.

use crate::device::Device;
use std::path::PathBuf;
use std::time::Duration;

/// The format of a virtqueue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ring {
    /// Split (virtio 1.2, section 2.7).
    #[default]
    Split,
    /// Packed (virtio 1.2, section 2.8).
    Packed,
}

/// The options of a connection to a server. [`Options::new`] returns the usual ones.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server's vhost-user socket.
    pub socket: PathBuf,
    /// The kind of device that the server has.
    pub device: Device,
    /// Number of request queues to use.
    pub queues: u16,
    /// Number of requests that can be in flight in each queue.
    pub depth: u16,
    /// Size of a request's buffer, in bytes.
    pub buffer: u32,
    /// Largest number of bytes of a buffer in one descriptor. A smaller number makes requests of several pieces.
    pub segment: u32,
    /// The format of the queues.
    pub ring: Ring,
    /// Number of descriptors of a queue, a power of two. Default: as many as `depth` requests need, and at least 128.
    pub ring_size: Option<u16>,
    /// Whether to put each request's descriptors into an indirect table, if the server supports that.
    pub indirect: bool,
    /// Whether to suppress notifications by index, if the server supports that.
    pub event_idx: bool,
    /// Whether the server should record the requests in flight, if it can, so that its successor continues them.
    pub inflight: bool,
    /// Whether the client answers all requests itself, without data, and gives the server no queue. This measures the
    /// client alone.
    pub echo: bool,
    /// How long the server may take for each answer on its socket.
    pub patience: Duration,
}

impl Options {
    /// Returns options for one split queue with 32 requests of at most 64 KiB, and with all features that the server
    /// has.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            device: Device::Blk,
            queues: 1,
            depth: 32,
            buffer: 64 << 10,
            segment: u32::MAX,
            ring: Ring::Split,
            ring_size: None,
            indirect: false,
            event_idx: true,
            inflight: true,
            echo: false,
            patience: Duration::from_secs(10),
        }
    }
}
