//! Endpoints: attached processes, and opening channels.

use crate::channel::{Channel, Pipe};
use crate::error::Error;
use crate::inner::{Inner, PATIENCE};
use crate::listener::Listener;
use crate::opening::Opening;
use crate::session::{FIRST_RETRY, LAST_RETRY, Session};
use ginnel_layout::Name;
use ginnel_layout::segment::MappingKind;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use ginnel_ring::wait::WaitMode;
use ginnel_shmem::Mapping;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// Options for attaching. The defaults are right for most programs.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Path of the daemon's socket. Default: `$GINNEL_SOCKET` if it is set, otherwise [`wire::SOCKET`].
    pub socket: PathBuf,
    /// The name under which this endpoint appears to people and peers. Default: the program's name.
    pub name: Option<String>,
    /// The default wait mode of the endpoint's channels and locks.
    pub mode: WaitMode,
}

impl Default for AttachOptions {
    fn default() -> Self {
        let socket = std::env::var_os("GINNEL_SOCKET").map_or_else(|| wire::SOCKET.into(), PathBuf::from);
        Self { socket, name: None, mode: WaitMode::default() }
    }
}

/// Options for opening a channel.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChannelOptions {
    /// Size in bytes of the ring into which this side sends, rounded up to a power of two. If both sides ask for a
    /// size, the larger one counts. 0 means the daemon's default. A message may have at most a quarter of this size.
    pub capacity: usize,
    /// Size in bytes of the ring from which this side receives, like `capacity`. 0 means the same as `capacity`.
    pub input_capacity: usize,
    /// For connecting: how long to wait until an endpoint listens at the name. Zero means not at all.
    pub patience: Duration,
    /// For listening: how many connections may wait to be accepted. 0 means the daemon's default.
    pub backlog: u32,
}

/// An attached process, which can listen, connect, and open blocks and locks in one segment.
///
/// Clones refer to the same endpoint, which ends when its last clone, listener and channel is dropped. It may be used
/// from several threads at once.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

impl Endpoint {
    /// Attaches to `segment` through the daemon of this host or VM, with the default options. Blocks: see
    /// [`Endpoint::attach_with`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::attach_with`].
    pub fn attach(segment: &str) -> Result<Self, Error> {
        Self::attach_with(segment, &AttachOptions::default())
    }

    /// Attaches to `segment` with the given options.
    ///
    /// Blocks for the daemon, for at most 10 seconds if the daemon is being restarted or is slow. If no daemon has ever
    /// listened at the socket, it fails at once.
    ///
    /// # Errors
    ///
    /// [`Error::Name`] for an invalid name, [`Error::NoDaemon`] if there is no daemon, [`Error::Refused`] if the daemon
    /// refuses, for example with [`ErrorCode::NO_SEGMENT`] or [`ErrorCode::DENIED`], [`Error::Broken`] if the segment's
    /// memory is gone, [`Error::System`] if a system call fails.
    pub fn attach_with(segment: &str, options: &AttachOptions) -> Result<Self, Error> {
        Self::begin_attach(segment, options)?.wait()
    }

    /// Begins to attach to `segment` without waiting for the daemon; see [`Opening`].
    ///
    /// # Errors
    ///
    /// [`Error::Name`] for an invalid name, [`Error::System`] if a system call fails.
    pub fn begin_attach(segment: &str, options: &AttachOptions) -> Result<Opening<Self>, Error> {
        let request = attach_request(segment, options)?;
        let session = Session::open(&options.socket, Some(request), PATIENCE)?;
        Ok(Self::opening(session, request.segment, options.mode))
    }

    /// Returns the opening of an endpoint over a session that has asked to attach.
    pub(crate) fn opening(session: Session, segment: Name, mode: WaitMode) -> Opening<Self> {
        Opening::new(session, move |session, attached| {
            Inner::new(session, attached, segment, mode).map(|inner| Self(Arc::new(inner)))
        })
    }

    /// Listens at `name` in the segment, with the default options. Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] if this member may only read the segment, [`Error::Name`] for an invalid name,
    /// [`Error::Refused`] if the daemon refuses, for example with [`ErrorCode::IN_USE`] if another endpoint listens
    /// there, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn listen<C: Channel>(&self, name: &str) -> Result<Listener<C>, Error> {
        self.listen_with(name, &ChannelOptions::default())
    }

    /// Listens at `name` with the given options; otherwise like [`Endpoint::listen`].
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::listen`].
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

    /// Opens a channel to the endpoint that listens at `name` in the segment. The peer need not have accepted it when
    /// this returns. Blocks for the daemon, for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] if this member may only read the segment, [`Error::Name`] for an invalid name,
    /// [`Error::Refused`] if the daemon refuses, with [`ErrorCode::REFUSED`] if no endpoint listens at the name,
    /// [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn connect<C: Channel>(&self, name: &str) -> Result<C, Error> {
        self.connect_with(name, &ChannelOptions::default())
    }

    /// Opens a channel with the given options.
    ///
    /// Waits up to `options.patience` for an endpoint to listen, and up to 10 seconds for the daemon; the call as a
    /// whole takes no longer than the longer of the two.
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::connect`].
    pub fn connect_with<C: Channel>(&self, name: &str, options: &ChannelOptions) -> Result<C, Error> {
        self.connect_by(name, options, Tries::new(options.patience))
    }

    /// Opens a channel like [`Endpoint::connect`], but waits for at most `answer` for the daemon. If the daemon opens
    /// the channel after that, it is closed again.
    ///
    /// # Errors
    ///
    /// As for [`Endpoint::connect`].
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
                // No endpoint listens yet. The daemon does not queue such requests, so ask again at intervals.
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

    /// Returns the daemon's state as JSON (see `ginnel status --json`). In a VM it covers the segments of that VM.
    ///
    /// The state comes in pages, and other threads may use the connection between two of them. Blocks for each page,
    /// for at most 10 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the daemon refuses, [`Error::TimedOut`] or [`Error::NoDaemon`] if no daemon answers.
    pub fn inspect(&self) -> Result<String, Error> {
        self.0.inspect()
    }

    /// Checks that the endpoint can still be used. The death of the daemon does not make it unusable. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, [`Error::Refused`] if the daemon does not know the endpoint
    /// any more, for example because its segment was removed from the configuration.
    pub fn check(&self) -> Result<(), Error> {
        self.0.check()
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Returns the number of the member to which this endpoint belongs; 0 is the host.
    pub fn member(&self) -> u32 {
        self.0.identity.member
    }

    /// Returns this endpoint's number and its epoch, which distinguishes it from earlier endpoints with the same
    /// number.
    pub fn number(&self) -> (u32, u32) {
        (self.0.identity.endpoint, self.0.identity.epoch)
    }

    /// Returns the mapped bytes of the segment, for programs with a memory layout of their own. The mapping begins with
    /// the segment's header, at offset [`ginnel_layout::segment::RESERVED`] of the segment; the blocks that the daemon
    /// allocates lie behind it. If [`Endpoint::is_read_only`] is true, a store panics.
    pub fn memory(&self) -> &Mapping {
        &self.0.memory
    }

    /// Returns whether this member may only read the segment. Then it cannot open channels or locks, and a store to
    /// [`Endpoint::memory`] panics.
    pub fn is_read_only(&self) -> bool {
        self.0.identity.access.is_read_only()
    }

    /// Returns how this process has the segment mapped.
    pub fn mapping_kind(&self) -> MappingKind {
        self.0.identity.kind
    }

    /// Returns whether this endpoint has a doorbell on which it can sleep. In a VM without interrupts it has none, and
    /// a waiting thread checks at short intervals instead.
    pub fn has_interrupts(&self) -> bool {
        self.0.event.is_some()
    }

    /// Returns the page size of the segment in bytes: the unit in which its memory can be mapped.
    pub fn page(&self) -> usize {
        self.0.page()
    }
}

/// Repeated attempts, for as long as the caller has patience.
pub(crate) struct Tries {
    until: Option<Instant>,
    pause: Duration,
    /// The time until which an attempt waits for the daemon's answer.
    pub answer_by: Instant,
}

impl Tries {
    pub fn new(patience: Duration) -> Self {
        let now = Instant::now();
        // A deadline that the clock cannot represent means no deadline.
        let until = now.checked_add(patience);
        Self { until, pause: FIRST_RETRY, answer_by: until.unwrap_or(now).max(now + PATIENCE) }
    }

    /// Sleeps before the next attempt. Returns false if the caller's patience is over.
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

/// Makes the request to attach to a segment.
pub(crate) fn attach_request(segment: &str, options: &AttachOptions) -> Result<wire::Attach, Error> {
    let name = match &options.name {
        Some(name) => parse_name(name)?,
        None => program_name(),
    };
    Ok(wire::Attach { segment: parse_name(segment)?, name, ..wire::Attach::new_zeroed() })
}

/// Rounds a capacity as the protocol requires: 0 stays 0, others become a power of two.
fn round(capacity: usize) -> u64 {
    if capacity == 0 {
        return 0;
    }
    capacity.max(ginnel_layout::ring::MIN_CAPACITY).checked_next_power_of_two().unwrap_or(usize::MAX) as u64
}

pub(crate) fn parse_name(name: &str) -> Result<Name, Error> {
    Name::new(name).map_err(|reason| Error::Name { name: name.into(), reason })
}

/// Returns the program's name, or a substitute if it is not a valid name.
fn program_name() -> Name {
    let name = std::env::current_exe().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
    name.and_then(|name| Name::new(&name).ok()).or_else(|| Name::new("program").ok()).unwrap_or(Name::NONE)
}
