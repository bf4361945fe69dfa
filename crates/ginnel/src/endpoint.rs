//! An attached process.

use crate::block::OpenBlocks;
use crate::channel::{Channel, Pipe};
use crate::connection::{Connection, Lost, Packet, protocol};
use crate::doorbell::{BorrowedEvent, private_event};
use crate::error::Error;
use crate::listener::Listener;
use ginnel_layout::Name;
use ginnel_layout::segment::{self, MappingKind};
use ginnel_layout::wire::{self, ErrorCode, Fds, Kind};
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::device::Registers;
use ginnel_shmem::{Mapping, Protection};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// How long an operation that needs the daemon waits for one that is being restarted.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a daemon that is there may take to answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How often the calls of a block look whether the daemon has taken rights away.
const GLANCE: Duration = Duration::from_millis(10);
/// Between two tries to reach a daemon: from the first to the last, doubling.
pub(crate) const FIRST_RETRY: Duration = Duration::from_millis(5);
pub(crate) const LAST_RETRY: Duration = Duration::from_millis(200);

/// How to attach. The defaults are right for most programs.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// The daemon's socket. Default: `$GINNEL_SOCKET`, else [`wire::SOCKET`].
    pub socket: PathBuf,
    /// What this endpoint calls itself, for people. Default: the program's name.
    pub name: Option<String>,
    /// How channels wait unless told otherwise.
    pub mode: WaitMode,
}

impl Default for AttachOptions {
    fn default() -> Self {
        let socket = std::env::var_os("GINNEL_SOCKET").map_or_else(|| wire::SOCKET.into(), PathBuf::from);
        Self { socket, name: None, mode: WaitMode::default() }
    }
}

/// How to open a channel.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChannelOptions {
    /// Data bytes of each ring, rounded up to a power of two; the larger wish of the two sides counts. 0: the daemon's
    /// default. A message may be a quarter of it.
    pub capacity: usize,
    /// For connecting: how long to wait for somebody to listen. 0: not at all.
    pub patience: Duration,
    /// For listening: how many connections may wait to be accepted. 0: the daemon's default.
    pub backlog: u32,
}

/// An attached process: a share in a segment, a place to listen and connect from. Clones are the same endpoint, which
/// ends when the last clone, listener and channel is gone. May be used from several threads.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

impl Endpoint {
    /// Attaches to a segment through the daemon of this host or VM.
    pub fn attach(segment: &str) -> Result<Self, Error> {
        Self::attach_with(segment, &AttachOptions::default())
    }

    /// Attaches as `options` say. Waits a moment for a daemon that is being restarted, not for one that was never there.
    pub fn attach_with(segment: &str, options: &AttachOptions) -> Result<Self, Error> {
        let name = match &options.name {
            Some(name) => parse_name(name)?,
            None => program_name(),
        };
        Inner::attach(parse_name(segment)?, name, options).map(|inner| Self(Arc::new(inner)))
    }

    /// Listens at `name` in the segment. [`Error::ReadOnly`] if this member may only read it.
    pub fn listen<C: Channel>(&self, name: &str) -> Result<Listener<C>, Error> {
        self.listen_with(name, &ChannelOptions::default())
    }

    /// Listens as `options` say.
    pub fn listen_with<C: Channel>(
        &self,
        name: &str,
        options: &ChannelOptions,
    ) -> Result<Listener<C>, Error> {
        self.0.may_write()?;
        let body = wire::Listen {
            name: parse_name(name)?,
            kind: C::KIND.0,
            backlog: options.backlog,
            capacity: round(options.capacity),
        };
        let packet = self.0.request(Kind::LISTEN, body.as_bytes())?;
        let (answer, _) = packet.into_body::<wire::Listening>(Kind::LISTENING, &self.0.path)?;
        Ok(Listener::new(self.0.clone(), answer.listener))
    }

    /// Opens a channel to who listens at `name` in the segment. The peer need not have accepted yet. [`Error::ReadOnly`]
    /// if this member may only read the segment.
    pub fn connect<C: Channel>(&self, name: &str) -> Result<C, Error> {
        self.connect_with(name, &ChannelOptions::default())
    }

    /// Opens a channel as `options` say.
    pub fn connect_with<C: Channel>(&self, name: &str, options: &ChannelOptions) -> Result<C, Error> {
        self.0.may_write()?;
        let body = wire::Connect {
            name: parse_name(name)?,
            kind: C::KIND.0,
            reserved: 0,
            capacity: round(options.capacity),
            nonce: self.0.next_nonce(),
        };
        let deadline = Instant::now().checked_add(options.patience);
        let mut pause = FIRST_RETRY;
        loop {
            let packet = self.0.request(Kind::CONNECT, body.as_bytes())?;
            match packet.into_body::<wire::Channel>(Kind::CHANNEL, &self.0.path) {
                Err(error)
                    if error.code() == Some(ErrorCode::REFUSED)
                        && deadline.is_none_or(|d| Instant::now() < d) =>
                {
                    // Nobody listens yet. The daemon keeps no queue of hopes, so ask again now and then.
                    let left = deadline.map_or(pause, |d| d.saturating_duration_since(Instant::now()));
                    std::thread::sleep(pause.min(left));
                    pause = (pause * 2).min(LAST_RETRY);
                }
                Err(error) => return Err(error),
                Ok((channel, fds)) => return Ok(C::build(Pipe::new(self.0.clone(), &channel, fds)?)),
            }
        }
    }

    /// What the daemon knows, as JSON (see `ginnel status --json`). In a VM: of the segments it has a share in.
    pub fn inspect(&self) -> Result<String, Error> {
        let deadline = Instant::now() + PATIENCE;
        let mut control = self.0.lock();
        let mut text = Vec::new();
        let mut packet = self.0.ask(&mut control, Kind::INSPECT, &[], deadline)?;
        loop {
            if packet.header.kind != Kind::TEXT {
                return packet.into_body::<[u8; 0]>(Kind::TEXT, &self.0.path).map(|_| String::new());
            }
            text.extend_from_slice(&packet.body);
            if packet.header.flags & wire::Header::MORE == 0 {
                return String::from_utf8(text).map_err(|_| self.0.protocol("a status that is not UTF-8"));
            }
            let request = packet.header.request;
            packet = self.0.answer(&mut control, request, deadline)?;
        }
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Number of the member that this endpoint belongs to; 0 is the host.
    pub fn member(&self) -> u32 {
        self.0.identity.member
    }

    /// Number of this endpoint, and its epoch.
    pub fn number(&self) -> (u32, u32) {
        (self.0.identity.endpoint, self.0.identity.epoch)
    }

    /// The segment's bytes that are mapped, for programs with a layout of their own. They begin with the segment's
    /// header ([`ginnel_layout::segment::RESERVED`]); the daemon's blocks lie behind it. Where [`Endpoint::is_read_only`]
    /// says so it can be read only, and a store panics.
    pub fn memory(&self) -> &Mapping {
        &self.0.memory
    }

    /// Whether this member may only read the segment: then there are no channels, and [`Endpoint::memory`] takes no stores.
    pub fn is_read_only(&self) -> bool {
        self.0.identity.access.is_read_only()
    }

    /// How the segment's bytes come to this process.
    pub fn mapping_kind(&self) -> MappingKind {
        self.0.identity.kind
    }

    /// Whether this endpoint can sleep. A VM without interrupts can only look from time to time.
    pub fn has_interrupts(&self) -> bool {
        self.0.event.is_some()
    }

    /// The segment's page, in bytes: the unit in which it may be mapped.
    pub fn page(&self) -> usize {
        self.0.page()
    }
}

/// A capacity as it goes on the wire.
fn round(capacity: usize) -> u64 {
    if capacity == 0 {
        return 0;
    }
    capacity.max(ginnel_layout::ring::MIN_CAPACITY).checked_next_power_of_two().unwrap_or(usize::MAX) as u64
}

pub(crate) fn parse_name(name: &str) -> Result<Name, Error> {
    Name::new(name).map_err(|reason| Error::Name { name: name.into(), reason })
}

/// The program's name, as far as it can be one here.
fn program_name() -> Name {
    let name = std::env::current_exe().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
    name.and_then(|name| Name::new(&name).ok()).or_else(|| Name::new("program").ok()).unwrap_or(Name::NONE)
}

/// A connection that waits to be accepted.
pub(crate) struct Incoming {
    pub channel: wire::Channel,
    pub fds: Vec<OwnedFd>,
}

/// What an endpoint holds.
pub(crate) struct Inner {
    pub path: PathBuf,
    /// Where the memory comes from, for mapping parts of it once more.
    pub file: OwnedFd,
    pub memory: Mapping,
    /// The eventfd of our vector; none in a VM without interrupts.
    pub event: Option<BorrowedEvent>,
    /// The doorbell registers, in a VM.
    pub registers: Option<Arc<Registers>>,
    pub mode: WaitMode,
    identity: wire::Attached,
    attach: wire::Attach,
    nonce: AtomicU64,
    control: Mutex<Control>,
    /// Readable when a listener may have something to accept: the socket, the inbox, or the retry timer.
    pub accept_poll: OwnedFd,
    inbox: OwnedFd,
    retry: OwnedFd,
    /// When [`Inner::glance`] looks again, in milliseconds of the coarse clock.
    next_glance: AtomicU64,
}

impl Drop for Inner {
    /// The daemon takes the end of the connection for the end of the endpoint. A daemon that has been restarted meanwhile
    /// has no connection to see the end of, and must be given one; otherwise the endpoint's resources would stay until
    /// this process ends.
    fn drop(&mut self) {
        if self.lock().connection.is_none() {
            let _ = introduce(&self.path, &self.attach);
        }
    }
}

/// What needs the socket, one thread at a time.
pub(crate) struct Control {
    connection: Option<Connection>,
    next_request: u32,
    /// Connections to our listeners that nobody has accepted yet.
    waiting: HashMap<u32, VecDeque<Incoming>>,
    /// Channels that were announced to us and are not closed: a new daemon may announce them again.
    known: HashSet<u64>,
    pub blocks: OpenBlocks,
    /// What to tell the daemon when there is one again.
    unsaid: Vec<(Kind, Vec<u8>)>,
    pause: Duration,
    retry_at: Option<Instant>,
}

impl Inner {
    fn attach(segment: Name, name: Name, options: &AttachOptions) -> Result<Self, Error> {
        let attach = wire::Attach { segment, name, ..wire::Attach::new_zeroed() };
        let path = &options.socket;
        let deadline = Instant::now() + PATIENCE;
        let mut pause = FIRST_RETRY;
        let (connection, packet) = loop {
            match introduce(path, &attach) {
                Ok((_, packet)) if packet.is_unavailable() && Instant::now() < deadline => {}
                Ok(done) => break done,
                // A socket that refuses, or a connection that breaks, is what a daemon's restart looks like.
                Err(Introduction::Lost(Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE))
                    if Instant::now() < deadline => {}
                Err(Introduction::Lost(errno)) => {
                    return Err(Error::NoDaemon { path: path.clone(), source: errno.into() });
                }
                Err(Introduction::Refused(error)) => return Err(error),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LAST_RETRY);
        };
        let (identity, fds) = packet.into_body::<wire::Attached>(Kind::ATTACHED, path)?;
        let mut fds = fds.into_iter();
        let mut next = |bit| if identity.fds.0 & bit != 0 { fds.next() } else { None };
        let (memory, event, registers) = (next(Fds::MEMORY), next(Fds::EVENT), next(Fds::REGISTERS));
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

        let inbox = private_event().map_err(Error::system("making an eventfd"))?;
        let retry = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map_err(Error::system("making a timer"))?;
        let accept_poll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("making an epoll"))?;
        let inner = Self {
            path: path.clone(),
            file,
            memory,
            event: event.map(Arc::new),
            registers,
            mode: options.mode,
            attach: wire::Attach {
                endpoint: identity.endpoint,
                epoch: identity.epoch,
                token: identity.token,
                ..attach
            },
            identity,
            nonce: AtomicU64::new(1),
            control: Mutex::new(Control {
                connection: None,
                next_request: 1,
                waiting: HashMap::new(),
                known: HashSet::new(),
                blocks: OpenBlocks::default(),
                unsaid: Vec::new(),
                pause: FIRST_RETRY,
                retry_at: None,
            }),
            accept_poll,
            inbox,
            retry,
            next_glance: AtomicU64::new(0),
        };
        inner.watch(inner.inbox.as_fd())?;
        inner.watch(inner.retry.as_fd())?;
        inner.watch(connection.as_fd())?;
        inner.lock().connection = Some(connection);
        Ok(inner)
    }

    fn watch(&self, fd: std::os::fd::BorrowedFd<'_>) -> Result<(), Error> {
        epoll::add(&self.accept_poll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(Error::system("watching the daemon's socket"))
    }

    /// Both ends of a channel write, and so do those of a lock.
    pub fn may_write(&self) -> Result<(), Error> {
        if self.identity.access.is_read_only() {
            return Err(Error::ReadOnly { segment: self.attach.segment.as_str().into() });
        }
        Ok(())
    }

    /// The `len` bytes at `offset` of the segment, or `None` if they are not all mapped. The one place where offsets of the
    /// segment become offsets of its mapping, which begins behind the reserved front.
    pub fn part(&self, offset: u64, len: usize) -> Option<Mapping> {
        let at = offset.checked_sub(segment::RESERVED).and_then(|at| usize::try_from(at).ok())?;
        self.memory.part(at, len)
    }

    /// Where in the memory's file an offset of the segment lies.
    pub fn file_offset(&self, offset: u64) -> u64 {
        self.identity.map_offset + (offset - segment::RESERVED)
    }

    pub fn page(&self) -> usize {
        self.identity.page as usize
    }

    /// A number for a request that may be repeated.
    pub fn next_nonce(&self) -> u64 {
        self.nonce.fetch_add(1, Ordering::Relaxed)
    }

    pub fn protocol(&self, what: &'static str) -> Error {
        protocol(&self.path, what)
    }

    fn lock(&self) -> MutexGuard<'_, Control> {
        // A thread that panicked while it held the lock left nothing half done that matters: at worst a lost answer.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the daemon, waiting for its successor if need be.
    pub fn request(&self, kind: Kind, body: &[u8]) -> Result<Packet, Error> {
        self.request_then(kind, body, |_, packet| Ok(packet))
    }

    /// The same; what `then` does with the answer is done before anything that the daemon says afterwards is heard.
    pub fn request_then<T>(
        &self,
        kind: Kind,
        body: &[u8],
        then: impl FnOnce(&mut Control, Packet) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut control = self.lock();
        let packet = self.ask(&mut control, kind, body, Instant::now() + PATIENCE)?;
        let done = then(&mut control, packet);
        self.acknowledge(&mut control);
        done
    }

    /// Asks for something that is done or refused.
    pub fn order(&self, kind: Kind, body: &[u8]) -> Result<(), Error> {
        self.request(kind, body)?.into_body::<[u8; 0]>(Kind::OK, &self.path).map(drop)
    }

    /// Asks a daemon that is there, and answers at once; does not wait for another, nor for another thread's request.
    pub fn request_promptly(&self, kind: Kind, body: &[u8], within: Duration) -> Option<Packet> {
        let mut control = self.control.try_lock().ok()?;
        let deadline = Instant::now() + within;
        let request = control.next_request;
        control.next_request = request.checked_add(1).unwrap_or(1);
        if control.connection.as_ref()?.send(kind, request, body, Some(deadline)).is_err() {
            self.lost(&mut control);
            return None;
        }
        match self.answer(&mut control, request, deadline) {
            Ok(packet) if !packet.is_unavailable() => Some(packet),
            Ok(_) | Err(Error::TimedOut) => None,
            Err(_) => {
                self.lost(&mut control);
                None
            }
        }
    }

    /// Number of this endpoint.
    pub fn number(&self) -> u32 {
        self.identity.endpoint
    }

    /// All requests may be repeated: a daemon that has died may or may not have heard the first.
    fn ask(
        &self,
        control: &mut Control,
        kind: Kind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Packet, Error> {
        loop {
            self.connected(control, deadline)?;
            let request = control.next_request;
            control.next_request = request.checked_add(1).unwrap_or(1);
            let answer = match &control.connection {
                Some(connection) => connection.send(kind, request, body, Some(deadline)),
                None => continue,
            };
            if answer.is_err() {
                self.lost(control);
            } else {
                match self.answer(control, request, Instant::now() + ANSWER) {
                    Ok(packet) if !packet.is_unavailable() => return Ok(packet),
                    Ok(packet) if Instant::now() >= deadline => return Ok(packet),
                    Ok(_) => std::thread::sleep(FIRST_RETRY * 4),
                    Err(error) if Instant::now() >= deadline => return Err(error),
                    Err(_) => self.lost(control),
                }
            }
        }
    }

    /// The answer to a request; events that come before it are kept.
    fn answer(&self, control: &mut Control, request: u32, deadline: Instant) -> Result<Packet, Error> {
        loop {
            let received = match &control.connection {
                Some(connection) => connection.receive(Some(deadline)),
                None => Err(Lost(Errno::NOTCONN)),
            };
            match received {
                Ok(Some(packet)) if packet.header.request == request => return Ok(packet),
                Ok(Some(packet)) => self.event(control, packet),
                Ok(None) => return Err(Error::TimedOut),
                Err(Lost(errno)) => {
                    return Err(Error::NoDaemon { path: self.path.clone(), source: errno.into() });
                }
            }
        }
    }

    /// Keeps what the daemon says unasked.
    fn event(&self, control: &mut Control, packet: Packet) {
        if packet.header.kind == Kind::BLOCK_REVOKED
            && let Some(event) = wire::body(&packet.body)
        {
            control.blocks.revoked(&event);
        }
        if packet.header.kind != Kind::INCOMING {
            return;
        }
        // A malformed event costs the connection it announces, nothing else.
        let Some(channel) = wire::body::<wire::Channel>(&packet.body) else { return };
        if control.known.insert(channel.channel) {
            control
                .waiting
                .entry(channel.listener)
                .or_default()
                .push_back(Incoming { channel, fds: packet.fds });
            let _ = rustix::io::write(&self.inbox, &1u64.to_ne_bytes());
        }
    }

    fn lost(&self, control: &mut Control) {
        control.connection = None;
        control.pause = FIRST_RETRY;
        self.retry_in(control, FIRST_RETRY);
    }

    fn retry_in(&self, control: &mut Control, pause: Duration) {
        control.retry_at = Some(Instant::now() + pause);
        let value = Timespec::try_from(pause).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        let _ = timerfd_settime(&self.retry, TimerfdTimerFlags::empty(), &once);
    }

    /// Waits until there is a daemon that knows us.
    fn connected(&self, control: &mut Control, deadline: Instant) -> Result<(), Error> {
        while control.connection.is_none() {
            match self.reconnect(control) {
                Ok(()) => return Ok(()),
                Err(Introduction::Refused(error)) => return Err(error),
                Err(Introduction::Lost(errno)) if Instant::now() >= deadline => {
                    return Err(Error::NoDaemon { path: self.path.clone(), source: errno.into() });
                }
                Err(Introduction::Lost(_)) => std::thread::sleep(control.pause),
            }
        }
        Ok(())
    }

    /// One try.
    fn reconnect(&self, control: &mut Control) -> Result<(), Introduction> {
        let tried = introduce(&self.path, &self.attach).and_then(|(connection, packet)| {
            if packet.is_unavailable() {
                return Err(Introduction::Lost(Errno::AGAIN));
            }
            packet.into_body::<wire::Attached>(Kind::ATTACHED, &self.path).map_err(Introduction::Refused)?;
            self.watch(connection.as_fd()).map_err(Introduction::Refused)?;
            Ok(connection)
        });
        match tried {
            Ok(connection) => {
                control.connection = Some(connection);
                control.retry_at = None;
                control.pause = FIRST_RETRY;
                let deadline = Instant::now() + ANSWER;
                for (kind, body) in std::mem::take(&mut control.unsaid) {
                    let _ = self.say(control, kind, &body, deadline);
                }
                Ok(())
            }
            Err(error) => {
                control.pause = (control.pause * 2).min(LAST_RETRY);
                let pause = control.pause;
                self.retry_in(control, pause);
                Err(error)
            }
        }
    }

    fn say(&self, control: &mut Control, kind: Kind, body: &[u8], deadline: Instant) -> Result<(), Error> {
        let request = control.next_request;
        control.next_request = request.checked_add(1).unwrap_or(1);
        let sent = match &control.connection {
            Some(connection) => connection.send(kind, request, body, Some(deadline)).is_ok(),
            None => false,
        };
        if !sent || self.answer(control, request, deadline).is_err() {
            self.lost(control);
            control.unsaid.push((kind, body.to_vec()));
        }
        Ok(())
    }

    /// Tells the daemon something that needs no answer. If there is none just now, its successor hears it.
    pub fn tell(&self, kind: Kind, body: &[u8]) {
        let mut control = self.lock();
        if control.connection.is_none() {
            control.unsaid.push((kind, body.to_vec()));
        } else {
            let _ = self.say(&mut control, kind, body, Instant::now() + Duration::from_secs(1));
        }
    }

    /// Tells the daemon what we have heard of it.
    fn acknowledge(&self, control: &mut Control) {
        loop {
            // While we say one, another may come.
            let heard = control.blocks.take_acknowledgements();
            if heard.is_empty() {
                return;
            }
            for event in heard {
                match control.connection {
                    Some(_) => {
                        let _ = self.say(control, Kind::BLOCK_ACK, event.as_bytes(), Instant::now() + ANSWER);
                    }
                    None => control.unsaid.push((Kind::BLOCK_ACK, event.as_bytes().to_vec())),
                }
            }
        }
    }

    /// The next connection to a listener, if there is one.
    pub fn take_incoming(&self, listener: u32) -> Result<Option<Incoming>, Error> {
        let mut control = self.lock();
        let control = &mut *control;
        self.hear(control)?;
        let incoming = control.waiting.get_mut(&listener).and_then(VecDeque::pop_front);
        if control.waiting.values().all(VecDeque::is_empty) {
            let _ = rustix::io::read(&self.inbox, &mut [0u8; 8]);
        }
        Ok(incoming)
    }

    /// Handles what the daemon has said unasked, if nobody else is talking to it. Never blocks.
    pub fn look_for_events(&self) {
        if let Ok(mut control) = self.control.try_lock() {
            // Whoever needs the daemon next hears that it refuses us.
            let _ = self.hear(&mut control);
        }
    }

    /// The same, but not more often than every [`GLANCE`], and for no more than a look at the clock else.
    pub fn glance(&self) {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
        if now >= self.next_glance.load(Ordering::Relaxed) {
            self.next_glance.store(now + GLANCE.as_millis() as u64, Ordering::Relaxed);
            self.look_for_events();
        }
    }

    /// A block is closed.
    pub fn forget_block(&self, handle: u64) {
        self.lock().blocks.forget(handle);
    }

    /// Takes in what the daemon has said. Tries to reach a new one if it is gone and the time for that has come.
    fn hear(&self, control: &mut Control) -> Result<(), Error> {
        if control.connection.is_none() && control.retry_at.is_none_or(|at| Instant::now() >= at) {
            let _ = rustix::io::read(&self.retry, &mut [0u8; 8]);
            if let Err(Introduction::Refused(error)) = self.reconnect(control) {
                return Err(error);
            }
        }
        while let Some(connection) = &control.connection {
            match connection.receive(Some(Instant::now())) {
                Ok(Some(packet)) => self.event(control, packet),
                Ok(None) => break,
                Err(_) => self.lost(control),
            }
        }
        self.acknowledge(control);
        Ok(())
    }

    /// Tells the daemon that we have a channel that it announced.
    pub fn accepted(&self, channel: u64) {
        self.tell(Kind::ACCEPTED, wire::ChannelRef { channel }.as_bytes());
    }

    /// Our side of a channel is closed.
    pub fn close_channel(&self, channel: u64) {
        self.tell(Kind::CLOSE, wire::ChannelRef { channel }.as_bytes());
        self.lock().known.remove(&channel);
    }

    /// Nobody listens any more; what waits is refused.
    pub fn unlisten(&self, listener: u32) {
        self.tell(Kind::UNLISTEN, wire::Listening { listener, reserved: 0 }.as_bytes());
        let waiting = self.lock().waiting.remove(&listener).unwrap_or_default();
        for incoming in waiting {
            self.close_channel(incoming.channel.channel);
        }
    }
}

/// Why a connection to the daemon did not come about.
enum Introduction {
    /// There is none, or it went away meanwhile.
    Lost(Errno),
    /// It does not want us.
    Refused(Error),
}

impl From<Lost> for Introduction {
    fn from(Lost(errno): Lost) -> Self {
        Self::Lost(errno)
    }
}

/// Connects, greets and attaches; returns the answer to `ATTACH`.
fn introduce(path: &Path, attach: &wire::Attach) -> Result<(Connection, Packet), Introduction> {
    let deadline = Some(Instant::now() + ANSWER);
    let connection = Connection::open(path).map_err(Introduction::Lost)?;
    let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
    let receive = || match connection.receive(deadline)? {
        Some(packet) => Ok(packet),
        None => Err(Introduction::Lost(Errno::TIMEDOUT)),
    };
    connection.send(Kind::HELLO, 1, hello.as_bytes(), deadline)?;
    let (hello, _) =
        receive()?.into_body::<wire::HelloOk>(Kind::HELLO_OK, path).map_err(Introduction::Refused)?;
    if hello.version != wire::VERSION {
        return Err(Introduction::Refused(protocol(path, "another protocol version")));
    }
    connection.send(Kind::ATTACH, 2, attach.as_bytes(), deadline)?;
    let packet = receive()?;
    Ok((connection, packet))
}
