//! The socket to the daemon: packets in, packets out.

use crate::error::Error;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// No answer carries more file descriptors.
const MAX_FDS: usize = 4;

/// What came from the daemon.
pub(crate) struct Packet {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Packet {
    /// The body as a `T`, or the daemon's refusal.
    pub fn into_body<T: FromBytes>(self, kind: Kind, path: &Path) -> Result<(T, Vec<OwnedFd>), Error> {
        if self.header.kind == Kind::ERROR {
            return Err(self.into_refusal(path));
        }
        if self.header.kind != kind {
            return Err(protocol(path, "an answer of another kind"));
        }
        let body = wire::body(&self.body).ok_or_else(|| protocol(path, "an answer of the wrong length"))?;
        Ok((body, self.fds))
    }

    fn into_refusal(self, path: &Path) -> Error {
        match wire::Error::read_from_prefix(&self.body) {
            Ok((error, text)) => {
                Error::Refused { code: error.code, text: String::from_utf8_lossy(text).into_owned() }
            }
            Err(_) => protocol(path, "an error of the wrong length"),
        }
    }

    /// Whether the daemon asks to try again.
    pub fn is_unavailable(&self) -> bool {
        self.header.kind == Kind::ERROR
            && wire::Error::read_from_prefix(&self.body).is_ok_and(|(e, _)| e.code == ErrorCode::UNAVAILABLE)
    }
}

pub(crate) fn protocol(path: &Path, what: &'static str) -> Error {
    Error::Protocol { path: path.to_owned(), what }
}

/// Why the connection is of no more use, and a new one may help.
pub(crate) struct Lost(pub rustix::io::Errno);

/// A connected socket. Non-blocking inside; waits are polls with a deadline.
pub(crate) struct Connection {
    socket: OwnedFd,
}

impl Connection {
    /// Connects; says nothing yet.
    pub fn open(path: &Path) -> Result<Self, Errno> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket })
    }

    pub fn send(&self, kind: Kind, request: u32, body: &[u8], deadline: Option<Instant>) -> Result<(), Lost> {
        let mut packet = Header { kind, flags: 0, request }.as_bytes().to_vec();
        packet.extend_from_slice(body);
        loop {
            match send(&self.socket, &packet, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !wait(self.socket.as_fd(), PollFlags::OUT, deadline) {
                        return Err(Lost(Errno::TIMEDOUT));
                    }
                }
                Err(errno) => return Err(Lost(errno)),
            }
        }
    }

    /// The next packet; `None` if there is none by the deadline.
    pub fn receive(&self, deadline: Option<Instant>) -> Result<Option<Packet>, Lost> {
        loop {
            match self.try_receive() {
                Err(Lost(Errno::AGAIN)) => {
                    if !wait(self.socket.as_fd(), PollFlags::IN, deadline) {
                        return Ok(None);
                    }
                }
                Err(Lost(Errno::INTR)) => {}
                other => return other.map(Some),
            }
        }
    }

    fn try_receive(&self) -> Result<Packet, Lost> {
        let mut bytes = vec![0; wire::MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )
        .map_err(Lost)?;
        let fds = ancillary
            .drain()
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
                _ => Vec::new(),
            })
            .collect();
        if got.bytes == 0 {
            return Err(Lost(Errno::CONNRESET));
        }
        bytes.truncate(got.bytes);
        match wire::split(&bytes) {
            Some((header, body)) if !got.flags.contains(ReturnFlags::TRUNC) => {
                Ok(Packet { header, body: body.to_vec(), fds })
            }
            // Too long or too short for this protocol: whoever is there, it is no daemon of ours.
            _ => Err(Lost(Errno::PROTO)),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits for an event on a file descriptor. False at the deadline; without one, waits for ever.
pub(crate) fn wait(fd: BorrowedFd<'_>, events: PollFlags, deadline: Option<Instant>) -> bool {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| rustix::event::Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(fd, events)], timeout.as_ref()) {
            Ok(0) => {
                if left.is_some_and(|left| left.is_zero()) {
                    return false;
                }
            }
            Ok(_) => return true,
            Err(Errno::INTR) => {}
            // The descriptor is ours and valid, so this is lack of memory: let the caller try its call.
            Err(_) => return true,
        }
    }
}
