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

use crate::connection::{Connection, Packet, protocol, wait_any};
use crate::descriptor::kept;
use crate::doorbell::private_event;
use crate::endpoint_state::EndpointState;
use crate::error::Error;
use crate::fork::Process;
use ginnel_layout::wire::{self, ErrorCode, Header, Kind};
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Shortest and longest pause between two attempts to reach a daemon; each is twice as long as the one before.
pub(crate) const FIRST_RETRY: Duration = Duration::from_millis(5);
pub(crate) const LAST_RETRY: Duration = Duration::from_millis(200);
/// The pause before a request is repeated that the daemon could not serve at the moment.
const AGAIN: Duration = Duration::from_millis(20);
/// The most requests that are sent before the first is answered. A daemon disconnects a client that does not read.
const WINDOW: usize = 128;
/// The most packets that one call takes in. If there are more, the session stays readable.
const TURN: usize = 512;

/// Numbers of the first two requests of a connection; no others have them.
const HELLO: u32 = u32::MAX - 1;
const ATTACH: u32 = u32::MAX;

/// The reason why there is no session at the moment.
#[derive(Clone, Debug)]
enum Reason {
    Lost(Errno),
    Refused(ErrorCode, String),
    Protocol(&'static str),
}

impl Reason {
    /// Returns whether the reason looks like a restart of the daemon.
    fn is_passing(&self) -> bool {
        match self {
            Self::Lost(errno) => {
                matches!(*errno, Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE | Errno::AGAIN)
            }
            Self::Refused(code, _) => *code == ErrorCode::UNAVAILABLE,
            Self::Protocol(_) => false,
        }
    }

    fn error(&self, path: &Path) -> Error {
        match self {
            Self::Lost(errno) => Error::NoDaemon { path: path.into(), source: (*errno).into() },
            Self::Refused(code, text) => Error::Refused { code: *code, text: text.clone() },
            Self::Protocol(what) => protocol(path, what),
        }
    }
}

/// The progress of a request.
enum Progress {
    /// A caller waits for the answer, which may come in several packets.
    Asked(Vec<Packet>),
    Answered(Vec<Packet>),
    Failed(Reason),
    /// Nobody waits for the answer, which goes to the endpoint's state.
    Told,
    /// Nobody waits any more. If the request is granted after all, the grant is undone.
    Abandoned,
}

struct Request {
    /// Position in the order of asking.
    serial: u64,
    kind: Kind,
    body: Vec<u8>,
    /// Whether it was sent over the current connection.
    sent: bool,
    /// Whether it was sent over any connection, so that a daemon may know of it.
    was_sent: bool,
    /// The daemon's last answer, if that said that it cannot serve the request at the moment.
    put_off: Option<Packet>,
    /// The caller polls for the answer instead of waiting in [`Session::request`], so it need not be woken.
    polled: bool,
    progress: Progress,
}

impl Request {
    fn is_under_way(&self) -> bool {
        !matches!(self.progress, Progress::Answered(_) | Progress::Failed(_))
    }

    /// Whether the request may be sent again. An administrator's request may not, because the daemon may have executed
    /// it.
    fn may_be_repeated(&self) -> bool {
        self.kind != Kind::ADMIN
    }
}

pub(crate) struct Session {
    path: PathBuf,
    /// The request to attach, or to come back as the same endpoint; `None` for a session without an endpoint.
    attach: Option<wire::Attach>,
    /// The daemon has said which endpoint this is.
    is_known: bool,
    /// How long a request waits while there is no daemon that can serve it.
    patience: Duration,
    process: Process,
    /// Created at the first need, under the lock. A caller that only polls needs no descriptors for it.
    alarm: OnceLock<Alarm>,
    state: Mutex<State>,
}

/// The descriptors on which a thread sleeps until the session has something to do.
struct Alarm {
    /// Readable when there is something to do: it watches the socket and the timer.
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Readable as long as there are answers that waiting callers have not taken.
    answers: OwnedFd,
}

impl Alarm {
    fn new() -> Result<Self, Error> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
            .map(kept)
            .map_err(Error::system("making a timer"))?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map(kept).map_err(Error::system("making an epoll"))?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(Error::system("watching a timer"))?;
        let answers = private_event().map_err(Error::system("making an eventfd"))?;
        Ok(Self { epoll, timer, answers })
    }

    /// Watches the daemon's socket for packets and, if it is full, also for room.
    fn watch(&self, connection: &Connection, full: bool) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, epoll::EventData::new_u64(0), events(full))
    }

    /// Changes what is watched for on a socket that is watched already.
    fn watch_again(&self, connection: &Connection, full: bool) -> Result<(), Errno> {
        epoll::modify(&self.epoll, connection, epoll::EventData::new_u64(0), events(full))
    }

    fn unwatch(&self, connection: &Connection) -> Result<(), Errno> {
        epoll::delete(&self.epoll, connection)
    }

    fn wait(&self, deadline: Instant) {
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN), PollFd::new(&self.answers, PollFlags::IN)];
        wait_any(&mut fds, Some(deadline));
    }
}

fn events(full: bool) -> epoll::EventFlags {
    let mut events = epoll::EventFlags::IN;
    events.set(epoll::EventFlags::OUT, full);
    events
}

struct State {
    endpoint_state: EndpointState,
    connection: Option<Connection>,
    /// Whether this connection has been greeted, and attached if there is an endpoint.
    ready: bool,
    /// The daemon's answer to the last greeting or request to attach.
    welcome: Option<Packet>,
    /// The reason why the last connection ended, or failed to open.
    reason: Reason,
    requests: HashMap<u32, Request>,
    asked: u64,
    /// Numbers of requests that are still to be sent.
    outbox: VecDeque<u32>,
    /// Number of requests that were sent over this connection and are not answered.
    in_flight: usize,
    /// The socket has no room.
    full: bool,
    /// Number of answers that waiting callers have not taken.
    untaken: usize,
    /// Whether [`Alarm::answers`] is readable.
    shown: bool,
    pause: Duration,
    /// When to connect again; `None` while connected.
    retry_at: Option<Instant>,
    /// Requests to be repeated at `later_at`.
    later: Vec<u32>,
    later_at: Option<Instant>,
    /// The time to which the timer is set.
    timer_for: Option<Instant>,
    /// A parent's connection. It stays open until this process has a connection of its own, so that the endpoint always
    /// has an owner.
    inherited: Option<Connection>,
}

impl Session {
    /// Begins a session, with the endpoint that `attach` describes or without an endpoint: connects and greets, as far
    /// as that is possible without waiting. [`Session::welcome`] says when the daemon has answered.
    pub fn open(path: &Path, attach: Option<wire::Attach>, patience: Duration) -> Result<Self, Error> {
        let session = Self::new(path, attach, patience, EndpointState::default(), None);
        session.pump(&mut session.lock());
        Ok(session)
    }

    /// Asks to attach a session without an endpoint as `attach` describes, over the existing connection.
    /// [`Session::welcome`] says when the daemon has answered. Never waits.
    pub fn attach(&mut self, attach: wire::Attach, patience: Duration) {
        (self.attach, self.patience) = (Some(attach), patience);
        let mut state = self.lock();
        state.welcome = None;
        let said = state.connection.as_ref().map(|to| to.send(Kind::ATTACH, ATTACH, attach.as_bytes()));
        match said {
            Some(Ok(())) => state.ready = false,
            // The request to attach goes out over a new connection then, as over each later one.
            Some(Err(errno)) => self.lost(&mut state, Reason::Lost(errno)),
            None => {}
        }
        self.pump(&mut state);
    }

    /// Returns the daemon's answer to the greeting, or to the request to attach; `None` if it has not come yet. Never
    /// waits. It is an error if the daemon refuses, or if there is no daemon and it does not look as if one were being
    /// restarted.
    pub fn welcome(&mut self) -> Result<Option<Packet>, Error> {
        let mut state = self.lock();
        self.pump(&mut state);
        let Some(packet) = state.welcome.take() else {
            let lasts = state.connection.is_none() && !state.reason.is_passing();
            return if lasts { Err(state.reason.error(&self.path)) } else { Ok(None) };
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
                    (Some(_), Reason::Lost(_)) => Reason::Lost(Errno::TIMEDOUT).error(&self.path),
                    (_, reason) => reason.error(&self.path),
                });
            }
            let alarm = self.alarm(&mut self.lock())?;
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
        let state = State {
            endpoint_state,
            connection: None,
            ready: false,
            welcome: None,
            reason: Reason::Lost(Errno::NOTCONN),
            requests: HashMap::new(),
            asked: 0,
            outbox: VecDeque::new(),
            in_flight: 0,
            full: false,
            untaken: 0,
            shown: false,
            timer_for: None,
            pause: FIRST_RETRY,
            retry_at: Some(Instant::now()),
            later: Vec::new(),
            later_at: None,
            inherited,
        };
        let (path, process) = (path.to_owned(), Process::current());
        let (alarm, state) = (OnceLock::new(), Mutex::new(state));
        Self { path, attach, is_known: false, patience, process, alarm, state }
    }

    /// Remembers what is needed to come back as the same endpoint.
    fn learn(&mut self, welcome: &Packet) -> Result<(), Error> {
        if let Some(attach) = &mut self.attach {
            let attached: wire::Attached = wire::body(&welcome.body)
                .ok_or_else(|| protocol(&self.path, "an answer of the wrong length"))?;
            attach.endpoint = attached.endpoint;
            attach.epoch = attached.epoch;
            attach.token = attached.token;
            self.is_known = true;
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
        let mut session = Self::new(&self.path, self.attach, self.patience, endpoint_state, connection);
        session.is_known = self.is_known;
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
        let alarm = self.alarm(&mut state)?;
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
        self.pump(&mut state);
        number
    }

    /// Takes the answer to a request. Never waits. Returns an error for a request that this process has not made.
    pub fn answer(&self, number: u32) -> Option<Result<Vec<Packet>, Error>> {
        self.take(&mut self.lock(), number)
    }

    fn take(&self, state: &mut State, number: u32) -> Option<Result<Vec<Packet>, Error>> {
        self.pump(state);
        let result = state.take(number)?;
        self.show_answers(state);
        Some(result.map_err(|reason| reason.error(&self.path)))
    }

    fn abandon(&self, state: &mut State, number: u32) -> Result<Vec<Packet>, Error> {
        let connected = state.connection.is_some();
        let Some(request) = state.requests.get_mut(&number) else { return Err(Error::TimedOut) };
        let put_off = request.put_off.take();
        if request.sent || (request.was_sent && makes_something(request.kind)) {
            request.progress = Progress::Abandoned;
        } else {
            state.requests.remove(&number);
        }
        match put_off {
            Some(packet) => Ok(vec![packet]),
            None if connected => Err(Error::TimedOut),
            None => Err(state.reason.error(&self.path)),
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
                self.pump(&mut state);
            }
        }
    }

    /// Tells the daemon something, now or as soon as possible. Never waits.
    pub fn tell(&self, kind: Kind, body: &[u8]) {
        let mut state = self.lock();
        state.add(kind, body.to_vec(), Progress::Told);
        self.pump(&mut state);
    }

    /// Does what is possible without waiting. An error means that the daemon refuses this endpoint.
    pub fn look(&self) -> Result<(), Error> {
        let mut state = self.lock();
        self.pump(&mut state);
        match &state.reason {
            Reason::Refused(code, _) if *code == ErrorCode::UNAVAILABLE => Ok(()),
            reason @ (Reason::Refused(..) | Reason::Protocol(_)) if !state.ready => {
                Err(reason.error(&self.path))
            }
            _ => Ok(()),
        }
    }

    /// Calls `work` with the endpoint's state, and sends the messages that result. Never waits.
    pub fn with_endpoint_state<R>(&self, work: impl FnOnce(&mut EndpointState) -> R) -> R {
        let mut state = self.lock();
        let done = work(&mut state.endpoint_state);
        if state.tell_notes() {
            self.pump(&mut state);
        }
        done
    }

    /// Returns the path of the daemon's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether this process has begun the session. A child must inherit the session, not use it.
    pub fn is_own(&self) -> bool {
        self.process == Process::current()
    }

    /// Returns a descriptor that is readable when [`Session::look`] has something to do.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        Ok(self.alarm(&mut self.lock())?.epoll.as_fd())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked while it held the lock has left no harmful half-done work: at worst an answer is lost.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the alarm; creates it if necessary, already readable if there is something to do.
    fn alarm(&self, state: &mut State) -> Result<&Alarm, Error> {
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
    fn pump(&self, state: &mut State) {
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
    fn lost(&self, state: &mut State, reason: Reason) {
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
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = next.map_or(zero, |at| {
            // All zeros would stop the timer.
            let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
        });
        // Setting the timer also makes it unreadable.
        let once = Itimerspec { it_interval: zero, it_value: value };
        let _ = timerfd_settime(&alarm.timer, TimerfdTimerFlags::empty(), &once);
    }

    /// Makes the answers' eventfd readable as long as there are answers for waiting callers.
    fn show_answers(&self, state: &mut State) {
        let Some(alarm) = self.alarm.get() else { return };
        let show = state.untaken > 0;
        if std::mem::replace(&mut state.shown, show) != show {
            let _ = match show {
                true => rustix::io::write(&alarm.answers, &1u64.to_ne_bytes()),
                false => rustix::io::read(&alarm.answers, &mut [0u8; 8]),
            };
        }
    }

    /// Sends what the daemon must still get, and tells it that this process is no longer an owner. Never waits.
    fn say_goodbye(&self, state: &mut State) {
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

/// Returns whether requests of this kind create something that must be undone if nobody takes it.
fn makes_something(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::LISTEN | Kind::CONNECT | Kind::SYNC_OPEN | Kind::BLOCK_CREATE | Kind::BLOCK_OPEN | Kind::HOLD
    )
}

impl State {
    /// Adds a request whose answer a caller takes.
    fn ask(&mut self, kind: Kind, body: &[u8], polled: bool) -> u32 {
        // A daemon that has refused before is asked again, and may refuse again.
        if matches!(self.reason, Reason::Refused(..) | Reason::Protocol(_)) && self.connection.is_none() {
            self.retry_at = Some(Instant::now());
        }
        let number = self.add(kind, body.to_vec(), Progress::Asked(Vec::new()));
        if let Some(request) = self.requests.get_mut(&number) {
            request.polled = polled;
        }
        number
    }

    /// Adds a request.
    fn add(&mut self, kind: Kind, body: Vec<u8>, progress: Progress) -> u32 {
        let number = loop {
            self.asked += 1;
            let number = (self.asked % u64::from(HELLO - 2)) as u32 + 1;
            if !self.requests.contains_key(&number) {
                break number;
            }
        };
        let request = Request {
            serial: self.asked,
            kind,
            body,
            sent: false,
            was_sent: false,
            put_off: None,
            polled: false,
            progress,
        };
        self.requests.insert(number, request);
        self.outbox.push_back(number);
        number
    }

    fn tell_notes(&mut self) -> bool {
        let notifications = self.endpoint_state.take_notifications();
        let some = !notifications.is_empty();
        for (kind, body) in notifications {
            self.add(kind, body, Progress::Told);
        }
        some
    }

    /// Queues all unanswered requests for a new connection.
    fn again(&mut self) {
        self.requests.retain(|_, request| match request.progress {
            // If it creates nothing, there is nothing to undo.
            Progress::Abandoned => makes_something(request.kind),
            _ => true,
        });
        let mut numbers: Vec<(u64, u32)> = Vec::new();
        for (number, request) in &mut self.requests {
            if request.is_under_way() {
                request.sent = false;
                if let Progress::Asked(packets) = &mut request.progress {
                    packets.clear();
                }
                numbers.push((request.serial, *number));
            }
        }
        numbers.sort_unstable();
        self.outbox = numbers.into_iter().map(|(_, number)| number).collect();
        self.later.clear();
        self.later_at = None;
        self.in_flight = 0;
    }

    fn answered(&mut self, number: u32, packet: Packet) {
        let Some(request) = self.requests.get_mut(&number).filter(|request| request.sent) else { return };
        // A page of a status ends with a packet of kind `PAGE`.
        let more = packet.header.kind == Kind::TEXT
            && (packet.header.flags & Header::MORE != 0 || request.kind == Kind::INSPECT);
        if !more {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        // Before `ATTACHED`, an error only means that the endpoint is not attached yet.
        if packet.is_unavailable() || !self.ready {
            request.sent = false;
            request.put_off = Some(packet).filter(Packet::is_unavailable);
            self.later.push(number);
            self.later_at.get_or_insert(Instant::now() + AGAIN);
            return;
        }
        match &mut request.progress {
            Progress::Asked(packets) => {
                packets.push(packet);
                if !more {
                    request.progress = Progress::Answered(std::mem::take(packets));
                    self.untaken += usize::from(!request.polled);
                }
            }
            Progress::Answered(_) | Progress::Failed(_) => {}
            Progress::Told | Progress::Abandoned if more => {}
            Progress::Told => {
                if let Some(request) = self.requests.remove(&number) {
                    self.endpoint_state.answered(request.kind, &request.body, packet);
                    self.tell_notes();
                }
            }
            Progress::Abandoned => {
                if let Some(request) = self.requests.remove(&number) {
                    self.endpoint_state.unclaimed(request.kind, &request.body, &packet);
                    self.tell_notes();
                }
            }
        }
    }

    fn fail(&mut self, number: u32, reason: Reason) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        match request.progress {
            Progress::Asked(_) => {
                request.progress = Progress::Failed(reason);
                self.untaken += usize::from(!request.polled);
            }
            Progress::Told | Progress::Abandoned => drop(self.requests.remove(&number)),
            Progress::Answered(_) | Progress::Failed(_) => {}
        }
    }

    /// Fails all waiting requests, because the daemon refuses this session. If the daemon does not know the endpoint
    /// any more, drops the other requests too.
    fn give_up(&mut self, reason: &Reason) {
        let stale = matches!(reason, Reason::Refused(ErrorCode::STALE, _));
        let numbers: Vec<u32> = self.requests.keys().copied().collect();
        for number in numbers {
            let asked = self.requests.get(&number).is_some_and(|r| matches!(r.progress, Progress::Asked(_)));
            if asked || stale {
                self.fail(number, reason.clone());
            }
        }
    }

    /// Takes the result of a request, if there is one.
    fn take(&mut self, number: u32) -> Option<Result<Vec<Packet>, Reason>> {
        if self.requests.get(&number).is_some_and(Request::is_under_way) {
            return None;
        }
        // In the child of a fork, the parent's requests are not in this table.
        let Some(request) = self.requests.remove(&number) else {
            return Some(Err(Reason::Lost(Errno::NOTCONN)));
        };
        self.untaken -= usize::from(!request.polled);
        match request.progress {
            Progress::Answered(packets) => Some(Ok(packets)),
            Progress::Failed(reason) => Some(Err(reason)),
            Progress::Asked(_) | Progress::Told | Progress::Abandoned => None,
        }
    }
}

impl Drop for Session {
    /// A session of another process is not ended; only its descriptors are closed here.
    fn drop(&mut self) {
        if self.is_own() {
            self.say_goodbye(&mut self.lock());
        }
    }
}
