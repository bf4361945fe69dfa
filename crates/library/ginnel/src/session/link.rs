//! The link to the daemon: one connection after another, over which the waiting requests are sent and answers come.

use super::alarm::Alarm;
use super::reason::Reason;
use super::request::Progress;
use super::state::{ATTACH, FIRST_RETRY, HELLO, LAST_RETRY, State};
use crate::connection::{Connection, Packet};
use crate::error::Error;
use ginnel_layout::wire::{self, ErrorCode, Kind};
use rustix::io::Errno;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;
use zerocopy::IntoBytes;

/// The most requests that are sent before the first is answered. A daemon disconnects a client that does not read.
const WINDOW: usize = 128;
/// The most packets that one call takes in. If there are more, the session stays readable.
const TURN: usize = 512;

/// What a session needs to reach its daemon. It is used with the lock of the session's state.
pub struct Link {
    pub path: PathBuf,
    /// The request to attach, or to come back as the same endpoint; `None` for a session without an endpoint.
    pub attach: Option<wire::Attach>,
    /// The daemon has said which endpoint this is.
    pub is_known: bool,
    /// Created at the first need, under the lock. A caller that only polls needs no descriptors for it.
    alarm: OnceLock<Alarm>,
}

impl Link {
    pub fn new(path: PathBuf, attach: Option<wire::Attach>) -> Self {
        Self { path, attach, is_known: false, alarm: OnceLock::new() }
    }

    /// Returns the alarm; creates it if necessary, already readable if there is something to do.
    pub fn alarm(&self, state: &mut State) -> Result<&Alarm, Error> {
        if let Some(alarm) = self.alarm.get() {
            return Ok(alarm);
        }
        let alarm = Alarm::new()?;
        if let Some(connection) = &state.connection {
            alarm.watch(connection, state.full).map_err(Error::system("watching the daemon's socket"))?;
        }
        // The lock ensures that no other thread has created one meanwhile.
        let alarm = self.alarm.get_or_init(|| alarm);
        self.set_timer(state);
        self.show_answers(state);
        Ok(alarm)
    }

    /// Connects if it is time to, sends waiting requests, and takes in packets.
    pub fn pump(&self, state: &mut State) {
        let now = Instant::now();
        if state.later_at.is_some_and(|at| now >= at) {
            state.later_at = None;
            let later = std::mem::take(&mut state.later);
            state.outbox.extend(later);
        }
        if state.connection.is_none() && state.retry_at.is_none_or(|at| now >= at) {
            self.connect(state);
        }
        for _ in 0..TURN {
            self.flush(state);
            let Some(connection) = &state.connection else { break };
            match connection.receive() {
                Ok(Some(packet)) => self.take_in(state, packet),
                Ok(None) => break,
                Err(errno) => self.lost(state, Reason::Lost(errno)),
            }
        }
        self.set_timer(state);
        self.show_answers(state);
    }

    fn connect(&self, state: &mut State) {
        let connection = match Connection::open(&self.path) {
            Ok(connection) => connection,
            Err(errno) => return self.lost(state, Reason::Lost(errno)),
        };
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let watched = self.alarm.get().map_or(Ok(()), |alarm| alarm.watch(&connection, false));
        let said =
            watched.and_then(|()| connection.send(Kind::HELLO, HELLO, hello.as_bytes())).and_then(|()| {
                match &self.attach {
                    Some(attach) => connection.send(Kind::ATTACH, ATTACH, attach.as_bytes()),
                    None => Ok(()),
                }
            });
        state.connection = Some(connection);
        state.retry_at = None;
        state.again();
        if let Err(errno) = said {
            self.lost(state, Reason::Lost(errno));
        }
    }

    /// Sends waiting requests, as far as the socket takes them.
    fn flush(&self, state: &mut State) {
        let mut full = false;
        while state.in_flight < WINDOW {
            let (Some(connection), Some(number)) = (&state.connection, state.outbox.front()) else { break };
            let Some(request) = state.requests.get_mut(number) else {
                state.outbox.pop_front();
                continue;
            };
            match connection.send(request.kind, *number, &request.body) {
                Ok(()) => {
                    (request.sent, request.was_sent) = (true, true);
                    state.outbox.pop_front();
                    state.in_flight += 1;
                }
                Err(Errno::AGAIN) => {
                    full = true;
                    break;
                }
                // The packet is too long for any socket.
                Err(Errno::MSGSIZE) => {
                    let number = *number;
                    state.outbox.pop_front();
                    state.fail(number, Reason::Lost(Errno::MSGSIZE));
                }
                Err(errno) => self.lost(state, Reason::Lost(errno)),
            }
        }
        if full != state.full
            && let Some(connection) = &state.connection
        {
            // This fails only if the kernel has no memory; then the next call sends what waits.
            let _ = self.alarm.get().map(|alarm| alarm.watch_again(connection, full));
            state.full = full;
        }
    }

    fn take_in(&self, state: &mut State, packet: Packet) {
        match packet.header.request {
            HELLO => {
                let hello = match packet.header.kind {
                    Kind::HELLO_OK => wire::body::<wire::HelloOk>(&packet.body),
                    _ => return self.refused(state, &packet),
                };
                if hello.is_none_or(|hello| hello.version != wire::VERSION) {
                    return self.lost(state, Reason::Protocol("another protocol version"));
                }
                if self.attach.is_none() {
                    self.greeted(state, packet);
                }
            }
            ATTACH if packet.header.kind == Kind::ATTACHED => self.greeted(state, packet),
            ATTACH => self.refused(state, &packet),
            0 if packet.header.kind == Kind::ERROR => {
                // The daemon reports the reason before it closes the connection.
                if !state.ready {
                    self.refused(state, &packet);
                }
            }
            0 => {
                state.endpoint_state.event(packet);
                state.tell_notes();
            }
            number => state.answered(number, packet),
        }
    }

    fn greeted(&self, state: &mut State, welcome: Packet) {
        state.ready = true;
        state.reason = Reason::Lost(Errno::CONNRESET);
        state.pause = FIRST_RETRY;
        state.inherited = None;
        state.welcome = Some(welcome);
        // The first connection of an endpoint has no identity yet; `learn` lets children join over it.
        if self.is_known
            && let Some(connection) = &mut state.connection
        {
            connection.let_children_join();
        }
    }

    /// Handles the daemon's refusal of this session.
    fn refused(&self, state: &mut State, packet: &Packet) {
        let reason = match packet.refusal() {
            Some((code, text)) => Reason::Refused(code, text),
            None => Reason::Protocol("an answer of another kind"),
        };
        self.lost(state, reason);
    }

    /// Handles the end of the connection, or a failure to connect.
    pub fn lost(&self, state: &mut State, reason: Reason) {
        if let Some(connection) = state.connection.take() {
            // A child of a fork may have the socket open, and an epoll keeps watching the open file.
            let _ = self.alarm.get().map(|alarm| alarm.unwatch(&connection));
        }
        let was_ready = std::mem::take(&mut state.ready);
        (state.in_flight, state.full) = (0, false);
        let now = Instant::now();
        match &reason {
            // Retry at once: the next daemon may be there already.
            Reason::Lost(_) if was_ready => state.retry_at = Some(now),
            Reason::Lost(_) | Reason::Refused(ErrorCode::UNAVAILABLE, _) => {
                state.retry_at = Some(now + state.pause);
                state.pause = (state.pause * 2).min(LAST_RETRY);
            }
            // Nothing changes by itself. The next request tries again.
            Reason::Refused(..) | Reason::Protocol(_) => {
                state.retry_at = Some(now + LAST_RETRY);
                state.give_up(&reason);
            }
        }
        for request in state.requests.values_mut() {
            if request.sent && matches!(request.progress, Progress::Asked(_)) && !request.may_be_repeated() {
                request.progress = Progress::Failed(reason.clone());
                state.untaken += usize::from(!request.polled);
            }
        }
        state.reason = reason;
        if was_ready && state.retry_at.is_some_and(|at| now >= at) {
            self.connect(state);
        }
    }

    fn set_timer(&self, state: &mut State) {
        let Some(alarm) = self.alarm.get() else { return };
        // After a refusal, callers are not woken for another attempt.
        let waits = state.connection.is_none()
            && matches!(state.reason, Reason::Lost(_) | Reason::Refused(ErrorCode::UNAVAILABLE, _));
        let retry = if waits { state.retry_at } else { None };
        let next = [retry, state.later_at].into_iter().flatten().min();
        if next == state.timer_for {
            return;
        }
        state.timer_for = next;
        alarm.set_timer(next);
    }

    /// Makes the answers' eventfd readable as long as there are answers for waiting callers.
    pub fn show_answers(&self, state: &mut State) {
        let Some(alarm) = self.alarm.get() else { return };
        let show = state.untaken > 0;
        if std::mem::replace(&mut state.shown, show) != show {
            alarm.show_answers(show);
        }
    }

    /// Sends what the daemon must still get, and tells it that this process is no longer an owner. Never waits.
    pub fn say_goodbye(&self, state: &mut State) {
        let Some(attach) = &self.attach else { return };
        // Nobody reads the answers, so the window does not apply.
        state.in_flight = 0;
        if state.connection.is_some() {
            self.flush(state);
        }
        let detach = |connection: &Connection| connection.send(Kind::DETACH, HELLO - 1, &[]);
        if state.connection.as_ref().is_some_and(|connection| detach(connection).is_ok()) {
            return;
        }
        if !self.is_known {
            return; // No process knows of an endpoint yet.
        }
        // There is no connection, or its socket is full: open a new one. If there is no daemon, the endpoint ends with
        // this process.
        let Ok(connection) = Connection::open(&self.path) else { return };
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let _ = connection
            .send(Kind::HELLO, HELLO, hello.as_bytes())
            .and_then(|()| connection.send(Kind::ATTACH, ATTACH, attach.as_bytes()))
            .and_then(|()| detach(&connection));
    }
}
