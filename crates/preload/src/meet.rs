//! The daemon: reports, matches, rings.
//!
//! A process has one session with its daemon, and one endpoint in each segment through which it has a connection. Nobody waits for
//! them: a call on a socket that is not where it is to be looks whether something has come. The lock is only tried: who does not get
//! it comes back with the next call.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use ginnel::{
    Endpoint, ErrorCode, Meeting, Opening, OpeningSocket, SocketChannel, SocketEnd, SocketEvent,
    SocketSession, StaysReason,
};
use ginnel_ring::wait::Waitable;
use ginnel_shmem::{Mapping, SharedMemory};
use ginnel_tcp::{Connecting, Role};
use libc::c_int;

use crate::confined::is_confined;
use crate::family;
use crate::grow;
use crate::kernel;
use crate::passing;
use crate::settings::{self, Mode};
use crate::signals::Blocked;
use crate::socket::{Growth, Socket, Stage};
use crate::table::{SOCKETS, Using};

/// What a connection has to have done before it is reported: so many calls that sent,
const SENDS: u32 = 4;
/// or so many bytes in both directions,
const BYTES: u64 = 32 << 10;
/// or this age.
const AGE: Duration = Duration::from_millis(10);
/// Channels that are being opened at a time. Each takes a listener of the endpoint, which may have 64 by default.
const OPENINGS: usize = 32;
/// After that, larger rings are given up: the other end does not ask for them.
const PATIENCE: Duration = Duration::from_secs(10);
/// Reports whose sockets the daemon may have at a time. Each takes two descriptors meanwhile.
const LOANS: usize = 8;
/// How long a socket that is closed waits for a daemon that has just taken its copy, and looks at it for some microseconds.
const RETURN: Duration = Duration::from_millis(20);
/// Why a connection stays on TCP of which nothing more is known.
const NO_RINGS: &str = "the daemon did not open the rings";
/// Between two looks at the daemon.
const LOOK: Duration = Duration::from_micros(50);
/// After a daemon was not there, before it is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// A socket that waits for something of the daemon.
#[derive(Clone, Copy)]
struct Pending {
    socket: &'static Socket,
    life: u64,
    /// Its stage as long as it does.
    stage: Stage,
}

impl Pending {
    fn new(socket: &'static Socket, stage: Stage) -> Self {
        Self { socket, life: socket.life.load(Ordering::Relaxed), stage }
    }

    /// The socket, if it is still that one and waits.
    fn current(self) -> Option<&'static Socket> {
        let is = self.socket.life.load(Ordering::Relaxed) == self.life && self.socket.stage() == self.stage;
        is.then_some(self.socket)
    }

    /// There are no rings for it, for this reason.
    fn fail(self, reason: &'static str) {
        match (self.current(), self.stage) {
            (Some(socket), Stage::Joined) if socket.has_returned() => {
                socket.pause();
                socket.set_growth(Growth::None);
            }
            (Some(socket), Stage::Joined) => socket.set_growth(Growth::Over),
            (Some(socket), _) => socket.stays(reason),
            (None, _) => {}
        }
    }
}

enum Segment {
    Attaching(Box<Opening<Endpoint>>),
    /// With the segment's name, which reports show as long as this process runs.
    Attached(Endpoint, &'static str),
    Failed,
}

/// Rings that the daemon makes.
struct OpeningRings {
    pending: Pending,
    segment: &'static str,
    meeting: Meeting,
    opening: OpeningSocket,
    /// When they are given up, for rings that a connection can do without.
    until: Option<Instant>,
}

#[derive(Default)]
struct Meet {
    process: i32,
    daemon: Option<SocketSession>,
    segments: HashMap<String, Segment>,
    reports: HashMap<u64, Pending>,
    /// Reports whose other end was found, and who wait for an endpoint.
    matched: VecDeque<(Pending, String, Meeting)>,
    openings: Vec<OpeningRings>,
    /// Whose copies the daemon may have.
    lent: Vec<&'static Socket>,
    last: u64,
    look_at: Option<Instant>,
}

static MEET: Mutex<Option<Meet>> = Mutex::new(None);

/// Somebody could not withdraw a report, because another thread was at work here.
static SOME_ARE_STALE: AtomicBool = AtomicBool::new(false);

/// There was no daemon when it was last looked for.
static NO_DAEMON: AtomicBool = AtomicBool::new(false);

/// Works on what is there, if nobody else does. Never waits.
fn with<R>(work: impl FnOnce(&mut Meet) -> R) -> Option<R> {
    let _blocked = Blocked::new();
    let mut meet = match MEET.try_lock() {
        Ok(meet) => meet,
        Err(TryLockError::Poisoned(meet)) => meet.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    let process = process();
    // The child of a fork has a session of its own. What its parent has reported is the parent's.
    if meet.as_ref().is_none_or(|meet| meet.process != process) {
        if let Some(parents) = meet.take() {
            std::mem::forget(parents);
        }
        *meet = Some(Meet { process, ..Meet::default() });
    }
    meet.as_mut().map(work)
}

#[expect(unsafe_code, reason = "getpid, which has no rules")]
fn process() -> i32 {
    // SAFETY: it cannot fail.
    unsafe { libc::getpid() }
}

/// Brings a socket further on its way to its rings. Never waits.
#[cold]
pub fn attend(socket: &'static Socket, fd: c_int) {
    if is_confined() {
        return;
    }
    match socket.stage() {
        // Of several processes, none can say whether it is the one that goes on.
        Stage::Native if is_alive(socket) && socket.is_report_due() && !family::is_shared(socket) => {
            let Some(_using) = Using::begin(socket, fd) else { return };
            let _ = with(|meet| meet.report(socket, fd));
            // However the program has asked for them, and whenever. Who does so from now on finds that it is reported.
            if socket.stage() != Stage::Native && kernel::sends_signals(fd) {
                passing::signalled(socket, fd);
            }
        }
        Stage::Reported => drop(with(|meet| meet.look())),
        Stage::Joined if socket.is_passed() => {}
        Stage::Joined => match socket.growth() {
            Growth::Wanted if grow::may_begin(socket) => drop(with(|meet| meet.grow(socket))),
            Growth::Asked => drop(with(|meet| meet.look())),
            Growth::None if socket.is_again_due() => {
                socket.pause();
                socket.grow();
            }
            _ => {}
        },
        _ => {}
    }
}

/// Whether a connection has not done enough to be worth a report: there is nothing to be done for it. Most connections are no more than
/// that, so it is looked at before anything else is.
#[inline]
pub fn is_young(socket: &Socket) -> bool {
    socket.stage() == Stage::Native && settings::lets_age() && !is_alive(socket)
}

/// Whether a connection has done enough to be worth a report.
fn is_alive(socket: &Socket) -> bool {
    if settings::mode() == Mode::Eager || socket.sends.load(Ordering::Relaxed) >= SENDS {
        return true;
    }
    let bytes =
        socket.sending.native.load(Ordering::Relaxed) + socket.receiving.native.load(Ordering::Relaxed);
    bytes >= BYTES || (bytes > 0 && Connecting::now().saturating_sub(socket.facts.lock().begun) >= AGE)
}

/// The socket is left to the kernel, if it still is the kernel's.
#[cold]
pub fn stays(socket: &'static Socket, reason: &'static str) {
    crate::cache::leave(socket);
    if !socket.is_joined() && socket.stage() != Stage::Stays {
        withdraw(socket);
        socket.stays(reason);
    }
}

/// Why a connection of which nothing else is known has ended on TCP.
pub fn why_not_joined() -> &'static str {
    match NO_DAEMON.load(Ordering::Relaxed) {
        true => "there is no daemon",
        false => "it ended before both its ends were reported",
    }
}

/// A socket that was reported is closed: gives back what that has led to, as far as the daemon has answered. The rest is given back with
/// the next call that looks at the daemon.
pub fn tidy() {
    if !is_confined() {
        let _ = with(Meet::open);
    }
}

/// Nothing is to come of the report of a socket any more. False if it has none.
pub fn withdraw(socket: &Socket) -> bool {
    if is_confined() {
        return false;
    }
    take_back(socket);
    let report = std::mem::take(&mut socket.facts.lock().report);
    if report == 0 {
        return false;
    }
    let withdrawn = with(|meet| meet.withdraw(report));
    if withdrawn.is_none() {
        SOME_ARE_STALE.store(true, Ordering::Relaxed);
    }
    true
}

/// In the child of a fork: what was reported is the parent's.
pub fn forget_report(socket: &Socket) {
    std::mem::forget(socket.loan.lock().take());
    socket.facts.lock().report = 0;
    if socket.stage() == Stage::Reported {
        socket.set_stage(Stage::Native);
    }
}

/// Takes the daemon's copy of a socket back. As long as there is one, the kernel does not tell the peer that the program has closed the
/// socket.
fn take_back(socket: &Socket) {
    if is_confined() {
        return;
    }
    let loan = socket.loan.lock().take();
    if let Some(loan) = loan {
        loan.end(RETURN);
    }
}

/// Whether the daemon may have a copy of a socket.
fn is_lent(socket: &Socket) -> bool {
    let mut loan = socket.loan.lock();
    let is_lent = loan.as_mut().is_some_and(|loan| !loan.is_over());
    if !is_lent {
        *loan = None;
    }
    is_lent
}

/// A program that ends closes its sockets.
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

impl Meet {
    /// To be told to the daemon, unless it has answered.
    fn withdraw(&mut self, report: u64) {
        if self.reports.remove(&report).is_some()
            && let Some(daemon) = &mut self.daemon
        {
            // If that cannot be told, the daemon finds a socket that has ended.
            let _ = daemon.withdraw(report);
        }
    }

    /// The same for those that could not say so.
    #[cold]
    fn withdraw_stale(&mut self) {
        let is_stale = |(key, pending): (&u64, &Pending)| {
            let socket = pending.socket;
            let is_current =
                socket.life.load(Ordering::Relaxed) == pending.life && socket.facts.lock().report == *key;
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
            return;
        }
        let Some(daemon) = &mut self.daemon else { return };
        match daemon.is_supported() {
            Ok(None) => return,
            Ok(Some(false)) => {
                return socket
                    .stays("the daemon takes no connections: it is too old, or its configuration says so");
            }
            Ok(Some(true)) => {}
            Err(_) => return self.lose_daemon(),
        }
        self.last += 1;
        let key = self.last;
        let end = end_of(socket);
        // Whoever closes the socket takes the loan, once it is there.
        let mut loan = socket.loan.lock();
        let reported = daemon.report(kernel::borrow(fd), end, key).map(|lent| *loan = Some(lent));
        drop(loan);
        match reported {
            Ok(()) => {
                self.lent.push(socket);
                self.reports.insert(key, Pending::new(socket, Stage::Reported));
                socket.facts.lock().report = key;
                socket.set_stage(Stage::Reported);
                self.look_at = None;
                self.look();
            }
            // With the next call.
            Err(ginnel::Error::WouldBlock) => {}
            Err(_) => self.lose_daemon(),
        }
    }

    /// Begins a session. False if there is no daemon.
    fn begin(&mut self) -> bool {
        if self.look_at.is_some_and(|at| Instant::now() < at) {
            return false;
        }
        let begun = SocketSession::begin(&settings::attach().socket);
        NO_DAEMON.store(begun.is_err(), Ordering::Relaxed);
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
        self.look_at = Some(Instant::now() + PAUSE);
    }

    /// Looks what has come.
    fn look(&mut self) {
        let now = Instant::now();
        if self.look_at.is_some_and(|at| now < at) {
            return;
        }
        self.look_at = Some(now + LOOK);
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
                Ok(Some(SocketEvent::Stays { key, reason })) => {
                    match self.reports.remove(&key).and_then(Pending::current) {
                        Some(socket) if reason == StaysReason::TOO_MANY => socket.put_off(reason.as_str()),
                        Some(socket) => {
                            socket.facts.lock().report = 0;
                            socket.stays(reason.as_str());
                        }
                        None => {}
                    }
                }
                Err(_) => {
                    self.report_again();
                    self.lose_daemon();
                }
            }
        }
        self.attach();
        self.open();
    }

    /// The daemon is gone, and what it was told with it. Its successor is told anew, with a later call on each socket.
    fn report_again(&mut self) {
        for (_, pending) in self.reports.drain() {
            is_native_again(pending);
        }
    }

    /// Asks for rings for those whose other end was found, where there is an endpoint. In the order in which the daemon has matched
    /// them, which is the order of the processes at the other ends too: if two asked for different ones first, each would wait for
    /// the other one.
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
                    match endpoint.begin_open_socket(&meeting, end_of(socket), grow::SMALLEST) {
                        Ok(opening) => {
                            let (segment, until) = (*name, None);
                            self.openings.push(OpeningRings { pending, segment, meeting, opening, until });
                        }
                        Err(error) => pending.fail(why_no_rings(&error)),
                    }
                }
                Segment::Failed => {
                    self.segments.remove(&name);
                    socket.stays("attaching to the segment failed");
                }
            }
        }
        later.append(&mut self.matched);
        self.matched = later;
    }

    /// Takes the rings that have been opened. Those of a socket that was closed meanwhile are taken too, because nobody else gives
    /// them back.
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
                    is_native_again(*pending);
                }
                Err(error) => pending.fail(why_no_rings(&error)),
            }
            false
        });
    }

    /// Asks for larger rings for a socket that has some. The other end does the same.
    fn grow(&mut self, socket: &'static Socket) {
        // Those that have none come first.
        if self.openings.len() >= OPENINGS / 2 {
            return self.look();
        }
        let (meeting, channels, segment) = {
            let facts = socket.facts.lock();
            (facts.meeting, facts.channels, facts.segment)
        };
        let pending = Pending::new(socket, Stage::Joined);
        let opening = match (self.segments.get(segment), meeting, grow::next_capacity(socket)) {
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
                self.look_at = None;
                self.look();
            }
            Err(error) => pending.fail(why_no_rings(&error)),
        }
    }
}

/// Why a connection stays on TCP whose rings the daemon did not open.
fn why_no_rings(error: &ginnel::Error) -> &'static str {
    match error.code() {
        Some(ErrorCode::NO_MEMORY) => "the segment has no room for its rings",
        _ => NO_RINGS,
    }
}

/// A socket whose report has led to nothing is as if it had not been reported.
fn is_native_again(pending: Pending) {
    if let Some(socket) = pending.current() {
        socket.facts.lock().report = 0;
        socket.set_stage(Stage::Native);
    }
}

/// Which end of its connection a socket is.
fn end_of(socket: &Socket) -> SocketEnd {
    let facts = socket.facts.lock();
    match facts.role {
        Role::Connector => {
            SocketEnd::Connector { before: facts.connecting.before, after: facts.connecting.after }
        }
        Role::Acceptor => SocketEnd::Acceptor,
    }
}

/// The socket has its rings, unless it was closed meanwhile.
fn join(pending: Pending, segment: &'static str, meeting: Meeting, channel: SocketChannel) {
    let Pending { socket, .. } = pending;
    // Who closes it takes the same lock first.
    let mut facts = socket.facts.lock();
    if pending.current().is_none() {
        return;
    }
    (facts.report, facts.channel, facts.segment) = (0, channel.info().id, segment);
    facts.reason = "";
    (facts.meeting, facts.channels) = (Some(meeting), 1);
    if channel.is_peer_elsewhere() {
        let fd = socket.fd.load(Ordering::Relaxed);
        crate::wait::note_peer_elsewhere(ginnel_tcp::round_trip(kernel::borrow(fd)).unwrap_or_default());
    }
    let capacity = channel.info().capacity;
    let (sender, mut receiver) = channel.split();
    let is_there = |memory: &Mapping| {
        memory.load_relaxed_u64(0);
        !memory.is_broken()
    };
    if !is_there(sender.ring.memory()) || !is_there(receiver.ring.memory()) {
        drop(facts);
        socket.stays("the segment's memory is gone");
        return;
    }
    socket.cookie.store(kernel::cookie(socket.fd.load(Ordering::Relaxed)).unwrap_or(0), Ordering::Relaxed);
    for fd in SOCKETS.used(0, u32::MAX) {
        if SOCKETS.get(fd).is_some_and(|other| std::ptr::eq(other, socket)) {
            passing::withhold(fd);
        }
    }
    // Another thread may sleep in a call of the kernel that began before there were rings (poll, select): a wake byte for it comes with
    // the first bytes.
    receiver.ring.arm();
    socket.ring_bytes.store(capacity as u64, Ordering::Relaxed);
    socket.sending.lock().begin(sender);
    socket.receiving.lock().begin(receiver);
    socket.set_stage(Stage::Joined);
    drop(facts);
    // The daemon has read from its copy, and closed it, long ago.
    *socket.loan.lock() = None;
}

/// The socket has larger rings, unless it was closed meanwhile. Each direction goes on in its own when it can.
fn take_larger(pending: Pending, channel: SocketChannel) {
    let id = channel.info().id;
    // Whoever brings a socket's first rings holds its facts' lock meanwhile, and who has them may take that lock.
    if grow::take(pending.socket, channel, || pending.current().is_some()) {
        let mut facts = pending.socket.facts.lock();
        facts.channel = id;
        facts.channels += 1;
    }
}
