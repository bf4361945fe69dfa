//! What the two halves of a channel share: its endpoint, its properties, the peer's doorbell, and closing.

use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::fork::Opener;
use crate::inner::Inner;
use crate::saved_channel::SavedChannel;
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::Cursor;
use ginnel_shmem::SharedMemory;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The endpoint at the other end of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Number of the peer's member; 0 is the host.
    pub member: u32,
    /// Name of the peer's member.
    pub member_name: String,
    /// Number of the peer's endpoint.
    pub endpoint: u32,
    /// Epoch of that endpoint number; see [`crate::Endpoint::number`].
    pub epoch: u32,
    /// The name that the peer has chosen for itself ([`crate::AttachOptions::name`]); it is not verified.
    pub name: String,
}

/// Constant properties of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelInfo {
    /// Number of the channel, which is never reused in this installation.
    pub id: u64,
    /// Size in bytes of the ring into which this side sends.
    pub capacity: usize,
    /// Size in bytes of the ring from which this side receives.
    pub input_capacity: usize,
    /// The endpoint at the other end.
    pub peer: Peer,
}

/// Counters of one half of a channel, since the channel was opened or resumed by this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of messages, or of calls on a stream.
    pub operations: u64,
    /// Number of times that the peer's doorbell was rung.
    // This field stays between the two that grow together: side by side the compiler would add them as a vector, which
    // is slow in emulated guests.
    pub rings: u64,
    /// Number of payload bytes.
    pub bytes: u64,
    /// Number of operations that had to wait.
    pub waits: u64,
}

/// The state that the two halves of a channel share. It is dropped with the last half, which closes the channel.
pub(crate) struct Shared {
    pub endpoint: Arc<Inner>,
    pub info: ChannelInfo,
    pub doorbell: Arc<Doorbell>,
    opener: Arc<Opener>,
    is_initiator: bool,
    /// The channel was saved and continues elsewhere, so this process must not end it.
    is_saved: AtomicBool,
}

impl Shared {
    pub fn new(endpoint: Arc<Inner>, info: ChannelInfo, doorbell: Arc<Doorbell>, is_initiator: bool) -> Self {
        let (opener, is_saved) = (Opener::current(), AtomicBool::new(false));
        Self { endpoint, info, doorbell, opener, is_initiator, is_saved }
    }

    /// Whether this process must end the channel. False in the child of a fork while the parent lives, and after the
    /// channel was saved.
    pub fn is_ours(&self) -> bool {
        !self.is_saved.load(Ordering::Relaxed) && self.opener.is_succeeded()
    }

    /// Returns what another process needs to continue the channel. From now on dropping the halves does not end it.
    pub fn save(&self, kind: ChannelKind, output: Cursor, input: Cursor) -> SavedChannel {
        self.is_saved.store(true, Ordering::Relaxed);
        SavedChannel { kind, channel: self.info.id, is_initiator: self.is_initiator, output, input }
    }

    /// Checks that the memory still exists. Called after the rings were written, because data written to memory that is
    /// gone never arrives.
    #[inline]
    pub fn check_memory(&self) -> Result<(), Error> {
        if self.endpoint.memory.is_broken() { Err(Error::Broken) } else { Ok(()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        self.endpoint.close_channel(self.info.id);
    }
}
