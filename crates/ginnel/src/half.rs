//! What the four halves of channels have in common: a side of a ring, how it waits, how the peer is woken, what is counted,
//! and the end.

use crate::channel::{Counters, Pipe, Shared};
use crate::error::Error;
use crate::peer::PeerBell;
use crate::waiter::{Term, Waiter};
use crate::{ChannelInfo, ReadySet};
use ginnel_ring::wait::Watchable;
use ginnel_ring::{Corrupt, Cursor, message, stream};
use ginnel_shmem::Mapping;
use std::sync::Arc;

/// One side of a ring.
pub(crate) trait Side: Watchable<Memory = Mapping> + Sized {
    /// Ends this direction. True if the peer must be woken.
    fn finish(&mut self) -> bool;
    /// Ends this direction, and makes void what is on its way. True if the peer must be woken.
    fn abort(&mut self) -> bool;
    /// Goes on where another process has stopped.
    fn resume(memory: Mapping, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt>;
    /// Where this side is.
    fn cursor(&self) -> Cursor;
    /// Makes visible what is committed. True if the peer must be woken, for that or from before.
    fn settle(&mut self) -> bool;
}

macro_rules! side {
    ($($side:ty: $settle:expr;)*) => {$(
        impl Side for $side {
            fn finish(&mut self) -> bool {
                // The method of the side itself, which goes before that of the trait.
                <$side>::finish(self)
            }
            fn abort(&mut self) -> bool {
                <$side>::abort(self)
            }
            fn resume(memory: Mapping, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt> {
                <$side>::resume(memory, capacity, cursor)
            }
            fn cursor(&self) -> Cursor {
                <$side>::cursor(self)
            }
            fn settle(&mut self) -> bool {
                $settle(self)
            }
        }
    )*};
}
side! {
    message::Producer<Mapping>: |side: &mut Self| side.publish() | side.take_owed();
    message::Consumer<Mapping>: Self::take_owed;
    stream::Producer<Mapping>: Self::take_owed;
    stream::Consumer<Mapping>: Self::take_owed;
}

/// One half of a channel. Dropping it ends its direction, except in a fork's child whose parent lives, or after it was saved.
pub(crate) struct Half<S: Side> {
    pub ring: S,
    pub waiter: Waiter,
    pub account: Account,
}

/// What the operations of a half add up to, and the peer that they wake. Apart from the ring, so that room or a message that
/// is borrowed from the ring can be charged when it is given back.
pub(crate) struct Account {
    counters: Counters,
    peer: PeerBell,
}

impl<S: Side> Half<S> {
    pub fn new(ring: S, pipe: &Pipe, peer: PeerBell) -> Self {
        Self { ring, waiter: pipe.waiter(), account: Account { counters: Counters::default(), peer } }
    }

    /// Where another process has stopped. Wakes the peer if that process owed it.
    pub fn resume(
        ring: Mapping,
        capacity: usize,
        cursor: Cursor,
        pipe: &Pipe,
        peer: PeerBell,
    ) -> Result<Self, Corrupt> {
        let mut half = Self::new(S::resume(ring, capacity, cursor)?, pipe, peer);
        half.settle();
        Ok(half)
    }

    fn settle(&mut self) {
        let ring = self.ring.settle();
        self.account.ring_if(ring);
    }

    /// Where this half stands, once nobody waits and nothing is kept back. It is not used any more.
    pub fn stop(&mut self) -> Cursor {
        self.deregister();
        self.settle();
        self.ring.cursor()
    }

    /// Waits until the ring is worth another look, as this half is set up to.
    #[inline]
    pub fn wait(&mut self, term: &mut Term) -> Result<(), Error> {
        self.waiter.wait(&mut self.ring, term)
    }

    /// Takes back what a non-blocking operation has left armed.
    #[inline]
    pub fn begin(&mut self) {
        self.waiter.begin(&mut self.ring);
    }

    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.begin();
        self.waiter.nonblocking = nonblocking;
    }

    pub fn register(&mut self, set: &ReadySet, key: u64) -> Result<(), Error> {
        self.waiter.register(&mut self.ring, &self.account.peer.shared.endpoint, set, key)
    }

    pub fn deregister(&mut self) {
        self.waiter.deregister(&mut self.ring);
    }

    pub fn counters(&self) -> Counters {
        Counters { waits: self.waiter.waits, ..self.account.counters }
    }

    pub fn info(&self) -> &ChannelInfo {
        &self.account.peer.shared.info
    }

    /// Whether this and another half are the two of one channel.
    pub fn is_of_one_channel<O: Side>(&self, other: &Half<O>) -> bool {
        Arc::ptr_eq(self.account.shared(), other.account.shared())
    }

    /// Ends this direction.
    pub fn finish(&mut self) {
        let ring = self.ring.finish();
        self.account.ring_if(ring);
    }

    /// Ends this direction, and makes void what is on its way.
    pub fn abort(&mut self) {
        let ring = self.ring.abort();
        self.account.ring_if(ring);
    }
}

impl<S: Side> Drop for Half<S> {
    fn drop(&mut self) {
        if self.account.peer.shared.is_ours() {
            self.finish();
        }
    }
}

impl Account {
    /// What both halves have.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.peer.shared
    }

    /// Counts an operation.
    #[inline]
    pub fn count(&mut self, len: usize) {
        self.counters.operations += 1;
        self.counters.bytes += len as u64;
    }

    /// Wakes the peer if that is `needed`.
    #[inline]
    pub fn ring_if(&mut self, needed: bool) {
        if needed {
            self.wake();
        }
    }

    /// Wakes the peer. Never waits.
    #[cold]
    pub fn wake(&mut self) {
        self.peer.wake(&mut self.counters);
    }

    /// [`Error::Broken`] if the segment's memory is gone, and with it what was written to it or zeros were read from it.
    #[inline]
    pub fn check_memory(&self) -> Result<(), Error> {
        self.peer.shared.check_memory()
    }

    /// After an operation in place on `len` bytes: counts it, and wakes the peer if that is `needed`. Neither, and
    /// [`Error::Broken`], if the segment's memory is gone.
    #[inline]
    pub fn settle(&mut self, len: usize, needed: bool) -> Result<(), Error> {
        self.check_memory()?;
        self.count(len);
        self.ring_if(needed);
        Ok(())
    }
}

/// The methods that all four halves share. Each is a [`Half`] and nothing more.
macro_rules! half {
    ($half:ty) => {
        impl $half {
            /// How this half waits. The default is adaptive.
            pub fn set_mode(&mut self, mode: $crate::WaitMode) {
                self.0.waiter.mode = mode;
            }

            /// How long an operation of this half may wait in all; `None`, the default, means for ever.
            pub fn set_timeout(&mut self, timeout: Option<std::time::Duration>) {
                self.0.waiter.timeout = timeout;
            }

            /// Whether operations of this half return [`Error::WouldBlock`] instead of waiting.
            pub fn set_nonblocking(&mut self, nonblocking: bool) {
                self.0.set_nonblocking(nonblocking);
            }

            /// From now on this half never waits: an operation that would returns [`Error::WouldBlock`], and `set` says `key`
            /// when another try is worth it; it says `key` once at the beginning, too. What was said is said again only after
            /// another [`Error::WouldBlock`]. A half is in one set at a time.
            ///
            /// Asks the daemon for a readiness board when those that this process has are full, each of which serves
            /// 24,576 halves of an endpoint.
            pub fn register(&mut self, set: &$crate::ReadySet, key: u64) -> Result<(), Error> {
                self.0.register(set, key)
            }

            /// Takes this half out of its set. Operations wait again, unless it is non-blocking.
            pub fn deregister(&mut self) {
                self.0.deregister();
            }

            /// A file descriptor for poll and epoll. After an operation has returned [`Error::WouldBlock`], it becomes
            /// readable when another try is worth it (which may still say [`Error::WouldBlock`]). An error in a VM
            /// without interrupts.
            pub fn poll_fd(&mut self) -> Result<std::os::fd::BorrowedFd<'_>, Error> {
                self.0.waiter.fd()
            }

            /// Ends this direction at once, and makes void what is on its way in it: what was sent and is not received yet
            /// never is, and the peer's next call in this direction says [`Error::Aborted`], as this side's next receive does.
            /// Without effect if the direction has ended otherwise and nothing is on its way. Does not block.
            pub fn abort(&mut self) {
                self.0.abort();
            }

            /// What this half has done so far.
            pub fn counters(&self) -> $crate::Counters {
                self.0.counters()
            }

            /// Facts about the channel.
            pub fn info(&self) -> &$crate::ChannelInfo {
                self.0.info()
            }
        }
    };
}

/// What both kinds of channel share: two halves, each a [`Half`] of a side in the module `$side`.
macro_rules! channel {
    ($channel:ident of $sender:ident and $receiver:ident, $kind:expr, $side:ident) => {
        impl $crate::channel::Channel for $channel {
            const KIND: ginnel_layout::channel::ChannelKind = $kind;
        }

        impl $crate::channel::sealed::Build for $channel {
            fn build(pipe: $crate::channel::Pipe) -> Self {
                let output = $side::Producer::new(pipe.output.clone(), pipe.shared.info.capacity);
                let input = $side::Consumer::new(pipe.input.clone(), pipe.shared.info.input_capacity);
                Self {
                    sender: $sender($crate::half::Half::new(output, &pipe, pipe.reader())),
                    receiver: $receiver($crate::half::Half::new(input, &pipe, pipe.writer())),
                }
            }

            fn resume(
                pipe: $crate::channel::Pipe,
                output: ginnel_ring::Cursor,
                input: ginnel_ring::Cursor,
            ) -> Result<Self, ginnel_ring::Corrupt> {
                let $crate::ChannelInfo { capacity, input_capacity, .. } = pipe.shared.info;
                let (to, from) = (pipe.output.clone(), pipe.input.clone());
                let receiver = $crate::half::Half::resume(from, input_capacity, input, &pipe, pipe.writer())?;
                let sender = $crate::half::Half::resume(to, capacity, output, &pipe, pipe.reader())?;
                Ok(Self { sender: $sender(sender), receiver: $receiver(receiver) })
            }
        }

        impl $channel {
            /// The two halves, for two threads.
            pub fn split(self) -> ($sender, $receiver) {
                (self.sender, self.receiver)
            }

            /// The two halves of one channel together again. If they are of two channels, they come back as they were.
            pub fn reunite(sender: $sender, receiver: $receiver) -> Result<Self, Box<($sender, $receiver)>> {
                match sender.0.is_of_one_channel(&receiver.0) {
                    true => Ok(Self { sender, receiver }),
                    false => Err(Box::new((sender, receiver))),
                }
            }

            /// Stops using this channel and says where it stands, so that whoever adopts its endpoint goes on with it
            /// ([`crate::Endpoint::resume`]); so can this process, if nobody did. What is committed goes out before. The peer
            /// notices nothing: what it sends meanwhile waits in the ring. The channel ends with its endpoint if nobody resumes it.
            ///
            /// Does not block.
            pub fn save(mut self) -> $crate::SavedChannel {
                let (output, input) = (self.sender.0.stop(), self.receiver.0.stop());
                let kind = <Self as $crate::channel::Channel>::KIND;
                self.sender.0.account.shared().save(kind, output, input)
            }

            /// The sending half.
            pub fn sender(&mut self) -> &mut $sender {
                &mut self.sender
            }

            /// The receiving half.
            pub fn receiver(&mut self) -> &mut $receiver {
                &mut self.receiver
            }

            /// Sets how both halves wait.
            pub fn set_mode(&mut self, mode: $crate::WaitMode) {
                self.sender.set_mode(mode);
                self.receiver.set_mode(mode);
            }

            /// Sets how long operations of both halves may wait.
            pub fn set_timeout(&mut self, timeout: Option<std::time::Duration>) {
                self.sender.set_timeout(timeout);
                self.receiver.set_timeout(timeout);
            }

            /// Facts about the channel.
            pub fn info(&self) -> &$crate::ChannelInfo {
                self.sender.info()
            }
        }
    };
}
pub(crate) use {channel, half};
