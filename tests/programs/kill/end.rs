//! One end of a connection, which knows each byte that it must send and receive.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Which end of the connection it is.
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

    /// Returns the byte that it sends at a position of its stream.
    fn byte(self, position: u64) -> u8 {
        let salt = if self == Self::Connector { 0x9e37 } else { 0x79b9 };
        ((position + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
    }
}

/// An end. None of its methods waits, except `drain`.
pub struct Connection {
    stream: TcpStream,
    side: Side,
    pub sent: u64,
    pub received: u64,
    /// How the connection has ended, if it has.
    ended: bool,
}

impl Connection {
    pub fn new(stream: TcpStream, side: Side) -> Self {
        // Each byte that the test considers sent over TCP must have left this process.
        stream.set_nodelay(true).unwrap();
        Self { stream, side, sent: 0, received: 0, ended: false }
    }

    /// Sends this many bytes, or fewer if there is no room or the peer is gone.
    pub fn send(&mut self, len: usize) {
        let bytes: Vec<u8> = (self.sent..self.sent + len as u64).map(|at| self.side.byte(at)).collect();
        // SAFETY: the kernel reads `bytes.len()` bytes, and so many are there.
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

    /// Receives at most this many bytes, if they are there. Returns true at the end of the stream.
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

    /// Receives until the end or a reset, and checks that the peer does not accept data any more. Returns the total
    /// number of received bytes.
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

    /// Returns whether another byte can apparently be sent.
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

    /// Ends the sending direction.
    pub fn finish(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}
