//! The socket to a server: messages with descriptors, and answers that must come in time.
//!
//! The front end of the `vhost` crate is not used: it waits for an answer without limit, and its `SET_VRING_BASE` has
//! 16 of the 32 bits that a packed ring needs.

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

/// A received message: its header, its payload and its descriptors.
pub(crate) struct Message {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A connection to a server. Calls block for at most the patience that was given to [`Connection::connect`].
pub(crate) struct Connection {
    socket: Arc<OwnedFd>,
    patience: Duration,
    /// Whether to ask for an acknowledgement of messages that have no answer of their own (`REPLY_ACK`).
    pub acknowledge: bool,
}

impl Connection {
    /// Connects. Makes one attempt.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self, Error> {
        let connected = || {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            // Without a timeout, `connect` blocks on a server that accepts no connections, and `sendmsg` on one that
            // reads nothing.
            set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        let socket =
            connected().map_err(|errno: Errno| Error::Connect { path: path.into(), source: errno.into() })?;
        Ok(Self { socket: Arc::new(socket), patience, acknowledge: false })
    }

    /// Returns the socket, on which a queue can detect the end of the server.
    pub fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Sends a message that has no answer of its own, and waits for its acknowledgement if acknowledgements are on.
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

    /// Sends a request, and waits for its answer.
    pub fn ask(&mut self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message, Error> {
        self.send(request, Header::VERSION, body, fds)?;
        self.answer(request)
    }

    /// Sends a request, and waits for an answer that is one value.
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

/// Receives one message. Returns `None` if it has not arrived by the deadline.
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

/// Reads until `bytes` is full. Returns false if the deadline passes first.
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

/// Waits until one of the descriptors is readable. Returns false if the time limit passes first.
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

/// Returns whether the peer has closed its end.
pub(crate) fn is_closed(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}
