//! Message channels.

use crate::error::Error;
use crate::half::{Account, Half, channel, half};
use crate::waiter::Term;
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError, message};
use ginnel_shmem::{Mapping, SharedSlice};

/// Messages in both directions, each received whole and in order. Split it to use the directions in two threads.
pub struct MessageChannel {
    sender: MessageSender,
    receiver: MessageReceiver,
}

/// The sending half of a [`MessageChannel`]. Dropping it finishes.
pub struct MessageSender(Half<message::Producer<Mapping>>);

/// The receiving half of a [`MessageChannel`]. Dropping it closes this direction: the peer's next send fails.
pub struct MessageReceiver(Half<message::Consumer<Mapping>>);

half!(MessageSender);
half!(MessageReceiver);
channel!(MessageChannel of MessageSender and MessageReceiver, ChannelKind::MESSAGE, message);

impl MessageChannel {
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
        let Some(ring) = self.0.ring.put(message) else { return self.send_by_claim(message) };
        self.0.account.count(message.len());
        self.0.account.ring_if(ring);
        Ok(())
    }

    /// [`MessageSender::send`] where something may be in the way.
    #[cold]
    fn send_by_claim(&mut self, message: &[u8]) -> Result<(), Error> {
        let mut term = Term::default();
        let ring = loop {
            match self.0.ring.send(message) {
                Ok(ring) => break ring,
                Err(SendError::Full) => self.wait_for_room(message.len(), &mut term)?,
                Err(error) => return Err(error.into()),
            }
        };
        self.0.account.count(message.len());
        self.0.account.ring_if(ring);
        Ok(())
    }

    /// Claims room for a message of up to `len` bytes, to be written in place. Waits while the ring is full.
    pub fn claim(&mut self, len: usize) -> Result<Claim<'_>, Error> {
        let mut term = Term::default();
        while !self.room(len)? {
            self.wait_for_room(len, &mut term)?;
        }
        // Room was found and nobody else takes it, so this cannot be `Full`.
        let inner = self.0.ring.claim(len)?;
        Ok(Claim { inner, account: &mut self.0.account })
    }

    /// Whether a message of `len` bytes finds room now, so that [`MessageSender::claim`] would not wait. Never waits, and no
    /// system call unless a non-blocking call has said [`Error::WouldBlock`] before.
    pub fn has_room(&mut self, len: usize) -> Result<bool, Error> {
        self.0.begin();
        self.room(len)
    }

    fn room(&mut self, len: usize) -> Result<bool, Error> {
        match self.0.ring.claim(len) {
            Ok(_abandoned) => Ok(true),
            Err(SendError::Full) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes all committed messages visible at once. Needed after [`Claim::commit`] only. [`Error::Broken`] if the segment's
    /// memory is gone, and the messages with it.
    pub fn publish(&mut self) -> Result<(), Error> {
        let ring = self.0.ring.publish();
        self.0.account.ring_if(ring);
        self.0.account.check_memory()
    }

    /// Says that nothing more comes; the peer receives the rest, then [`Error::Finished`].
    pub fn finish(&mut self) {
        self.0.finish();
    }

    /// The longest message.
    pub fn max_message(&self) -> usize {
        self.0.ring.max_message()
    }

    /// Wakes the peer, which [`Claim::send_quietly`] has left asleep. Never waits.
    pub fn wake(&mut self) {
        self.0.account.wake();
    }

    #[cold]
    fn wait_for_room(&mut self, len: usize, term: &mut Term) -> Result<(), Error> {
        // What is committed must go out first, or the peer could never make room.
        self.publish()?;
        self.0.waiter.wait(self.0.ring.want(len), term)
    }
}

/// Room for one message, in the ring. Dropping it sends nothing.
#[must_use = "a claim sends nothing until it is sent or committed"]
pub struct Claim<'a> {
    inner: message::Claim<'a, Mapping>,
    account: &'a mut Account,
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
        let ring = self.inner.publish(len);
        self.account.settle(len, ring)
    }

    /// Sends the first `len` bytes, and all that is committed before, but lets a peer that sleeps sleep on, so that it can be
    /// woken once for several messages. True if it does: then it must be woken later ([`MessageSender::wake`]), because no other
    /// send does it. [`Error::Broken`] if the segment's memory is gone, and the message with it.
    #[must_use = "a peer that sleeps must be woken"]
    pub fn send_quietly(self, len: usize) -> Result<bool, Error> {
        let owed = self.inner.publish(len);
        self.account.settle(len, false)?;
        Ok(owed)
    }

    /// Makes the first `len` bytes a message that goes out with the next [`MessageSender::publish`] or send.
    pub fn commit(self, len: usize) {
        self.account.count(len);
        self.inner.commit(len);
    }
}

impl MessageReceiver {
    /// Receives a message into `buffer`; returns its length. Waits while there is none. A message longer than the buffer
    /// is [`Error::BufferTooSmall`], and stays.
    #[inline(always)]
    pub fn recv_into(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let Some((len, ring)) = self.0.ring.take(buffer, self.0.waiter.looks()) else {
            return self.recv_by_peek(buffer);
        };
        self.0.account.count(len);
        self.0.account.ring_if(ring);
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
            match self.0.ring.poll() {
                Ok(()) => break,
                Err(RecvError::Empty) => self.wait_for_message(&mut term)?,
                Err(error) => {
                    let owed = self.0.ring.take_owed();
                    self.0.account.ring_if(owed);
                    return Err(error.into());
                }
            }
        }
        let inner = self.0.ring.peek()?;
        Ok(Message { inner, account: &mut self.0.account })
    }

    /// Whether [`MessageReceiver::peek`] would return at once, be it with an error. Never waits, and no system call unless the
    /// peer waits for room, or a non-blocking call has said [`Error::WouldBlock`] before.
    #[inline]
    pub fn is_ready(&mut self) -> bool {
        self.0.begin();
        let ready = self.0.ring.ready();
        let owed = self.0.ring.take_owed();
        self.0.account.ring_if(owed);
        ready
    }

    #[inline]
    fn wait_for_message(&mut self, term: &mut Term) -> Result<(), Error> {
        let owed = self.0.ring.take_owed();
        self.0.account.ring_if(owed);
        self.0.wait(term)
    }
}

/// A received message, still in the ring. Dropping it keeps it for the next call.
pub struct Message<'a> {
    inner: message::Message<'a, Mapping>,
    account: &'a mut Account,
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
        let len = self.inner.len();
        let ring = self.inner.release();
        self.account.settle(len, ring)
    }
}
