//! The part that both kinds of channel share: how they are opened, and the channel's memory in the segment.

use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::inner::Inner;
use crate::peer::PeerWaker;
use crate::shared::{ChannelInfo, Peer, Shared};
use crate::waiter::Waiter;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::{ring, wire};
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::Mapping;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A kind of channel: [`crate::MessageChannel`] or [`crate::StreamChannel`]. The trait is sealed.
pub trait Channel: Sized + sealed::Build {
    /// The number of the kind in the attach protocol.
    const KIND: ChannelKind;
}

pub(crate) mod sealed {
    use crate::channel::Pipe;
    use ginnel_ring::{Corrupt, Cursor};

    pub trait Build: Sized {
        fn build(pipe: Pipe) -> Self;
        /// Continues at the position where another process has stopped.
        fn resume(pipe: Pipe, output: Cursor, input: Cursor) -> Result<Self, Corrupt>;
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
        let shared = Shared::new(endpoint, info, doorbell, wire.is_initiator());
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
