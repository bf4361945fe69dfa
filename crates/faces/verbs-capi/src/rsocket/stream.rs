//! A connected rsocket.

use super::direction::{Direction, Failed, Half, How};
use super::maps::Maps;
use super::waiting::Wake;
use ginnel::{Error, StreamChannel, StreamReceiver, StreamSender};
use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDHUP, POLLRDNORM, POLLWRNORM, c_short};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

/// A connection.
pub struct Stream {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub maps: Option<Maps>,
    sending: Direction<StreamSender>,
    receiving: Direction<StreamReceiver>,
    /// Whether this side has ended the direction in which it sends.
    is_finished: AtomicBool,
    /// Whether the program has been told that the peer has ended.
    is_told: AtomicBool,
}

/// The events of poll that mean readable and writable.
pub const IN: c_short = POLLIN | POLLRDNORM;
pub const OUT: c_short = POLLOUT | POLLWRNORM;

impl Stream {
    pub fn new(
        (sender, receiver): (StreamSender, StreamReceiver),
        local: SocketAddr,
        peer: SocketAddr,
        maps: Option<Maps>,
    ) -> Self {
        Self {
            local,
            peer,
            maps,
            sending: Direction::new(sender),
            receiving: Direction::new(receiver),
            is_finished: AtomicBool::new(false),
            is_told: AtomicBool::new(false),
        }
    }

    /// Returns the error after the peer has ended. As with sockets, the first call gets ECONNRESET, and later calls get EPIPE.
    fn broken(&self) -> c_int {
        if self.is_told.swap(true, Ordering::Relaxed) { libc::EPIPE } else { libc::ECONNRESET }
    }

    /// Converts the result of a receive for C. The end of the stream is not an error.
    fn received(&self, result: Result<usize, Failed>) -> Result<usize, c_int> {
        match result {
            Ok(len) => Ok(len),
            // If a process dies, its streams end, but what it has sent is received before that.
            Err(Failed::Shut | Failed::Channel(Error::Finished | Error::PeerDead)) => Ok(0),
            Err(Failed::Later) => Err(libc::EAGAIN),
            Err(Failed::System(error)) => Err(error),
            Err(Failed::Channel(_)) if self.is_told.swap(true, Ordering::Relaxed) => Ok(0),
            Err(Failed::Channel(_)) => Err(libc::ECONNRESET),
        }
    }

    fn sent(&self, result: Result<usize, Failed>) -> Result<usize, c_int> {
        result.map_err(|failed| match failed {
            Failed::Shut | Failed::Channel(Error::AfterFinish | Error::Closed) => libc::EPIPE,
            Failed::Later => libc::EAGAIN,
            Failed::System(error) => error,
            Failed::Channel(_) => self.broken(),
        })
    }

    /// Receives the data that is there. Returns 0 at the end of the stream.
    pub fn receive(&self, buffer: &mut [u8], waits: bool) -> Result<usize, c_int> {
        self.received(self.receiving.run(waits, |half| half.recv(buffer)))
    }

    /// The same, but the data stays in the stream. May return less than there is.
    pub fn peek(&self, buffer: &mut [u8], waits: bool) -> Result<usize, c_int> {
        self.received(
            self.receiving.run(waits, |half| half.peek().map(|bytes| bytes.slice().read(0, buffer))),
        )
    }

    /// Sends some of the bytes. Returns how many.
    pub fn send(&self, bytes: &[u8], waits: bool) -> Result<usize, c_int> {
        self.sent(self.sending.run(waits, |half| half.send(bytes)))
    }

    /// Ends the direction in which this side sends. The peer still receives what was sent.
    pub fn finish(&self) {
        self.is_finished.store(true, Ordering::Relaxed);
        self.sending.with(StreamSender::finish);
    }

    /// Ends the direction in which this side receives.
    pub fn deafen(&self) {
        self.receiving.shut();
    }

    /// Returns the events that poll would report. Adds to `wake` what becomes readable when there are more.
    pub fn ready(&self, wanted: c_short, mut wake: Option<&mut Wake>) -> c_short {
        let mut found = 0;
        let how = if wake.is_some() { How::Arm } else { How::Look };
        // This is needed even if the program waits only for an end.
        if wanted & (IN | POLLRDHUP) != 0 || wanted & OUT == 0 {
            found |= match self.receiving.attempt(how, wake.as_deref_mut(), |half| half.peek().map(drop)) {
                Ok(()) => IN,
                Err(Failed::Later) => 0,
                Err(Failed::Shut | Failed::Channel(Error::Finished)) => match self.is_finished() {
                    true => IN | POLLRDHUP | POLLHUP,
                    false => IN | POLLRDHUP,
                },
                Err(_) => IN | POLLRDHUP | POLLHUP | POLLERR,
            };
        }
        if wanted & OUT != 0 {
            // A send that cannot succeed fails at once, so the stream counts as writable.
            found |= match self.sending.attempt(how, wake, |half| half.claim(1).map(drop)) {
                Err(Failed::Later) => 0,
                Ok(()) | Err(Failed::Shut | Failed::Channel(Error::AfterFinish)) => OUT,
                Err(_) => OUT | POLLERR | POLLHUP,
            };
        }
        found & (wanted | POLLERR | POLLHUP)
    }

    pub fn is_finished(&self) -> bool {
        self.is_finished.load(Ordering::Relaxed)
    }

    pub fn directions(&self) -> [&super::waiting::Waiters; 2] {
        [&self.sending.waiters, &self.receiving.waiters]
    }
}

/// The first bytes of a stream, which do not belong to the program, as they arrive.
pub struct Greeting<const LEN: usize> {
    bytes: [u8; LEN],
    len: usize,
}

impl<const LEN: usize> Greeting<LEN> {
    pub fn new() -> Self {
        Self { bytes: [0; LEN], len: 0 }
    }

    /// Returns the bytes once all of them have arrived. Otherwise arms the half, and adds its descriptor to `wake`.
    pub fn take(
        &mut self,
        half: &mut StreamReceiver,
        wake: Option<&mut Wake>,
    ) -> Result<Option<&[u8; LEN]>, Error> {
        half.arms();
        while self.len < LEN {
            match half.recv(&mut self.bytes[self.len..]) {
                Ok(0) => return Err(Error::Finished),
                Ok(len) => self.len += len,
                Err(Error::WouldBlock) => {
                    if let Some(wake) = wake {
                        wake.add(half.descriptor()?);
                    }
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(&self.bytes))
    }
}

/// Sends the first bytes of a stream, for which there is always room.
pub fn greet(channel: &mut StreamChannel, bytes: &[u8]) -> Result<(), Error> {
    channel.sender().set_nonblocking(true);
    channel.sender().send_all(bytes)
}
