//! The parts of an endpoint: its memory, its doorbell, and its session with the daemon.

use crate::connection::{Packet, protocol};
use crate::doorbell::{BorrowedEvent, Doorbell, private_event};
use crate::endpoint_state::{EndpointState, Incoming};
use crate::error::Error;
use crate::fork::PerProcess;
use crate::peer_doorbells::EndpointId;
use crate::session::Session;
use ginnel_layout::wire::{self, Fds, Kind};
use ginnel_layout::{Name, board, segment};
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::device::Registers;
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use rustix::event::epoll;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// How long a call that asks the daemon waits, for a restarted daemon and for the answer together.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How often the calls of a block check whether the daemon has revoked rights.
const GLANCE: Duration = Duration::from_millis(10);

pub(crate) struct Inner {
    pub path: PathBuf,
    /// The file that holds the memory, for mapping parts of it again.
    pub file: OwnedFd,
    pub memory: Mapping,
    /// The eventfd of this endpoint's vector; `None` in a VM without interrupts.
    pub event: Option<BorrowedEvent>,
    /// The doorbell registers of the control device, in a VM.
    pub registers: Option<Arc<Registers>>,
    pub mode: WaitMode,
    pub identity: wire::Attached,
    segment: Name,
    /// The next nonce. The processes of an endpoint must not use the same nonces.
    nonce: PerProcess<AtomicU64>,
    session: PerProcess<Session>,
    /// Doorbells of peers, by endpoint and epoch, so that all channels with a peer share one descriptor.
    doorbells: Mutex<HashMap<(u32, u32), Weak<Doorbell>>>,
    /// Unused lanes of readiness boards, by their offsets in the segment. A child does not inherit those of its parent.
    lanes: PerProcess<Mutex<Vec<u64>>>,
    /// The time at which [`Inner::glance`] looks again, in milliseconds of the coarse clock.
    next_glance: AtomicU64,
}

impl Inner {
    /// Makes the endpoint of a session from the daemon's answer to its request to attach.
    pub fn new(session: Session, attached: Packet, segment: Name, mode: WaitMode) -> Result<Self, Error> {
        let path = session.path().to_owned();
        let path = &path;
        let (identity, fds) = attached.into_body::<wire::Attached>(Kind::ATTACHED, path)?;
        let mut fds = fds.into_iter();
        let mut next = |bit| if identity.fds.0 & bit != 0 { fds.next() } else { None };
        let (memory, event, registers) = (next(Fds::MEMORY), next(Fds::EVENT), next(Fds::REGISTERS));
        if identity.fds.0 & Fds::MEMORY == 0 {
            return Err(Error::Broken); // An existing endpoint may be adopted even though its memory is gone.
        }
        let file = memory.ok_or_else(|| protocol(path, "no memory came with the answer"))?;
        let len = identity.mapped_len().and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| protocol(path, "an impossible segment"))?;
        let protection = match identity.access.is_read_only() {
            true => Protection::Read,
            false => Protection::ReadWrite,
        };
        let memory = Mapping::of_file(&file, identity.map_offset, len, protection)
            .map_err(Error::io("mapping the segment"))?;
        let registers = registers
            .map(|fd| Registers::map(&fd).map(Arc::new))
            .transpose()
            .map_err(Error::io("mapping the doorbell registers"))?;
        session
            .with_endpoint_state(|state: &mut EndpointState| state.doorbells.registers = registers.clone());
        Ok(Self {
            path: path.clone(),
            file,
            memory,
            event: event.map(Arc::new),
            registers,
            mode,
            identity,
            segment,
            nonce: PerProcess::new(AtomicU64::new(1)),
            session: PerProcess::new(session),
            doorbells: Mutex::default(),
            lanes: PerProcess::new(Mutex::default()),
            next_glance: AtomicU64::new(0),
        })
    }

    /// Returns this process's session. The child of a fork makes its own at the first use.
    fn session(&self) -> &Session {
        let Ok(session) = self.session.get(Session::inherit);
        session
    }

    /// Returns the name of the segment.
    pub fn segment(&self) -> &str {
        self.segment.as_str()
    }

    /// Checks that this member may write to the segment. Both sides of a channel write, and so do all users of a lock.
    pub fn may_write(&self) -> Result<(), Error> {
        if self.identity.access.is_read_only() {
            return Err(Error::ReadOnly { segment: self.segment.as_str().into() });
        }
        Ok(())
    }

    /// Returns the `len` bytes at `offset` of the segment, or `None` if they are not all mapped. This is the one place
    /// where offsets in the segment are converted to offsets in its mapping, which begins behind the reserved front.
    pub fn part(&self, offset: u64, len: usize) -> Option<Mapping> {
        let at = offset.checked_sub(segment::RESERVED).and_then(|at| usize::try_from(at).ok())?;
        self.memory.part(at, len)
    }

    /// Converts an offset in the segment to an offset in the memory's file.
    pub fn file_offset(&self, offset: u64) -> u64 {
        self.identity.map_offset + (offset - segment::RESERVED)
    }

    pub fn page(&self) -> usize {
        self.identity.page as usize
    }

    /// Returns the number of this endpoint.
    pub fn number(&self) -> u32 {
        self.identity.endpoint
    }

    /// Returns the doorbell of an endpoint on this host, for which the daemon has just sent another descriptor.
    pub fn doorbell_of(&self, endpoint: u32, epoch: u32, event: OwnedFd) -> Arc<Doorbell> {
        let mut doorbells = self.doorbells.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = doorbells.get(&(endpoint, epoch)).and_then(Weak::upgrade) {
            return known;
        }
        doorbells.retain(|_, doorbell| doorbell.strong_count() > 0);
        let doorbell = Arc::new(Doorbell::Event(event));
        doorbells.insert((endpoint, epoch), Arc::downgrade(&doorbell));
        doorbell
    }

    /// Returns the offset in the segment of an unused lane of a readiness board. Asks the daemon for another board if
    /// there is none.
    pub fn take_lane(&self) -> Result<u64, Error> {
        if let Some(lane) = self.free_lanes().pop() {
            return Ok(lane);
        }
        let body = wire::BoardOpen { nonce: self.next_nonce() };
        let packet = self.request(Kind::BOARD_OPEN, body.as_bytes())?;
        let (board, _) = packet.into_body::<wire::Board>(Kind::BOARD, &self.path)?;
        let mut free = self.free_lanes();
        free.extend((1..board::LANES as u64).map(|lane| board.offset + lane * board::LANE as u64));
        Ok(board.offset)
    }

    /// Gives a lane back. Peers may still write to it, which only causes needless checks at its next user.
    pub fn give_lane(&self, lane: u64) {
        self.free_lanes().push(lane);
    }

    fn free_lanes(&self) -> MutexGuard<'_, Vec<u64>> {
        let Ok(lanes) = self.lanes.get(|_| Ok::<_, Infallible>(Mutex::default()));
        lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a new nonce, for a request that may be repeated.
    pub fn next_nonce(&self) -> u64 {
        let random = |_: &AtomicU64| {
            let mut bytes = [0; 8];
            if getrandom(&mut bytes, GetRandomFlags::NONBLOCK) != Ok(bytes.len()) {
                bytes = (ginnel_clock::monotonic().as_nanos() as u64).to_le_bytes();
            }
            Ok::<_, Infallible>(AtomicU64::new(u64::from_le_bytes(bytes)))
        };
        let Ok(nonce) = self.nonce.get(random);
        nonce.fetch_add(1, Ordering::Relaxed)
    }

    pub fn protocol(&self, what: &'static str) -> Error {
        protocol(&self.path, what)
    }

    /// Sends a request to the daemon and waits for the answer, across a restart of the daemon if necessary, for at most
    /// [`PATIENCE`].
    pub fn request(&self, kind: Kind, body: &[u8]) -> Result<Packet, Error> {
        self.request_by(kind, body, Instant::now() + PATIENCE)
    }

    /// Does the same until `deadline`.
    pub fn request_by(&self, kind: Kind, body: &[u8], deadline: Instant) -> Result<Packet, Error> {
        let packets = self.session().request(kind, body, deadline)?;
        packets.into_iter().next_back().ok_or_else(|| self.protocol("an answer of no packets"))
    }

    /// Sends a request without waiting and returns its number, with which [`Inner::answer`] returns the daemon's
    /// answer.
    pub fn ask(&self, kind: Kind, body: &[u8]) -> u32 {
        self.session().ask(kind, body)
    }

    /// Returns the answer to a request, or the reason why there is none; `None` until the daemon has answered. Never
    /// waits.
    pub fn answer(&self, request: u32) -> Option<Result<Packet, Error>> {
        let last = |packets: Vec<Packet>| {
            packets.into_iter().next_back().ok_or_else(|| self.protocol("an answer of no packets"))
        };
        self.session().answer(request).map(|answer| answer.and_then(last))
    }

    /// Abandons a request. If the daemon grants it after all, the grant is undone.
    pub fn abandon(&self, request: u32) {
        self.session().give_up(request);
    }

    /// Returns the daemon's state as JSON.
    pub fn inspect(&self) -> Result<String, Error> {
        let session = self.session();
        state(&self.path, |page| session.request(Kind::INSPECT, page, Instant::now() + PATIENCE))
    }

    /// Sends a request whose answer is only success or refusal, and waits for it.
    pub fn order(&self, kind: Kind, body: &[u8]) -> Result<(), Error> {
        self.request(kind, body)?.into_body::<[u8; 0]>(Kind::OK, &self.path).map(drop)
    }

    /// Tells the daemon something whose answer nobody needs. Never waits. If there is no daemon at the moment, or it is
    /// slow, it receives the message later.
    pub fn tell(&self, kind: Kind, body: &[u8]) {
        self.session().tell(kind, body);
    }

    /// Rings a doorbell whose number was read from shared memory, for an endpoint that sleeps on it. Never waits: if
    /// the daemon has not said yet how to ring it, the daemon is asked, and rings it itself. Returns the doorbell if it
    /// is known.
    pub fn ring(&self, bell: u32, sleeper: EndpointId) -> Option<Arc<Doorbell>> {
        // The daemon may have answered an earlier question.
        self.look_for_events();
        let doorbell = self.with_endpoint_state(|state| state.ring(bell, sleeper))?;
        doorbell.ring();
        Some(doorbell)
    }

    /// Calls `work` with the endpoint's state.
    pub fn with_endpoint_state<R>(&self, work: impl FnOnce(&mut EndpointState) -> R) -> R {
        self.session().with_endpoint_state(work)
    }

    /// Handles messages that the daemon has sent unasked. Never waits.
    pub fn look_for_events(&self) {
        let session = self.session();
        // A refusal is reported by the next call that needs the daemon.
        let _ = session.look();
        if session.with_endpoint_state(|state| state.is_truncated) {
            self.memory.mark_broken();
        }
    }

    /// Does the same, and returns an error if the endpoint cannot be used any more.
    pub fn check(&self) -> Result<(), Error> {
        let looked = self.session().look();
        self.look_for_events();
        if self.memory.is_broken() { Err(Error::Broken) } else { looked }
    }

    /// Calls [`Inner::look_for_events`] at most once per [`GLANCE`]; otherwise only reads the clock.
    pub fn glance(&self) {
        let now = ginnel_clock::tick().as_millis() as u64;
        if now >= self.next_glance.load(Ordering::Relaxed) {
            self.next_glance.store(now + GLANCE.as_millis() as u64, Ordering::Relaxed);
            self.look_for_events();
        }
    }

    /// Returns a descriptor that is readable when a connection may wait at the listener, or the session has something
    /// to do.
    pub fn listener_events(&self, listener: u32) -> Result<ListenerEvents, Error> {
        let session = self.session();
        let event = private_event().map_err(Error::system("making an eventfd"))?;
        let event = session.with_endpoint_state(|state| state.arrival_event(listener, event));
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("making an epoll"))?;
        let daemon = session.fd()?;
        let (zero, readable) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        epoll::add(&poll, &event, zero, readable)
            .and_then(|()| epoll::add(&poll, daemon, zero, readable))
            .map_err(Error::system("watching the daemon's socket"))?;
        Ok(ListenerEvents { poll, _event: event })
    }

    /// Takes the next connection to a listener, if there is one. Never waits.
    pub fn take_incoming(&self, listener: u32) -> Result<Option<Incoming>, Error> {
        let session = self.session();
        let looked = session.look();
        match session.with_endpoint_state(|state| state.take_incoming(listener)) {
            Some(incoming) => Ok(Some(incoming)),
            None => looked.map(|()| None),
        }
    }

    /// Tells the daemon that this process has taken over a channel that it announced.
    pub fn accepted(&self, channel: u64) {
        self.tell(Kind::ACCEPTED, wire::ChannelRef { channel }.as_bytes());
    }

    /// Tells the daemon that our side of a channel is closed.
    pub fn close_channel(&self, channel: u64) {
        self.tell(Kind::CLOSE, wire::ChannelRef { channel }.as_bytes());
    }

    /// Stops listening; waiting connections are refused.
    pub fn unlisten(&self, listener: u32) {
        self.with_endpoint_state(|state| state.unlisten(listener));
    }
}

/// The descriptors on which one process waits for connections to a listener.
pub(crate) struct ListenerEvents {
    pub poll: OwnedFd,
    _event: Arc<OwnedFd>,
}

/// Joins the packets of an answer to its text.
pub(crate) fn text(packets: Vec<Packet>, path: &Path) -> Result<String, Error> {
    let mut text = Vec::new();
    for packet in packets {
        match packet.header.kind {
            Kind::OK => {}
            Kind::TEXT => text.extend_from_slice(&packet.body),
            _ => return packet.into_body::<[u8; 0]>(Kind::TEXT, path).map(|_| String::new()),
        }
    }
    String::from_utf8(text).map_err(|_| protocol(path, "a text that is not UTF-8"))
}

/// The part of the daemon's state that has been received so far; the daemon sends it in pages.
#[derive(Default)]
pub(crate) struct Pages(Vec<u8>);

impl Pages {
    /// Adds the answer to a request for a page. Returns the request for the next page, or the whole text at the end.
    pub fn add(
        &mut self,
        mut packets: Vec<Packet>,
        path: &Path,
    ) -> Result<ControlFlow<String, wire::Inspect>, Error> {
        let last = packets.pop().ok_or_else(|| protocol(path, "an answer of no packets"))?;
        if last.header.kind != Kind::PAGE {
            let refused = last.into_body::<[u8; 0]>(Kind::PAGE, path);
            return refused.map(|_| ControlFlow::Break(String::new()));
        }
        packets.iter().for_each(|packet| self.0.extend_from_slice(&packet.body));
        let (next, rest) = last.page(path)?;
        self.0.extend_from_slice(rest);
        if next.is_more() {
            return Ok(ControlFlow::Continue(next));
        }
        let text = String::from_utf8(std::mem::take(&mut self.0));
        text.map(ControlFlow::Break).map_err(|_| protocol(path, "a status that is not UTF-8"))
    }
}

/// Asks for all pages, one after the other, and returns their text.
pub(crate) fn state(
    path: &Path,
    mut ask: impl FnMut(&[u8]) -> Result<Vec<Packet>, Error>,
) -> Result<String, Error> {
    let (mut pages, mut from) = (Pages::default(), wire::Inspect::FIRST);
    loop {
        match pages.add(ask(from.as_bytes())?, path)? {
            ControlFlow::Continue(next) => from = next,
            ControlFlow::Break(text) => return Ok(text),
        }
    }
}
