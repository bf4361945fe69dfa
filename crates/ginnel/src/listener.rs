//! Accepting connections.

use crate::channel::{Channel, Pipe};
use crate::doorbell::readable;
use crate::error::Error;
use crate::fork::{Opener, PerProcess};
use crate::inner::{Inner, ListenerEvents};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A name at which others connect. Dropping it frees the name; channels stay. May be used from several threads, and by one
/// process: see [after `fork`](crate#after-fork).
pub struct Listener<C> {
    endpoint: Arc<Inner>,
    number: u32,
    events: PerProcess<ListenerEvents>,
    opener: Arc<Opener>,
    /// The endpoint goes on listening.
    is_left: bool,
    kind: PhantomData<fn() -> C>,
}

impl<C: Channel> Listener<C> {
    pub(crate) fn new(endpoint: Arc<Inner>, number: u32) -> Result<Self, Error> {
        let events = endpoint.listener_events(number).inspect_err(|_| endpoint.unlisten(number))?;
        let (events, opener) = (PerProcess::new(events), Opener::current());
        Ok(Self { endpoint, number, events, opener, is_left: false, kind: PhantomData })
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

    /// Takes a connection that is there, or returns [`Error::WouldBlock`]. Never waits.
    pub fn try_accept(&self) -> Result<C, Error> {
        match self.accept_by(Some(Instant::now())) {
            Err(Error::TimedOut) => Err(Error::WouldBlock),
            other => other,
        }
    }

    fn accept_by(&self, deadline: Option<Instant>) -> Result<C, Error> {
        let events = self.events()?;
        loop {
            if let Some(incoming) = self.endpoint.take_incoming(self.number)? {
                let channel = incoming.channel.channel;
                return match Pipe::new(self.endpoint.clone(), &incoming.channel, incoming.fds) {
                    Ok(pipe) => {
                        self.endpoint.accepted(channel);
                        Ok(C::build(pipe))
                    }
                    Err(error) => {
                        self.endpoint.close_channel(channel);
                        Err(error)
                    }
                };
            }
            if !readable(events.poll.as_fd(), deadline) {
                return Err(Error::TimedOut);
            }
        }
    }
}

impl<C> Listener<C> {
    /// Stops accepting here without giving up the name: whoever adopts the endpoint listens at it, and accepts those who wait. The
    /// name is free when the endpoint ends. Does not block.
    ///
    /// Before `exec`, which drops nothing, a listener is better kept: if that fails, this program goes on with it.
    pub fn leave(mut self) {
        self.is_left = true;
    }

    /// Where this process waits. The child of a fork has none as long as its parent may accept: both would take the same
    /// connections.
    fn events(&self) -> Result<&ListenerEvents, Error> {
        self.events.get(|_| match self.opener.is_succeeded() {
            true => self.endpoint.listener_events(self.number),
            false => Err(Error::System {
                what: "accepting at a listener of the process that has called fork, which still lives",
                source: std::io::ErrorKind::PermissionDenied.into(),
            }),
        })
    }
}

/// For poll and epoll: readable when [`Listener::try_accept`] is worth a try.
impl<C> AsFd for Listener<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.events() {
            Ok(events) => events.poll.as_fd(),
            // There is nothing to wait for; that of the parent.
            Err(_) => self.events.youngest().poll.as_fd(),
        }
    }
}

impl<C> Drop for Listener<C> {
    fn drop(&mut self) {
        if !self.is_left && self.opener.is_succeeded() {
            self.endpoint.unlisten(self.number);
        }
    }
}
