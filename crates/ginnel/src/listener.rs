//! Accepting connections.

use crate::channel::{Channel, Pipe};
use crate::doorbell::{BorrowedEvent, readable};
use crate::endpoint::Inner;
use crate::error::Error;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A name at which others connect. Dropping it frees the name; channels stay. May be used from several threads.
pub struct Listener<C> {
    endpoint: Arc<Inner>,
    number: u32,
    kind: PhantomData<fn() -> C>,
}

impl<C: Channel> Listener<C> {
    pub(crate) fn new(endpoint: Arc<Inner>, number: u32) -> Self {
        Self { endpoint, number, kind: PhantomData }
    }

    /// The eventfd by which channels of this listener's endpoint are woken; none in a VM without interrupts.
    pub(crate) fn event(&self) -> Option<&BorrowedEvent> {
        self.endpoint.event.as_ref()
    }

    /// Waits for a connection. Also outlives daemons: it goes on waiting with the next one.
    pub fn accept(&self) -> Result<C, Error> {
        self.accept_by(None)
    }

    /// Waits for a connection, but no longer than `timeout`.
    pub fn accept_timeout(&self, timeout: Duration) -> Result<C, Error> {
        // A timeout beyond what the clock can say is none.
        self.accept_by(Instant::now().checked_add(timeout))
    }

    /// Takes a connection that is there, or returns [`Error::WouldBlock`].
    pub fn try_accept(&self) -> Result<C, Error> {
        match self.accept_by(Some(Instant::now())) {
            Err(Error::TimedOut) => Err(Error::WouldBlock),
            other => other,
        }
    }

    fn accept_by(&self, deadline: Option<Instant>) -> Result<C, Error> {
        loop {
            if let Some(incoming) = self.endpoint.take_incoming(self.number)? {
                let pipe = Pipe::new(self.endpoint.clone(), &incoming.channel, incoming.fds)?;
                self.endpoint.accepted(incoming.channel.channel);
                return Ok(C::build(pipe));
            }
            if !readable(self.as_fd(), deadline) {
                return Err(Error::TimedOut);
            }
        }
    }
}

/// For poll and epoll: readable when [`Listener::try_accept`] is worth a try.
impl<C> AsFd for Listener<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.accept_poll.as_fd()
    }
}

impl<C> Drop for Listener<C> {
    fn drop(&mut self) {
        self.endpoint.unlisten(self.number);
    }
}
