//! The options of a connection to an NVMe controller.

use crate::error::Error;
use std::path::PathBuf;
use std::time::Duration;

/// How the client rings the doorbells of I/O queues. Those of the admin queues are always trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// Stores into memory of the device.
    Mapped,
    /// Stores into the guest's memory (Doorbell Buffer Config), and writes of registers that the device asks for.
    Shadow,
    /// Each is a write of a register, which goes over the socket.
    Trapped,
}

/// The options of a connection to an NVMe controller. [`NvmeOptions::new`] returns the usual ones.
#[derive(Clone, Debug)]
pub struct NvmeOptions {
    /// The vfio-user socket.
    pub socket: PathBuf,
    /// Number of pairs of I/O queues to create.
    pub queues: u16,
    /// Number of requests that can be in flight in each queue.
    pub depth: u16,
    /// Size of a request's buffer, in bytes, up to 2 MiB.
    pub buffer: u32,
    /// Number of entries of each I/O queue. Default: 128, or more if `depth` needs them.
    pub entries: Option<u16>,
    /// Whether completions raise interrupts. [`sleep`](crate::sleep) needs them; a client that polls does not.
    pub interrupts: bool,
    /// Whether all doorbells are trapped, even if the device has better ones.
    pub trapped: bool,
    /// How long the device may take for each answer, for an admin command, and to become ready.
    pub patience: Duration,
}

impl NvmeOptions {
    /// Returns options for one pair of queues with 32 requests of at most 64 KiB, without interrupts.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            queues: 1,
            depth: 32,
            buffer: 64 << 10,
            entries: None,
            interrupts: false,
            trapped: false,
            patience: Duration::from_secs(10),
        }
    }

    /// Returns the number of entries of each I/O queue.
    pub(crate) fn entries(&self) -> u16 {
        self.entries.unwrap_or(self.depth.saturating_add(1).max(128))
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let invalid = |what: String| Err(Error::Invalid(what));
        let Self { queues, depth, buffer, .. } = *self;
        let entries = self.entries();
        if !(1..=64).contains(&queues) {
            return invalid(format!("{queues} queues; 1 to 64 are possible"));
        }
        if !(1..=1023).contains(&depth) {
            return invalid(format!("{depth} requests on their way; 1 to 1023 are possible"));
        }
        if entries <= depth {
            return invalid(format!("queues of {entries} entries have no room for {depth} requests"));
        }
        if !(512..=2 << 20).contains(&buffer) {
            return invalid(format!("buffers of {buffer} bytes; 512 bytes to 2 MiB are possible"));
        }
        Ok(())
    }
}
