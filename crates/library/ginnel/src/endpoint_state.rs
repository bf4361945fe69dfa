//! The state that an endpoint keeps from the daemon's messages: connections to its listeners, rights to blocks, and the
//! doorbells of others.

use crate::connection::Packet;
use crate::doorbell::Doorbell;
use crate::open_blocks::OpenBlocks;
use crate::peer_doorbells::{EndpointId, PeerDoorbells, Ring};
use ginnel_layout::Name;
use ginnel_layout::wire::{self, Kind, Rights};
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// A message that the daemon must get, and whose answer nobody waits for.
pub(crate) type Notification = (Kind, Vec<u8>);

/// A connection that waits to be accepted.
pub(crate) struct Incoming {
    pub channel: wire::Channel,
    pub fds: Vec<OwnedFd>,
}

/// The state of one endpoint in one process. The session changes it while it holds its lock, so nothing here waits. It
/// stays empty as long as the session has no endpoint.
#[derive(Default)]
pub(crate) struct EndpointState {
    pub blocks: OpenBlocks,
    pub doorbells: PeerDoorbells,
    /// One eventfd per listener, readable as long as a connection waits there.
    arrival_events: HashMap<u32, Arc<OwnedFd>>,
    waiting: HashMap<u32, VecDeque<Incoming>>,
    /// Channels that the daemon has announced to this process. The daemon may announce them again until it has answered
    /// that they are closed.
    known: HashSet<u64>,
    notifications: Vec<Notification>,
    /// The segment's file was truncated.
    pub is_truncated: bool,
}

impl EndpointState {
    /// Returns the eventfd that becomes readable when a connection waits at the listener: `event`, unless the listener
    /// has one already.
    pub fn arrival_event(&mut self, listener: u32, event: OwnedFd) -> Arc<OwnedFd> {
        let event = self.arrival_events.entry(listener).or_insert_with(|| Arc::new(event)).clone();
        self.update_arrival_event(listener);
        event
    }

    /// Makes the listener's eventfd readable if and only if a connection waits there.
    fn update_arrival_event(&self, listener: u32) {
        let Some(event) = self.arrival_events.get(&listener) else { return };
        let _ = match self.waiting.get(&listener).is_none_or(VecDeque::is_empty) {
            true => rustix::io::read(event, &mut [0u8; 8]),
            false => rustix::io::write(event, &1u64.to_ne_bytes()),
        };
    }

    /// Takes the next connection to a listener.
    pub fn take_incoming(&mut self, listener: u32) -> Option<Incoming> {
        let incoming = self.waiting.get_mut(&listener).and_then(VecDeque::pop_front)?;
        self.update_arrival_event(listener);
        Some(incoming)
    }

    /// Notes that this process continues a channel that another process has accepted, so that it is not accepted here.
    pub fn resumed(&mut self, channel: u64) {
        self.known.insert(channel);
        let at = self.waiting.iter().find(|(_, all)| all.iter().any(|i| i.channel.channel == channel));
        if let Some(listener) = at.map(|(listener, _)| *listener)
            && let Some(waiting) = self.waiting.get_mut(&listener)
        {
            waiting.retain(|incoming| incoming.channel.channel != channel);
            self.update_arrival_event(listener);
        }
    }

    /// Returns the doorbell with this number. `None` means that the daemon rings it, or that it cannot be rung.
    pub fn ring(&mut self, bell: u32, sleeper: EndpointId) -> Option<Arc<Doorbell>> {
        match self.doorbells.ring(bell, sleeper, Instant::now()) {
            Ring::By(doorbell) => return Some(doorbell),
            Ring::Ask => self.ask_for_bell(bell),
            Ring::Nothing => {}
        }
        None
    }

    fn ask_for_bell(&mut self, bell: u32) {
        self.tell(Kind::BELL, &wire::BellOf { bell, reserved: 0 });
    }

    /// Stops listening; waiting connections are refused.
    pub fn unlisten(&mut self, listener: u32) {
        self.arrival_events.remove(&listener);
        self.tell(Kind::UNLISTEN, &wire::Listening { listener, reserved: 0 });
        self.refuse(listener);
    }

    fn refuse(&mut self, listener: u32) {
        for Incoming { channel, .. } in self.waiting.remove(&listener).unwrap_or_default() {
            self.tell(Kind::CLOSE, &wire::ChannelRef { channel: channel.channel });
        }
    }

    fn tell<T: IntoBytes + zerocopy::Immutable>(&mut self, kind: Kind, body: &T) {
        self.notifications.push((kind, body.as_bytes().to_vec()));
    }

    fn incoming(&mut self, channel: wire::Channel, fds: Vec<OwnedFd>) {
        if self.known.insert(channel.channel) {
            self.waiting.entry(channel.listener).or_default().push_back(Incoming { channel, fds });
            self.update_arrival_event(channel.listener);
        }
    }
}

/// Returns the body of an answer, if the answer is of that kind.
fn granted<T: FromBytes>(answer: &Packet, kind: Kind) -> Option<T> {
    if answer.header.kind == kind { wire::body(&answer.body) } else { None }
}

impl EndpointState {
    /// Handles a message that the daemon has sent unasked.
    pub fn event(&mut self, packet: Packet) {
        // A malformed event is ignored, which affects only the object that it announces.
        match packet.header.kind {
            Kind::INCOMING => {
                if let Some(channel) = wire::body(&packet.body) {
                    self.incoming(channel, packet.fds);
                }
            }
            Kind::BLOCK_REVOKED => {
                if let Some(event) = wire::body(&packet.body) {
                    self.blocks.revoked(&event);
                }
            }
            Kind::SEGMENT_CUT => self.is_truncated = true,
            _ => {}
        }
    }

    /// Handles the answer to a message that was sent with [`crate::session::Session::tell`].
    pub fn answered(&mut self, kind: Kind, body: &[u8], answer: Packet) {
        match kind {
            Kind::BELL => {
                if let Some(wire::BellOf { bell, .. }) = wire::body(body)
                    && self.doorbells.answered(bell, answer, Instant::now())
                {
                    self.ask_for_bell(bell);
                }
            }
            Kind::CLOSE => {
                if let Some(wire::ChannelRef { channel }) = wire::body(body) {
                    self.known.remove(&channel);
                }
            }
            Kind::UNLISTEN => {
                // Connections that came before the daemon knew that nobody listens any more.
                if let Some(wire::Listening { listener, .. }) = wire::body(body)
                    && !self.arrival_events.contains_key(&listener)
                {
                    self.refuse(listener);
                }
            }
            Kind::BLOCK_CLOSE => {
                // The daemon may have revoked rights of this handle before it was closed.
                if let Some(wire::BlockRights { handle, .. }) = wire::body(body) {
                    self.blocks.forget(handle);
                }
            }
            _ => {}
        }
    }

    /// Handles the answer to an abandoned request: queues the message that undoes the grant.
    pub fn unclaimed(&mut self, kind: Kind, body: &[u8], answer: &Packet) {
        match kind {
            Kind::CONNECT => {
                if let Some(channel) = granted::<wire::Channel>(answer, Kind::CHANNEL) {
                    self.tell(Kind::CLOSE, &wire::ChannelRef { channel: channel.channel });
                }
            }
            Kind::LISTEN => {
                // An endpoint that listens twice at a name has one listener.
                if let Some(listening) = granted::<wire::Listening>(answer, Kind::LISTENING)
                    && !self.arrival_events.contains_key(&listening.listener)
                {
                    self.unlisten(listening.listener);
                }
            }
            Kind::HOLD => {
                if let Some(hold) = wire::body::<wire::Hold>(body).filter(|_| answer.header.kind == Kind::OK)
                {
                    self.tell(Kind::HOLD, &wire::Hold { millis: 0, ..hold });
                }
            }
            Kind::SYNC_OPEN => {
                if let Some(wire::Sync { object, slot, epoch, .. }) = granted(answer, Kind::SYNC) {
                    self.tell(Kind::SYNC_CLOSE, &wire::SyncRef { object, slot, epoch });
                }
            }
            Kind::BLOCK_CREATE | Kind::BLOCK_OPEN => {
                let Some(wire::Block { handle, .. }) = granted(answer, Kind::BLOCK) else { return };
                if kind == Kind::BLOCK_CREATE
                    && let Some(name) = wire::body::<wire::BlockCreate>(body).map(|create| create.name)
                    && name != Name::NONE
                {
                    self.tell(Kind::BLOCK_UNLINK, &wire::ByName { name });
                }
                self.tell(
                    Kind::BLOCK_CLOSE,
                    &wire::BlockRights { handle, rights: Rights::NONE, reserved: 0 },
                );
            }
            _ => {}
        }
    }

    /// Takes the messages that the daemon must get because of the calls above.
    pub fn take_notifications(&mut self) -> Vec<Notification> {
        for heard in self.blocks.take_acknowledgements() {
            self.tell(Kind::BLOCK_ACK, &heard);
        }
        std::mem::take(&mut self.notifications)
    }

    /// Returns the state with which the child of a fork begins. Channels that were announced to the parent and accepted
    /// there must not be accepted in the child. Channels that still wait are announced to the child again.
    pub fn inherited(&self) -> Self {
        let waiting = self.waiting.values().flatten().map(|incoming| incoming.channel.channel);
        let waiting: HashSet<u64> = waiting.collect();
        Self {
            blocks: self.blocks.clone(),
            doorbells: self.doorbells.inherited(),
            known: self.known.difference(&waiting).copied().collect(),
            ..Self::default()
        }
    }
}
