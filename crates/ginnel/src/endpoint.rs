//! An attached process.

use crate::channel::{Channel, Pipe};
use crate::error::Error;
pub(crate) use crate::inner::Inner;
use crate::inner::PATIENCE;
use crate::listener::Listener;
use crate::opening::Opening;
use crate::session::Session;
pub(crate) use crate::session::{FIRST_RETRY, LAST_RETRY};
use ginnel_layout::Name;
use ginnel_layout::segment::MappingKind;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::Mapping;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

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
    /// Data bytes of the ring into which this side sends, rounded up to a power of two; the larger wish of the two sides counts.
    /// 0: the daemon's default. A message may be a quarter of it.
    pub capacity: usize,
    /// The same for the ring from which this side receives. 0: as `capacity`.
    pub input_capacity: usize,
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
        Self::begin_attach(segment, options)?.wait()
    }

    /// The same without waiting for the daemon.
    pub fn begin_attach(segment: &str, options: &AttachOptions) -> Result<Opening<Self>, Error> {
        let wish = wish(segment, options)?;
        let session = Session::open(&options.socket, Some(wish), PATIENCE)?;
        Ok(Self::opening(session, wish.segment, options.mode))
    }

    /// What a session becomes that asks to be attached.
    pub(crate) fn opening(session: Session, segment: Name, mode: WaitMode) -> Opening<Self> {
        Opening::new(session, move |session, attached| {
            Inner::new(session, attached, segment, mode).map(|inner| Self(Arc::new(inner)))
        })
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
            input_capacity: round(options.input_capacity),
        };
        let packet = self.0.request(Kind::LISTEN, body.as_bytes())?;
        let (answer, _) = packet.into_body::<wire::Listening>(Kind::LISTENING, &self.0.path)?;
        Listener::new(self.0.clone(), answer.listener)
    }

    /// Opens a channel to who listens at `name` in the segment. The peer need not have accepted yet. [`Error::ReadOnly`]
    /// if this member may only read the segment.
    pub fn connect<C: Channel>(&self, name: &str) -> Result<C, Error> {
        self.connect_with(name, &ChannelOptions::default())
    }

    /// Opens a channel as `options` say. It waits for somebody to listen as long as their patience, and for the daemon at most
    /// 10 seconds; both together no longer than the longer of the two.
    pub fn connect_with<C: Channel>(&self, name: &str, options: &ChannelOptions) -> Result<C, Error> {
        self.connect_by(name, options, Tries::new(options.patience))
    }

    /// Opens a channel if somebody listens, and waits at most this long for the daemon's answer: then it fails, and if the daemon opens the
    /// channel later, it is closed again. Errors: as [`Endpoint::connect`].
    pub fn connect_soon<C: Channel>(&self, name: &str, answer: Duration) -> Result<C, Error> {
        let tries = Tries { answer_by: Instant::now() + answer, ..Tries::new(Duration::ZERO) };
        self.connect_by(name, &ChannelOptions::default(), tries)
    }

    fn connect_by<C: Channel>(
        &self,
        name: &str,
        options: &ChannelOptions,
        mut tries: Tries,
    ) -> Result<C, Error> {
        self.0.may_write()?;
        let body = wire::Connect {
            name: parse_name(name)?,
            kind: C::KIND.0,
            reserved: 0,
            capacity: round(options.capacity),
            input_capacity: round(options.input_capacity),
            nonce: self.0.next_nonce(),
        };
        loop {
            let packet = self.0.request_by(Kind::CONNECT, body.as_bytes(), tries.answer_by)?;
            match packet.into_body::<wire::Channel>(Kind::CHANNEL, &self.0.path) {
                // Nobody listens yet. The daemon keeps no queue of hopes, so ask again now and then.
                Err(error) if error.code() == Some(ErrorCode::REFUSED) && tries.pause() => {}
                Err(error) => return Err(error),
                Ok((channel, fds)) => {
                    let number = channel.channel;
                    let pipe = Pipe::new(self.0.clone(), &channel, fds);
                    return match pipe {
                        Ok(pipe) => Ok(C::build(pipe)),
                        Err(error) => {
                            self.0.close_channel(number);
                            Err(error)
                        }
                    };
                }
            }
        }
    }

    /// What the daemon knows, as JSON (see `ginnel status --json`). In a VM: of the segments it has a share in. It comes in
    /// pages, between which others may use the connection; each is waited for at most 10 seconds.
    pub fn inspect(&self) -> Result<String, Error> {
        self.0.inspect()
    }

    /// Whether the endpoint can be used; if it cannot be any more, the error says why. The death of a daemon is no such case. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, [`Error::Refused`] if the daemon does not know the endpoint any more: its segment
    /// is not declared any more, for example.
    pub fn check(&self) -> Result<(), Error> {
        self.0.check()
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

/// Asking again and again, for as long as the caller has patience.
pub(crate) struct Tries {
    until: Option<Instant>,
    pause: Duration,
    /// When the answer of a daemon is not waited for any more.
    pub answer_by: Instant,
}

impl Tries {
    pub fn new(patience: Duration) -> Self {
        let now = Instant::now();
        // A time beyond what the clock can say is none.
        let until = now.checked_add(patience);
        Self { until, pause: FIRST_RETRY, answer_by: until.unwrap_or(now).max(now + PATIENCE) }
    }

    /// Waits a moment before the next try. False if there is none.
    pub fn pause(&mut self) -> bool {
        let now = Instant::now();
        let left = self.until.map_or(self.pause, |until| until.saturating_duration_since(now));
        if left.is_zero() {
            return false;
        }
        std::thread::sleep(self.pause.min(left));
        self.pause = (self.pause * 2).min(LAST_RETRY);
        if self.until.is_none() {
            self.answer_by = Instant::now() + PATIENCE;
        }
        true
    }
}

/// The wish to be attached to a segment.
pub(crate) fn wish(segment: &str, options: &AttachOptions) -> Result<wire::Attach, Error> {
    let name = match &options.name {
        Some(name) => parse_name(name)?,
        None => program_name(),
    };
    Ok(wire::Attach { segment: parse_name(segment)?, name, ..wire::Attach::new_zeroed() })
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
