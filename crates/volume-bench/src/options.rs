//! How to connect.

use crate::device::Device;
use std::path::PathBuf;
use std::time::Duration;

/// The form of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ring {
    /// Virtio 1.2, section 2.7.
    #[default]
    Split,
    /// Virtio 1.2, section 2.8.
    Packed,
}

/// How to connect to a server. [`Options::new`] has what most want.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server's vhost-user socket.
    pub socket: PathBuf,
    /// What it serves.
    pub device: Device,
    /// Request queues to use.
    pub queues: u16,
    /// Requests that can be on their way in each queue.
    pub depth: u16,
    /// Bytes of a request's buffer.
    pub buffer: u32,
    /// Bytes of a buffer that one descriptor covers at most; smaller ones make requests of several pieces.
    pub segment: u32,
    /// The form of the queues.
    pub ring: Ring,
    /// Descriptors of a queue, a power of two; none: as many as `depth` requests need, and at least 128.
    pub ring_size: Option<u16>,
    /// Put each request's descriptors into a table of its own, if the server can read them there.
    pub indirect: bool,
    /// Suppress notifications by index, if the server can.
    pub event_idx: bool,
    /// Let the server keep account of what is in flight, if it can, so that its successor goes on with it.
    pub inflight: bool,
    /// Hand the server no queue, and answer all requests ourselves, with nothing: to measure the client alone.
    pub echo: bool,
    /// How long the server has for each answer on its socket.
    pub patience: Duration,
}

impl Options {
    /// One queue, 32 requests of at most 64 KiB, split, and whatever the server can do.
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
