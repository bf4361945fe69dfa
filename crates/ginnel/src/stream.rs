//! Stream channels.

use crate::error::Error;
use crate::half::{Account, Half, channel, half};
use crate::waiter::Term;
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::{RecvError, SendError, stream};
use ginnel_shmem::{Mapping, SharedSlice};
use std::io;

/// A stream of bytes in both directions, like a TCP connection. Split it to use the directions in two threads.
pub struct StreamChannel {
    sender: StreamSender,
    receiver: StreamReceiver,
}

/// The sending half of a [`StreamChannel`]. Dropping it finishes.
pub struct StreamSender(Half<stream::Producer<Mapping>>);

/// The receiving half of a [`StreamChannel`]. Dropping it closes this direction: the peer's next send fails.
pub struct StreamReceiver(Half<stream::Consumer<Mapping>>);

half!(StreamSender);
half!(StreamReceiver);
channel!(StreamChannel of StreamSender and StreamReceiver, ChannelKind::STREAM, stream);

impl StreamSender {
    /// Sends some of `bytes`; returns how many, at least one unless `bytes` is empty. Waits while the ring is full.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.send_by(bytes, &mut Term::default())
    }

    fn send_by(&mut self, bytes: &[u8], term: &mut Term) -> Result<usize, Error> {
        loop {
            let Half { ring, account, .. } = &mut self.0;
            match ring.write(bytes, || account.wake()) {
                Ok(n) => {
                    account.count(n);
                    return Ok(n);
                }
                Err(SendError::Full) => self.0.wait(term)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends all of `bytes`. A timeout counts for all of them together; after an error it is unknown how many have gone.
    pub fn send_all(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        let mut term = Term::default();
        while !bytes.is_empty() {
            let n = self.send_by(bytes, &mut term)?;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Room for at most `most` bytes in one run, to be written in place. Waits while the ring is full.
    pub fn claim(&mut self, most: usize) -> Result<Room<'_>, Error> {
        let mut term = Term::default();
        loop {
            match self.0.ring.claim(most) {
                Ok(_abandoned) => break,
                Err(SendError::Full) => self.0.wait(&mut term)?,
                Err(error) => return Err(error.into()),
            }
        }
        let inner = self.0.ring.claim(most)?;
        Ok(Room { inner, account: &mut self.0.account })
    }

    /// Says that nothing more comes; the peer receives the rest, then the end.
    pub fn finish(&mut self) {
        self.0.finish();
    }
}

/// [`Error::WouldBlock`] and the others become the [`io::Error`] of that kind.
impl io::Write for StreamSender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.send(bytes)?)
    }
    /// Nothing is held back, so there is nothing to do.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Room in the stream. Dropping it sends nothing.
#[must_use = "room sends nothing until it is sent"]
pub struct Room<'a> {
    inner: stream::Room<'a, Mapping>,
    account: &'a mut Account,
}

impl Room<'_> {
    /// The bytes to fill.
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Sends the first `len` bytes. [`Error::Broken`] if the segment's memory is gone, and the bytes with it.
    #[inline]
    pub fn send(self, len: usize) -> Result<(), Error> {
        let ring = self.inner.publish(len);
        self.account.settle(len, ring)
    }
}

impl StreamReceiver {
    /// Receives what is there, up to the buffer's length; returns how many bytes, 0 at the end of the stream (or for an
    /// empty buffer). Waits while there is nothing.
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let mut term = Term::default();
        loop {
            let Half { ring, account, .. } = &mut self.0;
            match ring.read(buffer, || account.wake()) {
                Ok(n) => {
                    account.count(n);
                    return Ok(n);
                }
                Err(RecvError::Finished) => return Ok(0),
                Err(RecvError::Empty) => self.0.wait(&mut term)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The bytes that are there, in place, as one run. Waits while there are none; [`Error::Finished`] at the end.
    pub fn peek(&mut self) -> Result<Bytes<'_>, Error> {
        let mut term = Term::default();
        loop {
            let polled = self.0.ring.poll();
            if polled.is_err() {
                let owed = self.0.ring.take_owed();
                self.0.account.ring_if(owed);
            }
            match polled {
                Ok(_) => break,
                Err(RecvError::Empty) => self.0.wait(&mut term)?,
                Err(error) => return Err(error.into()),
            }
        }
        let inner = self.0.ring.peek()?;
        Ok(Bytes { inner, account: &mut self.0.account })
    }
}

/// The end of the stream is `Ok(0)`; a dead peer is [`io::ErrorKind::ConnectionReset`].
impl io::Read for StreamReceiver {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.recv(buffer)?)
    }
}

impl io::Write for StreamChannel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sender.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl io::Read for StreamChannel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receiver.read(buffer)
    }
}

/// Received bytes, still in the ring. Dropping the value keeps them for the next call.
pub struct Bytes<'a> {
    inner: stream::Bytes<'a, Mapping>,
    account: &'a mut Account,
}

impl Bytes<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// The bytes. A hostile peer can still change them: copy what must not change before checking it. If the
    /// segment's file is truncated meanwhile, they read as zeros, and [`Bytes::release`] says [`Error::Broken`].
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Gives the room of the first `len` bytes back to the peer. [`Error::Broken`] if the segment's memory is gone: what was
    /// read of the bytes may be zeros.
    #[inline]
    pub fn release(self, len: usize) -> Result<(), Error> {
        let released = len.min(self.inner.len());
        let ring = self.inner.release(len);
        self.account.settle(released, ring)
    }
}
