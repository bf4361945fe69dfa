//! The socket to the daemon, which carries packets. Nothing here waits, except [`wait`] and [`wait_any`].

use crate::descriptor::kept;
use crate::error::Error;
use crate::fork::Inheritance;
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// The most file descriptors that an answer of the daemon carries.
const MAX_FDS: usize = 4;

/// A packet from the daemon.
pub(crate) struct Packet {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Packet {
    /// Returns the body as a `T` with the packet's file descriptors, or the daemon's refusal.
    pub fn into_body<T: FromBytes>(self, kind: Kind, path: &Path) -> Result<(T, Vec<OwnedFd>), Error> {
        if self.header.kind == Kind::ERROR {
            return Err(match self.refusal() {
                Some((code, text)) => Error::Refused { code, text },
                None => protocol(path, "an error of the wrong length"),
            });
        }
        if self.header.kind != kind {
            return Err(protocol(path, "an answer of another kind"));
        }
        let body = wire::body(&self.body).ok_or_else(|| protocol(path, "an answer of the wrong length"))?;
        Ok((body, self.fds))
    }

    /// Returns the header and the text of one page of a status.
    pub fn page(&self, path: &Path) -> Result<(wire::Inspect, &[u8]), Error> {
        wire::Inspect::read_from_prefix(&self.body).map_err(|_| protocol(path, "a page of the wrong length"))
    }

    /// Returns the error's code and text if this packet is an error.
    pub fn refusal(&self) -> Option<(ErrorCode, String)> {
        if self.header.kind != Kind::ERROR {
            return None;
        }
        let (error, text) = wire::Error::read_from_prefix(&self.body).ok()?;
        Some((error.code, String::from_utf8_lossy(text).into_owned()))
    }

    /// Returns whether the daemon asks the client to try again.
    pub fn is_unavailable(&self) -> bool {
        self.header.kind == Kind::ERROR
            && wire::Error::read_from_prefix(&self.body).is_ok_and(|(e, _)| e.code == ErrorCode::UNAVAILABLE)
    }
}

pub(crate) fn protocol(path: &Path, what: &'static str) -> Error {
    Error::Protocol { path: path.to_owned(), what }
}

/// A connected socket to the daemon.
pub(crate) struct Connection {
    /// Lets children of a fork join over this socket. Declared before the socket, so that it is dropped first.
    _inheritance: Option<Inheritance>,
    socket: OwnedFd,
}

impl Connection {
    /// Connects to the socket at `path` without waiting; sends nothing.
    pub fn open(path: &Path) -> Result<Self, Errno> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { _inheritance: None, socket: kept(socket) })
    }

    /// Lets children of a fork join over this connection from now on.
    pub fn let_children_join(&mut self) {
        self._inheritance = Some(Inheritance::of(self.socket.as_fd()));
    }

    /// Sends a packet; fails with [`Errno::AGAIN`] if the socket has no room for it.
    pub fn send(&self, kind: Kind, request: u32, body: &[u8]) -> Result<(), Errno> {
        self.send_with(kind, request, body, &[])
    }

    /// Sends a packet with file descriptors; fails with [`Errno::AGAIN`] if the socket has no room for it.
    pub fn send_with(
        &self,
        kind: Kind,
        request: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        let mut packet = Header { kind, flags: 0, request }.as_bytes().to_vec();
        packet.extend_from_slice(body);
        fdpass::send(self.as_fd(), &packet, fds, SendFlags::DONTWAIT).map(drop)
    }

    /// Receives the next packet; returns `None` if there is none now. After an error the connection is unusable.
    pub fn receive(&self) -> Result<Option<Packet>, Errno> {
        // Not on the stack: the thread may be one of an unmodified program, and have little of it.
        let mut bytes = vec![0; wire::MAX_PACKET];
        let got = match fdpass::receive(self.as_fd(), &mut bytes, MAX_FDS, RecvFlags::DONTWAIT) {
            Ok(got) if got.len == 0 => return Err(Errno::CONNRESET),
            Ok(got) => got,
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        match bytes.get(..got.len).and_then(wire::split) {
            // Descriptors may have been lost on the way; the code that needs them reports that.
            Some((header, body)) if !got.truncated => {
                let fds = got.fds.into_iter().map(kept).collect();
                Ok(Some(Packet { header, body: body.to_vec(), fds }))
            }
            // The packet is too long or too short for this protocol, so the peer is not a daemon of ours.
            _ => Err(Errno::PROTO),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits for an event on a file descriptor. Returns false at the deadline; without one, waits for ever.
pub(crate) fn wait(fd: BorrowedFd<'_>, events: PollFlags, deadline: Option<Instant>) -> bool {
    wait_any(&mut [PollFd::from_borrowed_fd(fd, events)], deadline)
}

/// Waits for an event on one of several file descriptors, like [`wait`].
pub(crate) fn wait_any(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| rustix::event::Timespec::try_from(left).ok());
        match poll(fds, timeout.as_ref()) {
            Ok(0) => {
                if left.is_some_and(|left| left.is_zero()) {
                    return false;
                }
            }
            Ok(_) => return true,
            Err(Errno::INTR) => {}
            // The descriptors are ours and valid, so the kernel is out of memory: let the caller try its call.
            Err(_) => return true,
        }
    }
}
