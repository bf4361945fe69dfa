//! One end of a connection, which knows each byte that it is to send and to receive.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    Connector,
    Acceptor,
}

impl Side {
    pub fn other(self) -> Self {
        match self {
            Self::Connector => Self::Acceptor,
            Self::Acceptor => Self::Connector,
        }
    }

    /// What it sends at a position of its stream.
    fn byte(self, position: u64) -> u8 {
        let salt = if self == Self::Connector { 0x9e37 } else { 0x79b9 };
        ((position + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
    }
}

/// An end. No call of it waits, but for `drain`.
pub struct Connection {
    stream: TcpStream,
    side: Side,
    pub sent: u64,
    pub received: u64,
    /// How it has ended, if it has.
    ended: bool,
}

impl Connection {
    pub fn new(stream: TcpStream, side: Side) -> Self {
        // So that a byte of TCP which the test says was sent has left this process.
        stream.set_nodelay(true).unwrap();
        Self { stream, side, sent: 0, received: 0, ended: false }
    }

    /// Sends so many bytes, or fewer if there is no room or nobody is there.
    pub fn send(&mut self, len: usize) {
        let bytes: Vec<u8> = (self.sent..self.sent + len as u64).map(|at| self.side.byte(at)).collect();
        // SAFETY: as many bytes.
        let n = unsafe {
            libc::send(
                self.stream.as_raw_fd(),
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        self.sent += u64::try_from(n).unwrap_or(0);
    }

    /// Receives at most so many bytes, if they are there. True at the end of the stream.
    pub fn receive(&mut self, most: usize) -> bool {
        let mut bytes = vec![0; most.min(64 << 10)];
        // SAFETY: room for as many bytes.
        let n = unsafe {
            libc::recv(self.stream.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT)
        };
        let Ok(n) = usize::try_from(n) else {
            match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => {}
                error if error.kind() == io::ErrorKind::ConnectionReset => self.ended = true,
                error => panic!("{error}"),
            }
            return self.ended;
        };
        for byte in &bytes[..n] {
            let right = self.side.other().byte(self.received);
            assert_eq!(*byte, right, "byte {} of the {:?}", self.received, self.side.other());
            self.received += 1;
        }
        self.ended |= n == 0 && most > 0;
        self.ended
    }

    /// Receives until the end or a reset, and sees that nobody takes what is sent any more. How many bytes have come in all.
    pub fn drain(&mut self, watchdog: Duration) -> u64 {
        let end = Instant::now() + watchdog;
        while !self.receive(usize::MAX) {
            assert!(
                self.is_readable(end.saturating_duration_since(Instant::now())),
                "the end of the other one is not told"
            );
        }
        while self.has_reader() {
            assert!(Instant::now() < end, "somebody is said to take what is sent to nobody");
        }
        self.received
    }

    /// Sleeps until there is something to receive.
    fn is_readable(&self, within: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&raw mut poll, 1, within.as_millis() as i32) > 0 }
    }

    /// Whether a byte more can be sent, as it seems.
    fn has_reader(&self) -> bool {
        // SAFETY: one byte.
        let n = unsafe {
            libc::send(
                self.stream.as_raw_fd(),
                b"x".as_ptr().cast(),
                1,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        n == 1 || io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
    }

    /// Sends nothing more.
    pub fn finish(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}
