//! The connection to the daemon: reports, matches and rings.
//!
//! A process has one session with its daemon, and one endpoint in each segment through which it has a connection. No
//! thread waits for them: a call on a socket that does not have its final carrier yet checks whether an answer has
//! come. The lock is only tried: a thread that does not get it tries again with the next call.

use crate::daemon::{larger, report, worth};
use crate::process::section::Section;
use crate::process::signals::Blocked;
use crate::process::{settings, signals};
use crate::state::known::Fact;
use crate::state::socket::{Growth, Socket, Stage};
use crate::state::sockets::{SOCKETS, Using};
use crate::state::{early, family, inherited, reasons, sockets};
use crate::system::confined::is_confined;
use crate::system::{clock, kernel};
use ginnel::{
    Endpoint, ErrorCode, Meeting, Opening, OpeningSocket, SocketChannel, SocketEnd, SocketEvent,
    SocketSession, StaysReason,
};
use ginnel_ring::wait::Waitable;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_tcp::Role;
use libc::c_int;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// The most channels that are being opened at a time. Each takes a listener of the endpoint, which may have 64 by
/// default.
const OPENINGS: usize = 32;
/// How long this end waits for larger rings before it gives them up. The other end may not ask for them at all.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most reports whose sockets the daemon may have at a time. Each takes two descriptors meanwhile.
const LOANS: usize = 8;
/// How long closing a socket waits for a daemon that has just taken its copy, which the daemon examines for a few
/// microseconds.
const RETURN: Duration = Duration::from_millis(20);
/// The reason why a connection stays on TCP, if nothing more is known.
const NO_RINGS: &str = "the daemon did not open the rings";
/// The pause before the next attempt when no daemon was there, in microseconds.
const PAUSE: u64 = 1_000_000;

/// The time from which on it is worthwhile to ask the daemon, for something that calls try again and again. An attempt costs some
/// system calls, so there is a pause after each that leads to nothing, which is longer each time: the daemon may answer at once, or
/// never, because a connection's other end is not reported.
struct Pace {
    due: AtomicU64,
    pause: AtomicU64,
}

impl Pace {
    /// The shortest and the longest pause, in microseconds.
    const SHORTEST: u64 = 50;
    const LONGEST: u64 = 10_000;

    const fn new() -> Self {
        Self { due: AtomicU64::new(0), pause: AtomicU64::new(Self::SHORTEST) }
    }

    #[inline]
    fn is_due(&self) -> bool {
        clock::now() >= self.due.load(Ordering::Relaxed)
    }

    /// Begins the next pause.
    fn rest(&self) {
        let pause = self.pause.load(Ordering::Relaxed);
        self.rest_for(pause);
        self.pause.store((pause * 2).min(Self::LONGEST), Ordering::Relaxed);
    }

    fn rest_for(&self, pause: u64) {
        self.due.store(clock::now() + pause, Ordering::Relaxed);
    }

    /// Says that something has happened, or soon will.
    fn hurry(&self) {
        self.pause.store(Self::SHORTEST, Ordering::Relaxed);
        self.due.store(0, Ordering::Relaxed);
    }
}

/// When sockets are reported, and when the daemon's answers are looked for.
static REPORTING: Pace = Pace::new();
static LOOKING: Pace = Pace::new();

/// A socket that waits for the daemon.
#[derive(Clone, Copy)]
struct Pending {
    socket: &'static Socket,
    connection: u64,
    /// The socket's stage while it waits.
    stage: Stage,
}

impl Pending {
    fn new(socket: &'static Socket, stage: Stage) -> Self {
        Self { socket, connection: socket.connection(), stage }
    }

    /// Returns the socket, unless its memory has another connection or socket now, or its stage has changed.
    fn current(self) -> Option<&'static Socket> {
        let is = self.socket.connection() == self.connection && self.socket.stage() == self.stage;
        is.then_some(self.socket)
    }

    /// Gives up the rings for this socket, for the given reason.
    fn fail(self, reason: &'static str) {
        match (self.current(), self.stage) {
            (Some(socket), Stage::Joined) if socket.has_returned() => {
                socket.pause();
                socket.set_growth(Growth::None);
            }
            (Some(socket), Stage::Joined) => socket.set_growth(Growth::Over),
            (Some(_), _) => self.stays(reason),
            (None, _) => {}
        }
    }

    /// Leaves the socket on TCP for this reason. A thread that closes the socket, or gives it another stage, does so under the lock
    /// under which that is checked.
    fn stays(self, reason: &'static str) {
        stays_if(self.socket, reason, || self.current().is_some());
    }

    /// Resets a socket whose report has led to nothing to the state before the report.
    fn is_native_again(self) {
        let mut facts = self.socket.facts.lock();
        if let Some(socket) = self.current() {
            (facts.report, facts.reported) = (0, 0);
            socket.set_stage(Stage::Native);
        }
    }
}

enum Segment {
    Attaching(Box<Opening<Endpoint>>),
    /// The endpoint, and the segment's name, which reports show as long as this process runs.
    Attached(Endpoint, &'static str),
    Failed,
}

/// Rings that the daemon is creating.
struct OpeningRings {
    pending: Pending,
    segment: &'static str,
    meeting: Meeting,
    opening: OpeningSocket,
    /// When these rings are given up. `None` for rings that the connection needs.
    until: Option<Instant>,
}

#[derive(Default)]
struct DaemonSession {
    process: i32,
    daemon: Option<SocketSession>,
    segments: HashMap<String, Segment>,
    reports: HashMap<u64, Pending>,
    /// Reports for which the daemon has found the other end. They wait for an endpoint.
    matched: VecDeque<(Pending, String, Meeting)>,
    openings: Vec<OpeningRings>,
    /// Sockets of which the daemon may have copies.
    lent: Vec<&'static Socket>,
    last: u64,
}

static SESSION: Mutex<Option<DaemonSession>> = Mutex::new(None);

/// A thread could not withdraw a report, because another thread held the lock.
static SOME_ARE_STALE: AtomicBool = AtomicBool::new(false);

/// Calls `work` with the lock held, or returns `None` if another thread holds it. Never waits.
fn with<R>(work: impl FnOnce(&mut DaemonSession) -> R) -> Option<R> {
    let _blocked = Blocked::new();
    let mut session = match SESSION.try_lock() {
        Ok(session) => session,
        Err(TryLockError::Poisoned(session)) => session.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    let process = process();
    // The child of a fork has a session of its own. What its parent has reported belongs to the parent.
    if session.as_ref().is_none_or(|session| session.process != process) {
        if let Some(parents) = session.take() {
            std::mem::forget(parents);
        }
        *session = Some(DaemonSession { process, ..DaemonSession::default() });
    }
    session.as_mut().map(work)
}

#[expect(unsafe_code, reason = "getpid, which has no rules")]
fn process() -> i32 {
    // SAFETY: it cannot fail.
    unsafe { libc::getpid() }
}

/// Advances a socket on its way to its rings. Never waits. Returns true if the socket has been reported now although the program wants
/// signals from it, which only the kernel sends.
#[cold]
pub fn attend(socket: &'static Socket, fd: c_int) -> bool {
    if is_confined() {
        return false;
    }
    match socket.stage() {
        // A relative has passed it on, and whoever has got it may go on with it over TCP.
        Stage::Native if socket.has(Fact::Passed) => stays(socket, reasons::PASSED),
        // If several processes have the socket, none of them knows whether it is the one that will continue with it.
        Stage::Native if worth::is_alive(socket) && sockets::has_standard_stream(socket) => {
            let mut facts = socket.facts.lock();
            if facts.reason.is_empty() {
                facts.reason = reasons::STANDARD;
            }
        }
        Stage::Native
            if worth::is_alive(socket)
                && REPORTING.is_due()
                && socket.is_report_due()
                && !family::is_shared(socket) =>
        {
            let Some(_using) = Using::begin(socket, fd) else { return false };
            let _ = with(|session| session.report(socket, fd));
            // The program may have asked for signals in any way and at any time. A thread that asks from now on finds
            // that the socket is reported.
            return socket.stage() != Stage::Native && kernel::sends_signals(fd);
        }
        Stage::Reported if LOOKING.is_due() => drop(with(|session| session.look())),
        Stage::Joined if socket.has(Fact::Passed) => {}
        Stage::Joined => match socket.growth() {
            Growth::Wanted if larger::may_begin(socket) => drop(with(|session| session.grow(socket))),
            Growth::Asked if LOOKING.is_due() => drop(with(|session| session.look())),
            Growth::None if socket.is_again_due() => {
                socket.pause();
                socket.grow();
            }
            _ => {}
        },
        _ => {}
    }
    false
}

/// Returns whether a connection has not done enough to be worth a report, so that nothing has to be done for it. Most
/// connections never do more, so callers check this before anything else.
#[inline]
pub fn is_young(socket: &Socket) -> bool {
    socket.stage() == Stage::Native
        && settings::lets_age()
        && (!REPORTING.is_due() || !worth::is_alive(socket))
}

/// Leaves the socket to the kernel for good, unless it has rings. Afterwards it has rings or stays.
#[cold]
pub fn stays(socket: &'static Socket, reason: &'static str) {
    socket.cache.leave();
    if reason == reasons::PASSED {
        // Relatives have to leave it there too.
        socket.note(Fact::Passed);
    }
    // The report comes last, because another thread may be about to report the socket until it stays.
    if socket.stage() != Stage::Stays && stays_unless_joined(socket, reason) {
        withdraw(socket);
    }
}

/// Leaves the socket on TCP for this reason, unless it has got its rings. Returns false if it has.
pub fn stays_unless_joined(socket: &'static Socket, reason: &'static str) -> bool {
    stays_if(socket, reason, || !socket.is_joined())
}

/// Leaves the socket on TCP for this reason if the condition holds while no other thread changes the stage. Returns whether it does.
pub fn stays_if(socket: &'static Socket, reason: &'static str, condition: impl FnOnce() -> bool) -> bool {
    let stays = socket.stays_if(reason, condition);
    if stays {
        report::stays(socket);
    }
    stays
}

/// Gives back what the report of a closed socket has led to, as far as the daemon has answered. The rest is given
/// back by the next call that checks the daemon's answers.
pub fn tidy() {
    if !is_confined() {
        let _ = with(DaemonSession::open);
    }
}

/// Does the same for a socket that has asked for larger rings. Few do at the moment when they are closed, and the program may make no
/// further call for long, so this waits for the daemon's answer, which takes microseconds.
#[cold]
pub fn tidy_larger() {
    let end = Instant::now() + RETURN;
    let is_left = |session: &mut DaemonSession| {
        session.open();
        session.openings.iter().any(|rings| rings.pending.current().is_none())
    };
    while !is_confined() && with(is_left) != Some(false) && Instant::now() < end {
        let _ = signals::sleep(1);
    }
}

/// Withdraws the report of a socket. Returns false if the socket has none.
pub fn withdraw(socket: &Socket) -> bool {
    if is_confined() {
        return false;
    }
    take_back(socket);
    let report = std::mem::take(&mut socket.facts.lock().report);
    if report == 0 {
        return false;
    }
    let withdrawn = with(|session| session.withdraw(report));
    if withdrawn.is_none() {
        SOME_ARE_STALE.store(true, Ordering::Relaxed);
    }
    true
}

/// Drops the reports in the child of a fork: they belong to the parent.
pub fn in_child() {
    SOCKETS.used(0, u32::MAX).filter_map(|fd| SOCKETS.get(fd)).for_each(forget_report);
}

fn forget_report(socket: &Socket) {
    std::mem::forget(socket.loan.lock().take());
    let mut facts = socket.facts.lock();
    (facts.report, facts.reported) = (0, 0);
    drop(facts);
    if socket.stage() == Stage::Reported {
        socket.set_stage(Stage::Native);
    }
}

/// Takes the daemon's copy of a socket back. While that copy exists, the kernel does not tell the peer that the
/// program has closed the socket.
fn take_back(socket: &Socket) {
    if is_confined() {
        return;
    }
    let _section = Section::begin();
    let loan = socket.loan.lock().take();
    if let Some(loan) = loan {
        loan.end(RETURN);
    }
}

/// Returns whether the daemon may have a copy of a socket.
fn is_lent(socket: &Socket) -> bool {
    let mut loan = socket.loan.lock();
    let is_lent = loan.as_mut().is_some_and(|loan| !loan.is_over());
    if !is_lent {
        *loan = None;
    }
    is_lent
}

/// Takes the copies back when the process exits, because a program that ends closes its sockets.
#[expect(unsafe_code, reason = "atexit")]
fn take_back_at_exit() {
    extern "C" fn at_exit() {
        SOCKETS.used(0, u32::MAX).filter_map(|fd| SOCKETS.get(fd)).for_each(take_back);
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: a function of this library that takes no argument.
        unsafe { libc::atexit(at_exit) };
    });
}

impl DaemonSession {
    /// Withdraws a report at the daemon, unless the daemon has answered it.
    fn withdraw(&mut self, report: u64) {
        if self.reports.remove(&report).is_some()
            && let Some(daemon) = &mut self.daemon
        {
            // If the withdrawal cannot be sent, the daemon finds a socket that has ended.
            let _ = daemon.withdraw(report);
        }
    }

    /// Withdraws the reports for which a thread could not get the lock.
    #[cold]
    fn withdraw_stale(&mut self) {
        let is_stale = |(key, pending): (&u64, &Pending)| {
            let socket = pending.socket;
            let is_current = socket.connection() == pending.connection && socket.facts.lock().report == *key;
            (!is_current).then_some(*key)
        };
        let stale: Vec<u64> = self.reports.iter().filter_map(is_stale).collect();
        stale.into_iter().for_each(|report| self.withdraw(report));
    }

    fn report(&mut self, socket: &'static Socket, fd: c_int) {
        if self.daemon.is_none() && !self.begin() {
            return;
        }
        self.lent.retain(|socket| is_lent(socket));
        if self.lent.len() >= LOANS {
            return REPORTING.rest();
        }
        let Some(daemon) = &mut self.daemon else { return };
        match daemon.is_supported() {
            Ok(None) => return REPORTING.rest(),
            Ok(Some(false)) => {
                stays_unless_joined(
                    socket,
                    "the daemon takes no connections: it is too old, or its configuration says so",
                );
                return;
            }
            Ok(Some(true)) => {}
            Err(_) => return self.lose_daemon(),
        }
        self.last += 1;
        let key = self.last;
        let end = end_of(socket);
        let pending = Pending::new(socket, Stage::Reported);
        // The lock is held until the loan is stored: a thread that closes the socket takes the loan from there.
        let mut loan = socket.loan.lock();
        let reported = daemon.report(kernel::borrow(fd), end, key).map(|lent| *loan = Some(lent));
        drop(loan);
        match reported {
            Ok(()) => {
                self.lent.push(socket);
                self.reports.insert(key, pending);
                let mut facts = socket.facts.lock();
                let is_native = socket.stage() == Stage::Native && socket.connection() == pending.connection;
                if is_native {
                    facts.report = key;
                    facts.reported = clock::now();
                    socket.set_stage(Stage::Reported);
                }
                drop(facts);
                if !is_native {
                    // Another thread has left it on TCP meanwhile, or has disconnected it.
                    self.withdraw(key);
                }
                REPORTING.hurry();
                LOOKING.hurry();
                self.look();
            }
            // A later call tries again.
            Err(ginnel::Error::WouldBlock) => REPORTING.rest(),
            Err(_) => self.lose_daemon(),
        }
    }

    /// Begins a session. Returns false if there is no daemon.
    fn begin(&mut self) -> bool {
        let begun = SocketSession::begin(&settings::attach().socket);
        report::note_daemon(begun.is_ok());
        match begun {
            Ok(daemon) => {
                take_back_at_exit();
                self.daemon = Some(daemon);
                true
            }
            Err(_) => {
                self.lose_daemon();
                false
            }
        }
    }

    fn lose_daemon(&mut self) {
        self.daemon = None;
        REPORTING.rest_for(PAUSE);
    }

    /// Handles the answers that have come.
    fn look(&mut self) {
        let before = self.progress();
        self.lent.retain(|socket| is_lent(socket));
        if SOME_ARE_STALE.swap(false, Ordering::Relaxed) {
            self.withdraw_stale();
        }
        while let Some(daemon) = &mut self.daemon {
            match daemon.poll() {
                Ok(None) => break,
                Ok(Some(SocketEvent::Matched { key, segment, meeting })) => {
                    if let Some(pending) = self.reports.remove(&key) {
                        self.matched.push_back((pending, segment, meeting));
                    }
                }
                Ok(Some(SocketEvent::Stays { key, reason })) => match self.reports.remove(&key) {
                    Some(pending) if reason == StaysReason::TOO_MANY => {
                        pending.socket.put_off_if(reason.as_str(), || pending.current().is_some());
                    }
                    Some(pending) => pending.stays(reason.as_str()),
                    None => {}
                },
                Err(_) => {
                    self.report_again();
                    self.lose_daemon();
                }
            }
        }
        self.attach();
        self.open();
        if self.progress() != before {
            LOOKING.hurry();
        }
        LOOKING.rest();
    }

    /// Returns numbers that differ when an answer of the daemon has led to something.
    fn progress(&self) -> [usize; 4] {
        let attached = self.segments.values().filter(|segment| matches!(segment, Segment::Attached(..)));
        [self.reports.len(), self.matched.len(), self.openings.len(), attached.count()]
    }

    /// Makes the sockets ready to be reported again after the daemon has gone, along with all that it knew. A later
    /// call on each socket reports it to the successor.
    fn report_again(&mut self) {
        for (_, pending) in self.reports.drain() {
            pending.is_native_again();
        }
    }

    /// Asks for rings for the matched sockets whose segments have an endpoint. It does so in the order in which the
    /// daemon has matched them, which is also the order of the processes at the other ends: if two processes asked in
    /// different orders, each could wait for the other.
    fn attach(&mut self) {
        for (name, segment) in &mut self.segments {
            if let Segment::Attaching(opening) = segment {
                match opening.poll() {
                    Ok(Some(endpoint)) => *segment = Segment::Attached(endpoint, name.clone().leak()),
                    Ok(None) => {}
                    Err(_) => *segment = Segment::Failed,
                }
            }
        }
        let mut later = VecDeque::new();
        while self.openings.len() < OPENINGS
            && let Some((pending, name, meeting)) = self.matched.pop_front()
        {
            let Some(socket) = pending.current() else { continue };
            let segment = self.segments.entry(name.clone()).or_insert_with(|| {
                match Endpoint::begin_attach(&name, settings::attach()) {
                    Ok(opening) => Segment::Attaching(Box::new(opening)),
                    Err(_) => Segment::Failed,
                }
            });
            match segment {
                Segment::Attaching(_) => later.push_back((pending, name, meeting)),
                Segment::Attached(endpoint, name) => {
                    match endpoint.begin_open_socket(&meeting, end_of(socket), larger::SMALLEST) {
                        Ok(opening) => {
                            let (segment, until) = (*name, None);
                            self.openings.push(OpeningRings { pending, segment, meeting, opening, until });
                        }
                        Err(error) => pending.fail(why_no_rings(&error)),
                    }
                }
                Segment::Failed => {
                    self.segments.remove(&name);
                    pending.stays("attaching to the segment failed");
                }
            }
        }
        later.append(&mut self.matched);
        self.matched = later;
    }

    /// Takes the rings that have been opened. It takes those of a socket that was closed meanwhile too, because
    /// nothing else gives them back.
    fn open(&mut self) {
        self.openings.retain_mut(|rings| {
            let OpeningRings { pending, segment, meeting, opening, until } = rings;
            let is_late = until.is_some_and(|until| Instant::now() >= until);
            if (pending.current().is_none() || is_late) && !opening.is_asking() {
                pending.fail(NO_RINGS);
                return false;
            }
            match opening.poll() {
                Ok(None) => return true,
                Ok(Some(channel)) if pending.stage == Stage::Joined => take_larger(*pending, channel),
                Ok(Some(channel)) => join(*pending, segment, *meeting, channel),
                Err(ginnel::Error::NoDaemon { .. }) if pending.stage == Stage::Reported => {
                    pending.is_native_again();
                }
                Err(error) => pending.fail(why_no_rings(&error)),
            }
            false
        });
    }

    /// Asks for larger rings for a socket that has rings. The other end does the same.
    fn grow(&mut self, socket: &'static Socket) {
        // Sockets without rings have precedence.
        if self.openings.len() >= OPENINGS / 2 {
            if LOOKING.is_due() {
                self.look();
            }
            return;
        }
        let (meeting, channels, segment) = {
            let facts = socket.facts.lock();
            (facts.meeting, facts.channels, facts.segment)
        };
        let pending = Pending::new(socket, Stage::Joined);
        let opening = match (self.segments.get(segment), meeting, larger::next_capacity(socket)) {
            (Some(Segment::Attached(endpoint, _)), Some(meeting), Some(capacity)) => meeting
                .again(channels)
                .and_then(|again| endpoint.begin_open_socket(&again, end_of(socket), capacity))
                .map(|opening| (meeting, opening)),
            _ => return pending.fail(NO_RINGS),
        };
        match opening {
            Ok((meeting, opening)) => {
                socket.set_growth(Growth::Asked);
                let until = Instant::now().checked_add(PATIENCE);
                self.openings.push(OpeningRings { pending, segment, meeting, opening, until });
                LOOKING.hurry();
                self.look();
            }
            Err(error) => pending.fail(why_no_rings(&error)),
        }
    }
}

/// Returns the reason why a connection stays on TCP when the daemon did not open its rings.
fn why_no_rings(error: &ginnel::Error) -> &'static str {
    match error.code() {
        Some(ErrorCode::NO_MEMORY) => "the segment has no room for its rings",
        _ => NO_RINGS,
    }
}

/// Returns which end of its connection a socket is.
fn end_of(socket: &Socket) -> SocketEnd {
    let facts = socket.facts.lock();
    match facts.role {
        Role::Connector => {
            SocketEnd::Connector { before: facts.connecting.before, after: facts.connecting.after }
        }
        Role::Acceptor => SocketEnd::Acceptor,
    }
}

/// Gives the socket its rings, unless it was closed meanwhile.
fn join(pending: Pending, segment: &'static str, meeting: Meeting, channel: SocketChannel) {
    let Pending { socket, .. } = pending;
    // A thread that closes the socket takes the same lock first.
    let mut facts = socket.facts.lock();
    if pending.current().is_none() {
        return;
    }
    (facts.report, facts.channel, facts.segment) = (0, channel.info().id, segment);
    facts.reason = "";
    (facts.meeting, facts.channels) = (Some(meeting), 1);
    if channel.is_peer_elsewhere() {
        let fd = socket.fd.load(Ordering::Relaxed);
        crate::process::spin::note_peer_elsewhere(
            ginnel_tcp::round_trip(kernel::borrow(fd)).unwrap_or_default(),
        );
    }
    let capacity = channel.info().capacity;
    let (sender, mut receiver) = channel.split();
    let is_there = |memory: &Mapping| {
        memory.load_relaxed_u64(0);
        !memory.is_broken()
    };
    if !is_there(sender.ring.memory()) || !is_there(receiver.ring.memory()) {
        drop(facts);
        pending.stays("the segment's memory is gone");
        return;
    }
    socket.opened_by.store(crate::process::ids::process(), Ordering::Relaxed);
    socket.cookie.store(kernel::cookie(socket.fd.load(Ordering::Relaxed)).unwrap_or(0), Ordering::Relaxed);
    for fd in SOCKETS.used(0, u32::MAX) {
        if SOCKETS.get(fd).is_some_and(|other| std::ptr::eq(other, socket)) {
            inherited::withhold(fd);
        }
    }
    // Another thread may sleep in a call of the kernel (poll, select) that began before there were rings. Arming
    // makes the peer send a wake byte for it with the first bytes.
    receiver.ring.arm();
    socket.ring_bytes.store(capacity as u64, Ordering::Relaxed);
    socket.sending.lock().begin(sender);
    socket.receiving.lock().begin(receiver);
    socket.set_stage(Stage::Joined);
    early::joined();
    drop(facts);
    // The daemon has read from its copy and closed it long ago.
    *socket.loan.lock() = None;
}

/// Gives the socket its larger rings, unless it was closed meanwhile. Each direction moves to its larger ring when it
/// can.
fn take_larger(pending: Pending, channel: SocketChannel) {
    let id = channel.info().id;
    // The thread that brings a socket's first rings holds the lock of its facts meanwhile. A thread that holds the
    // rings may take that lock.
    if larger::take(pending.socket, channel, || pending.current().is_some()) {
        let mut facts = pending.socket.facts.lock();
        facts.channel = id;
        facts.channels += 1;
    }
}
