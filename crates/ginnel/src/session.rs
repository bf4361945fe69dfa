//! A session with the daemon: many requests under way at once, over one connection after the other.
//!
//! A request is sent at once, or as soon as the socket has room, and its answer is found by its number. Whoever has asked
//! waits for that with [`Session::request`], or looks for it now and then ([`Session::ask`], [`Session::answer`]); nobody waits
//! for the answer to what the daemon is only told ([`Session::tell`]). What is not answered when the connection ends is sent again over the next one, in the same order,
//! so every request must be one that may be repeated. A daemon that is slow costs waiting, never the connection.
//!
//! Nothing is done in the background. [`Session::look`] does what can be done without waiting: it connects, sends, receives.
//! Every other call does the same, and [`Session::fd`] is readable when it is worth a call. The lock is never held while a
//! thread waits, so that no call waits for another thread's request.

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

/// Between two tries to reach a daemon: from the first to the last, doubling.
pub(crate) const FIRST_RETRY: Duration = Duration::from_millis(5);
pub(crate) const LAST_RETRY: Duration = Duration::from_millis(200);
/// Until a request is repeated that the daemon could not serve just now.
const AGAIN: Duration = Duration::from_millis(20);
/// Requests that are sent before the answer to the first has come. A daemon gives up a client that does not read.
const WINDOW: usize = 128;
/// Packets that one look takes in. More make the session readable again.
const TURN: usize = 512;

/// Numbers of the first two requests of a connection; no others have them.
const HELLO: u32 = u32::MAX - 1;
const ATTACH: u32 = u32::MAX;

/// Why there is no session just now.
#[derive(Clone, Debug)]
enum Reason {
    Lost(Errno),
    Refused(ErrorCode, String),
    Protocol(&'static str),
}

impl Reason {
    /// What a restart of the daemon looks like.
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

/// How far a request is.
enum Progress {
    /// Somebody waits for the answer, which may come in several packets.
    Asked(Vec<Packet>),
    Answered(Vec<Packet>),
    Failed(Reason),
    /// Nobody waits for the answer, which goes to the books.
    Told,
    /// Nobody waits any more. If it is granted after all, it is undone.
    Abandoned,
}

struct Request {
    /// In the order of asking.
    serial: u64,
    kind: Kind,
    body: Vec<u8>,
    /// Over this connection.
    sent: bool,
    /// Over any: a daemon may know of it.
    was_sent: bool,
    /// The daemon has said that it cannot serve it just now.
    put_off: Option<Packet>,
    /// Who has asked does not wait in [`Session::request`], which need not be woken then.
    polled: bool,
    progress: Progress,
}

impl Request {
    fn is_under_way(&self) -> bool {
        !matches!(self.progress, Progress::Answered(_) | Progress::Failed(_))
    }

    /// An administrator's order is not repeated: it may have been carried out.
    fn may_be_repeated(&self) -> bool {
        self.kind != Kind::ADMIN
    }
}

pub(crate) struct Session {
    path: PathBuf,
    /// How to attach, or to come back; none for a session without an endpoint.
    attach: Option<wire::Attach>,
    /// The daemon has said which endpoint this is.
    is_known: bool,
    /// How long a request waits while there is no daemon that can serve it.
    patience: Duration,
    process: Process,
    /// Made at the first need, under the lock: who only looks now and then needs no descriptors for it.
    alarm: OnceLock<Alarm>,
    state: Mutex<State>,
}

/// What is slept on until the session has something to do.
struct Alarm {
    /// Readable when there is something to do: the socket, and the timer.
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Readable as long as answers have not been taken by those who asked.
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

    /// Goes off when the daemon's socket has packets; if that is full, when it has room too.
    fn watch(&self, connection: &Connection, full: bool) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, epoll::EventData::new_u64(0), events(full))
    }

    /// The same for a socket that it watches.
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
    /// Greeted and attached over this connection.
    ready: bool,
    /// The answer to the last greeting.
    welcome: Option<Packet>,
    /// Why the last connection ended, or did not come about.
    reason: Reason,
    requests: HashMap<u32, Request>,
    asked: u64,
    /// Numbers of requests that are not sent.
    outbox: VecDeque<u32>,
    /// Requests that are sent over this connection and not answered.
    in_flight: usize,
    /// The socket has no room.
    full: bool,
    /// Answers that have not been taken.
    untaken: usize,
    /// That is what [`Alarm::answers`] says.
    shown: bool,
    pause: Duration,
    /// When to connect again; `None` while connected.
    retry_at: Option<Instant>,
    /// Requests that are repeated, and when.
    later: Vec<u32>,
    later_at: Option<Instant>,
    /// What the timer is set to.
    timer_for: Option<Instant>,
    /// A parent's connection. It is open until this process has one of its own, so that the endpoint has an owner.
    inherited: Option<Connection>,
}

impl Session {
    /// Begins a session without an endpoint, or with that which `attach` describes: connects and greets, as far as
    /// that goes without waiting. [`Session::welcome`] says when the daemon has answered.
    pub fn open(path: &Path, attach: Option<wire::Attach>, patience: Duration) -> Result<Self, Error> {
        let session = Self::new(path, attach, patience, EndpointState::default(), None);
        session.pump(&mut session.lock());
        Ok(session)
    }

    /// Makes a session without an endpoint one with that which `attach` describes, over the connection that there is.
    /// [`Session::welcome`] says when the daemon has answered. Never waits.
    pub fn attach(&mut self, attach: wire::Attach, patience: Duration) {
        (self.attach, self.patience) = (Some(attach), patience);
        let mut state = self.lock();
        state.welcome = None;
        let said = state.connection.as_ref().map(|to| to.send(Kind::ATTACH, ATTACH, attach.as_bytes()));
        match said {
            Some(Ok(())) => state.ready = false,
            // Over a new connection then, like each of the next ones.
            Some(Err(errno)) => self.lost(&mut state, Reason::Lost(errno)),
            None => {}
        }
        self.pump(&mut state);
    }

    /// The daemon's answer to the greeting, or to the wish to attach; none if it has not come yet. Never waits. An error if there
    /// is no daemon, unless it looks as if one were being restarted, or if it refuses.
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

    /// Waits for [`Session::welcome`], at most for the session's patience.
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

    /// Keeps what it needs to come back as the same endpoint.
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

    /// The session of a child of the process that has this one: of the same endpoint, over a connection of its own.
    pub fn inherit(&self) -> Result<Self, Infallible> {
        let (mut endpoint_state, mut connection) = (EndpointState::default(), None);
        // Another thread of the parent may have held the lock during the fork, and is not here to give it back.
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

    /// Asks, and waits for the answer until `deadline`; while there is no daemon that can serve it, no longer than the
    /// session's patience. All its packets; at least one.
    ///
    /// After a timeout the request stays under way if it may have made something; that is undone when it is answered.
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

    /// Asks without waiting: [`Session::answer`] says what the daemon has answered to the request of this number. As long as
    /// there is no daemon the request waits to be sent. [`Session::fd`] is readable when an answer may have come, unless another
    /// call has received it.
    pub fn ask(&self, kind: Kind, body: &[u8]) -> u32 {
        let mut state = self.lock();
        let number = state.ask(kind, body, true);
        self.pump(&mut state);
        number
    }

    /// The answer to a request, once. Never waits. An error too if this process has not made the request.
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

    /// Nobody asks for the answer to a request any more. If it makes something, or has, that is undone.
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

    /// Tells the daemon something, now or as soon as that can be. Never waits.
    pub fn tell(&self, kind: Kind, body: &[u8]) {
        let mut state = self.lock();
        state.add(kind, body.to_vec(), Progress::Told);
        self.pump(&mut state);
    }

    /// Does what there is to do. Never waits. An error is the daemon's refusal of this endpoint.
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

    /// Works on the books. Never waits.
    pub fn with_endpoint_state<R>(&self, work: impl FnOnce(&mut EndpointState) -> R) -> R {
        let mut state = self.lock();
        let done = work(&mut state.endpoint_state);
        if state.tell_notes() {
            self.pump(&mut state);
        }
        done
    }

    /// The daemon's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this process has begun it. The session of another one is to be inherited, not used.
    pub fn is_own(&self) -> bool {
        self.process == Process::current()
    }

    /// Readable when [`Session::look`] has something to do.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        Ok(self.alarm(&mut self.lock())?.epoll.as_fd())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked while it held the lock left nothing half done that matters: at worst a lost answer.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is slept on, and goes off if there is something to do already.
    fn alarm(&self, state: &mut State) -> Result<&Alarm, Error> {
        if let Some(alarm) = self.alarm.get() {
            return Ok(alarm);
        }
        let alarm = Alarm::new()?;
        if let Some(connection) = &state.connection {
            alarm.watch(connection, state.full).map_err(Error::system("watching the daemon's socket"))?;
        }
        // Nobody else has made one meanwhile, because of the lock.
        let alarm = self.alarm.get_or_init(|| alarm);
        self.set_timer(state);
        self.show_answers(state);
        Ok(alarm)
    }

    /// Connects if it is time, sends what waits, takes in what has come.
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

    /// Sends what waits, as far as the socket takes it.
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
                // A packet that no socket takes.
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
            // Fails only for want of memory; then the next call sends what waits.
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
                // Said before the end of the connection.
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
        // The first connection of an endpoint says later who it is.
        if self.is_known
            && let Some(connection) = &mut state.connection
        {
            connection.let_children_join();
        }
    }

    /// The daemon does not want us.
    fn refused(&self, state: &mut State, packet: &Packet) {
        let reason = match packet.refusal() {
            Some((code, text)) => Reason::Refused(code, text),
            None => Reason::Protocol("an answer of another kind"),
        };
        self.lost(state, reason);
    }

    /// There is no connection (any more).
    fn lost(&self, state: &mut State, reason: Reason) {
        if let Some(connection) = state.connection.take() {
            // A child of a fork may have it open, and an epoll holds on to the open file.
            let _ = self.alarm.get().map(|alarm| alarm.unwatch(&connection));
        }
        let was_ready = std::mem::take(&mut state.ready);
        (state.in_flight, state.full) = (0, false);
        let now = Instant::now();
        match &reason {
            // At once: the next daemon may be there.
            Reason::Lost(_) if was_ready => state.retry_at = Some(now),
            Reason::Lost(_) | Reason::Refused(ErrorCode::UNAVAILABLE, _) => {
                state.retry_at = Some(now + state.pause);
                state.pause = (state.pause * 2).min(LAST_RETRY);
            }
            // Nothing changes by itself. Who asks next tries again.
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
        // Who is refused is not woken for another try.
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
            // All zeros would stop it.
            let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
        });
        // Setting it takes back that it is readable.
        let once = Itimerspec { it_interval: zero, it_value: value };
        let _ = timerfd_settime(&alarm.timer, TimerfdTimerFlags::empty(), &once);
    }

    /// Wakes those whose answers have come, as long as there are any.
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

    /// Says that this process is no owner any more, and what is still to be told. Never waits.
    fn say_goodbye(&self, state: &mut State) {
        let Some(attach) = &self.attach else { return };
        // Nobody reads the answers, so they need no room.
        state.in_flight = 0;
        if state.connection.is_some() {
            self.flush(state);
        }
        let detach = |connection: &Connection| connection.send(Kind::DETACH, HELLO - 1, &[]);
        if state.connection.as_ref().is_some_and(|connection| detach(connection).is_ok()) {
            return;
        }
        if !self.is_known {
            return; // It has not become an endpoint as far as anybody knows.
        }
        // There is none, or it is full: a new one. If there is no daemon, the endpoint ends with this process.
        let Ok(connection) = Connection::open(&self.path) else { return };
        let hello = wire::Hello { version: wire::VERSION, reserved: 0, features: 0 };
        let _ = connection
            .send(Kind::HELLO, HELLO, hello.as_bytes())
            .and_then(|()| connection.send(Kind::ATTACH, ATTACH, attach.as_bytes()))
            .and_then(|()| detach(&connection));
    }
}

/// Requests of these kinds make something that has to be undone if nobody takes it.
fn makes_something(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::LISTEN | Kind::CONNECT | Kind::SYNC_OPEN | Kind::BLOCK_CREATE | Kind::BLOCK_OPEN | Kind::HOLD
    )
}

impl State {
    /// A new request, whose answer somebody takes.
    fn ask(&mut self, kind: Kind, body: &[u8], polled: bool) -> u32 {
        // Who asks a daemon that has refused before, lets it say so again.
        if matches!(self.reason, Reason::Refused(..) | Reason::Protocol(_)) && self.connection.is_none() {
            self.retry_at = Some(Instant::now());
        }
        let number = self.add(kind, body.to_vec(), Progress::Asked(Vec::new()));
        if let Some(request) = self.requests.get_mut(&number) {
            request.polled = polled;
        }
        number
    }

    /// A new request.
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

    /// Everything that is under way is to be sent over a new connection.
    fn again(&mut self) {
        self.requests.retain(|_, request| match request.progress {
            // It has made nothing.
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
        // A page of a status ends with `PAGE`.
        let more = packet.header.kind == Kind::TEXT
            && (packet.header.flags & Header::MORE != 0 || request.kind == Kind::INSPECT);
        if !more {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        // Before `ATTACHED`, an error says no more than that.
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

    /// The daemon refuses this session: so it does everything that was asked. If it does not know the endpoint any more,
    /// there is nothing to tell either.
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

    /// The result of a request, if there is one.
    fn take(&mut self, number: u32) -> Option<Result<Vec<Packet>, Reason>> {
        if self.requests.get(&number).is_some_and(Request::is_under_way) {
            return None;
        }
        // It is none of ours if this is the child of a fork, whose parent has asked.
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
    /// The session of another process is its own affair: here only the descriptors are closed.
    fn drop(&mut self) {
        if self.is_own() {
            self.say_goodbye(&mut self.lock());
        }
    }
}
