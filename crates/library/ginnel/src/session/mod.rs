//! A session with the daemon: many requests may wait for their answers at once, over one connection after another.
//!
//! A request is sent at once, or as soon as the socket has room. Its answer is recognised by its number. The caller
//! waits for the answer with [`Session::request`], or sends the request with [`Session::ask`] and polls for the answer
//! with [`Session::answer`]. With [`Session::tell`] the caller does not wait for an answer. Requests that have no answer when the
//! connection ends are sent again over the next one, in the same order, so every request must be repeatable. A slow
//! daemon makes callers wait, but never ends the connection.
//!
//! Nothing happens in the background. [`Session::look`] does what is possible without waiting: it connects, sends and
//! receives. Every other call does the same, and [`Session::fd`] is readable when a call is worthwhile. No thread holds
//! the lock while it waits, so that no call waits for another thread's request.

mod alarm;
mod link;
mod reason;
mod request;
mod state;

use crate::connection::{Connection, Packet, protocol};
use crate::endpoint_state::EndpointState;
use crate::error::Error;
use crate::fork::Process;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use link::Link;
use reason::Reason;
use request::{Progress, Request};
use rustix::io::Errno;
use state::{ATTACH, State};
pub(crate) use state::{FIRST_RETRY, LAST_RETRY};
use std::convert::Infallible;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

pub(crate) struct Session {
    link: Link,
    /// How long a request waits while there is no daemon that can serve it.
    patience: Duration,
    process: Process,
    state: Mutex<State>,
}

impl Session {
    /// Begins a session, with the endpoint that `attach` describes or without an endpoint: connects and greets, as far
    /// as that is possible without waiting. [`Session::welcome`] says when the daemon has answered.
    pub fn open(path: &Path, attach: Option<wire::Attach>, patience: Duration) -> Result<Self, Error> {
        let session = Self::new(path, attach, patience, EndpointState::default(), None);
        session.link.pump(&mut session.lock());
        Ok(session)
    }

    /// Asks to attach a session without an endpoint as `attach` describes, over the existing connection.
    /// [`Session::welcome`] says when the daemon has answered. Never waits.
    pub fn attach(&mut self, attach: wire::Attach, patience: Duration) {
        (self.link.attach, self.patience) = (Some(attach), patience);
        let mut state = self.lock();
        state.welcome = None;
        let said = state.connection.as_ref().map(|to| to.send(Kind::ATTACH, ATTACH, attach.as_bytes()));
        match said {
            Some(Ok(())) => state.ready = false,
            // The request to attach goes out over a new connection then, as over each later one.
            Some(Err(errno)) => self.link.lost(&mut state, Reason::Lost(errno)),
            None => {}
        }
        self.link.pump(&mut state);
    }

    /// Returns the daemon's answer to the greeting, or to the request to attach; `None` if it has not come yet. Never
    /// waits. It is an error if the daemon refuses, or if there is no daemon and it does not look as if one were being
    /// restarted.
    pub fn welcome(&mut self) -> Result<Option<Packet>, Error> {
        let mut state = self.lock();
        self.link.pump(&mut state);
        let Some(packet) = state.welcome.take() else {
            let lasts = state.connection.is_none() && !state.reason.is_passing();
            return if lasts { Err(state.reason.error(&self.link.path)) } else { Ok(None) };
        };
        drop(state);
        self.learn(&packet)?;
        Ok(Some(packet))
    }

    /// Waits for [`Session::welcome`], for at most the session's patience.
    pub fn wait_for_welcome(&mut self) -> Result<Packet, Error> {
        let deadline = Instant::now() + self.patience;
        loop {
            if let Some(packet) = self.welcome()? {
                return Ok(packet);
            }
            if Instant::now() >= deadline {
                let state = self.lock();
                return Err(match (&state.connection, &state.reason) {
                    (Some(_), Reason::Lost(_)) => Reason::Lost(Errno::TIMEDOUT).error(&self.link.path),
                    (_, reason) => reason.error(&self.link.path),
                });
            }
            let alarm = self.link.alarm(&mut self.lock())?;
            alarm.wait(deadline);
        }
    }

    fn new(
        path: &Path,
        attach: Option<wire::Attach>,
        patience: Duration,
        endpoint_state: EndpointState,
        inherited: Option<Connection>,
    ) -> Self {
        let state = Mutex::new(State::new(endpoint_state, inherited));
        Self { link: Link::new(path.to_owned(), attach), patience, process: Process::current(), state }
    }

    /// Remembers what is needed to come back as the same endpoint.
    fn learn(&mut self, welcome: &Packet) -> Result<(), Error> {
        if let Some(attach) = &mut self.link.attach {
            let attached: wire::Attached = wire::body(&welcome.body)
                .ok_or_else(|| protocol(&self.link.path, "an answer of the wrong length"))?;
            attach.endpoint = attached.endpoint;
            attach.epoch = attached.epoch;
            attach.token = attached.token;
            self.link.is_known = true;
            if let Some(connection) = &mut self.lock().connection {
                connection.let_children_join();
            }
        }
        Ok(())
    }

    /// Makes the session of a child of the process that has this one: of the same endpoint, over a connection of its
    /// own.
    pub fn inherit(&self) -> Result<Self, Infallible> {
        let (mut endpoint_state, mut connection) = (EndpointState::default(), None);
        // Another thread of the parent may have held the lock during the fork, and does not exist here to release it.
        match self.state.try_lock() {
            Ok(mut state) => {
                (endpoint_state, connection) = (state.endpoint_state.inherited(), state.connection.take())
            }
            Err(TryLockError::Poisoned(_) | TryLockError::WouldBlock) => {}
        }
        let mut session =
            Self::new(&self.link.path, self.link.attach, self.patience, endpoint_state, connection);
        session.link.is_known = self.link.is_known;
        Ok(session)
    }

    /// Sends a request and waits for the answer until `deadline`. While there is no daemon that can serve the request,
    /// waits for at most the session's patience. Returns all packets of the answer, at least one.
    ///
    /// After a timeout the request stays under way if it may have created something; that is undone when the answer
    /// comes.
    pub fn request(&self, kind: Kind, body: &[u8], deadline: Instant) -> Result<Vec<Packet>, Error> {
        let patient_until = Instant::now() + self.patience;
        let mut state = self.lock();
        let alarm = self.link.alarm(&mut state)?;
        let number = state.ask(kind, body, false);
        loop {
            if let Some(result) = self.take(&mut state, number) {
                return result;
            }
            let now = Instant::now();
            let unserved = state.connection.is_none()
                || state.requests.get(&number).is_some_and(|request| request.put_off.is_some());
            if now >= deadline || (unserved && now >= patient_until) {
                return self.abandon(&mut state, number);
            }
            drop(state);
            alarm.wait(if unserved { deadline.min(patient_until) } else { deadline });
            state = self.lock();
        }
    }

    /// Sends a request without waiting and returns its number, with which [`Session::answer`] returns the daemon's
    /// answer. As long as there is no daemon, the request waits to be sent. [`Session::fd`] is readable when an answer
    /// may have come, unless another call has received it.
    pub fn ask(&self, kind: Kind, body: &[u8]) -> u32 {
        let mut state = self.lock();
        let number = state.ask(kind, body, true);
        self.link.pump(&mut state);
        number
    }

    /// Takes the answer to a request. Never waits. Returns an error for a request that this process has not made.
    pub fn answer(&self, number: u32) -> Option<Result<Vec<Packet>, Error>> {
        self.take(&mut self.lock(), number)
    }

    fn take(&self, state: &mut State, number: u32) -> Option<Result<Vec<Packet>, Error>> {
        self.link.pump(state);
        let result = state.take(number)?;
        self.link.show_answers(state);
        Some(result.map_err(|reason| reason.error(&self.link.path)))
    }

    fn abandon(&self, state: &mut State, number: u32) -> Result<Vec<Packet>, Error> {
        let connected = state.connection.is_some();
        let Some(request) = state.requests.get_mut(&number) else { return Err(Error::TimedOut) };
        let put_off = request.put_off.take();
        if request.sent || (request.was_sent && request.makes_something()) {
            request.progress = Progress::Abandoned;
        } else {
            state.requests.remove(&number);
        }
        match put_off {
            Some(packet) => Ok(vec![packet]),
            None if connected => Err(Error::TimedOut),
            None => Err(state.reason.error(&self.link.path)),
        }
    }

    /// Abandons a request. If it creates something, or has already done so, that is undone.
    pub fn give_up(&self, number: u32) {
        let mut state = self.lock();
        if state.requests.get(&number).is_some_and(Request::is_under_way) {
            drop(self.abandon(&mut state, number));
        } else if let Some(request) = state.requests.remove(&number) {
            state.untaken -= usize::from(!request.polled);
            if let Progress::Answered(packets) = &request.progress {
                let state = &mut *state;
                packets
                    .iter()
                    .for_each(|packet| state.endpoint_state.unclaimed(request.kind, &request.body, packet));
            }
            if state.tell_notes() {
                self.link.pump(&mut state);
            }
        }
    }

    /// Tells the daemon something, now or as soon as possible. Never waits.
    pub fn tell(&self, kind: Kind, body: &[u8]) {
        let mut state = self.lock();
        state.add(kind, body.to_vec(), Progress::Told);
        self.link.pump(&mut state);
    }

    /// Does what is possible without waiting. An error means that the daemon refuses this endpoint.
    pub fn look(&self) -> Result<(), Error> {
        let mut state = self.lock();
        self.link.pump(&mut state);
        match &state.reason {
            Reason::Refused(code, _) if *code == ErrorCode::UNAVAILABLE => Ok(()),
            reason @ (Reason::Refused(..) | Reason::Protocol(_)) if !state.ready => {
                Err(reason.error(&self.link.path))
            }
            _ => Ok(()),
        }
    }

    /// Calls `work` with the endpoint's state, and sends the messages that result. Never waits.
    pub fn with_endpoint_state<R>(&self, work: impl FnOnce(&mut EndpointState) -> R) -> R {
        let mut state = self.lock();
        let done = work(&mut state.endpoint_state);
        if state.tell_notes() {
            self.link.pump(&mut state);
        }
        done
    }

    /// Returns the path of the daemon's socket.
    pub fn path(&self) -> &Path {
        &self.link.path
    }

    /// Returns whether this process has begun the session. A child must inherit the session, not use it.
    pub fn is_own(&self) -> bool {
        self.process == Process::current()
    }

    /// Returns a descriptor that is readable when [`Session::look`] has something to do.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        Ok(self.link.alarm(&mut self.lock())?.fd())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked while it held the lock has left no harmful half-done work: at worst an answer is lost.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Session {
    /// A session of another process is not ended; only its descriptors are closed here.
    fn drop(&mut self) {
        if self.is_own() {
            self.link.say_goodbye(&mut self.lock());
        }
    }
}
