//! QEMU's ivshmem server protocol, version 0: what a joining VM is told on its socket.
//!
//! Each message is a 64-bit number, little-endian, some with a descriptor (QEMU, "Device Specification for
//! Inter-VM shared memory device", section "ivshmem Client-Server Protocol"). The server says all that this VM may know
//! at once, because doorbells exist before their owners do:
//!
//! | number | descriptor | meaning |
//! |---|---|---|
//! | 0 | | version |
//! | own id | | this VM's member number |
//! | -1 | control memory | becomes BAR2 |
//! | own id | eventfd | own next vector; repeated for each |
//! | id of another member | eventfd | a vector of it that serves a segment which both share; repeated for each, and for each member |
//!
//! The own vectors come first, and fit into an empty socket together with what is before them. Whatever happens to the
//! server then, this VM has its interrupts.
//!
//! A QEMU that is refused is told version -1: it says that this is not version 0, and ends. Without a word it would wait
//! for ever, even for a connection that has ended.
//!
//! Later further vectors are told as above, and a member that is gone by its id without a descriptor. QEMU says
//! nothing; the end of the connection is the end of QEMU.

use super::members::MemberFds;
use crate::packet::{self, Gone};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Version of the protocol.
const VERSION: i64 = 0;
/// A version that no QEMU takes.
const NO_VERSION: i64 = -1;
/// "Here is the shared memory."
const MEMORY: i64 = -1;

/// One message.
#[derive(Clone, Debug)]
pub struct Message {
    /// What it says.
    pub number: i64,
    /// What goes along.
    pub fd: Option<Arc<OwnedFd>>,
}

/// What a joining VM is told of itself.
pub fn greeting(own: u32, fds: &MemberFds) -> Vec<Message> {
    let mut messages = vec![
        Message { number: VERSION, fd: None },
        Message { number: own.into(), fd: None },
        Message { number: MEMORY, fd: fds.control.clone() },
    ];
    messages.extend(joined(own, fds.vectors.values().cloned()));
    messages
}

/// What a QEMU is told that is not welcome.
pub fn refusal() -> Message {
    Message { number: NO_VERSION, fd: None }
}

/// A member has these vectors, beside those that were told before.
pub fn joined(id: u32, vectors: impl IntoIterator<Item = Arc<OwnedFd>>) -> impl Iterator<Item = Message> {
    vectors.into_iter().map(move |fd| Message { number: id.into(), fd: Some(fd) })
}

/// A member is there no more.
pub fn left(id: u32) -> Message {
    Message { number: id.into(), fd: None }
}

/// The connection to a QEMU.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
    queue: VecDeque<Message>,
    talked: bool,
}

/// What there was to read.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing.
    Nothing,
    /// Something, for the first time.
    Noise,
    /// The end.
    End,
}

impl Connection {
    /// Takes over a connected non-blocking stream socket.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, queue: VecDeque::new(), talked: false }
    }

    /// Says something, now or when the socket has room.
    pub fn say(&mut self, messages: impl IntoIterator<Item = Message>) {
        self.queue.extend(messages);
    }

    /// Sends as much as the socket takes. True if something is left.
    pub fn flush(&mut self) -> Result<bool, Gone> {
        while let Some(message) = self.queue.front() {
            // Eight bytes go as a whole or not at all.
            match packet::send(self.fd.as_fd(), &message.number.to_le_bytes(), message.fd.as_slice()) {
                Ok(()) => drop(self.queue.pop_front()),
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Gone::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(false)
    }

    /// Whether something waits for room.
    pub fn is_blocked(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Looks whether QEMU is still there. Whatever it says is thrown away, a bounded amount at a time.
    pub fn hear(&mut self) -> Heard {
        match rustix::io::read(&self.fd, &mut [0u8; 4096]) {
            Ok(0) => Heard::End,
            Ok(_) if std::mem::replace(&mut self.talked, true) => Heard::Nothing,
            Ok(_) => Heard::Noise,
            Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
            Err(_) => Heard::End,
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
