//! The part that the four kinds of half have in common: a side of a ring, waiting, waking the peer, counting, and
//! ending.

use crate::channel::Pipe;
use crate::error::Error;
use crate::peer::PeerWaker;
use crate::ready::ReadySet;
use crate::shared::{ChannelInfo, Counters, Shared};
use crate::waiter::{OperationDeadline, Waiter};
use ginnel_ring::wait::Watchable;
use ginnel_ring::{Corrupt, Cursor, message, stream};
use ginnel_shmem::Mapping;
use std::sync::Arc;

/// One side of a ring: a producer or a consumer.
pub(crate) trait Side: Watchable<Memory = Mapping> + Sized {
    /// Ends this direction. Returns true if the peer must be woken.
    fn finish(&mut self) -> bool;
    /// Ends this direction and discards the data in it. Returns true if the peer must be woken.
    fn abort(&mut self) -> bool;
    /// Continues at the position where another process has stopped.
    fn resume(memory: Mapping, capacity: usize, cursor: Cursor) -> Result<Self, Corrupt>;
    /// Returns the position of this side.
    fn cursor(&self) -> Cursor;
    /// Publishes all committed data. Returns true if the peer must be woken, for that or for an earlier reason.
    fn settle(&mut self) -> bool;
}

macro_rules! side {
    ($($side:ty: $settle:expr;)*) => {$(
        impl Side for $side {
            fn finish(&mut self) -> bool {
                // Calls the inherent method, which takes precedence over that of the trait.
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

/// One half of a channel. Dropping it ends its direction, except in the child of a fork while the parent lives, or
/// after the channel was saved.
pub(crate) struct Half<S: Side> {
    pub ring: S,
    pub waiter: Waiter,
    pub account: Account,
}

/// The counters of a half, and the peer that it wakes. They are separate from the ring, so that a message or room that
/// borrows the ring can be counted when it is given back.
pub(crate) struct Account {
    counters: Counters,
    peer: PeerWaker,
}

impl<S: Side> Half<S> {
    pub fn new(ring: S, pipe: &Pipe, peer: PeerWaker) -> Self {
        Self { ring, waiter: pipe.waiter(), account: Account { counters: Counters::default(), peer } }
    }

    /// Continues at the position where another process has stopped. Wakes the peer if that process should have done so.
    pub fn resume(
        ring: Mapping,
        capacity: usize,
        cursor: Cursor,
        pipe: &Pipe,
        peer: PeerWaker,
    ) -> Result<Self, Corrupt> {
        let mut half = Self::new(S::resume(ring, capacity, cursor)?, pipe, peer);
        half.settle();
        Ok(half)
    }

    fn settle(&mut self) {
        let ring = self.ring.settle();
        self.account.ring_if(ring);
    }

    /// Stops waiting, publishes what is committed, and returns the position. The half is not used after that.
    pub fn stop(&mut self) -> Cursor {
        self.deregister();
        self.settle();
        self.ring.cursor()
    }

    /// Waits, as this half is configured, until the ring is worth another look.
    #[inline]
    pub fn wait(&mut self, until: &mut OperationDeadline) -> Result<(), Error> {
        self.waiter.wait(&mut self.ring, until)
    }

    /// Disarms what an earlier non-blocking operation has left armed.
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

    /// Returns whether this half and `other` belong to one channel.
    pub fn is_of_one_channel<O: Side>(&self, other: &Half<O>) -> bool {
        Arc::ptr_eq(self.account.shared(), other.account.shared())
    }

    /// Ends this direction.
    pub fn finish(&mut self) {
        let ring = self.ring.finish();
        self.account.ring_if(ring);
    }

    /// Ends this direction and discards the data in it.
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
    /// Returns the state that both halves of the channel share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.peer.shared
    }

    /// Counts an operation on `len` bytes.
    #[inline]
    pub fn count(&mut self, len: usize) {
        self.counters.operations += 1;
        self.counters.bytes += len as u64;
    }

    /// Wakes the peer if `needed`.
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

    /// Checks that the segment's memory still exists. [`Error::Broken`] means that data was written to nowhere, or
    /// zeros were read.
    #[inline]
    pub fn check_memory(&self) -> Result<(), Error> {
        self.peer.shared.check_memory()
    }

    /// Completes an in-place operation on `len` bytes: counts it, and wakes the peer if `needed`. If the segment's
    /// memory is gone, does neither and returns [`Error::Broken`].
    #[inline]
    pub fn settle(&mut self, len: usize, needed: bool) -> Result<(), Error> {
        self.check_memory()?;
        self.count(len);
        self.ring_if(needed);
        Ok(())
    }
}

/// The methods that all four kinds of half share. Each is a [`Half`] and nothing more.
macro_rules! half {
    ($half:ty) => {
        impl $half {
            /// Sets how this half waits. The default is the endpoint's wait mode.
            pub fn set_mode(&mut self, mode: ginnel_ring::wait::WaitMode) {
                self.0.waiter.mode = mode;
            }

            /// Sets how long each operation of this half may wait in total; `None`, the default, means for ever.
            pub fn set_timeout(&mut self, timeout: Option<std::time::Duration>) {
                self.0.waiter.timeout = timeout;
            }

            /// Sets whether operations of this half return [`Error::WouldBlock`] instead of waiting. The default is
            /// false.
            pub fn set_nonblocking(&mut self, nonblocking: bool) {
                self.0.set_nonblocking(nonblocking);
            }

            /// Adds this half to `set`, under a key that the caller chooses. A half is in at most one set at a time.
            ///
            /// From now on this half never waits: an operation that would have to wait returns [`Error::WouldBlock`],
            /// and the set reports `key` when another attempt is worthwhile. The set also reports `key` once at the
            /// beginning. It reports it again only after another [`Error::WouldBlock`].
            ///
            /// Blocks for the daemon, for at most 10 seconds, if this process needs a new readiness board. Each board
            /// serves 24,576 halves of an endpoint.
            ///
            /// # Errors
            ///
            /// [`Error::Refused`] if the daemon refuses to allocate a board, [`Error::TimedOut`] or [`Error::NoDaemon`]
            /// if no daemon answers, [`Error::System`] if a system call fails.
            pub fn register(&mut self, set: &$crate::ready::ReadySet, key: u64) -> Result<(), Error> {
                self.0.register(set, key)
            }

            /// Removes this half from its set. Its operations wait again, unless it is non-blocking. Does not block.
            pub fn deregister(&mut self) {
                self.0.deregister();
            }

            /// Returns a file descriptor for poll and epoll. After an operation has returned [`Error::WouldBlock`], the
            /// descriptor becomes readable when another attempt is worthwhile; that attempt may still return
            /// [`Error::WouldBlock`].
            ///
            /// # Errors
            ///
            /// [`Error::System`] in a VM without interrupts, or if the descriptor cannot be created.
            pub fn poll_fd(&mut self) -> Result<std::os::fd::BorrowedFd<'_>, Error> {
                self.0.waiter.fd()
            }

            /// Ends this direction at once and discards the data in it: what was sent and not received yet is lost. The
            /// peer's next call in this direction returns [`Error::Aborted`], and so does this side's next receive. Has
            /// no effect if the direction has already ended and is empty. Does not block.
            pub fn abort(&mut self) {
                self.0.abort();
            }

            /// Returns the counters of this half.
            pub fn counters(&self) -> $crate::shared::Counters {
                self.0.counters()
            }

            /// Returns constant properties of the channel.
            pub fn info(&self) -> &$crate::shared::ChannelInfo {
                self.0.info()
            }
        }
    };
}

/// The methods that both kinds of channel share. A channel has two halves, each a [`Half`] of a side in the module
/// `$side`.
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
                let $crate::shared::ChannelInfo { capacity, input_capacity, .. } = pipe.shared.info;
                let (to, from) = (pipe.output.clone(), pipe.input.clone());
                let receiver = $crate::half::Half::resume(from, input_capacity, input, &pipe, pipe.writer())?;
                let sender = $crate::half::Half::resume(to, capacity, output, &pipe, pipe.reader())?;
                Ok(Self { sender: $sender(sender), receiver: $receiver(receiver) })
            }
        }

        impl $channel {
            /// Splits the channel into its two halves, for two threads.
            pub fn split(self) -> ($sender, $receiver) {
                (self.sender, self.receiver)
            }

            /// Joins the two halves of one channel again.
            ///
            /// # Errors
            ///
            /// If the halves belong to two channels, both are returned unchanged.
            pub fn reunite(sender: $sender, receiver: $receiver) -> Result<Self, Box<($sender, $receiver)>> {
                match sender.0.is_of_one_channel(&receiver.0) {
                    true => Ok(Self { sender, receiver }),
                    false => Err(Box::new((sender, receiver))),
                }
            }

            /// Stops using this channel and returns its position, so that a process that adopts its endpoint can
            /// continue it with [`crate::Endpoint::resume`]. If no process does, this one can resume it.
            ///
            /// Committed messages are published first. The peer notices nothing: what it sends meanwhile waits in the
            /// ring. If nobody resumes the channel, it ends with its endpoint. Does not block.
            pub fn save(mut self) -> $crate::saved_channel::SavedChannel {
                let (output, input) = (self.sender.0.stop(), self.receiver.0.stop());
                let kind = <Self as $crate::channel::Channel>::KIND;
                self.sender.0.account.shared().save(kind, output, input)
            }

            /// Returns the sending half.
            pub fn sender(&mut self) -> &mut $sender {
                &mut self.sender
            }

            /// Returns the receiving half.
            pub fn receiver(&mut self) -> &mut $receiver {
                &mut self.receiver
            }

            /// Sets how both halves wait.
            pub fn set_mode(&mut self, mode: ginnel_ring::wait::WaitMode) {
                self.sender.set_mode(mode);
                self.receiver.set_mode(mode);
            }

            /// Sets how long each operation of the two halves may wait; `None` means for ever.
            pub fn set_timeout(&mut self, timeout: Option<std::time::Duration>) {
                self.sender.set_timeout(timeout);
                self.receiver.set_timeout(timeout);
            }

            /// Returns constant properties of the channel.
            pub fn info(&self) -> &$crate::shared::ChannelInfo {
                self.sender.info()
            }
        }
    };
}
pub(crate) use channel;
pub(crate) use half;
