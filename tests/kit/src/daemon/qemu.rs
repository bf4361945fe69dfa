//! Plays the part of a QEMU on its ivshmem socket, and of the guest's daemon behind it.

use super::{Channel, readable};
use crate::wait::{WATCHDOG, wait_for};
use ginnel_daemon::control_link::{Event, GuestLink, PeerInfo};
use ginnel_daemon::packet;
use ginnel_layout::control;
use ginnel_layout::relay::{self, RelayKind};
use ginnel_layout::wire::{self, Header, Kind};
use ginnel_shmem::{Mapping, Protection};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// The connection of a QEMU to its ivshmem socket.
pub struct Qemu {
    pub socket: UnixStream,
    pub id: i64,
    pub control: OwnedFd,
    /// The eventfds that the server has sent, by member number.
    pub peers: BTreeMap<i64, Vec<OwnedFd>>,
    /// The numbers that the server has sent, in order of arrival, each with whether a descriptor came with it.
    pub received: Vec<(i64, bool)>,
    vectors: usize,
}

impl Qemu {
    /// Connects as QEMU does, and checks what QEMU checks. Waits only until the VM's own vectors have arrived, which come
    /// first.
    pub fn join(socket: &Path, vectors: usize) -> Self {
        Self::take_over(wait_for("the VM's socket", || UnixStream::connect(socket).ok()), vectors)
    }

    /// Does the same as [`Self::join`] with a socket that is connected already.
    pub fn take_over(socket: UnixStream, vectors: usize) -> Self {
        let mut received = Vec::new();
        let mut next = || {
            let (number, fd) = receive(&socket).expect("the server hangs up");
            received.push((number, fd.is_some()));
            (number, fd)
        };
        let (version, fd) = next();
        assert_eq!((version, fd.is_none()), (0, true), "version");
        let (id, fd) = next();
        assert!((1..=0xffff).contains(&id) && fd.is_none(), "own id");
        let (number, control) = next();
        assert_eq!(number, -1);
        let mut peers: BTreeMap<i64, Vec<OwnedFd>> = BTreeMap::new();
        while peers.get(&id).is_none_or(|own| own.len() < vectors) {
            let (number, fd) = next();
            let peer = peers.entry(number).or_default();
            peer.push(fd.expect("a doorbell without an eventfd"));
        }
        Self { id, control: control.expect("no control memory"), peers, received, socket, vectors }
    }

    /// Waits for the next message. Like QEMU, it keeps the eventfds of a peer, and forgets a peer that is gone.
    pub fn next_message(&mut self) -> (i64, bool) {
        assert!(readable(&self.socket, WATCHDOG), "nothing is said");
        let (number, fd) = receive(&self.socket).expect("the server hangs up");
        self.received.push((number, fd.is_some()));
        match fd {
            Some(fd) => {
                let peer = self.peers.entry(number).or_default();
                peer.push(fd);
                assert!(peer.len() <= self.vectors, "QEMU refuses more eventfds than its device has vectors");
                (number, true)
            }
            None => (number, self.peers.remove(&number).is_none()),
        }
    }

    /// Returns the n-th doorbell of a peer, and waits for it if it has not arrived yet.
    pub fn doorbell(&mut self, peer: i64, n: usize) -> &OwnedFd {
        while self.peers.get(&peer).is_none_or(|peer| peer.len() <= n) {
            self.next_message();
        }
        &self.peers[&peer][n]
    }

    /// Returns whether one of the VM's own vectors is rung within `timeout`.
    pub fn is_rung(&self, vector: u32, timeout: Duration) -> bool {
        readable(&self.peers[&self.id][vector as usize], timeout)
    }

    pub fn memory(&self) -> Mapping {
        Mapping::of_file(&self.control, 0, control::SIZE, Protection::ReadWrite).unwrap()
    }

    pub fn ring(&mut self, peer: i64, n: usize) {
        rustix::io::write(self.doorbell(peer, n), &1u64.to_ne_bytes()).unwrap();
    }

    pub fn guest(self, boot: u8, interrupts: bool) -> Guest {
        Guest::start(self, boot, interrupts)
    }
}

/// Receives one message. Returns `None` at the end of the connection.
fn receive(socket: &UnixStream) -> Option<(i64, Option<OwnedFd>)> {
    let packet = packet::receive(socket.as_fd(), 8, 1).ok()?;
    let number = i64::from_le_bytes(packet.bytes.try_into().expect("a short message"));
    Some((number, packet.fds.into_iter().next()))
}

/// A guest's daemon.
pub struct Guest {
    pub qemu: Qemu,
    pub link: GuestLink,
    messages: VecDeque<(RelayKind, u32, Vec<u8>)>,
    requests: u32,
}

impl Guest {
    pub fn start(qemu: Qemu, boot: u8, interrupts: bool) -> Self {
        let link = GuestLink::new(qemu.memory(), [boot; 16], interrupts);
        let mut guest = Self { qemu, link, messages: VecDeque::new(), requests: 100 };
        guest.until("a session", |event| matches!(event, Event::Up(_)).then_some(()));
        guest
    }

    /// Starts the session again, as after a restart of the guest's daemon or of its kernel (then with another `boot`).
    pub fn restart(self, boot: u8, interrupts: bool) -> Self {
        Self::start(self.qemu, boot, interrupts)
    }

    fn ring_if_owed(&mut self) {
        if self.link.take_ring() {
            self.qemu.ring(0, 0);
        }
    }

    /// Steps until `take` returns a value for an event. Messages that `take` does not want are kept.
    pub fn until<T>(&mut self, what: &str, mut take: impl FnMut(&Event) -> Option<T>) -> T {
        wait_for(what, || {
            loop {
                let event = self.link.step();
                self.ring_if_owed();
                if let Some(value) = take(&event) {
                    return Some(value);
                }
                match event {
                    Event::Idle => return None,
                    Event::Message { kind, client, body } => self.messages.push_back((kind, client, body)),
                    Event::Up(PeerInfo { .. }) | Event::Down => {}
                }
            }
        })
    }

    /// Waits for the next message of this kind for this client. Other messages are kept.
    pub fn message(&mut self, kind: RelayKind, client: u32) -> Vec<u8> {
        if let Some(at) = self.messages.iter().position(|m| (m.0, m.1) == (kind, client)) {
            return self.messages.remove(at).unwrap().2;
        }
        self.until(&format!("{kind:?} for {client}"), |event| match event {
            Event::Message { kind: k, client: c, body } if (*k, *c) == (kind, client) => Some(body.clone()),
            _ => None,
        })
    }

    pub fn send(&mut self, kind: RelayKind, client: u32, body: &[u8]) {
        self.link.send(kind, client, body).unwrap();
        self.ring_if_owed();
    }

    pub fn segments(&mut self) -> Vec<relay::Segment> {
        entries(&self.message(RelayKind::SEGMENTS, 0))
    }

    pub fn endpoints(&mut self) -> Vec<relay::Endpoint> {
        entries(&self.message(RelayKind::ENDPOINTS, 0))
    }

    pub fn open(&mut self, client: u32, pid: u32) {
        let open = relay::Open { pid, uid: 1000, gid: 1000, reserved: 0, started: 5 };
        self.send(RelayKind::OPEN, client, open.as_bytes());
    }

    /// Sends a program's request and returns its answer.
    pub fn ask<T: FromBytes>(
        &mut self,
        client: u32,
        kind: Kind,
        body: &[u8],
        expect: Kind,
    ) -> Result<T, (u32, String)> {
        self.requests += 1;
        let mut packet = Header { kind, flags: 0, request: self.requests }.as_bytes().to_vec();
        packet.extend_from_slice(body);
        self.send(RelayKind::DATA, client, &packet);
        let request = self.requests;
        // Events that arrive before the answer are kept.
        let packet = self.until("an answer", |event| match event {
            Event::Message { kind: RelayKind::DATA, client: c, body } if *c == client => {
                (wire::split(body)?.0.request == request).then(|| body.clone())
            }
            _ => None,
        });
        let (header, body) = wire::split(&packet).unwrap();
        if header.kind != expect {
            assert_eq!(header.kind, Kind::ERROR);
            let (error, text) = wire::Error::read_from_prefix(body).unwrap();
            return Err((error.code.0, String::from_utf8(text.to_vec()).unwrap()));
        }
        Ok(wire::body(body).expect("an answer of another length"))
    }

    pub fn attach(&mut self, client: u32, body: wire::Attach) -> Result<wire::Attached, (u32, String)> {
        self.ask(client, Kind::ATTACH, body.as_bytes(), Kind::ATTACHED)
    }

    pub fn listen(&mut self, client: u32, at: &str) -> u32 {
        let body =
            wire::Listen { name: super::name(at), kind: 1, backlog: 0, capacity: 0, input_capacity: 0 };
        self.ask::<wire::Listening>(client, Kind::LISTEN, body.as_bytes(), Kind::LISTENING).unwrap().listener
    }

    pub fn connect(&mut self, client: u32, to: &str) -> Result<wire::Channel, (u32, String)> {
        let body = wire::Connect {
            name: super::name(to),
            kind: 1,
            reserved: 0,
            capacity: 4096,
            input_capacity: 0,
            nonce: 1,
        };
        self.ask(client, Kind::CONNECT, body.as_bytes(), Kind::CHANNEL)
    }

    pub fn incoming(&mut self, client: u32) -> wire::Channel {
        let packet = self.message(RelayKind::DATA, client);
        let (header, body) = wire::split(&packet).unwrap();
        assert_eq!((header.kind, header.request), (Kind::INCOMING, 0));
        wire::body(body).unwrap()
    }
}

/// Returns the rings of a channel as the guest sees them, through a mapping of the segment.
pub fn rings(memory: &Mapping, wire: wire::Channel) -> Channel {
    Channel::new(memory, wire, Vec::new())
}

fn entries<T: FromBytes>(bytes: &[u8]) -> Vec<T> {
    assert_eq!(bytes.len() % size_of::<T>(), 0);
    bytes
        .chunks(size_of::<T>())
        .map(|chunk| T::read_from_bytes(chunk).unwrap_or_else(|_| panic!("sized")))
        .collect()
}
