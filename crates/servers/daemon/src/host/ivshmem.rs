//! QEMU's ivshmem server protocol, version 0: the messages that a VM gets on its socket when it joins.
//!
//! Each message is a 64-bit number, little-endian, and some carry a descriptor (QEMU, "Device Specification for Inter-VM shared
//! memory device", section "ivshmem Client-Server Protocol"). The server sends everything at once that this VM may know, because
//! doorbells exist before their owners do:
//!
//! | number | descriptor | meaning |
//! |---|---|---|
//! | 0 | | version |
//! | own id | | this VM's member number |
//! | -1 | control memory | becomes BAR2 |
//! | own id | eventfd | the next vector of its own; repeated for each |
//! | id of another member | eventfd | a vector of that member that serves a segment which both share; repeated for each, and for each member |
//!
//! The VM's own vectors come first, and fit into an empty socket together with the messages before them. So the VM has its
//! interrupts whatever happens to the server after that.
//!
//! To refuse a QEMU, the server sends version -1: QEMU reports that this is not version 0, and ends. Without any message it would
//! wait for ever, even on a connection that has ended.
//!
//! Later, further vectors are sent in the same way, and a member that has gone is reported by its id without a descriptor. QEMU
//! sends nothing; the end of the connection means the end of QEMU.

use super::members::MemberFds;
use crate::closer::{Closer, Connected};
use crate::packet::{self, Gone};
use ginnel_fdpass::{RecvFlags, receive};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The version of the protocol.
const VERSION: i64 = 0;
/// A version that no QEMU accepts.
const NO_VERSION: i64 = -1;
/// The number that announces the control memory.
const MEMORY: i64 = -1;

/// One message.
#[derive(Clone, Debug)]
pub struct Message {
    /// The number: a version, an id, or -1.
    pub number: i64,
    /// The descriptor that goes along.
    pub fd: Option<Arc<OwnedFd>>,
}

/// Returns the messages that tell a joining VM about itself.
pub fn greeting(own: u32, fds: &MemberFds) -> Vec<Message> {
    let mut messages = vec![
        Message { number: VERSION, fd: None },
        Message { number: own.into(), fd: None },
        Message { number: MEMORY, fd: fds.control.clone() },
    ];
    messages.extend(joined(own, fds.events().map(|(_, event)| event.clone())));
    messages
}

/// Returns the message that refuses a QEMU.
pub fn refusal() -> Message {
    Message { number: NO_VERSION, fd: None }
}

/// Returns the messages that tell of vectors of a member, in addition to earlier ones.
pub fn joined(id: u32, vectors: impl IntoIterator<Item = Arc<OwnedFd>>) -> impl Iterator<Item = Message> {
    vectors.into_iter().map(move |fd| Message { number: id.into(), fd: Some(fd) })
}

/// Returns the message that a member has gone.
pub fn left(id: u32) -> Message {
    Message { number: id.into(), fd: None }
}

/// The connection to a QEMU.
#[derive(Debug)]
pub struct Connection {
    fd: Connected,
    queue: VecDeque<Message>,
    talks: bool,
}

/// The result of reading from the connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// There was nothing to read.
    Nothing,
    /// QEMU has sent something, for the first time. It should not.
    Noise,
    /// The connection has ended.
    End,
}

impl Connection {
    /// Takes over a connected non-blocking stream socket.
    pub fn new(fd: OwnedFd, closer: &Closer) -> Self {
        Self { fd: Connected::new(fd, closer), queue: VecDeque::new(), talks: false }
    }

    /// Queues messages, which [`Connection::flush`] sends.
    pub fn say(&mut self, messages: impl IntoIterator<Item = Message>) {
        self.queue.extend(messages);
    }

    /// Sends as much as the socket takes. Returns true if something is left.
    pub fn flush(&mut self) -> Result<bool, Gone> {
        while let Some(message) = self.queue.front() {
            // The socket takes eight bytes as a whole or not at all.
            match packet::send(self.fd.as_fd(), &message.number.to_le_bytes(), message.fd.as_slice()) {
                Ok(()) => drop(self.queue.pop_front()),
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Gone::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(false)
    }

    /// Returns whether messages wait for room.
    pub fn is_blocked(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Checks whether QEMU is still there. What it sends is never taken out of the socket's queue, because descriptors may be with
    /// it ([`crate::strangers`]).
    pub fn hear(&mut self) -> Heard {
        match receive(self.fd.as_fd(), &mut [0], 0, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok(got) if got.len == 0 => Heard::End,
            Ok(_) if std::mem::replace(&mut self.talks, true) => Heard::Nothing,
            Ok(_) => Heard::Noise,
            Err(Errno::AGAIN) => Heard::Nothing,
            Err(_) => Heard::End,
        }
    }

    /// Returns whether QEMU has sent something, so that the socket always has something to read: then only its end matters.
    pub fn talks(&self) -> bool {
        self.talks
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
