//! Message channels.

use crate::error::Error;
use crate::half::{Account, Half, channel, half};
use crate::waiter::OperationDeadline;
use ginnel_layout::channel::ChannelKind;
use ginnel_ring::wait::Waitable;
use ginnel_ring::{RecvError, SendError, message};
use ginnel_shmem::{Mapping, SharedSlice};

/// A channel that carries messages in both directions. Each message is received whole and in order. Use
/// [`MessageChannel::split`] to use the two directions from two threads.
pub struct MessageChannel {
    sender: MessageSender,
    receiver: MessageReceiver,
}

/// The sending half of a [`MessageChannel`]. Dropping it calls [`MessageSender::finish`].
pub struct MessageSender(Half<message::Producer<Mapping>>);

/// The receiving half of a [`MessageChannel`]. Dropping it closes this direction: the peer's next send fails.
pub struct MessageReceiver(Half<message::Consumer<Mapping>>);

half!(MessageSender);
half!(MessageReceiver);
channel!(MessageChannel of MessageSender and MessageReceiver, ChannelKind::MESSAGE, message);

impl MessageChannel {
    /// Sends a message; see [`MessageSender::send`].
    ///
    /// # Errors
    ///
    /// As for [`MessageSender::send`].
    #[inline(always)]
    pub fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        self.sender.send(message)
    }

    /// Receives a message; see [`MessageReceiver::recv`].
    ///
    /// # Errors
    ///
    /// As for [`MessageReceiver::recv`].
    pub fn recv(&mut self) -> Result<Vec<u8>, Error> {
        self.receiver.recv()
    }

    /// Receives a message into a buffer; see [`MessageReceiver::recv_into`].
    ///
    /// # Errors
    ///
    /// As for [`MessageReceiver::recv_into`].
    #[inline(always)]
    pub fn recv_into(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        self.receiver.recv_into(buffer)
    }

    /// Returns the length in bytes of the longest message that this side can send.
    pub fn max_message(&self) -> usize {
        self.sender.max_message()
    }
}

impl MessageSender {
    /// Sends a message. Waits while the ring is full.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if this half is non-blocking and the ring is full, [`Error::TimedOut`] after this half's
    /// timeout, [`Error::TooLong`] if the message is longer than [`MessageSender::max_message`], [`Error::Closed`] if
    /// the peer does not receive any more, [`Error::PeerDead`], [`Error::Aborted`], [`Error::AfterFinish`],
    /// [`Error::Corrupt`] or [`Error::Broken`].
    // Inlined into the caller, like `recv_into`: in an emulated guest each call and each return costs as much as the
    // operation itself.
    #[inline(always)]
    pub fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        let Some(ring) = self.0.ring.put(message) else { return self.send_by_claim(message) };
        self.0.account.count(message.len());
        self.0.account.ring_if(ring);
        Ok(())
    }

    /// Does the work of [`MessageSender::send`] when the fast path has failed.
    #[cold]
    fn send_by_claim(&mut self, message: &[u8]) -> Result<(), Error> {
        let mut until = OperationDeadline::default();
        let ring = loop {
            match self.0.ring.send(message) {
                Ok(ring) => break ring,
                Err(SendError::Full) => self.wait_for_room(message.len(), &mut until)?,
                Err(error) => return Err(error.into()),
            }
        };
        self.0.account.count(message.len());
        self.0.account.ring_if(ring);
        Ok(())
    }

    /// Claims room for a message of up to `len` bytes, to be written in place. Waits while the ring is full.
    ///
    /// # Errors
    ///
    /// As for [`MessageSender::send`].
    pub fn claim(&mut self, len: usize) -> Result<Claim<'_>, Error> {
        let mut until = OperationDeadline::default();
        while !self.room(len)? {
            self.wait_for_room(len, &mut until)?;
        }
        // There is room, and no other thread takes it, so this cannot be `Full`.
        let inner = self.0.ring.claim(len)?;
        Ok(Claim { inner, account: &mut self.0.account })
    }

    /// Returns whether the ring has room for a message of `len` bytes, so that [`MessageSender::claim`] would not wait.
    /// Never waits, and makes no system call unless an earlier non-blocking call has returned [`Error::WouldBlock`].
    ///
    /// # Errors
    ///
    /// As for [`MessageSender::send`], without [`Error::WouldBlock`] and [`Error::TimedOut`].
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

    /// Makes all committed messages visible to the peer at once. Needed only after [`Claim::commit`]. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, and the messages with it.
    pub fn publish(&mut self) -> Result<(), Error> {
        let ring = self.0.ring.publish();
        self.0.account.ring_if(ring);
        self.0.account.check_memory()
    }

    /// Ends this direction. The peer receives everything that was sent, and then [`Error::Finished`]. Never waits.
    pub fn finish(&mut self) {
        self.0.finish();
    }

    /// Returns the length in bytes of the longest message that this side can send.
    pub fn max_message(&self) -> usize {
        self.0.ring.max_message()
    }

    /// Wakes a peer that [`Claim::send_quietly`] has left asleep. Never waits.
    pub fn wake(&mut self) {
        self.0.account.wake();
    }

    #[cold]
    fn wait_for_room(&mut self, len: usize, until: &mut OperationDeadline) -> Result<(), Error> {
        // Committed messages must be published first, or the peer could never make room.
        self.publish()?;
        self.0.waiter.wait(self.0.ring.want(len), until)
    }
}

/// Room in the ring for one message. Dropping it sends nothing.
#[must_use = "a claim sends nothing until it is sent or committed"]
pub struct Claim<'a> {
    inner: message::Claim<'a, Mapping>,
    account: &'a mut Account,
}

impl Claim<'_> {
    /// Returns the bytes to fill in.
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Sends the first `len` bytes as a message, after all messages that were committed before. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, and the message with it.
    #[inline]
    pub fn send(self, len: usize) -> Result<(), Error> {
        let ring = self.inner.publish(len);
        self.account.settle(len, ring)
    }

    /// Sends the first `len` bytes like [`Claim::send`], but does not wake a sleeping peer, so that the caller can wake
    /// it once for several messages. Never waits.
    ///
    /// Returns true if the peer sleeps. Then the caller must call [`MessageSender::wake`] later, because no other send
    /// wakes the peer.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, and the message with it.
    #[must_use = "a peer that sleeps must be woken"]
    pub fn send_quietly(self, len: usize) -> Result<bool, Error> {
        let owed = self.inner.publish(len);
        self.account.settle(len, false)?;
        Ok(owed)
    }

    /// Commits the first `len` bytes as a message, which becomes visible with the next [`MessageSender::publish`] or
    /// send.
    pub fn commit(self, len: usize) {
        self.account.count(len);
        self.inner.commit(len);
    }
}

impl MessageReceiver {
    /// Receives a message into `buffer` and returns its length in bytes. Waits while there is none.
    ///
    /// # Errors
    ///
    /// [`Error::BufferTooSmall`] if the message is longer than the buffer; the message stays in the channel. Otherwise
    /// as [`MessageReceiver::peek`].
    #[inline(always)]
    pub fn recv_into(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let Some((len, ring)) = self.0.ring.take(buffer, self.0.waiter.looks()) else {
            return self.recv_by_peek(buffer);
        };
        self.0.account.count(len);
        self.0.account.ring_if(ring);
        Ok(len)
    }

    /// Does the work of [`MessageReceiver::recv_into`] if there is no message yet, or the fast path cannot take it, or
    /// the channel has ended.
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
    ///
    /// # Errors
    ///
    /// As for [`MessageReceiver::peek`].
    pub fn recv(&mut self) -> Result<Vec<u8>, Error> {
        let message = self.peek()?;
        let bytes = message.slice().to_vec();
        message.release()?;
        Ok(bytes)
    }

    /// Returns the next message in place. Waits while there is none. The message stays in the channel until it is
    /// released.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if this half is non-blocking or in a [`crate::ReadySet`] and there is no message,
    /// [`Error::TimedOut`] after this half's timeout, [`Error::Finished`] if the peer has finished sending,
    /// [`Error::PeerDead`], [`Error::Aborted`], [`Error::Corrupt`] or [`Error::Broken`].
    #[inline]
    pub fn peek(&mut self) -> Result<Message<'_>, Error> {
        let mut until = OperationDeadline::default();
        loop {
            match self.0.ring.poll() {
                Ok(()) => break,
                Err(RecvError::Empty) => self.wait_for_message(&mut until)?,
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

    /// Returns whether [`MessageReceiver::peek`] would return at once, with a message or with an error. Never waits,
    /// and makes no system call unless the peer waits for room or an earlier non-blocking call has returned
    /// [`Error::WouldBlock`].
    #[inline]
    pub fn is_ready(&mut self) -> bool {
        self.0.begin();
        let ready = self.0.ring.ready();
        let owed = self.0.ring.take_owed();
        self.0.account.ring_if(owed);
        ready
    }

    #[inline]
    fn wait_for_message(&mut self, until: &mut OperationDeadline) -> Result<(), Error> {
        let owed = self.0.ring.take_owed();
        self.0.account.ring_if(owed);
        self.0.wait(until)
    }
}

/// A received message that is still in the ring. Dropping it without [`Message::release`] keeps it for the next call.
pub struct Message<'a> {
    inner: message::Message<'a, Mapping>,
    account: &'a mut Account,
}

impl Message<'_> {
    /// Returns the length of the payload in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Returns whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Returns the payload. A hostile peer can still change it, so copy data that must not change between a check and
    /// its use. If the segment's file is truncated meanwhile, the payload reads as zeros, and [`Message::release`]
    /// returns [`Error::Broken`].
    #[inline]
    pub fn slice(&self) -> SharedSlice<'_, Mapping> {
        self.inner.slice()
    }

    /// Removes the message from the ring, so that the peer can use the room. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone; the payload that was read may have been zeros.
    #[inline]
    pub fn release(self) -> Result<(), Error> {
        let len = self.inner.len();
        let ring = self.inner.release();
        self.account.settle(len, ring)
    }
}
