//! Raw clients: they speak the attach protocol, and keep to it only as far as the test wants.

use super::{name, readable};
use crate::wait::{WATCHDOG, wait_for};
use ginnel_daemon::packet::{self, Packet};
use ginnel_layout::ring;
use ginnel_layout::segment::RESERVED;
use ginnel_layout::wire::{self, Header, Kind};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// An `ERROR` answer.
#[derive(Debug)]
pub struct Refused {
    pub code: u32,
    pub text: String,
}

/// A connection that speaks the attach protocol.
pub struct Client {
    pub fd: OwnedFd,
    request: u32,
    pub events: Vec<Packet>,
}

impl Client {
    pub fn raw(socket: &Path) -> Self {
        Self::over(wait_for("a connection", || packet::connect_to(socket).ok()))
    }

    fn over(fd: OwnedFd) -> Self {
        Self { fd, request: 0, events: Vec::new() }
    }

    pub fn hello(socket: &Path) -> Self {
        let mut client = Self::raw(socket);
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let ok: wire::HelloOk = client.ask(Kind::HELLO, hello.as_bytes(), Kind::HELLO_OK).unwrap().0;
        assert_eq!((ok.version, ok.member, ok.name.as_str()), (wire::VERSION, 0, "host"));
        client
    }

    /// Returns whether a daemon answers. One that starts may have a socket already, and not serve yet.
    pub fn is_served(socket: &Path) -> bool {
        let Ok(fd) = packet::connect_to(socket) else { return false };
        let mut client = Self::over(fd);
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let request = client.try_send(Kind::HELLO, hello.as_bytes());
        request.is_some_and(|request| client.answer(request).is_some())
    }

    pub fn send(&mut self, kind: Kind, body: &[u8]) -> u32 {
        self.request += 1;
        let mut packet = Header { kind, flags: 0, request: self.request }.as_bytes().to_vec();
        packet.extend_from_slice(body);
        self.send_raw(&packet).unwrap();
        self.request
    }

    /// Sends a request without waiting for room in the socket. Returns `None` if the daemon has dropped this client, or there
    /// is no room.
    pub fn try_send(&mut self, kind: Kind, body: &[u8]) -> Option<u32> {
        self.request += 1;
        let header = Header { kind, flags: 0, request: self.request };
        rustix::io::ioctl_fionbio(&self.fd, true).ok()?;
        self.send_raw(&[header.as_bytes(), body].concat()).ok()?;
        Some(self.request)
    }

    pub fn send_raw(&self, packet: &[u8]) -> Result<(), rustix::io::Errno> {
        packet::send::<OwnedFd>(self.fd.as_fd(), packet, &[])
    }

    /// Waits for the next packet. Returns `None` if the connection has ended.
    pub fn receive(&self) -> Option<Packet> {
        assert!(readable(&self.fd, WATCHDOG), "no packet came");
        packet::receive(self.fd.as_fd(), wire::MAX_PACKET, 8).ok()
    }

    /// Waits for the answer to a request. Events that arrive before it are kept in `events`.
    pub fn answer(&mut self, request: u32) -> Option<Packet> {
        loop {
            let packet = self.receive()?;
            let (header, _) = wire::split(&packet.bytes).unwrap();
            if header.request == request {
                return Some(packet);
            }
            assert_eq!(header.request, 0);
            self.events.push(packet);
        }
    }

    pub fn ask<T: FromBytes>(
        &mut self,
        kind: Kind,
        body: &[u8],
        expect: Kind,
    ) -> Result<(T, Vec<OwnedFd>), Refused> {
        let request = self.send(kind, body);
        let packet = self.answer(request).expect("the connection ended");
        parse(packet, expect)
    }

    /// Returns the whole status, of all pages.
    pub fn status(&mut self) -> serde_json::Value {
        let (mut text, mut from) = (Vec::new(), wire::Inspect::FIRST);
        loop {
            let request = self.send(Kind::INSPECT, from.as_bytes());
            from = loop {
                let packet = self.answer(request).expect("the connection ended");
                let (header, body) = wire::split(&packet.bytes).unwrap();
                if header.kind == Kind::PAGE {
                    let (next, rest) = wire::Inspect::read_from_prefix(body).unwrap();
                    text.extend_from_slice(rest);
                    break next;
                }
                assert_eq!(header.kind, Kind::TEXT);
                text.extend_from_slice(body);
            };
            if !from.is_more() {
                return serde_json::from_slice(&text).unwrap();
            }
        }
    }

    pub fn text(&mut self, kind: Kind, body: &[u8]) -> Result<String, Refused> {
        let request = self.send(kind, body);
        let mut text = Vec::new();
        loop {
            let packet = self.answer(request).expect("the connection ended");
            let (header, body) = wire::split(&packet.bytes).unwrap();
            if header.kind == Kind::OK {
                return Ok(String::new());
            }
            if header.kind != Kind::TEXT {
                return Err(refused(header.kind, body));
            }
            text.extend_from_slice(body);
            if header.flags & Header::MORE == 0 {
                return Ok(String::from_utf8(text).unwrap());
            }
        }
    }

    pub fn attach(self, segment: &str, name: &str) -> Result<Attached, Refused> {
        let body = wire::Attach {
            segment: self::name(segment),
            name: self::name(name),
            ..wire::Attach::new_zeroed()
        };
        self.attach_as(body)
    }

    pub fn attach_as(mut self, body: wire::Attach) -> Result<Attached, Refused> {
        let (wire, fds) = self.ask::<wire::Attached>(Kind::ATTACH, body.as_bytes(), Kind::ATTACHED)?;
        assert_eq!(fds.len(), 2, "memory and event");
        let len = wire.mapped_len().unwrap() as usize;
        let read_only = wire.access.is_read_only();
        let protection = if read_only { Protection::Read } else { Protection::ReadWrite };
        let memory = Mapping::of_file(&fds[0], wire.map_offset, len, protection).unwrap();
        let writable = Mapping::of_file(&fds[0], wire.map_offset, len, Protection::ReadWrite).is_ok();
        assert_eq!(writable, !read_only, "what the descriptor allows");
        let event = fds.into_iter().nth(1).unwrap();
        let back = wire::Attach { endpoint: wire.endpoint, epoch: wire.epoch, token: wire.token, ..body };
        Ok(Attached { client: self, wire, memory, event, back, nonce: 0 })
    }
}

fn refused(kind: Kind, body: &[u8]) -> Refused {
    assert_eq!(kind, Kind::ERROR, "an answer of another kind");
    let (error, text) = wire::Error::read_from_prefix(body).unwrap();
    Refused { code: error.code.0, text: String::from_utf8(text.to_vec()).unwrap() }
}

fn parse<T: FromBytes>(packet: Packet, expect: Kind) -> Result<(T, Vec<OwnedFd>), Refused> {
    let (header, body) = wire::split(&packet.bytes).unwrap();
    if header.kind != expect {
        return Err(refused(header.kind, body));
    }
    Ok((wire::body(body).expect("an answer of another length"), packet.fds))
}

/// An endpoint of a raw client.
pub struct Attached {
    pub client: Client,
    pub wire: wire::Attached,
    pub memory: Mapping,
    pub event: OwnedFd,
    /// The request that attaches this endpoint again on another connection.
    pub back: wire::Attach,
    nonce: u64,
}

impl Drop for Attached {
    /// Sends `DETACH`, as a program does that ends in order. A program that only loses its connection does not send it (see
    /// [`Attached::hang_up`]).
    fn drop(&mut self) {
        let header = Header { kind: Kind::DETACH, flags: 0, request: u32::MAX };
        let _ = self.client.send_raw(header.as_bytes());
    }
}

impl Attached {
    /// Closes the connection without `DETACH`. Returns the request that attaches the endpoint again.
    pub fn hang_up(mut self) -> wire::Attach {
        drop(self.take_connection());
        self.back
    }

    /// Clears the endpoint's doorbell.
    pub fn clear_doorbell(&self) {
        while readable(&self.event, Duration::ZERO) {
            rustix::io::read(&self.event, &mut [0; 8]).unwrap();
        }
    }

    /// Takes the connection out, so that it stays open when the endpoint is dropped.
    pub fn take_connection(&mut self) -> OwnedFd {
        let none = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        std::mem::replace(&mut self.client.fd, none)
    }

    /// Makes an endpoint of the answer to an attach request that the test has sent by itself.
    pub fn of(
        fd: OwnedFd,
        wire: wire::Attached,
        memory: Mapping,
        event: OwnedFd,
        back: wire::Attach,
    ) -> Self {
        let client = Client { fd, request: 100, events: Vec::new() };
        Self { client, wire, memory, event, back, nonce: 0 }
    }

    pub fn listen(&mut self, at: &str) -> Result<u32, Refused> {
        let body = wire::Listen { name: name(at), kind: 1, backlog: 0, capacity: 0, input_capacity: 0 };
        self.client
            .ask::<wire::Listening>(Kind::LISTEN, body.as_bytes(), Kind::LISTENING)
            .map(|(l, _)| l.listener)
    }

    pub fn connect(&mut self, to: &str) -> Result<Channel, Refused> {
        self.nonce += 1;
        self.connect_as(to, self.nonce, 4096)
    }

    pub fn connect_as(&mut self, to: &str, nonce: u64, capacity: u64) -> Result<Channel, Refused> {
        let body = wire::Connect { name: name(to), kind: 1, reserved: 0, capacity, input_capacity: 0, nonce };
        let (wire, fds) = self.client.ask(Kind::CONNECT, body.as_bytes(), Kind::CHANNEL)?;
        Ok(Channel::new(&self.memory, wire, fds))
    }

    /// Waits for the next `INCOMING` event and returns its channel.
    pub fn incoming(&mut self) -> Channel {
        let packet = match self.client.events.is_empty() {
            true => self.client.receive().expect("the connection ended"),
            false => self.client.events.remove(0),
        };
        let (wire, fds) = parse(packet, Kind::INCOMING).unwrap();
        Channel::new(&self.memory, wire, fds)
    }

    pub fn accepted(&mut self, channel: &Channel) {
        self.ask_about_channel(Kind::ACCEPTED, channel.wire.channel).unwrap();
    }

    pub fn close(&mut self, channel: u64) -> Result<(), Refused> {
        self.ask_about_channel(Kind::CLOSE, channel)
    }

    pub fn ask_about_channel(&mut self, kind: Kind, channel: u64) -> Result<(), Refused> {
        self.client.ask::<[u8; 0]>(kind, wire::ChannelRef { channel }.as_bytes(), Kind::OK).map(drop)
    }
}

/// A channel, as one side sees it.
pub struct Channel {
    pub wire: wire::Channel,
    pub bell: Option<OwnedFd>,
    pub output: Mapping,
    pub input: Mapping,
}

impl Channel {
    pub fn new(memory: &Mapping, wire: wire::Channel, mut fds: Vec<OwnedFd>) -> Self {
        let (output, input) = wire.capacities().rings(wire.initiator == 1);
        let block = (wire.offset - RESERVED) as usize; // The mapping begins at `RESERVED`.
        let part = |at, capacity| memory.part(block + at, ring::footprint(capacity as usize)).unwrap();
        let (output, input) = (part(output, wire.capacity), part(input, wire.input_capacity));
        Self { bell: fds.pop(), output, input, wire }
    }

    /// Returns the state of the peer, as written by the daemon or by the peer: as consumer of our output, and as producer of
    /// our input.
    pub fn peer_state(&self) -> (u32, u32) {
        (
            self.output.load_acquire_u32(ring::CONSUMER_STATE),
            self.input.load_acquire_u32(ring::PRODUCER_STATE),
        )
    }

    pub fn ring(&self) {
        rustix::io::write(self.bell.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
    }
}
