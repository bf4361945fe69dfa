//! Stream channels.

use crate::error::Error;
use crate::half::{Account, Half, channel, half};
use crate::waiter::OperationDeadline;
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::{RecvError, SendError, stream};
use ginnel_shmem::{Mapping, SharedSlice};
use std::io;

/// A channel that carries a stream of bytes in both directions, like a TCP connection. Use [`StreamChannel::split`] to
/// use the two directions from two threads.
pub struct StreamChannel {
    sender: StreamSender,
    receiver: StreamReceiver,
}

/// The sending half of a [`StreamChannel`]. Dropping it calls [`StreamSender::finish`].
pub struct StreamSender(Half<stream::Producer<Mapping>>);

/// The receiving half of a [`StreamChannel`]. Dropping it closes this direction: the peer's next send fails.
pub struct StreamReceiver(Half<stream::Consumer<Mapping>>);

half!(StreamSender);
half!(StreamReceiver);
channel!(StreamChannel of StreamSender and StreamReceiver, ChannelKind::STREAM, stream);

impl StreamSender {
    /// Sends a part of `bytes` and returns its length: at least one byte, unless `bytes` is empty. Waits while the ring
    /// is full.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if this half is non-blocking and the ring is full, [`Error::TimedOut`] after this half's
    /// timeout, [`Error::Closed`] if the peer does not receive any more, [`Error::PeerDead`], [`Error::Aborted`],
    /// [`Error::AfterFinish`], [`Error::Corrupt`] or [`Error::Broken`].
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.send_by(bytes, &mut OperationDeadline::default())
    }

    fn send_by(&mut self, bytes: &[u8], until: &mut OperationDeadline) -> Result<usize, Error> {
        loop {
            let Half { ring, account, .. } = &mut self.0;
            match ring.write(bytes, || account.wake()) {
                Ok(n) => {
                    account.count(n);
                    return Ok(n);
                }
                Err(SendError::Full) => self.0.wait(until)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends all of `bytes`. Waits while the ring is full; the timeout limits the whole call.
    ///
    /// # Errors
    ///
    /// As for [`StreamSender::send`]. After an error it is unknown how many bytes have been sent.
    pub fn send_all(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        let mut until = OperationDeadline::default();
        while !bytes.is_empty() {
            let n = self.send_by(bytes, &mut until)?;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Claims room for at most `most` contiguous bytes, to be written in place. Waits while the ring is full.
    ///
    /// # Errors
    ///
    /// As for [`StreamSender::send`].
    pub fn claim(&mut self, most: usize) -> Result<Room<'_>, Error> {
        let mut until = OperationDeadline::default();
        loop {
            match self.0.ring.claim(most) {
                Ok(_abandoned) => break,
                Err(SendError::Full) => self.0.wait(&mut until)?,
                Err(error) => return Err(error.into()),
            }
        }
        let inner = self.0.ring.claim(most)?;
        Ok(Room { inner, account: &mut self.0.account })
    }

    /// Ends this direction. The peer receives everything that was sent, and then the end of the stream. Never waits.
    pub fn finish(&mut self) {
        self.0.finish();
    }
}

/// Errors are converted to the [`io::Error`] of the corresponding kind, for example [`io::ErrorKind::WouldBlock`].
impl io::Write for StreamSender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.send(bytes)?)
    }
    /// Does nothing, because nothing is buffered.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Room in the ring for some bytes. Dropping it sends nothing.
#[must_use = "room sends nothing until it is sent"]
pub struct Room<'a> {
    inner: stream::Room<'a, Mapping>,
    account: &'a mut Account,
}

impl Room<'_> {
    /// Returns the bytes to fill in.
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Sends the first `len` bytes. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, and the bytes with it.
    #[inline]
    pub fn send(self, len: usize) -> Result<(), Error> {
        let ring = self.inner.publish(len);
        self.account.settle(len, ring)
    }
}

impl StreamReceiver {
    /// Receives at most `buffer.len()` bytes and returns how many; 0 at the end of the stream, or for an empty buffer.
    /// Waits while there are none.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if this half is non-blocking or in a [`crate::ReadySet`] and there are no bytes,
    /// [`Error::TimedOut`] after this half's timeout, [`Error::PeerDead`], [`Error::Aborted`], [`Error::Corrupt`] or
    /// [`Error::Broken`].
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let mut until = OperationDeadline::default();
        loop {
            let Half { ring, account, .. } = &mut self.0;
            match ring.read(buffer, || account.wake()) {
                Ok(n) => {
                    account.count(n);
                    return Ok(n);
                }
                Err(RecvError::Finished) => return Ok(0),
                Err(RecvError::Empty) => self.0.wait(&mut until)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the available bytes in place, as one contiguous run. Waits while there are none.
    ///
    /// # Errors
    ///
    /// [`Error::Finished`] at the end of the stream; otherwise as [`StreamReceiver::recv`].
    pub fn peek(&mut self) -> Result<Bytes<'_>, Error> {
        let mut until = OperationDeadline::default();
        loop {
            let polled = self.0.ring.poll();
            if polled.is_err() {
                let owed = self.0.ring.take_owed();
                self.0.account.ring_if(owed);
            }
            match polled {
                Ok(_) => break,
                Err(RecvError::Empty) => self.0.wait(&mut until)?,
                Err(error) => return Err(error.into()),
            }
        }
        let inner = self.0.ring.peek()?;
        Ok(Bytes { inner, account: &mut self.0.account })
    }
}

/// The end of the stream is `Ok(0)`. A dead peer is an error of kind [`io::ErrorKind::ConnectionReset`].
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

/// Received bytes that are still in the ring. Dropping the value without [`Bytes::release`] keeps them for the next
/// call.
pub struct Bytes<'a> {
    inner: stream::Bytes<'a, Mapping>,
    account: &'a mut Account,
}

impl Bytes<'_> {
    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Returns the bytes. A hostile peer can still change them, so copy data that must not change between a check and
    /// its use. If the segment's file is truncated meanwhile, the bytes read as zeros, and [`Bytes::release`] returns
    /// [`Error::Broken`].
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Removes the first `len` bytes from the ring, so that the peer can use the room. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone; the bytes that were read may have been zeros.
    #[inline]
    pub fn release(self, len: usize) -> Result<(), Error> {
        let released = len.min(self.inner.len());
        let ring = self.inner.release(len);
        self.account.settle(released, ring)
    }
}
