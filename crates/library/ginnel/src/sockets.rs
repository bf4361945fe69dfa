//! TCP connections that continue over a channel: finding their two ends, and opening the channel between them.
//!
//! Meant for libraries that carry other programs' connections. Nothing here waits, and nothing starts a thread.

use crate::channel::Pipe;
use crate::connection::{Connection, Packet, protocol};
use crate::doorbell::Doorbell;
use crate::endpoint::{Endpoint, parse_name};
use crate::error::Error;
use crate::inner::Inner;
use crate::loan::Loan;
use crate::shared::{ChannelInfo, Shared};
use ginnel_layout::board::Place;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::wire::{self, ErrorCode, Kind, SocketRole, StaysReason, features};
use ginnel_layout::{Name, ring};
use ginnel_ring::stream;
use ginnel_ring::wait::notified_at;
use ginnel_shmem::Mapping;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// The end of a TCP connection at which a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketEnd {
    /// The socket has called `connect`, between these two times of CLOCK_MONOTONIC.
    Connector {
        /// Time immediately before the call.
        before: Duration,
        /// Time immediately after the call.
        after: Duration,
    },
    /// The socket was accepted.
    Acceptor,
}

/// The outcome of a reported connection.
#[derive(Debug)]
pub enum SocketEvent {
    /// The daemon has found the other end.
    Matched {
        /// The caller's number of the report.
        key: u64,
        /// Name of the segment in which the channel is to be opened.
        segment: String,
        /// The name at which the two ends meet.
        meeting: Meeting,
    },
    /// The connection stays on TCP.
    Stays {
        /// The caller's number of the report.
        key: u64,
        /// The reason.
        reason: StaysReason,
    },
}

/// The name at which the two ends of a connection open their channel. Only the two ends and the daemon know it.
#[derive(Clone, Copy, Debug)]
pub struct Meeting {
    name: Name,
}

impl Meeting {
    /// Returns another meeting for another channel of the same connection. Each `number` gives a different name, which
    /// nobody else knows either.
    ///
    /// # Errors
    ///
    /// [`Error::Name`] if the name becomes too long.
    pub fn again(&self, number: u32) -> Result<Self, Error> {
        Ok(Self { name: parse_name(&format!("{}.{number}", self.name.as_str()))? })
    }
}

/// A session with the daemon of this host or VM for reporting TCP connections. It belongs to the process that has begun
/// it. It ends when the daemon ends, together with all reports that have no outcome yet.
pub struct SocketSession {
    path: PathBuf,
    connection: Connection,
    /// Whether the daemon accepts reports; `None` until it has said so.
    supported: Option<bool>,
}

const HELLO: u32 = 1;

impl SocketSession {
    /// Begins a session with the daemon whose socket is `path`. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] if there is no daemon.
    pub fn begin(path: &Path) -> Result<Self, Error> {
        let lost = |errno: Errno| Error::NoDaemon { path: path.into(), source: errno.into() };
        let connection = Connection::open(path).map_err(lost)?;
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: features::SOCKETS };
        connection.send(Kind::HELLO, HELLO, hello.as_bytes()).map_err(lost)?;
        Ok(Self { path: path.into(), connection, supported: None })
    }

    /// Returns whether the daemon accepts reports; `None` until it has answered. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] or [`Error::Protocol`]; the session is unusable then.
    pub fn is_supported(&mut self) -> Result<Option<bool>, Error> {
        if self.supported.is_none()
            && let Some(packet) = self.receive()?
        {
            self.take_hello(packet)?;
        }
        Ok(self.supported)
    }

    /// Handles the daemon's first answer, which names its features.
    fn take_hello(&mut self, packet: Packet) -> Result<(), Error> {
        let (hello, _) = packet.into_body::<wire::HelloOk>(Kind::HELLO_OK, &self.path)?;
        self.supported = Some(hello.features & features::SOCKETS != 0);
        Ok(())
    }

    /// Reports a connection. The daemon borrows `socket` and reads from it what the kernel knows about the connection.
    /// `key` is the caller's number for the report; [`SocketSession::poll`] returns it with the outcome. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if the socket to the daemon is full or there is no free descriptor, [`Error::NoDaemon`] if
    /// the daemon has ended.
    pub fn report(&self, socket: BorrowedFd<'_>, end: SocketEnd, key: u64) -> Result<Loan, Error> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut report = wire::SocketReport { key, role: SocketRole::ACCEPTOR, ..FromZeros::new_zeroed() };
        if let SocketEnd::Connector { before, after } = end {
            (report.role, report.before, report.after) = (SocketRole::CONNECTOR, nanos(before), nanos(after));
        }
        let loan = Loan::new(socket).map_err(|_| Error::WouldBlock)?;
        let lent = loan.to_send().ok_or(Error::WouldBlock)?;
        self.sent(self.connection.send_with(Kind::SOCK_REPORT, 0, report.as_bytes(), &[lent]))?;
        Ok(loan)
    }

    /// Withdraws a report, so that it gets no outcome. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if the socket to the daemon is full, [`Error::NoDaemon`] if the daemon has ended.
    pub fn withdraw(&self, key: u64) -> Result<(), Error> {
        self.sent(self.connection.send(Kind::SOCK_WITHDRAW, 0, wire::SocketKey { key }.as_bytes()))
    }

    fn sent(&self, result: Result<(), Errno>) -> Result<(), Error> {
        result.map_err(|errno| match errno {
            Errno::AGAIN => Error::WouldBlock,
            errno => Error::NoDaemon { path: self.path.clone(), source: errno.into() },
        })
    }

    /// Returns the outcome of a report, or `None` if there is none at present. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::NoDaemon`] or [`Error::Protocol`]; the session is unusable then.
    pub fn poll(&mut self) -> Result<Option<SocketEvent>, Error> {
        while let Some(packet) = self.receive()? {
            if self.supported.is_none() {
                self.take_hello(packet)?;
                continue;
            }
            let event = match packet.header.kind {
                Kind::SOCK_MATCHED => {
                    wire::body::<wire::SocketMatched>(&packet.body).map(|matched| SocketEvent::Matched {
                        key: matched.key,
                        segment: matched.segment.as_str().into(),
                        meeting: Meeting { name: matched.listener },
                    })
                }
                Kind::SOCK_STAYS => wire::body::<wire::SocketStays>(&packet.body)
                    .map(|stays| SocketEvent::Stays { key: stays.key, reason: stays.reason }),
                _ => continue,
            };
            return event.map(Some).ok_or_else(|| protocol(&self.path, "an event of the wrong length"));
        }
        Ok(None)
    }

    fn receive(&self) -> Result<Option<Packet>, Error> {
        let lost = |errno: Errno| Error::NoDaemon { path: self.path.clone(), source: errno.into() };
        self.connection.receive().map_err(lost)
    }
}

/// How long the connecting end waits for the other end to listen, and how long the listening end then waits for it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Shortest and longest pause between its attempts; each is twice as long as the one before.
const FIRST_TRY: Duration = Duration::from_micros(200);
const LAST_TRY: Duration = Duration::from_millis(20);

/// A channel to the other end of a connection that is being opened. Dropping it gives up.
pub struct OpeningSocket {
    endpoint: Arc<Inner>,
    step: Step,
}

enum Step {
    /// The daemon has been asked to listen.
    Listening(u32),
    /// This end listens, and the other end has not connected yet.
    Waiting {
        listener: u32,
        until: Instant,
    },
    /// This end connects: either a request is under way, or the next one is due at `next`.
    Connecting {
        connect: wire::Connect,
        request: Option<u32>,
        next: Instant,
        pause: Duration,
        until: Instant,
    },
    Over,
}

impl Endpoint {
    /// Begins to open the channel of a connection whose ends have been found. The end that accepted the connection
    /// listens, and the other one connects. Each ring gets `capacity` bytes. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::ReadOnly`] if this member may only read the segment, [`Error::Name`] if the daemon has named an invalid
    /// meeting.
    pub fn begin_open_socket(
        &self,
        meeting: &Meeting,
        end: SocketEnd,
        capacity: usize,
    ) -> Result<OpeningSocket, Error> {
        let endpoint = self.inner().clone();
        endpoint.may_write()?;
        // Checked like a name from a program, because the daemon may be of another version.
        let name = parse_name(meeting.name.as_str())?;
        let (kind, capacity) = (ChannelKind::SOCKET.0, capacity.next_power_of_two() as u64);
        let step = match end {
            SocketEnd::Acceptor => {
                let listen = wire::Listen { name, kind, backlog: 1, capacity, input_capacity: 0 };
                Step::Listening(endpoint.ask(Kind::LISTEN, listen.as_bytes()))
            }
            SocketEnd::Connector { .. } => {
                let nonce = endpoint.next_nonce();
                let connect = wire::Connect { name, kind, reserved: 0, capacity, input_capacity: 0, nonce };
                let now = Instant::now();
                Step::Connecting {
                    connect,
                    request: None,
                    next: now,
                    pause: FIRST_TRY,
                    until: now + PATIENCE,
                }
            }
        };
        Ok(OpeningSocket { endpoint, step })
    }
}

impl OpeningSocket {
    /// Returns whether a request to the daemon is under way. If the value is dropped before the answer comes, the next
    /// call that asks the daemon for something in this segment undoes what the request has created.
    pub fn is_asking(&self) -> bool {
        matches!(self.step, Step::Listening(_) | Step::Connecting { request: Some(_), .. })
    }

    /// Returns the channel, or `None` if it is not open yet. After the channel or an error there is no further result.
    /// Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if the other end has not come for some seconds, [`Error::Refused`] if the daemon refuses,
    /// [`Error::Finished`] if the result was returned already.
    pub fn poll(&mut self) -> Result<Option<SocketChannel>, Error> {
        loop {
            match &mut self.step {
                Step::Listening(request) => {
                    let Some(answer) = self.endpoint.answer(*request) else { return Ok(None) };
                    self.step = Step::Over;
                    let (answer, _) =
                        answer?.into_body::<wire::Listening>(Kind::LISTENING, &self.endpoint.path)?;
                    // The time limit starts only now, when this end listens: if the other end comes and gives up after
                    // that, it has seen this listener.
                    self.step = Step::Waiting { listener: answer.listener, until: Instant::now() + PATIENCE };
                }
                Step::Waiting { listener, until } => {
                    let (listener, until) = (*listener, *until);
                    let Some(incoming) = self.endpoint.take_incoming(listener)? else {
                        if Instant::now() < until {
                            return Ok(None);
                        }
                        self.step = Step::Over;
                        self.endpoint.unlisten(listener);
                        return Err(Error::TimedOut);
                    };
                    let channel = incoming.channel.channel;
                    self.step = Step::Over;
                    let pipe = Pipe::new(self.endpoint.clone(), &incoming.channel, incoming.fds);
                    match &pipe {
                        Ok(_) => self.endpoint.accepted(channel),
                        Err(_) => self.endpoint.close_channel(channel),
                    }
                    // This listener is for one connection only.
                    self.endpoint.unlisten(listener);
                    return pipe.map(|pipe| Some(SocketChannel::new(pipe)));
                }
                Step::Connecting { request: Some(request), next, pause, until, .. } => {
                    let Some(answer) = self.endpoint.answer(*request) else { return Ok(None) };
                    let answer = answer?.into_body::<wire::Channel>(Kind::CHANNEL, &self.endpoint.path);
                    match answer {
                        // The other end does not listen yet.
                        Err(error) if error.code() == Some(ErrorCode::REFUSED) && Instant::now() < *until => {
                            *next = Instant::now() + *pause;
                            *pause = (*pause * 2).min(LAST_TRY);
                            if let Step::Connecting { request, .. } = &mut self.step {
                                *request = None;
                            }
                            return Ok(None);
                        }
                        Err(error) => {
                            self.step = Step::Over;
                            return Err(error);
                        }
                        Ok((channel, fds)) => {
                            self.step = Step::Over;
                            let pipe = Pipe::new(self.endpoint.clone(), &channel, fds);
                            if pipe.is_err() {
                                self.endpoint.close_channel(channel.channel);
                            }
                            return pipe.map(|pipe| Some(SocketChannel::new(pipe)));
                        }
                    }
                }
                Step::Connecting { connect, request, next, .. } => {
                    if Instant::now() < *next {
                        return Ok(None);
                    }
                    *request = Some(self.endpoint.ask(Kind::CONNECT, connect.as_bytes()));
                }
                Step::Over => return Err(Error::Finished),
            }
        }
    }
}

impl Drop for OpeningSocket {
    fn drop(&mut self) {
        match self.step {
            Step::Listening(request) | Step::Connecting { request: Some(request), .. } => {
                self.endpoint.abandon(request);
            }
            Step::Waiting { listener, .. } => self.endpoint.unlisten(listener),
            Step::Connecting { request: None, .. } | Step::Over => {}
        }
    }
}

/// The two rings of a connection.
pub struct SocketChannel {
    sender: SocketSender,
    receiver: SocketReceiver,
}

/// The ring into which this side sends. Dropping it ends this direction, except in the child of a fork while the parent
/// lives.
pub struct SocketSender {
    /// The ring. Its methods say when the peer must be woken; the caller does so with `waker`.
    pub ring: stream::Producer<Mapping>,
    /// The means to wake the peer.
    pub waker: SocketWaker,
    shared: Arc<Shared>,
}

/// The ring from which this side receives. Dropping it closes this direction, except in the child of a fork while the
/// parent lives.
pub struct SocketReceiver {
    /// The ring. Its methods say when the peer must be woken; the caller does so with `waker`.
    pub ring: stream::Consumer<Mapping>,
    /// The means to wake the peer.
    pub waker: SocketWaker,
    shared: Arc<Shared>,
}

/// The means to wake the peer at the other side of a socket's ring.
pub struct SocketWaker {
    memory: Mapping,
    /// Offset of the peer's wake word in the ring.
    armed: usize,
    doorbell: Arc<Doorbell>,
}

impl SocketWaker {
    fn new(memory: &Mapping, armed: usize, shared: &Shared) -> Self {
        Self { memory: memory.clone(), armed, doorbell: shared.doorbell.clone() }
    }

    /// Rings the peer's doorbell if the peer sleeps there. Call it when the ring has said that the peer must be woken.
    /// Returns false if the peer must be woken by a byte on the kernel's connection instead. Never waits.
    pub fn ring(&self) -> bool {
        let sleeps_there = notified_at(&self.memory, self.armed) == Place::DOORBELL
            && !matches!(*self.doorbell, Doorbell::None);
        if sleeps_there {
            self.doorbell.ring();
        }
        sleeps_there
    }
}

impl SocketChannel {
    fn new(pipe: Pipe) -> Self {
        let ChannelInfo { capacity, input_capacity, .. } = pipe.shared.info;
        let output = stream::Producer::new(pipe.output.clone(), capacity);
        let input = stream::Consumer::new(pipe.input.clone(), input_capacity);
        Self {
            sender: SocketSender {
                ring: output,
                waker: SocketWaker::new(&pipe.output, ring::DATA_ARMED, &pipe.shared),
                shared: pipe.shared.clone(),
            },
            receiver: SocketReceiver {
                ring: input,
                waker: SocketWaker::new(&pipe.input, ring::SPACE_ARMED, &pipe.shared),
                shared: pipe.shared,
            },
        }
    }

    /// Returns constant properties of the channel.
    pub fn info(&self) -> &ChannelInfo {
        &self.sender.shared.info
    }

    /// Returns whether the peer belongs to another member, so that as far as this machine knows it does not run on this
    /// machine's CPUs.
    pub fn is_peer_elsewhere(&self) -> bool {
        self.sender.shared.endpoint.identity.member != self.info().peer.member
    }

    /// Returns the name of the segment in which the channel lies.
    pub fn segment(&self) -> &str {
        self.sender.shared.endpoint.segment()
    }

    /// Splits the channel into its two directions, for two threads. The channel is closed with the last of them.
    pub fn split(self) -> (SocketSender, SocketReceiver) {
        (self.sender, self.receiver)
    }
}

impl SocketSender {
    /// Returns whether this process must end the direction. False in the child of a fork while the parent lives.
    pub fn is_ours(&self) -> bool {
        self.shared.is_ours()
    }
}

impl SocketReceiver {
    /// Returns the eventfd on which this side's doorbell rings; `None` in a VM without interrupts. Nobody may read from
    /// it: other sleepers wait for it too, each with an edge-triggered epoll of its own.
    pub fn doorbell_event(&self) -> Option<BorrowedFd<'_>> {
        self.shared.endpoint.event.as_ref().map(|event| event.as_fd())
    }

    /// Returns whether this process must end the direction. False in the child of a fork while the parent lives.
    pub fn is_ours(&self) -> bool {
        self.shared.is_ours()
    }
}

// These drops wake nobody: a sleeping peer is woken by the end of the kernel's connection.
impl Drop for SocketSender {
    fn drop(&mut self) {
        if self.is_ours() {
            let _ = self.ring.finish();
        }
    }
}

impl Drop for SocketReceiver {
    fn drop(&mut self) {
        if self.is_ours() {
            let _ = self.ring.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_fdpass as fdpass;
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with,
    };
    use std::os::fd::AsFd;

    #[test]
    fn poll_also_handles_the_daemons_greeting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("daemon");
        let daemon =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&daemon, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&daemon, 1).unwrap();
        let mut session = SocketSession::begin(&path).unwrap();
        let daemon = accept(&daemon).unwrap();
        let say = |kind, request, body: &[u8]| {
            let mut packet = wire::Header { kind, flags: 0, request }.as_bytes().to_vec();
            packet.extend_from_slice(body);
            fdpass::send::<BorrowedFd<'_>>(daemon.as_fd(), &packet, &[], SendFlags::empty()).unwrap();
        };
        assert!(session.poll().unwrap().is_none());
        assert_eq!(session.is_supported().unwrap(), None);
        let hello = wire::HelloOk { features: features::SOCKETS, ..FromZeros::new_zeroed() };
        say(Kind::HELLO_OK, HELLO, hello.as_bytes());
        assert!(session.poll().unwrap().is_none());
        assert_eq!(session.is_supported().unwrap(), Some(true));
        let stays = wire::SocketStays { key: 7, reason: StaysReason::EXCLUDED, reserved: 0 };
        say(Kind::SOCK_STAYS, 0, stays.as_bytes());
        assert!(matches!(
            session.poll().unwrap(),
            Some(SocketEvent::Stays { key: 7, reason: StaysReason::EXCLUDED })
        ));
    }
}
