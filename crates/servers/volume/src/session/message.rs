//! vhost-user messages on a front end's socket.
//!
//! The `vhost` crate is not used: it cannot tell a front end that the configuration has changed (a live resize), it
//! blocks in the middle of a message, and it fails on a message that arrives in two pieces.

use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_layout::vhost_user::{Header, MAX_FDS, MAX_PAYLOAD, Request};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

/// How long a front end may leave its answers unread before the connection is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why the connection to a front end ends.
#[derive(Debug, Error)]
pub enum Gone {
    /// The front end has closed it.
    #[error("the front end has closed the connection")]
    Closed,
    /// The front end sends something that is not vhost-user, or asks for something that is not allowed.
    #[error("{0}")]
    Refused(String),
    /// A system call has failed.
    #[error("the connection to the front end failed: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for Gone {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// A message of the front end.
#[derive(Debug)]
pub struct Message {
    /// The number of the request.
    pub request: Request,
    /// Whether the front end wants to know if the request succeeded. Valid only if [`protocol::REPLY_ACK`] was
    /// negotiated.
    ///
    /// [`protocol::REPLY_ACK`]: ginnel_layout::vhost_user::protocol::REPLY_ACK
    pub need_reply: bool,
    /// The payload.
    pub body: Vec<u8>,
    /// Descriptors that were attached to the message.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Returns the payload as a `T`, or an error if it does not have the size of a `T`.
    pub fn payload<T: FromBytes>(&self) -> Result<T, Gone> {
        T::read_from_bytes(&self.body).map_err(|_| self.malformed("has a payload of the wrong size"))
    }

    /// Takes the descriptor of a message that must have exactly one.
    pub fn one_fd(&mut self) -> Result<OwnedFd, Gone> {
        match self.fds.len() {
            1 => self.fds.pop().ok_or_else(|| self.malformed("has no descriptor")),
            n => Err(self.malformed(&format!("has {n} descriptors, not one"))),
        }
    }

    /// Returns an error about this message. `why` continues the sentence "the front end's message N".
    pub fn malformed(&self, why: &str) -> Gone {
        Gone::Refused(format!("the front end's message {} {why}", self.request.0))
    }
}

/// The socket of one front end. [`Connection::receive`] never blocks; [`Connection::reply`] waits at most ten seconds
/// for a front end that does not read.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
    /// The bytes that have arrived of the current message: its header, then its payload.
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Connection {
    /// Takes over a connected socket.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
        Ok(Self { socket, bytes: Vec::new(), fds: Vec::new() })
    }

    /// Returns the next message, if all of it has arrived.
    pub fn receive(&mut self) -> Result<Option<Message>, Gone> {
        // Never reads beyond this message: descriptors arrive with the first byte of their message.
        loop {
            let header = Header::read_from_prefix(&self.bytes).ok().map(|(header, _)| header);
            let wanted = match header {
                None => size_of::<Header>(),
                Some(header) => size_of::<Header>() + check(header)?,
            };
            if let Some(header) = header
                && self.bytes.len() == wanted
            {
                return Ok(Some(Message {
                    request: Request(header.request),
                    need_reply: header.flags & Header::NEED_REPLY != 0,
                    body: self.bytes.drain(..).skip(size_of::<Header>()).collect(),
                    fds: std::mem::take(&mut self.fds),
                }));
            }
            if !self.receive_up_to(wanted)? {
                return Ok(None);
            }
        }
    }

    /// Reads until there are `wanted` bytes, or no more bytes have arrived. Returns false if none had arrived.
    fn receive_up_to(&mut self, wanted: usize) -> Result<bool, Gone> {
        let have = self.bytes.len();
        self.bytes.resize(wanted, 0);
        let left = MAX_FDS.saturating_sub(self.fds.len());
        let result = fdpass::receive(self.socket.as_fd(), &mut self.bytes[have..], left, RecvFlags::DONTWAIT);
        self.bytes.truncate(have + result.as_ref().map_or(0, |received| received.len));
        let received = match result {
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::CONNRESET) => return Err(Gone::Closed),
            other => other?,
        };
        if received.fds_lost {
            return Err(Gone::Refused(format!(
                "a message has more than {MAX_FDS} descriptors, or this process has too many open: see RLIMIT_NOFILE"
            )));
        }
        self.fds.extend(received.fds);
        if received.len == 0 {
            return Err(Gone::Closed);
        }
        Ok(true)
    }

    /// Sends the answer to a request.
    pub fn reply(&self, to: Request, body: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), Gone> {
        send(&self.socket, to.0, Header::REPLY, body, fd, SendFlags::empty())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Checks a header, and returns the length of its payload in bytes.
fn check(header: Header) -> Result<usize, Gone> {
    let size = header.size as usize;
    if header.flags & Header::VERSION_MASK != Header::VERSION || header.flags & Header::REPLY != 0 {
        return Err(Gone::Refused(format!(
            "what the front end sends is not vhost-user: flags {:#x} of message {}",
            header.flags, header.request
        )));
    }
    if size > MAX_PAYLOAD {
        return Err(Gone::Refused(format!(
            "message {} of {size} bytes; at most {MAX_PAYLOAD} are taken",
            header.request
        )));
    }
    Ok(size)
}

/// Sends a request to the front end on the channel that it has provided. Never blocks, even if the front end makes the
/// socket blocking: both processes share the socket's flags.
pub(super) fn tell(channel: &UnixStream, request: u32) -> Result<(), Gone> {
    send(channel, request, 0, &[], None, SendFlags::DONTWAIT)
}

/// Sends a message on a socket whose peer may not be reading.
fn send(
    socket: &UnixStream,
    request: u32,
    flags: u32,
    body: &[u8],
    fd: Option<BorrowedFd<'_>>,
    how: SendFlags,
) -> Result<(), Gone> {
    let header = Header { request, flags: flags | Header::VERSION, size: body.len() as u32 };
    let bytes = [header.as_bytes(), body].concat();
    let sent = fdpass::send(socket.as_fd(), &bytes, fd.as_slice(), how);
    match sent {
        // All answers are far shorter than an empty socket buffer, so a partial write means that the buffer is full.
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err(Gone::Refused("the front end does not read its answers".to_owned())),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Gone::Closed),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    fn pair() -> (UnixStream, Connection) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours, Connection::new(theirs).unwrap())
    }

    fn bytes(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
        let header = Header { request, flags, size: body.len() as u32 };
        [header.as_bytes(), body].concat()
    }

    #[test]
    fn messages_come_whole_however_they_are_cut() {
        let (mut front, mut back) = pair();
        let all = [bytes(1, 1, &[]), bytes(8, 9, &[1, 2, 3, 4, 5, 6, 7, 8])].concat();
        let mut seen = Vec::new();
        for byte in all {
            front.write_all(&[byte]).unwrap();
            seen.extend(back.receive().unwrap());
        }
        assert_eq!(seen.len(), 2);
        assert_eq!((seen[0].request, seen[0].need_reply, seen[0].body.len()), (Request(1), false, 0));
        assert_eq!((seen[1].request, seen[1].need_reply, seen[1].body[7]), (Request(8), true, 8));
        drop(front);
        assert!(matches!(back.receive(), Err(Gone::Closed)));
    }

    #[test]
    fn two_messages_at_once_keep_their_descriptors_apart() {
        let (front, mut back) = pair();
        let file = File::open("/dev/null").unwrap();
        send(&front, 12, 0, &[0; 8], Some(file.as_fd()), SendFlags::empty()).unwrap();
        send(&front, 13, 0, &[1; 8], Some(file.as_fd()), SendFlags::empty()).unwrap();
        for request in [12, 13] {
            let mut message = back.receive().unwrap().unwrap();
            assert_eq!(message.request, Request(request));
            message.one_fd().unwrap();
            assert!(message.one_fd().is_err());
        }
        assert!(back.receive().unwrap().is_none());
    }

    #[test]
    fn invalid_vhost_user_headers_are_refused() {
        for wrong in [bytes(1, 0, &[]), bytes(1, 5, &[]), b"GET / HTTP/1.1\r\n".to_vec()] {
            let (mut front, mut back) = pair();
            front.write_all(&wrong).unwrap();
            assert!(matches!(back.receive(), Err(Gone::Refused(_))), "{wrong:?}");
        }
        let (mut front, mut back) = pair();
        front.write_all(Header { request: 5, flags: 1, size: 1 << 20 }.as_bytes()).unwrap();
        assert!(matches!(back.receive(), Err(Gone::Refused(_))));
    }

    #[test]
    fn a_channel_that_nobody_reads_holds_nobody_up() {
        let (_front, back) = UnixStream::pair().unwrap();
        // As a front end can do at any time with its own copy of the descriptor.
        back.set_nonblocking(false).unwrap();
        let told = (0..100_000).find_map(|_| tell(&back, 2).err());
        assert!(matches!(told, Some(Gone::Refused(_))), "{told:?}");
    }

    #[test]
    fn answers_bear_the_request() {
        let (mut front, back) = pair();
        back.reply(Request(1), &7u64.to_le_bytes(), None).unwrap();
        let mut got = [0; 20];
        front.read_exact(&mut got).unwrap();
        assert_eq!(got.to_vec(), bytes(1, 5, &7u64.to_le_bytes()));
        drop(front);
        assert!(back.reply(Request(1), &[0; 8], None).is_err());
    }
}
