//! The socket to a server: messages with descriptors, and answers that come in time or not at all.
//!
//! Own code and not the front end of the `vhost` crate, because that one waits for an answer without end, and its
//! `SET_VRING_BASE` has 16 of the 32 bits that a packed ring needs.

use crate::error::Error;
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_layout::vhost_user::{Header, MAX_FDS, MAX_PAYLOAD, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// What has come: the words in front, the bytes and the descriptors.
pub(crate) struct Message {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A connection. Calls block, for at most the patience it was made with.
pub(crate) struct Connection {
    socket: Arc<OwnedFd>,
    patience: Duration,
    /// Ask for an answer to messages that have none of their own.
    pub acknowledge: bool,
}

impl Connection {
    /// Connects. Tries once.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self, Error> {
        let connected = || {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            // A server that takes no connections makes `connect` wait; and one that reads nothing, `sendmsg`.
            set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        let socket =
            connected().map_err(|errno: Errno| Error::Connect { path: path.into(), source: errno.into() })?;
        Ok(Self { socket: Arc::new(socket), patience, acknowledge: false })
    }

    /// The socket itself, to learn whether the server is there.
    pub fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Says something that has no answer, or only one that says that it was done; then waits for that.
    pub fn tell(&mut self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let need = if self.acknowledge { Header::NEED_REPLY } else { 0 };
        self.send(request, Header::VERSION | need, body, fds)?;
        if need != 0 {
            let answer = self.answer(request)?;
            match u64::read_from_bytes(&answer.body) {
                Ok(0) => {}
                Ok(_) => return Err(Error::Refused(request)),
                Err(_) => return Err(Error::Malformed { request, what: "an acknowledgement has 8 bytes" }),
            }
        }
        Ok(())
    }

    /// Asks for something.
    pub fn ask(&mut self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message, Error> {
        self.send(request, Header::VERSION, body, fds)?;
        self.answer(request)
    }

    /// Asks for a value.
    pub fn ask_for<T: FromBytes>(&mut self, request: Request, body: &[u8]) -> Result<T, Error> {
        let answer = self.ask(request, body, &[])?;
        T::read_from_bytes(&answer.body).map_err(|_| Error::Malformed { request, what: "its length" })
    }

    fn send(&self, request: Request, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let header = Header { request: request.0, flags, size: body.len() as u32 };
        let bytes = [header.as_bytes(), body].concat();
        let sent = fdpass::send_all(self.socket.as_fd(), &bytes, fds, SendFlags::empty());
        sent.map_err(|errno| match errno {
            Errno::AGAIN => Error::Silent { request, patience: self.patience },
            _ => gone(errno, "sending to the server"),
        })
    }

    fn answer(&self, request: Request) -> Result<Message, Error> {
        let message = receive(self.socket.as_fd(), Instant::now() + self.patience)?
            .ok_or(Error::Silent { request, patience: self.patience })?;
        let malformed = |what| Err(Error::Malformed { request, what });
        if message.header.request != request.0 {
            return malformed("it answers another request");
        }
        if message.header.flags & Header::REPLY == 0 {
            return malformed("it is not marked as an answer");
        }
        Ok(message)
    }
}

/// Receives one message; none if it has not come by the deadline.
pub(crate) fn receive(socket: BorrowedFd<'_>, deadline: Instant) -> Result<Option<Message>, Error> {
    let mut fds = Vec::new();
    let mut header = [0; size_of::<Header>()];
    if !fill(socket, &mut header, &mut fds, deadline)? {
        return Ok(None);
    }
    let header: Header = zerocopy::transmute!(header);
    if header.size as usize > MAX_PAYLOAD || header.flags & Header::VERSION_MASK != Header::VERSION {
        let source = std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            format!("a message with flags {:#x} and {} bytes", header.flags, header.size),
        );
        return Err(Error::Io { what: "reading from the server", source });
    }
    let mut body = vec![0; header.size as usize];
    if !fill(socket, &mut body, &mut fds, deadline)? {
        return Ok(None);
    }
    Ok(Some(Message { header, body, fds }))
}

/// Reads until `bytes` is full; false if the deadline comes first.
fn fill(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<bool, Error> {
    let mut have = 0;
    while have < bytes.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if !wait(&[socket], Some(left))? {
            return Ok(false);
        }
        let left = MAX_FDS.saturating_sub(fds.len());
        match fdpass::receive(socket, &mut bytes[have..], left, RecvFlags::DONTWAIT) {
            Ok(got) if got.fds_lost => return Err(gone(Errno::TOOMANYREFS, "receiving descriptors")),
            Ok(got) if got.len == 0 => return Err(Error::Gone),
            Ok(got) => {
                have += got.len;
                fds.extend(got.fds);
            }
            Err(Errno::AGAIN) => {}
            Err(errno) => return Err(gone(errno, "reading from the server")),
        }
    }
    Ok(true)
}

/// Waits until one of them has something; false if the time is up first.
pub(crate) fn wait(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> Result<bool, Error> {
    let deadline = limit.map(|limit| Instant::now() + limit);
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left =
            left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        match poll(&mut fds, left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("waiting")(errno)),
        }
    }
}

fn gone(errno: Errno, what: &'static str) -> Error {
    match errno {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Error::Gone,
        _ => Error::io(what)(errno),
    }
}

/// Whether the peer has closed its end.
pub(crate) fn is_closed(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}
