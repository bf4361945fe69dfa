//! Listeners, which accept channels.

use crate::channel::{Channel, Pipe};
use crate::doorbell::readable;
use crate::error::Error;
use crate::fork::{Opener, PerProcess};
use crate::inner::{Inner, ListenerEvents};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A name at which other endpoints connect. Dropping the listener frees the name; accepted channels stay open. It may
/// be used from several threads, but only by one process: see [after `fork`](crate#after-fork).
pub struct Listener<C> {
    endpoint: Arc<Inner>,
    number: u32,
    events: PerProcess<ListenerEvents>,
    opener: Arc<Opener>,
    /// The endpoint keeps listening when this value is dropped.
    is_left: bool,
    kind: PhantomData<fn() -> C>,
}

impl<C: Channel> Listener<C> {
    pub(crate) fn new(endpoint: Arc<Inner>, number: u32) -> Result<Self, Error> {
        let events = endpoint.listener_events(number).inspect_err(|_| endpoint.unlisten(number))?;
        let (events, opener) = (PerProcess::new(events), Opener::current());
        Ok(Self { endpoint, number, events, opener, is_left: false, kind: PhantomData })
    }

    /// Waits for a connection and accepts it. If the daemon is restarted, continues to wait with its successor.
    ///
    /// # Errors
    ///
    /// [`Error::Broken`] if the segment's memory is gone, [`Error::Refused`] or [`Error::NoDaemon`] if the endpoint is
    /// no longer usable ([`crate::Endpoint::check`]), [`Error::System`] in the child of a fork whose parent lives.
    pub fn accept(&self) -> Result<C, Error> {
        self.accept_by(None)
    }

    /// Waits for a connection for at most `timeout`, and accepts it.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if no connection came; otherwise as [`Listener::accept`].
    pub fn accept_timeout(&self, timeout: Duration) -> Result<C, Error> {
        // A deadline that the clock cannot represent means no timeout.
        self.accept_by(Instant::now().checked_add(timeout))
    }

    /// Accepts a waiting connection, if there is one. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] if no connection waits; otherwise as [`Listener::accept`].
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
    /// Stops accepting here without giving up the name. A process that adopts the endpoint can listen at the name
    /// again, and then accepts the connections that wait. The name becomes free when the endpoint ends. Does not block.
    ///
    /// Before `exec`, which runs no destructors, it is better to keep the listener: if `exec` fails, this program can
    /// continue with it.
    pub fn leave(mut self) {
        self.is_left = true;
    }

    /// Returns the events on which this process waits. The child of a fork has none as long as its parent may accept,
    /// because both would take the same connections.
    fn events(&self) -> Result<&ListenerEvents, Error> {
        self.events.get(|_| match self.opener.is_succeeded() {
            true => self.endpoint.listener_events(self.number),
            false => Err(Error::System {
                what: "accepting at a listener that belongs to the parent of this process, which still lives",
                source: std::io::ErrorKind::PermissionDenied.into(),
            }),
        })
    }
}

/// A descriptor for poll and epoll, readable when [`Listener::try_accept`] is worth a call.
impl<C> AsFd for Listener<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self.events() {
            Ok(events) => events.poll.as_fd(),
            // This process has nothing to wait for; return the parent's descriptor.
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
