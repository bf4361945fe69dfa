//! The server's end of a connection.

use crate::request::{MAX_DATA, Request};
use ginnel_fdpass::{self as fdpass, RecvFlags, SendFlags};
use ginnel_layout::vfio_user::{Access, Command, Header};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

/// Most bytes of a body that are taken: an access with as much data as is allowed. A longer body is skipped, and its command is
/// answered with `EMSGSIZE`.
pub const MAX_BODY: usize = size_of::<Access>() + MAX_DATA;

/// Most descriptors that are taken with one message. A command with more is answered with `EMFILE`.
pub const MAX_FDS: usize = 16;

/// While so many bytes of replies wait for the client, nothing is received from it.
const MAX_WAITING: usize = 64 << 10;

/// Most bytes of a long body that one call of [`Server::receive`] skips.
const SKIP: usize = 64 << 10;

/// Why the connection to a client ends.
#[derive(Debug, Error)]
pub enum Gone {
    /// The client has closed it.
    #[error("the client has closed the connection")]
    Closed,
    /// The client sends something that is not vfio-user.
    #[error("what the client sends is not vfio-user: {0}")]
    Refused(String),
    /// A system call has failed.
    #[error("the connection to the client failed: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for Gone {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            errno => Self::Io(errno.into()),
        }
    }
}

/// To which command a reply belongs, and whether its sender wants one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    id: u16,
    command: Command,
    wanted: bool,
}

/// A command of the client.
#[derive(Debug)]
pub struct Message {
    to: ReplyTo,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
    fault: Option<Errno>,
}

impl Message {
    /// Returns which command this is.
    pub fn command(&self) -> Command {
        self.to.command
    }

    /// Returns what [`Server::reply`] needs.
    pub fn reply_to(&self) -> ReplyTo {
        self.to
    }

    /// Returns what the client asks for, once: descriptors are moved out of the message.
    ///
    /// # Errors
    ///
    /// The error number for [`Server::fail`]: `EOPNOTSUPP` for an unknown command, `EMSGSIZE` for a body and `EMFILE` for
    /// descriptors that were not taken, `EINVAL` for everything else.
    pub fn request(&mut self) -> Result<Request<'_>, Errno> {
        if let Some(errno) = self.fault {
            return Err(errno);
        }
        Request::parse(self.to.command, &self.body, std::mem::take(&mut self.fds))
    }
}

/// The socket of one client. No function blocks.
#[derive(Debug)]
pub struct Server {
    socket: UnixStream,
    /// The bytes that have arrived of the current message: its header, then its body.
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    fault: Option<Errno>,
    /// Bytes of the current message that are still to be skipped.
    skip: usize,
    replies: VecDeque<Waiting>,
    /// Bytes in `replies`.
    waiting: usize,
}

/// A reply that the client's socket had no room for.
#[derive(Debug)]
struct Waiting {
    bytes: Vec<u8>,
    file: Option<Arc<OwnedFd>>,
}

impl Server {
    /// Takes over a connected socket, and makes it nonblocking.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let (bytes, fds, replies) = (Vec::new(), Vec::new(), VecDeque::new());
        Ok(Self { socket, bytes, fds, fault: None, skip: 0, replies, waiting: 0 })
    }

    /// Returns whether messages are received: not while too many replies wait for the client.
    pub fn is_receiving(&self) -> bool {
        self.waiting < MAX_WAITING
    }

    /// Returns whether replies wait until the socket can be written.
    pub fn is_waiting(&self) -> bool {
        !self.replies.is_empty()
    }

    /// Returns the next message, if all of it has arrived.
    ///
    /// # Errors
    ///
    /// [`Gone`] if the client has gone, or if where the next message begins cannot be known.
    pub fn receive(&mut self) -> Result<Option<Message>, Gone> {
        if !self.is_receiving() {
            return Ok(None);
        }
        // Never reads beyond this message: descriptors arrive with the first byte of their message.
        let mut skipped = 0;
        loop {
            if self.skip > 0 {
                if skipped >= SKIP {
                    return Ok(None);
                }
                let mut nowhere = [0; 4096];
                let wanted = self.skip.min(nowhere.len());
                let got = self.receive_into(&mut nowhere[..wanted])?;
                if got == 0 {
                    return Ok(None);
                }
                (self.skip, skipped) = (self.skip - got, skipped + got);
                continue;
            }
            let header = Header::read_from_prefix(&self.bytes).ok().map(|(header, _)| header);
            let wanted = match header {
                None => size_of::<Header>(),
                Some(header) => length(header)?,
            };
            if let Some(header) = header {
                if wanted > size_of::<Header>() + MAX_BODY && self.fault != Some(Errno::MSGSIZE) {
                    // What comes is skipped, and then the header alone is the message.
                    self.fault = Some(Errno::MSGSIZE);
                    self.skip = wanted - self.bytes.len();
                    continue;
                }
                if self.bytes.len() == wanted || self.fault == Some(Errno::MSGSIZE) {
                    return Ok(Some(self.message(header)));
                }
            }
            let have = self.bytes.len();
            let mut bytes = std::mem::take(&mut self.bytes);
            bytes.resize(wanted, 0);
            let got = self.receive_into(&mut bytes[have..]);
            bytes.truncate(have + got.as_ref().map_or(0, |got| *got));
            self.bytes = bytes;
            if got? == 0 {
                return Ok(None);
            }
        }
    }

    fn message(&mut self, header: Header) -> Message {
        let to =
            ReplyTo { id: header.id, command: header.command, wanted: header.flags & Header::NO_REPLY == 0 };
        let body = self.bytes.split_off(size_of::<Header>());
        self.bytes.clear();
        Message { to, body, fds: std::mem::take(&mut self.fds), fault: self.fault.take() }
    }

    /// Receives into a buffer that is not empty. Returns 0 if nothing has arrived.
    fn receive_into(&mut self, into: &mut [u8]) -> Result<usize, Gone> {
        let left = MAX_FDS.saturating_sub(self.fds.len());
        let received = match fdpass::receive(self.socket.as_fd(), into, left, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) => return Ok(0),
            other => other?,
        };
        if received.len == 0 {
            return Err(Gone::Closed);
        }
        if received.fds_lost {
            // Either there were too many, or this process has too many files open. The client can go on without this command.
            self.fault = self.fault.or(Some(Errno::MFILE));
        }
        self.fds.extend(received.fds);
        if self.fault.is_some() {
            self.fds.clear();
        }
        Ok(received.len)
    }

    /// Answers a command, if its sender wants an answer. The reply is sent by [`Server::flush`].
    pub fn reply(&mut self, to: ReplyTo, body: &[u8], file: Option<Arc<OwnedFd>>) {
        self.put(to, Header::REPLY, 0, body, file);
    }

    /// Answers a command with an error.
    pub fn fail(&mut self, to: ReplyTo, errno: Errno) {
        let error = errno.raw_os_error().unsigned_abs();
        self.put(to, Header::REPLY | Header::ERROR, error, &[], None);
    }

    fn put(&mut self, to: ReplyTo, flags: u32, error: u32, body: &[u8], file: Option<Arc<OwnedFd>>) {
        if !to.wanted {
            return;
        }
        let size = (size_of::<Header>() + body.len()) as u32;
        let header = Header { id: to.id, command: to.command, size, flags, error };
        let bytes = [header.as_bytes(), body].concat();
        self.waiting += bytes.len();
        self.replies.push_back(Waiting { bytes, file });
    }

    /// Sends the replies that wait, as far as the client's socket has room.
    pub fn flush(&mut self) -> Result<(), Gone> {
        while let Some(reply) = self.replies.front_mut() {
            let file = reply.file.as_ref().map(|file| file.as_fd());
            // One call for each reply: QEMU fails if it cannot read the whole header at once.
            match fdpass::send(self.socket.as_fd(), &reply.bytes, file.as_slice(), SendFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS) => return Ok(()),
                Err(errno) => return Err(errno.into()),
                Ok(sent) => {
                    self.waiting -= sent;
                    if sent < reply.bytes.len() {
                        reply.bytes.drain(..sent);
                        reply.file = None;
                    } else {
                        self.replies.pop_front();
                    }
                }
            }
        }
        Ok(())
    }
}

impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Checks a header, and returns the length of its message with the header.
fn length(header: Header) -> Result<usize, Gone> {
    let size = header.size as usize;
    if size < size_of::<Header>() {
        let command = header.command;
        return Err(Gone::Refused(format!("{command:?} of {size} bytes, which is less than its header")));
    }
    if header.flags & Header::TYPE != 0 {
        return Err(Gone::Refused(format!(
            "flags {:#x} of {:?}; only commands are taken",
            header.flags, header.command
        )));
    }
    Ok(size)
}
