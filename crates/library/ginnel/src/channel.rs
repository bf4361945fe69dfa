//! The part that both kinds of channel share: the channel's memory in the segment, the peer, its doorbell, and closing.

use crate::doorbell::Doorbell;
use crate::endpoint::Inner;
use crate::error::Error;
use crate::fork::Opener;
use crate::handover::SavedChannel;
use crate::peer::PeerWaker;
use crate::waiter::Waiter;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::{ring, wire};
use ginnel_ring::wait::WaitMode;
use ginnel_ring::{Corrupt, Cursor};
use ginnel_shmem::{Mapping, SharedMemory};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A kind of channel: [`crate::MessageChannel`] or [`crate::StreamChannel`]. The trait is sealed.
pub trait Channel: Sized + sealed::Build {
    /// The number of the kind in the attach protocol.
    const KIND: ChannelKind;
}

pub(crate) mod sealed {
    pub trait Build: Sized {
        fn build(pipe: super::Pipe) -> Self;
        /// Continues at the position where another process has stopped.
        fn resume(
            pipe: super::Pipe,
            output: super::Cursor,
            input: super::Cursor,
        ) -> Result<Self, super::Corrupt>;
    }
}

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

/// A channel whose two rings have not been given a kind yet. Used internally.
pub struct Pipe {
    pub(crate) shared: Arc<Shared>,
    pub(crate) output: Mapping,
    pub(crate) input: Mapping,
    mode: WaitMode,
}

impl Pipe {
    /// Checks the daemon's description of a channel, and maps its rings.
    pub(crate) fn new(
        endpoint: Arc<Inner>,
        wire: &wire::Channel,
        mut fds: Vec<OwnedFd>,
    ) -> Result<Self, Error> {
        let bad = |what| endpoint.protocol(what);
        let capacities = wire.capacities();
        if !capacities.are_valid() {
            return Err(bad("a channel with an impossible capacity"));
        }
        let (capacity, input_capacity) = (wire.capacity as usize, wire.input_capacity as usize);
        let block = Some(wire.offset)
            .filter(|offset| offset.is_multiple_of(ginnel_layout::PAGE as u64))
            .and_then(|offset| endpoint.part(offset, capacities.footprint()))
            .ok_or_else(|| bad("a channel outside its segment"))?;
        let (output, input) = capacities.rings(wire.is_initiator());
        let ring = |at, capacity| {
            block.part(at, ring::footprint(capacity)).ok_or_else(|| bad("a ring outside its channel"))
        };
        let doorbell = match wire.bell_kind {
            wire::BellKind::EVENT => {
                let event = fds.pop().ok_or_else(|| bad("a channel without its doorbell"))?;
                endpoint.doorbell_of(wire.peer_endpoint, wire.peer_epoch, event)
            }
            wire::BellKind::REGISTER => {
                let registers = endpoint.registers.clone();
                Arc::new(Doorbell::Register(
                    registers.ok_or_else(|| bad("a doorbell register that was never sent"))?,
                    wire.bell,
                ))
            }
            wire::BellKind::NONE => Arc::new(Doorbell::None),
            _ => return Err(bad("an unknown kind of doorbell")),
        };
        let (output, input) = (ring(output, capacity)?, ring(input, input_capacity)?);
        let info = ChannelInfo {
            id: wire.channel,
            capacity,
            input_capacity,
            peer: Peer {
                member: wire.peer_member,
                member_name: wire.peer_member_name.as_str().into(),
                endpoint: wire.peer_endpoint,
                epoch: wire.peer_epoch,
                name: wire.peer_name.as_str().into(),
            },
        };
        let mode = endpoint.mode;
        let (opener, is_initiator) = (Opener::current(), wire.is_initiator());
        let is_saved = AtomicBool::new(false);
        let shared = Shared { endpoint, info, doorbell, opener, is_initiator, is_saved };
        Ok(Self { shared: Arc::new(shared), output, input, mode })
    }

    pub(crate) fn waiter(&self) -> Waiter {
        Waiter::new(self.mode, self.shared.endpoint.event.clone())
    }

    /// Returns the means to wake the consumer of our output ring.
    pub(crate) fn reader(&self) -> PeerWaker {
        PeerWaker::new(self.shared.clone(), self.output.clone(), ring::DATA_ARMED)
    }

    /// Returns the means to wake the producer of our input ring.
    pub(crate) fn writer(&self) -> PeerWaker {
        PeerWaker::new(self.shared.clone(), self.input.clone(), ring::SPACE_ARMED)
    }
}
