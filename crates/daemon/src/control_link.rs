//! The link between the two daemons of a VM: session and relay messages over the control memory, both ends.
//!
//! The session protocol is written in [`ginnel_layout::control`]. Each daemon may die at any instruction and come back,
//! and the other must notice and begin anew; what was on its way is lost then, and the callers ask again.
//!
//! Neither end blocks. The owner calls `step` until it says [`Event::Idle`], whenever it is woken (or, in a guest without
//! interrupts, from time to time), and rings the peer's daemon vector when `take_ring` says so. Every store that the
//! peer may be waiting for asks for a ring, and before `Idle` the consumer is armed and looks again, so no wake is lost.
//!
//! The peer's words are hostile input. Whatever stands there, a step is bounded work: one look at the session words, and
//! at most one message or one new handshake. A peer that keeps sending keeps `step` from saying `Idle`, so an owner with
//! other work to do turns to it after some number of events.

use ginnel_layout::control::{
    CAPACITY, ControlHeader, GUEST_ACK, GUEST_BOOT_ID, GUEST_EPOCH, GUEST_INTERRUPTS, HOST_ACK, HOST_EPOCH,
    MAGIC, SIZE, TO_GUEST, TO_HOST, VERSION, VERSION_AT,
};
use ginnel_layout::relay::{Envelope, MAX_MESSAGE, RelayKind};
use ginnel_layout::ring::{self, CONSUMER_STATE, PRODUCER_STATE, SideState};
use ginnel_layout::{Name, wire};
use ginnel_ring::message::{Consumer, Producer};
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError};
use ginnel_shmem::{Mapping, SharedMemory};
use std::mem::offset_of;
use thiserror::Error;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// What a step found.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing. The peer will ring when there is something.
    Idle,
    /// A session is established; [`HostLink::send`] and [`GuestLink::send`] work from here on.
    Up(PeerInfo),
    /// A message has arrived. Its kind and body are the peer's word and unchecked, but for their length.
    Message {
        /// What it is.
        kind: RelayKind,
        /// The guest's client that is meant.
        client: u32,
        /// Its content, at most [`wire::MAX_PACKET`] bytes.
        body: Vec<u8>,
    },
    /// The session is over: the peer has restarted, or has broken its ring. The next handshake begins by itself. What was
    /// sent and not received is lost. Comes only after `Up`.
    Down,
}

/// What the guest says of itself, in its session line. On the guest's end of the link: what it has said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerInfo {
    /// The boot identity of its kernel. Another one than last time: the VM has rebooted.
    pub boot_id: [u8; 16],
    /// Whether it can be interrupted; otherwise it polls.
    pub interrupts: bool,
}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendRefused {
    /// No room now. The peer rings when there is some.
    #[error("the control ring is full")]
    Full,
    /// No session, or the ring is broken and the next step says so.
    #[error("the peer's daemon is not there")]
    Down,
    /// Longer than a packet can be.
    #[error("a body of {0} bytes; a relay message carries at most {max}", max = wire::MAX_PACKET)]
    TooLong(usize),
}

/// Memory that can be cut into parts, for the two rings.
pub trait Parts: SharedMemory {
    /// The `len` bytes from `at`, which are inside.
    fn ring(&self, at: usize, len: usize) -> Self;
}

impl Parts for Mapping {
    fn ring(&self, at: usize, len: usize) -> Self {
        self.part(at, len).expect("the caller has checked that the control memory has its full size")
    }
}

/// Who a control memory belongs to, as its guest reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The VM's member number.
    pub member: u32,
    /// Doorbell vectors of each member.
    pub vectors: u32,
    /// The VM's name.
    pub name: Name,
}

/// Why a control memory cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BadHeader {
    /// The host daemon has not written it yet, or is just rewriting it.
    #[error("the host daemon has not set it up yet")]
    NotReady,
    /// Another format.
    #[error(
        "it has version {0}, this daemon knows version {VERSION}; use the same release of ginneld on host and guest"
    )]
    Version(u32),
    /// Something that no host daemon writes.
    #[error("its header is damaged ({0})")]
    Damaged(&'static str),
}

impl Identity {
    /// Reads the header of a control memory of full size. `None` if it is something else.
    pub fn read(memory: &impl SharedMemory) -> Option<Result<Self, BadHeader>> {
        if memory.load_relaxed_u64(0) != MAGIC {
            return None;
        }
        // ORDER link.header. Pairs with: `HostLink::new`.
        let version = memory.load_acquire_u32(VERSION_AT);
        let mut bytes = [0; size_of::<ControlHeader>()];
        memory.read(0, &mut bytes);
        let header: ControlHeader = zerocopy::transmute!(bytes);
        Some(match version {
            0 => Err(BadHeader::NotReady),
            VERSION if !(1..=0xffff).contains(&header.member) => Err(BadHeader::Damaged("member number")),
            VERSION if !(1..=2048).contains(&header.vectors) => Err(BadHeader::Damaged("number of vectors")),
            VERSION if header.name.checked().is_err() => Err(BadHeader::Damaged("name")),
            VERSION => Ok(Self { member: header.member, vectors: header.vectors, name: header.name }),
            other => Err(BadHeader::Version(other)),
        })
    }
}

/// The rings of one session, as one end sees them.
struct Rings<M: SharedMemory> {
    output: Producer<M>,
    input: Consumer<M>,
    /// The producer has asked to be woken for space.
    waits_for_space: bool,
    /// The output is broken; the next step ends the session.
    failed: bool,
}

/// The session must end.
struct Broken;

impl<M: Parts> Rings<M> {
    /// Resets this end's words of both rings.
    fn new(memory: &M, output: usize, input: usize) -> Self {
        let footprint = ring::footprint(CAPACITY);
        let (output, input) = (memory.ring(output, footprint), memory.ring(input, footprint));
        // A ring leaves a side alone that the daemon has declared dead. Here nobody does that but a hostile peer.
        output.store_relaxed_u32(PRODUCER_STATE, SideState::NEW.0);
        input.store_relaxed_u32(CONSUMER_STATE, SideState::NEW.0);
        Self {
            output: Producer::new(output, CAPACITY),
            input: Consumer::new(input, CAPACITY),
            waits_for_space: false,
            failed: false,
        }
    }

    /// The next message. `None`: the consumer is armed, the peer will ring.
    fn receive(&mut self, ring: &mut bool) -> Result<Option<Event>, Broken> {
        if self.failed {
            return Err(Broken);
        }
        let mut found = self.input.poll();
        if found == Err(RecvError::Empty) {
            // Stays armed: the peer rings once for each arming, and the next look arms afresh.
            self.input.arm();
            found = self.input.poll();
        }
        *ring |= self.input.take_owed();
        match found {
            Ok(()) => {}
            Err(RecvError::Empty) => return Ok(None),
            Err(_) => return Err(Broken),
        }
        let message = self.input.peek().map_err(|_| Broken)?;
        if !(size_of::<Envelope>()..=MAX_MESSAGE).contains(&message.len()) {
            return Err(Broken);
        }
        let mut bytes = message.slice().to_vec();
        *ring |= message.release();
        let body = bytes.split_off(size_of::<Envelope>());
        let envelope = Envelope::read_from_bytes(&bytes).map_err(|_| Broken)?;
        Ok(Some(Event::Message { kind: envelope.kind, client: envelope.client, body }))
    }

    fn send(
        &mut self,
        kind: RelayKind,
        client: u32,
        body: &[u8],
        ring: &mut bool,
    ) -> Result<(), SendRefused> {
        if body.len() > wire::MAX_PACKET {
            return Err(SendRefused::TooLong(body.len()));
        }
        if self.failed {
            return Err(SendRefused::Down);
        }
        let len = size_of::<Envelope>() + body.len();
        if !self.has_room(len) {
            return Err(SendRefused::Full);
        }
        match self.output.claim(len) {
            Ok(claim) => {
                claim.slice().write(0, Envelope { kind, client }.as_bytes());
                claim.slice().write(size_of::<Envelope>(), body);
                *ring |= claim.publish(len);
                Ok(())
            }
            Err(SendError::Full) => Err(SendRefused::Full),
            Err(_) => {
                self.failed = true;
                Err(SendRefused::Down)
            }
        }
    }

    /// Whether the output takes `len` bytes (or has an error to tell). If not, the peer has been asked to ring.
    fn has_room(&mut self, len: usize) -> bool {
        if !self.output.want(len).ready() {
            self.output.arm();
            self.waits_for_space = true;
            if !self.output.ready() {
                return false;
            }
        }
        if std::mem::take(&mut self.waits_for_space) {
            self.output.disarm();
        }
        true
    }
}

/// A number that no earlier session had.
fn fresh_epoch() -> u64 {
    let mut bytes = [0; 8];
    loop {
        // Fails only when interrupted.
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        let epoch = u64::from_ne_bytes(bytes);
        if filled == Ok(bytes.len()) && epoch != 0 {
            return epoch;
        }
    }
}

/// The host daemon's end.
pub struct HostLink<M: Parts = Mapping> {
    memory: M,
    /// The guest epoch that has been answered, 0 for none.
    accepted: u64,
    /// Our answer to it.
    epoch: u64,
    guest: PeerInfo,
    rings: Option<Rings<M>>,
    up: bool,
    ring: bool,
}

impl<M: Parts> HostLink<M> {
    /// Takes the host's end of `memory`, writes the VM's identity into it and ends the session of an earlier host daemon.
    /// The guest must be rung ([`HostLink::take_ring`]). Panics if `memory` is smaller than [`SIZE`].
    pub fn new(memory: M, member: u32, vectors: u32, name: Name) -> Self {
        assert!(memory.len() >= SIZE, "the control memory has its full size");
        memory.store_release_u32(VERSION_AT, 0);
        let mut header = ControlHeader::new_zeroed();
        header.magic = MAGIC;
        header.member = member;
        header.vectors = vectors;
        // Up to the session lines; `version` stays zero for now.
        memory.write(0, &header.as_bytes()[..offset_of!(ControlHeader, host)]);
        memory.write(offset_of!(ControlHeader, name), name.as_bytes());
        memory.store_relaxed_u64(HOST_ACK, 0);
        let epoch = fresh_epoch();
        // ORDER link.host_epoch. Pairs with: `GuestLink::step`.
        memory.store_release_u64(HOST_EPOCH, epoch);
        // ORDER link.header: all of the header before its version. Pairs with: `Identity::read`.
        memory.store_release_u32(VERSION_AT, VERSION);
        Self { memory, accepted: 0, epoch, guest: PeerInfo::default(), rings: None, up: false, ring: true }
    }

    /// Looks for the next thing that has happened.
    pub fn step(&mut self) -> Event {
        // ORDER link.guest_epoch: boot identity and mode are seen. Pairs with: `GuestLink::begin`.
        let guest = self.memory.load_acquire_u64(GUEST_EPOCH);
        if guest != self.accepted {
            if self.end() {
                return Event::Down;
            }
            self.accept(guest);
            return Event::Idle;
        }
        let Some(rings) = &mut self.rings else { return Event::Idle };
        if !self.up {
            // ORDER link.guest_ack: the guest has reset its words of the rings. Pairs with: `GuestLink::step`.
            if self.memory.load_acquire_u64(GUEST_ACK) != self.epoch {
                return Event::Idle;
            }
            self.up = true;
            return Event::Up(self.guest);
        }
        match rings.receive(&mut self.ring) {
            Ok(event) => event.unwrap_or(Event::Idle),
            Err(Broken) => {
                self.end();
                Event::Down
            }
        }
    }

    /// Answers a guest epoch.
    fn accept(&mut self, guest: u64) {
        self.accepted = guest;
        if guest == 0 {
            return; // The guest's daemon has said goodbye, or has never been there.
        }
        let boot_id = [0, 8].map(|at| self.memory.load_relaxed_u64(GUEST_BOOT_ID + at));
        let boot_id = zerocopy::transmute!(boot_id);
        self.guest = PeerInfo { boot_id, interrupts: self.memory.load_relaxed_u32(GUEST_INTERRUPTS) != 0 };
        self.rings = Some(Rings::new(&self.memory, TO_GUEST, TO_HOST));
        self.epoch = fresh_epoch();
        self.memory.store_release_u64(HOST_EPOCH, self.epoch);
        // ORDER link.host_ack: our words of the rings and our epoch before this. Pairs with: `GuestLink::step`.
        self.memory.store_release_u64(HOST_ACK, guest);
        self.ring = true;
    }

    /// Ends the session; the next step answers whatever guest epoch stands there. Whether there was one.
    fn end(&mut self) -> bool {
        self.rings = None;
        self.accepted = 0;
        std::mem::take(&mut self.up)
    }

    /// Sends a message. Never blocks.
    pub fn send(&mut self, kind: RelayKind, client: u32, body: &[u8]) -> Result<(), SendRefused> {
        match &mut self.rings {
            Some(rings) if self.up => rings.send(kind, client, body, &mut self.ring),
            _ => Err(SendRefused::Down),
        }
    }

    /// Whether the guest's daemon vector must be rung. Answers true once.
    pub fn take_ring(&mut self) -> bool {
        std::mem::take(&mut self.ring)
    }
}

/// The guest daemon's end.
pub struct GuestLink<M: Parts = Mapping> {
    memory: M,
    info: PeerInfo,
    epoch: u64,
    /// While up: the host epoch of the session, and its rings.
    session: Option<(u64, Rings<M>)>,
    ring: bool,
}

impl<M: Parts> GuestLink<M> {
    /// Takes the guest's end of `memory` and asks the host for a session. The host must be rung
    /// ([`GuestLink::take_ring`]). Panics if `memory` is smaller than [`SIZE`].
    pub fn new(memory: M, boot_id: [u8; 16], interrupts: bool) -> Self {
        assert!(memory.len() >= SIZE, "the control memory has its full size");
        let info = PeerInfo { boot_id, interrupts };
        let mut link = Self { memory, info, epoch: 0, session: None, ring: false };
        link.begin();
        link
    }

    /// Asks the host for a session.
    fn begin(&mut self) {
        self.session = None;
        self.epoch = fresh_epoch();
        // Word by word: a host may be reading what an earlier guest daemon wrote there.
        let boot_id: [u64; 2] = zerocopy::transmute!(self.info.boot_id);
        self.memory.store_relaxed_u64(GUEST_BOOT_ID, boot_id[0]);
        self.memory.store_relaxed_u64(GUEST_BOOT_ID + 8, boot_id[1]);
        self.memory.store_relaxed_u32(GUEST_INTERRUPTS, self.info.interrupts.into());
        // ORDER link.guest_epoch: boot identity and mode before this. Pairs with: `HostLink::step`.
        self.memory.store_release_u64(GUEST_EPOCH, self.epoch);
        self.ring = true;
    }

    /// Looks for the next thing that has happened.
    pub fn step(&mut self) -> Event {
        let Some((host, rings)) = &mut self.session else { return self.answered() };
        // ORDER link.host_epoch. Pairs with: `HostLink::new`, `HostLink::accept`.
        if self.memory.load_acquire_u64(HOST_EPOCH) != *host {
            self.begin();
            return Event::Down;
        }
        match rings.receive(&mut self.ring) {
            Ok(event) => event.unwrap_or(Event::Idle),
            Err(Broken) => {
                self.begin();
                Event::Down
            }
        }
    }

    /// No session yet: has the host answered?
    fn answered(&mut self) -> Event {
        // ORDER link.host_ack: the host's words of the rings and its epoch are seen. Pairs with: `HostLink::accept`.
        if self.memory.load_acquire_u64(HOST_ACK) != self.epoch {
            return Event::Idle;
        }
        // If the host has been replaced since, this is the new one's epoch; it will have another when it answers us,
        // which ends the session at the next step.
        let host = self.memory.load_acquire_u64(HOST_EPOCH);
        self.session = Some((host, Rings::new(&self.memory, TO_HOST, TO_GUEST)));
        // ORDER link.guest_ack: our words of the rings before this. Pairs with: `HostLink::step`.
        self.memory.store_release_u64(GUEST_ACK, host);
        self.ring = true;
        Event::Up(self.info)
    }

    /// Sends a message. Never blocks.
    pub fn send(&mut self, kind: RelayKind, client: u32, body: &[u8]) -> Result<(), SendRefused> {
        match &mut self.session {
            Some((_, rings)) => rings.send(kind, client, body, &mut self.ring),
            None => Err(SendRefused::Down),
        }
    }

    /// Whether the host's daemon vector must be rung. Answers true once.
    pub fn take_ring(&mut self) -> bool {
        std::mem::take(&mut self.ring)
    }

    /// Says goodbye: the host sees at once that nobody is there.
    pub fn close(self) {
        self.memory.store_release_u64(GUEST_EPOCH, 0);
    }
}

#[cfg(test)]
mod tests;
