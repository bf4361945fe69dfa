//! Both ends of the link between the two daemons of a VM: session and relay messages over the control memory.
//!
//! [`ginnel_layout::control`] describes the session protocol. Each daemon may die at any instruction and come back. The other
//! daemon must notice this and begin a new session. Messages that were on their way are lost then, and the callers repeat their
//! requests.
//!
//! Neither end blocks. The caller calls `step` until it returns [`Event::Idle`], whenever it is woken (or, in a guest without
//! interrupts, from time to time), and rings the peer's daemon vector when `take_ring` returns true. Every store that the
//! peer may be waiting for asks for a ring. Before `step` returns `Idle`, the consumer is armed and looks again, so no wake-up is
//! lost.
//!
//! The words that the peer writes are hostile input. Whatever they contain, the work of one step is bounded: it looks once at the
//! session words, and handles at most one message or one new handshake. A peer that sends without end keeps `step` from returning
//! `Idle`, so a caller with other work must stop after some number of events.

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

/// The result of one step.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Nothing has happened. The peer will ring when something does.
    Idle,
    /// A session is established; [`HostLink::send`] and [`GuestLink::send`] work from here on.
    Up(PeerInfo),
    /// A message has arrived. Its kind and body come from the peer and are not checked, except for their length.
    Message {
        /// The kind of the message.
        kind: RelayKind,
        /// The number of the guest's client that the message concerns.
        client: u32,
        /// Its content, at most [`wire::MAX_PACKET`] bytes.
        body: Vec<u8>,
    },
    /// The session is over: the peer has restarted or has broken its ring. The next handshake begins by itself. Messages that
    /// were sent and not received are lost. This event comes only after `Up`.
    Down,
}

/// Facts about the guest, which it writes into its session line. At the guest's end of the link, these are the values that the
/// guest itself has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerInfo {
    /// The boot identity of the guest's kernel. If it differs from the last one, the VM has rebooted.
    pub boot_id: [u8; 16],
    /// Whether the guest can be interrupted; otherwise it polls.
    pub interrupts: bool,
}

/// The reason why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendRefused {
    /// There is no room now. The peer rings when there is some.
    #[error("the control ring is full")]
    Full,
    /// There is no session, or the ring is broken and the next step reports that.
    #[error("the peer's daemon is not there")]
    Down,
    /// The message is longer than a packet can be.
    #[error("a body of {0} bytes; a relay message carries at most {max}", max = wire::MAX_PACKET)]
    TooLong(usize),
}

/// Memory that can be divided into parts, for the two rings.
pub trait Parts: SharedMemory {
    /// Returns the `len` bytes from `at`, which must lie inside.
    fn ring(&self, at: usize, len: usize) -> Self;
}

impl Parts for Mapping {
    fn ring(&self, at: usize, len: usize) -> Self {
        self.part(at, len).expect("the caller has checked that the control memory has its full size")
    }
}

/// The VM that a control memory belongs to, as its guest reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The VM's member number.
    pub member: u32,
    /// The number of doorbell vectors of each member.
    pub vectors: u32,
    /// The VM's name.
    pub name: Name,
}

/// The reason why a control memory cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BadHeader {
    /// The host's daemon has not written it yet, or is just rewriting it.
    #[error("the host daemon has not set it up yet")]
    NotReady,
    /// The format is another version.
    #[error(
        "it has version {0}, this daemon knows version {VERSION}; use the same release of ginneld on host and guest"
    )]
    Version(u32),
    /// The header contains something that no host daemon writes.
    #[error("its header is damaged ({0})")]
    Damaged(&'static str),
}

impl Identity {
    /// Reads the header of a control memory of full size. Returns `None` if the memory is something else.
    pub fn read(memory: &impl SharedMemory) -> Option<Result<Self, BadHeader>> {
        if memory.load_relaxed_u64(0) != MAGIC {
            return None;
        }
        // ORDER link.header: the version is loaded before the rest of the header. Pairs with: `HostLink::new`.
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
    /// The producer has armed itself and waits for space.
    waits_for_space: bool,
    /// The output ring is broken; the next step ends the session.
    failed: bool,
}

/// A ring is broken, so the session must end.
struct Broken;

impl<M: Parts> Rings<M> {
    /// Resets this end's words of both rings.
    fn new(memory: &M, output: usize, input: usize) -> Self {
        let footprint = ring::footprint(CAPACITY);
        let (output, input) = (memory.ring(output, footprint), memory.ring(input, footprint));
        // A ring does not touch a side that the daemon has declared dead. In this memory only a hostile peer can declare that.
        output.store_relaxed_u32(PRODUCER_STATE, SideState::NEW.0);
        input.store_relaxed_u32(CONSUMER_STATE, SideState::NEW.0);
        Self {
            output: Producer::new(output, CAPACITY),
            input: Consumer::new(input, CAPACITY),
            waits_for_space: false,
            failed: false,
        }
    }

    /// Returns the next message. `None` means that the consumer is armed and the peer will ring.
    fn receive(&mut self, ring: &mut bool) -> Result<Option<Event>, Broken> {
        if self.failed {
            return Err(Broken);
        }
        let mut found = self.input.poll();
        if found == Err(RecvError::Empty) {
            // The consumer stays armed: the peer rings once for each arming, and the next look arms it again.
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

    /// Returns whether the output takes `len` bytes (or has an error to report). If not, the peer has been asked to ring.
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

/// Returns an epoch that no earlier session had.
fn fresh_epoch() -> u64 {
    let mut bytes = [0; 8];
    loop {
        // This fails only when it is interrupted.
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        let epoch = u64::from_ne_bytes(bytes);
        if filled == Ok(bytes.len()) && epoch != 0 {
            return epoch;
        }
    }
}

/// The host daemon's end of the link.
pub struct HostLink<M: Parts = Mapping> {
    memory: M,
    /// The guest epoch that this end has answered; 0 for none.
    accepted: u64,
    /// The host epoch of that answer.
    epoch: u64,
    guest: PeerInfo,
    rings: Option<Rings<M>>,
    up: bool,
    ring: bool,
}

impl<M: Parts> HostLink<M> {
    /// Takes the host's end of `memory`, writes the VM's identity into it and ends the session of an earlier host daemon.
    /// The caller must ring the guest ([`HostLink::take_ring`]). Panics if `memory` is smaller than [`SIZE`].
    pub fn new(memory: M, member: u32, vectors: u32, name: Name) -> Self {
        assert!(memory.len() >= SIZE, "the control memory has its full size");
        memory.store_release_u32(VERSION_AT, 0);
        let mut header = ControlHeader::new_zeroed();
        header.magic = MAGIC;
        header.member = member;
        header.vectors = vectors;
        // This writes the header up to the session lines; `version` stays zero for now.
        memory.write(0, &header.as_bytes()[..offset_of!(ControlHeader, host)]);
        memory.write(offset_of!(ControlHeader, name), name.as_bytes());
        memory.store_relaxed_u64(HOST_ACK, 0);
        let epoch = fresh_epoch();
        // ORDER link.host_epoch. Pairs with: `GuestLink::step`.
        memory.store_release_u64(HOST_EPOCH, epoch);
        // ORDER link.header: the whole header is visible before its version. Pairs with: `Identity::read`.
        memory.store_release_u32(VERSION_AT, VERSION);
        Self { memory, accepted: 0, epoch, guest: PeerInfo::default(), rings: None, up: false, ring: true }
    }

    /// Returns the next event, without blocking.
    pub fn step(&mut self) -> Event {
        // ORDER link.guest_epoch: the guest's boot identity and mode are seen once its epoch is seen. Pairs with:
        // `GuestLink::begin`.
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
            // ORDER link.guest_ack: once the acknowledgement is seen, the guest has reset its words of the rings. Pairs
            // with: `GuestLink::step`.
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
            return; // The guest's daemon has closed its end, or has never been there.
        }
        let boot_id = [0, 8].map(|at| self.memory.load_relaxed_u64(GUEST_BOOT_ID + at));
        let boot_id = zerocopy::transmute!(boot_id);
        self.guest = PeerInfo { boot_id, interrupts: self.memory.load_relaxed_u32(GUEST_INTERRUPTS) != 0 };
        self.rings = Some(Rings::new(&self.memory, TO_GUEST, TO_HOST));
        self.epoch = fresh_epoch();
        self.memory.store_release_u64(HOST_EPOCH, self.epoch);
        // ORDER link.host_ack: our words of the rings and our epoch are visible before this acknowledgement. Pairs with:
        // `GuestLink::step`.
        self.memory.store_release_u64(HOST_ACK, guest);
        self.ring = true;
    }

    /// Ends the session; the next step answers the guest epoch that it then finds. Returns whether there was a session.
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

    /// Returns whether the guest's daemon vector must be rung, and clears that request.
    pub fn take_ring(&mut self) -> bool {
        std::mem::take(&mut self.ring)
    }
}

/// The guest daemon's end of the link.
pub struct GuestLink<M: Parts = Mapping> {
    memory: M,
    info: PeerInfo,
    epoch: u64,
    /// The host epoch and the rings of the session; `None` while there is no session.
    session: Option<(u64, Rings<M>)>,
    ring: bool,
}

impl<M: Parts> GuestLink<M> {
    /// Takes the guest's end of `memory` and asks the host for a session. The caller must ring the host
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
        // This writes word by word, because a host may be reading what an earlier guest daemon wrote there.
        let boot_id: [u64; 2] = zerocopy::transmute!(self.info.boot_id);
        self.memory.store_relaxed_u64(GUEST_BOOT_ID, boot_id[0]);
        self.memory.store_relaxed_u64(GUEST_BOOT_ID + 8, boot_id[1]);
        self.memory.store_relaxed_u32(GUEST_INTERRUPTS, self.info.interrupts.into());
        // ORDER link.guest_epoch: the boot identity and the mode are visible before this epoch. Pairs with: `HostLink::step`.
        self.memory.store_release_u64(GUEST_EPOCH, self.epoch);
        self.ring = true;
    }

    /// Returns the next event, without blocking.
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

    /// Begins the session if the host has answered.
    fn answered(&mut self) -> Event {
        // ORDER link.host_ack: the host's words of the rings and its epoch are seen once its acknowledgement is seen. Pairs
        // with: `HostLink::accept`.
        if self.memory.load_acquire_u64(HOST_ACK) != self.epoch {
            return Event::Idle;
        }
        // If the host's daemon has been replaced since then, this is the new daemon's epoch. That daemon will choose another
        // epoch when it answers, which ends the session at the next step.
        let host = self.memory.load_acquire_u64(HOST_EPOCH);
        self.session = Some((host, Rings::new(&self.memory, TO_HOST, TO_GUEST)));
        // ORDER link.guest_ack: our words of the rings are visible before this acknowledgement. Pairs with: `HostLink::step`.
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

    /// Returns whether the host's daemon vector must be rung, and clears that request.
    pub fn take_ring(&mut self) -> bool {
        std::mem::take(&mut self.ring)
    }

    /// Closes this end, so that the host sees at once that the guest's daemon is gone.
    pub fn close(&self) {
        self.memory.store_release_u64(GUEST_EPOCH, 0);
    }
}

#[cfg(test)]
mod tests;
