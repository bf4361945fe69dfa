//! An rsocket and its states.
//!
//! An rsocket is new at first, and then a listener or a connection. A connection with an offer of I/O maps is established when the other
//! side has accepted it. Any other connection is established at once, like a TCP connection that waits in a backlog.

use super::direction::locked;
use super::listening::Listening;
use super::maps::Maps;
use super::options::Options;
use super::stream::{Greeting, IN, OUT, Stream, greet};
use super::table;
use super::waiting::{Waiters, Wake};
use crate::cm::{addresses, opened};
use ginnel::{ChannelOptions, Error, ErrorCode, StreamChannel, StreamReceiver, StreamSender};
use ginnel_verbs::cm::hello::{Answer, Hello};
use ginnel_verbs::cm::names::PortSpace;
use ginnel_verbs::cm::rendezvous;
use libc::{POLLERR, POLLHUP, POLLRDHUP, c_short};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How long a connecting thread waits for room in a listener's queue, and how often it tries.
const PATIENCE: Duration = Duration::from_secs(5);
const INTERVAL: Duration = Duration::from_millis(2);

/// An rsocket.
pub struct Socket {
    number: OwnedFd,
    pub family: c_int,
    pub is_nonblocking: AtomicBool,
    pub options: Mutex<Options>,
    state: Mutex<State>,
    stream: OnceLock<Stream>,
    listening: OnceLock<Listening>,
    /// Threads that wait until a connection is established or has failed.
    changes: Waiters,
}

#[derive(Default)]
struct State {
    bound: Option<SocketAddr>,
    /// Whether this library chose the port.
    is_port_chosen: bool,
    /// A connection that the other side has not accepted yet.
    pending: Option<Pending>,
    /// The result of a connection that a non-blocking call began, until the program has asked for it.
    outcome: Option<Result<(), c_int>>,
}

struct Pending {
    sender: StreamSender,
    receiver: StreamReceiver,
    maps: Maps,
    greeting: Greeting<{ Answer::LEN }>,
    local: SocketAddr,
    peer: SocketAddr,
}

impl Socket {
    pub fn new(family: c_int, is_nonblocking: bool) -> Result<Arc<Self>, c_int> {
        let number = table::reserve().map_err(|error| super::code(&error, libc::EMFILE))?;
        Ok(Arc::new(Self {
            number,
            family,
            is_nonblocking: AtomicBool::new(is_nonblocking),
            options: Mutex::default(),
            state: Mutex::default(),
            stream: OnceLock::new(),
            listening: OnceLock::new(),
            changes: Waiters::default(),
        }))
    }

    pub fn number(&self) -> &OwnedFd {
        &self.number
    }

    pub fn waits(&self) -> bool {
        !self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Returns the connection.
    pub fn stream(&self) -> Result<&Stream, c_int> {
        match self.stream.get() {
            Some(stream) => Ok(stream),
            None => self.stream_slowly(),
        }
    }

    #[cold]
    fn stream_slowly(&self) -> Result<&Stream, c_int> {
        if self.advance(None) {
            return Err(libc::EAGAIN);
        }
        self.stream.get().ok_or(libc::ENOTCONN)
    }

    pub fn bind(&self, address: SocketAddr) -> Result<(), c_int> {
        let address = self.own_kind(address)?;
        if !address.ip().is_unspecified() && !addresses::is_local(address.ip()) {
            return Err(libc::EADDRNOTAVAIL);
        }
        let mut state = locked(&self.state);
        if state.bound.is_some() || self.stream.get().is_some() {
            return Err(libc::EINVAL);
        }
        state.is_port_chosen = address.port() == 0;
        let port = if state.is_port_chosen { addresses::any_port() } else { address.port() };
        state.bound = Some(SocketAddr::new(address.ip(), port));
        Ok(())
    }

    fn channel_options(&self, backlog: u32) -> ChannelOptions {
        let options = locked(&self.options);
        ChannelOptions {
            capacity: options.sends,
            input_capacity: options.receives,
            patience: Duration::ZERO,
            backlog,
        }
    }

    pub fn listen(&self, backlog: c_int) -> Result<(), c_int> {
        if self.listening.get().is_some() {
            return Ok(());
        }
        let mut state = locked(&self.state);
        if self.stream.get().is_some() || state.pending.is_some() {
            return Err(libc::EINVAL);
        }
        let any = match self.family {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            _ => Ipv6Addr::UNSPECIFIED.into(),
        };
        let (bound, is_chosen) = match state.bound {
            Some(bound) => (bound, state.is_port_chosen),
            None => (SocketAddr::new(any, addresses::any_port()), true),
        };
        let backlog = u32::try_from(backlog).unwrap_or(0).max(1);
        let made = Listening::new(bound, is_chosen, &self.channel_options(backlog), backlog as usize)?;
        state.bound = Some(made.bound);
        let _ = self.listening.set(made);
        Ok(())
    }

    /// Accepts a connection. The new rsocket has the options of this one.
    pub fn accept(&self) -> Result<Arc<Self>, c_int> {
        let listening = self.listening.get().ok_or(libc::EINVAL)?;
        // This comes first, because a connection would be lost if there were no number for it.
        let socket = Self::new(self.family, false)?;
        let stream = listening.accept(self.waits())?;
        *locked(&socket.options) = locked(&self.options).clone();
        locked(&socket.state).bound = Some(stream.local);
        let _ = socket.stream.set(stream);
        Ok(socket)
    }

    /// Starts a connection.
    pub fn connect(&self, to: SocketAddr) -> Result<(), c_int> {
        let to = addresses::target(self.own_kind(to)?);
        let waits = self.waits();
        if self.advance(None) {
            return if waits { self.finish_connecting() } else { Err(libc::EALREADY) };
        }
        let mut state = locked(&self.state);
        if let Some(outcome) = state.outcome.take() {
            return outcome;
        }
        if self.stream.get().is_some() {
            return Err(libc::EISCONN);
        }
        if self.listening.get().is_some() {
            return Err(libc::EISCONN);
        }
        let end = Instant::now() + PATIENCE;
        let made = loop {
            let made = self.begin(&mut state, to);
            // The listener's queue may be full.
            if made != Err(libc::ETIMEDOUT) || !waits || Instant::now() >= end {
                break made;
            }
            // Other threads may need the state meanwhile.
            drop(state);
            std::thread::sleep(INTERVAL);
            state = locked(&self.state);
            if self.stream.get().is_some() || state.pending.is_some() {
                return Err(libc::EALREADY);
            }
        };
        if !waits {
            // As with TCP, the program learns the result from poll and SO_ERROR.
            if made.is_err() || state.pending.is_none() {
                state.outcome = Some(made);
            }
            return Err(libc::EINPROGRESS);
        }
        made?;
        let is_pending = state.pending.is_some();
        drop(state);
        if is_pending { self.finish_connecting() } else { Ok(()) }
    }

    fn begin(&self, state: &mut State, to: SocketAddr) -> Result<(), c_int> {
        let from =
            addresses::origin(state.bound, to).map_err(|error| super::code(&error, libc::ENETUNREACH))?;
        let options = self.channel_options(0);
        let namespace = addresses::namespace();
        let mut reached = Err(libc::ECONNREFUSED);
        for opened in opened() {
            let open = opened.open();
            match rendezvous::connect::<StreamChannel>(&open.device, PortSpace::Tcp, to, namespace, &options)
            {
                Ok(Some(channel)) => {
                    reached = Ok((channel, open));
                    break;
                }
                Ok(None) => {}
                Err(error) => reached = Err(unreachable(&error)),
            }
        }
        let (mut channel, open) = reached?;
        let has_maps = locked(&self.options).io_maps > 0;
        let maps = if has_maps { Some(Maps::new(&open)?) } else { None };
        let hello = Hello { from, to, offer: maps.as_ref().and_then(Maps::offer) };
        greet(&mut channel, &hello.encode()).map_err(|_| libc::ECONNREFUSED)?;
        state.bound = Some(from);
        let (sender, receiver) = channel.split();
        match maps {
            None => {
                let _ = self.stream.set(Stream::new((sender, receiver), from, to, None));
            }
            Some(maps) => {
                let greeting = Greeting::new();
                state.pending = Some(Pending { sender, receiver, maps, greeting, local: from, peer: to });
            }
        }
        Ok(())
    }

    /// Waits until the other side has accepted.
    fn finish_connecting(&self) -> Result<(), c_int> {
        let mut wake = Wake::new()?;
        let _entered = self.changes.enter(&wake);
        while self.advance(Some(&mut wake)) {
            wake.sleep(None)?;
        }
        let outcome = locked(&self.state).outcome.take();
        outcome.unwrap_or(if self.stream.get().is_some() { Ok(()) } else { Err(libc::ECONNREFUSED) })
    }

    /// Checks whether the other side has accepted. Returns true if it has not yet; then adds to `wake` what becomes readable.
    fn advance(&self, wake: Option<&mut Wake>) -> bool {
        let mut state = locked(&self.state);
        let Some(pending) = &mut state.pending else { return false };
        let answer = match pending.greeting.take(&mut pending.receiver, wake) {
            Ok(None) => return true,
            Ok(Some(bytes)) => Answer::decode(bytes).ok_or(libc::ECONNREFUSED),
            Err(_) => Err(libc::ECONNREFUSED),
        };
        let outcome = match (answer, state.pending.take()) {
            (Ok(answer), Some(pending)) => {
                let Pending { sender, receiver, mut maps, local, peer, .. } = pending;
                let endpoint = receiver.info().peer.endpoint;
                let is_connected = answer.offer.is_some_and(|theirs| maps.connect(theirs, endpoint).is_ok());
                let maps = is_connected.then_some(maps);
                let _ = self.stream.set(Stream::new((sender, receiver), local, peer, maps));
                Ok(())
            }
            (answer, _) => answer.map(drop),
        };
        state.outcome = Some(outcome);
        drop(state);
        self.changes.ring(None);
        false
    }

    /// Returns the error for SO_ERROR, once.
    pub fn take_error(&self) -> c_int {
        self.advance(None);
        let mut state = locked(&self.state);
        match state.outcome {
            Some(Err(error)) => {
                state.outcome = None;
                error
            }
            _ => 0,
        }
    }

    pub fn shut_down(&self, how: c_int) -> Result<(), c_int> {
        if !matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR) {
            return Err(libc::EINVAL);
        }
        let stream = self.stream()?;
        if how != libc::SHUT_RD {
            stream.finish();
        }
        if how != libc::SHUT_WR {
            stream.deafen();
        }
        Ok(())
    }

    /// Ends the connection when the program has closed the rsocket. A thread that is still in a call can complete it.
    pub fn close(&self) {
        if let Some(stream) = self.stream.get() {
            stream.finish();
        }
    }

    pub fn local(&self) -> SocketAddr {
        let any = match self.family {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            _ => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = self.stream.get().map(|stream| stream.local).or_else(|| locked(&self.state).bound);
        self.shown(local.unwrap_or(SocketAddr::new(any, 0)))
    }

    pub fn peer(&self) -> Result<SocketAddr, c_int> {
        Ok(self.shown(self.stream()?.peer))
    }

    pub fn listens(&self) -> bool {
        self.listening.get().is_some()
    }

    pub fn is_new(&self) -> bool {
        !self.listens() && self.stream.get().is_none() && locked(&self.state).pending.is_none()
    }

    /// Returns an address of the program if its family fits this rsocket.
    fn own_kind(&self, address: SocketAddr) -> Result<SocketAddr, c_int> {
        match (self.family, address) {
            (libc::AF_INET, SocketAddr::V6(_)) => Err(libc::EAFNOSUPPORT),
            _ => Ok(address),
        }
    }

    /// Converts an address to the family of this rsocket.
    fn shown(&self, address: SocketAddr) -> SocketAddr {
        let ip = match (self.family, address.ip()) {
            (libc::AF_INET6, IpAddr::V4(ip)) => ip.to_ipv6_mapped().into(),
            (libc::AF_INET, IpAddr::V6(ip)) => ip.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED).into(),
            (_, ip) => ip,
        };
        SocketAddr::new(ip, address.port())
    }

    /// Returns the events that poll would report. Adds to `wake` what becomes readable when there are more.
    pub fn ready(&self, wanted: c_short, mut wake: Option<&mut Wake>) -> c_short {
        if let Some(listening) = self.listening.get() {
            return if wanted & IN != 0 && listening.is_ready(wake) { wanted & IN } else { 0 };
        }
        if self.stream.get().is_none() && self.advance(wake.as_deref_mut()) {
            return 0;
        }
        if let Some(stream) = self.stream.get() {
            return stream.ready(wanted, wake);
        }
        match locked(&self.state).outcome {
            Some(Err(_)) => (wanted & (IN | OUT | POLLRDHUP)) | POLLERR | POLLHUP,
            // TCP reports the same for a socket that is not connected.
            _ => (wanted & OUT) | POLLHUP,
        }
    }

    /// Returns the lists of waiters for changes of the result of `ready`.
    pub fn waiters(&self, wanted: c_short) -> Vec<&Waiters> {
        if let Some(listening) = self.listening.get() {
            return vec![&listening.waiters];
        }
        match self.stream.get() {
            None => vec![&self.changes],
            Some(stream) => {
                let [sending, receiving] = stream.directions();
                let mut waiters = Vec::new();
                if wanted & OUT != 0 {
                    waiters.push(sending);
                }
                if wanted & (IN | POLLRDHUP) != 0 || wanted & OUT == 0 {
                    waiters.push(receiving);
                }
                waiters
            }
        }
    }
}

fn unreachable(error: &Error) -> c_int {
    match error.code() {
        Some(ErrorCode::LIMIT) => libc::ETIMEDOUT,
        Some(ErrorCode::DENIED | ErrorCode::READ_ONLY) => libc::EACCES,
        Some(ErrorCode::NO_MEMORY | ErrorCode::QUOTA) => libc::ENOBUFS,
        _ => libc::ENETUNREACH,
    }
}
