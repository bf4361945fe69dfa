//! Stream channels.

use crate::channel::{Channel, Counters, Pipe, half, sealed};
use crate::error::Error;
use crate::peer::PeerBell;
use crate::waiter::{Term, Waiter};
use crate::{ChannelInfo, WaitMode};
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::stream::{self, Consumer, Producer};
use ginnel_ring::{RecvError, SendError};
use ginnel_shmem::{Mapping, SharedSlice};
use std::io;
use std::time::Duration;

/// A stream of bytes in both directions, like a TCP connection. Split it to use the directions in two threads.
pub struct StreamChannel {
    sender: StreamSender,
    receiver: StreamReceiver,
}

/// The sending half of a [`StreamChannel`]. Dropping it finishes.
pub struct StreamSender {
    ring: Producer<Mapping>,
    waiter: Waiter,
    counters: Counters,
    peer: PeerBell,
}

/// The receiving half of a [`StreamChannel`]. Dropping it closes this direction: the peer's next send fails.
pub struct StreamReceiver {
    ring: Consumer<Mapping>,
    waiter: Waiter,
    counters: Counters,
    peer: PeerBell,
}

half!(StreamSender, ring);
half!(StreamReceiver, ring);

impl Channel for StreamChannel {
    const KIND: ChannelKind = ChannelKind::STREAM;
}

impl sealed::Build for StreamChannel {
    fn build(pipe: Pipe) -> Self {
        Self {
            sender: StreamSender {
                waiter: pipe.waiter(),
                ring: Producer::new(pipe.output.clone(), pipe.capacity),
                counters: Counters::default(),
                peer: pipe.reader(),
            },
            receiver: StreamReceiver {
                waiter: pipe.waiter(),
                ring: Consumer::new(pipe.input.clone(), pipe.capacity),
                counters: Counters::default(),
                peer: pipe.writer(),
            },
        }
    }
}

impl StreamChannel {
    /// The two halves, for two threads.
    pub fn split(self) -> (StreamSender, StreamReceiver) {
        (self.sender, self.receiver)
    }

    /// The sending half.
    pub fn sender(&mut self) -> &mut StreamSender {
        &mut self.sender
    }

    /// The receiving half.
    pub fn receiver(&mut self) -> &mut StreamReceiver {
        &mut self.receiver
    }

    /// Sets how both halves wait.
    pub fn set_mode(&mut self, mode: WaitMode) {
        self.sender.set_mode(mode);
        self.receiver.set_mode(mode);
    }

    /// Sets how long operations of both halves may wait.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.sender.set_timeout(timeout);
        self.receiver.set_timeout(timeout);
    }

    /// Facts about the channel.
    pub fn info(&self) -> &ChannelInfo {
        self.sender.info()
    }
}

impl StreamSender {
    /// Sends some of `bytes`; returns how many, at least one unless `bytes` is empty. Waits while the ring is full.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.send_by(bytes, &mut Term::default())
    }

    fn send_by(&mut self, bytes: &[u8], term: &mut Term) -> Result<usize, Error> {
        loop {
            let Self { ring, peer, counters, .. } = self;
            let sent = ring.write(bytes, || peer.wake(counters));
            match sent {
                Ok(n) => {
                    self.counters.operations += 1;
                    self.counters.bytes += n as u64;
                    return Ok(n);
                }
                Err(SendError::Full) => self.waiter.wait(&mut self.ring, term)?,
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
            match self.ring.claim(most) {
                Ok(_abandoned) => break,
                Err(SendError::Full) => self.waiter.wait(&mut self.ring, &mut term)?,
                Err(error) => return Err(error.into()),
            }
        }
        let inner = self.ring.claim(most)?;
        Ok(Room { inner, counters: &mut self.counters, peer: &mut self.peer })
    }

    /// Says that nothing more comes; the peer receives the rest, then the end.
    pub fn finish(&mut self) {
        let ring = self.ring.finish();
        self.ring_if(ring);
    }
}

impl Drop for StreamSender {
    fn drop(&mut self) {
        if self.peer.shared.is_ours() {
            self.finish();
        }
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
    counters: &'a mut Counters,
    peer: &'a mut PeerBell,
}

impl Room<'_> {
    /// The bytes to fill.
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Sends the first `len` bytes. [`Error::Broken`] if the segment's memory is gone, and the bytes with it.
    #[inline]
    pub fn send(self, len: usize) -> Result<(), Error> {
        let Self { inner, counters, peer } = self;
        let ring = inner.publish(len);
        peer.shared.check_memory()?;
        counters.operations += 1;
        counters.bytes += len as u64;
        if ring {
            peer.wake(counters);
        }
        Ok(())
    }
}

impl StreamReceiver {
    /// Receives what is there, up to the buffer's length; returns how many bytes, 0 at the end of the stream (or for an
    /// empty buffer). Waits while there is nothing.
    pub fn recv(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let mut term = Term::default();
        loop {
            let Self { ring, peer, counters, .. } = self;
            let got = ring.read(buffer, || peer.wake(counters));
            match got {
                Ok(n) => {
                    self.counters.operations += 1;
                    self.counters.bytes += n as u64;
                    return Ok(n);
                }
                Err(RecvError::Finished) => return Ok(0),
                Err(RecvError::Empty) => self.waiter.wait(&mut self.ring, &mut term)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The bytes that are there, in place, as one run. Waits while there are none; [`Error::Finished`] at the end.
    pub fn peek(&mut self) -> Result<Bytes<'_>, Error> {
        let mut term = Term::default();
        loop {
            let polled = self.ring.poll();
            if polled.is_err() {
                let owed = self.ring.take_owed();
                self.ring_if(owed);
            }
            match polled {
                Ok(_) => break,
                Err(RecvError::Empty) => self.waiter.wait(&mut self.ring, &mut term)?,
                Err(error) => return Err(error.into()),
            }
        }
        let inner = self.ring.peek()?;
        Ok(Bytes { inner, counters: &mut self.counters, peer: &mut self.peer })
    }
}

impl Drop for StreamReceiver {
    fn drop(&mut self) {
        if self.peer.shared.is_ours() {
            let ring = self.ring.finish();
            self.ring_if(ring);
        }
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
    counters: &'a mut Counters,
    peer: &'a mut PeerBell,
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
        let Self { inner, counters, peer } = self;
        let released = len.min(inner.len());
        let ring = inner.release(len);
        peer.shared.check_memory()?;
        counters.operations += 1;
        counters.bytes += released as u64;
        if ring {
            peer.wake(counters);
        }
        Ok(())
    }
}
