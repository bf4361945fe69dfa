//! Message channels.

use crate::channel::{Channel, Counters, Pipe, half, sealed};
use crate::error::Error;
use crate::peer::PeerBell;
use crate::waiter::{Term, Waiter};
use crate::{ChannelInfo, WaitMode};
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::message::{self, Consumer, Producer};
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError};
use ginnel_shmem::{Mapping, SharedSlice};
use std::time::Duration;

/// Messages in both directions, each received whole and in order. Split it to use the directions in two threads.
pub struct MessageChannel {
    sender: MessageSender,
    receiver: MessageReceiver,
}

/// The sending half of a [`MessageChannel`]. Dropping it finishes.
pub struct MessageSender {
    ring: Producer<Mapping>,
    waiter: Waiter,
    counters: Counters,
    peer: PeerBell,
}

/// The receiving half of a [`MessageChannel`]. Dropping it closes this direction: the peer's next send fails.
pub struct MessageReceiver {
    ring: Consumer<Mapping>,
    waiter: Waiter,
    counters: Counters,
    peer: PeerBell,
}

half!(MessageSender, ring);
half!(MessageReceiver, ring);

impl Channel for MessageChannel {
    const KIND: ChannelKind = ChannelKind::MESSAGE;
}

impl sealed::Build for MessageChannel {
    fn build(pipe: Pipe) -> Self {
        Self {
            sender: MessageSender {
                waiter: pipe.waiter(),
                ring: Producer::new(pipe.output.clone(), pipe.capacity),
                counters: Counters::default(),
                peer: pipe.reader(),
            },
            receiver: MessageReceiver {
                waiter: pipe.waiter(),
                ring: Consumer::new(pipe.input.clone(), pipe.capacity),
                counters: Counters::default(),
                peer: pipe.writer(),
            },
        }
    }
}

impl MessageChannel {
    /// The two halves, for two threads.
    pub fn split(self) -> (MessageSender, MessageReceiver) {
        (self.sender, self.receiver)
    }

    /// The sending half.
    pub fn sender(&mut self) -> &mut MessageSender {
        &mut self.sender
    }

    /// The receiving half.
    pub fn receiver(&mut self) -> &mut MessageReceiver {
        &mut self.receiver
    }

    /// See [`MessageSender::send`].
    #[inline(always)]
    pub fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        self.sender.send(message)
    }

    /// See [`MessageReceiver::recv`].
    pub fn recv(&mut self) -> Result<Vec<u8>, Error> {
        self.receiver.recv()
    }

    /// See [`MessageReceiver::recv_into`].
    #[inline(always)]
    pub fn recv_into(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        self.receiver.recv_into(buffer)
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

    /// The longest message.
    pub fn max_message(&self) -> usize {
        self.sender.max_message()
    }
}

impl MessageSender {
    /// Sends a message. Waits while the ring is full.
    // In the caller, like `recv_into`: in an emulated guest each call and each return costs as much as the way itself.
    #[inline(always)]
    pub fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        let Some(ring) = self.ring.put(message) else { return self.send_by_claim(message) };
        self.counted(message.len());
        self.ring_if(ring);
        Ok(())
    }

    /// [`MessageSender::send`] where something may be in the way.
    #[cold]
    fn send_by_claim(&mut self, message: &[u8]) -> Result<(), Error> {
        let mut term = Term::default();
        let ring = loop {
            match self.ring.send(message) {
                Ok(ring) => break ring,
                Err(SendError::Full) => self.wait_for_room(message.len(), &mut term)?,
                Err(error) => return Err(error.into()),
            }
        };
        self.counted(message.len());
        self.ring_if(ring);
        Ok(())
    }

    /// Claims room for a message of up to `len` bytes, to be written in place. Waits while the ring is full.
    pub fn claim(&mut self, len: usize) -> Result<Claim<'_>, Error> {
        let mut term = Term::default();
        while !self.room(len)? {
            self.wait_for_room(len, &mut term)?;
        }
        // Room was found and nobody else takes it, so this cannot be `Full`.
        let inner = self.ring.claim(len)?;
        Ok(Claim { inner, counters: &mut self.counters, peer: &mut self.peer })
    }

    /// Whether a message of `len` bytes finds room now, so that [`MessageSender::claim`] would not wait. Never waits, and no
    /// system call unless a non-blocking call has said [`Error::WouldBlock`] before.
    pub fn has_room(&mut self, len: usize) -> Result<bool, Error> {
        self.waiter.begin(&mut self.ring);
        self.room(len)
    }

    fn room(&mut self, len: usize) -> Result<bool, Error> {
        match self.ring.claim(len) {
            Ok(_abandoned) => Ok(true),
            Err(SendError::Full) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes all committed messages visible at once. Needed after [`Claim::commit`] only. [`Error::Broken`] if the segment's
    /// memory is gone, and the messages with it.
    pub fn publish(&mut self) -> Result<(), Error> {
        let ring = self.ring.publish();
        self.ring_if(ring);
        self.peer.shared.check_memory()
    }

    /// Says that nothing more comes; the peer receives the rest, then [`Error::Finished`].
    pub fn finish(&mut self) {
        let ring = self.ring.finish();
        self.ring_if(ring);
    }

    /// The longest message.
    pub fn max_message(&self) -> usize {
        self.ring.max_message()
    }

    /// Wakes the peer, which [`Claim::send_quietly`] has left asleep. Never waits.
    pub fn wake(&mut self) {
        self.ring_if(true);
    }

    #[cold]
    fn wait_for_room(&mut self, len: usize, term: &mut Term) -> Result<(), Error> {
        // What is committed must go out first, or the peer could never make room.
        self.publish()?;
        self.waiter.wait(self.ring.want(len), term)
    }

    #[inline]
    fn counted(&mut self, len: usize) {
        self.counters.operations += 1;
        self.counters.bytes += len as u64;
    }
}

impl Drop for MessageSender {
    fn drop(&mut self) {
        if self.peer.shared.is_ours() {
            self.finish();
        }
    }
}

/// Room for one message, in the ring. Dropping it sends nothing.
#[must_use = "a claim sends nothing until it is sent or committed"]
pub struct Claim<'a> {
    inner: message::Claim<'a, Mapping>,
    counters: &'a mut Counters,
    peer: &'a mut PeerBell,
}

impl Claim<'_> {
    /// The bytes to fill.
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Sends the first `len` bytes, and all that is committed before. [`Error::Broken`] if the segment's memory is gone, and
    /// the message with it.
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

    /// Sends the first `len` bytes, and all that is committed before, but lets a peer that sleeps sleep on, so that it can be
    /// woken once for several messages. True if it does: then it must be woken later ([`MessageSender::wake`]), because no other
    /// send does it. [`Error::Broken`] if the segment's memory is gone, and the message with it.
    #[must_use = "a peer that sleeps must be woken"]
    pub fn send_quietly(self, len: usize) -> Result<bool, Error> {
        let owed = self.inner.publish(len);
        self.peer.shared.check_memory()?;
        self.counters.operations += 1;
        self.counters.bytes += len as u64;
        Ok(owed)
    }

    /// Makes the first `len` bytes a message that goes out with the next [`MessageSender::publish`] or send.
    pub fn commit(self, len: usize) {
        self.counters.operations += 1;
        self.counters.bytes += len as u64;
        self.inner.commit(len);
    }
}

impl MessageReceiver {
    /// Receives a message into `buffer`; returns its length. Waits while there is none. A message longer than the buffer
    /// is [`Error::BufferTooSmall`], and stays.
    #[inline(always)]
    pub fn recv_into(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let Some((len, ring)) = self.ring.take(buffer, self.waiter.looks()) else {
            return self.recv_by_peek(buffer);
        };
        self.counters.operations += 1;
        self.counters.bytes += len as u64;
        self.ring_if(ring);
        Ok(len)
    }

    /// [`MessageReceiver::recv_into`] where there is no message yet, or one that wants a closer look, or an end.
    #[cold]
    fn recv_by_peek(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let message = self.peek()?;
        let len = message.len();
        if len > buffer.len() {
            return Err(Error::BufferTooSmall { len, buffer: buffer.len() });
        }
        message.slice().read(0, buffer);
        message.release()?;
        Ok(len)
    }

    /// Receives a message. Waits while there is none.
    pub fn recv(&mut self) -> Result<Vec<u8>, Error> {
        let message = self.peek()?;
        let bytes = message.slice().to_vec();
        message.release()?;
        Ok(bytes)
    }

    /// The next message, in place. Waits while there is none. It stays until it is released.
    #[inline]
    pub fn peek(&mut self) -> Result<Message<'_>, Error> {
        let mut term = Term::default();
        loop {
            match self.ring.poll() {
                Ok(()) => break,
                Err(RecvError::Empty) => self.wait_for_message(&mut term)?,
                Err(error) => {
                    let owed = self.ring.take_owed();
                    self.ring_if(owed);
                    return Err(error.into());
                }
            }
        }
        let inner = self.ring.peek()?;
        Ok(Message { inner, counters: &mut self.counters, peer: &mut self.peer })
    }

    /// Whether [`MessageReceiver::peek`] would return at once, be it with an error. Never waits, and no system call unless the
    /// peer waits for room, or a non-blocking call has said [`Error::WouldBlock`] before.
    #[inline]
    pub fn is_ready(&mut self) -> bool {
        self.waiter.begin(&mut self.ring);
        let ready = self.ring.ready();
        let owed = self.ring.take_owed();
        self.ring_if(owed);
        ready
    }

    #[inline]
    fn wait_for_message(&mut self, term: &mut Term) -> Result<(), Error> {
        let owed = self.ring.take_owed();
        self.ring_if(owed);
        self.waiter.wait(&mut self.ring, term)
    }
}

impl Drop for MessageReceiver {
    fn drop(&mut self) {
        if self.peer.shared.is_ours() {
            let ring = self.ring.finish();
            self.ring_if(ring);
        }
    }
}

/// A received message, still in the ring. Dropping it keeps it for the next call.
pub struct Message<'a> {
    inner: message::Message<'a, Mapping>,
    counters: &'a mut Counters,
    peer: &'a mut PeerBell,
}

impl Message<'_> {
    /// Bytes of payload.
    #[inline]
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// True if the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// The payload. A hostile peer can still change it: copy what must not change before checking it. If the segment's file
    /// is truncated meanwhile, it reads as zeros, and [`Message::release`] says [`Error::Broken`].
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Gives the room back to the peer. [`Error::Broken`] if the segment's memory is gone: what was read of the message may be
    /// zeros.
    #[inline]
    pub fn release(self) -> Result<(), Error> {
        let Self { inner, counters, peer } = self;
        let len = inner.len();
        let ring = inner.release();
        peer.shared.check_memory()?;
        counters.operations += 1;
        counters.bytes += len as u64;
        if ring {
            peer.wake(counters);
        }
        Ok(())
    }
}
