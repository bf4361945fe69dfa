//! What is known of a TCP socket.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ginnel::{Loan, Meeting, SocketReceiver, SocketSender};
use ginnel_tcp::{Connecting, Role};
use libc::c_int;

use crate::cache::Cache;
use crate::direction::Direction;
use crate::epoll::Watchers;
use crate::errno::Errno;
use crate::lock::Lock;

/// How far a socket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Not connected.
    New,
    /// Listens.
    Listening,
    /// Connected, and not reported.
    Native,
    /// The daemon has been told, and looks for the other end.
    Reported,
    /// It has its rings. Each direction changes over when it can.
    Joined,
    /// It stays on TCP.
    Stays,
}

/// Whether a connection goes on in larger rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Growth {
    /// Nobody has asked for it.
    None,
    /// One of its rings is too small.
    Wanted,
    /// The daemon has been asked for larger ones.
    Asked,
    /// They are there. Each direction goes on in its own when it can.
    Begun,
    /// There will be none.
    Over,
}

/// How the peer's end of the kernel's connection has ended, once it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum End {
    /// It has not.
    None,
    /// In order.
    Fin,
    /// By a reset.
    Reset,
    /// The kernel has given it up, because it has heard nothing from the peer for too long (SO_KEEPALIVE, TCP_USER_TIMEOUT), or has no way
    /// to it.
    Lost,
}

/// Microseconds between two looks at the kernel's socket.
const LOOK: u64 = 100;

/// How long the kernel carries after a ring, before rings are asked for again, in microseconds. It is doubled each time.
const FIRST_PAUSE: u64 = 25_000;
const LONGEST_PAUSE: u64 = 10_000_000;

/// Microseconds of CLOCK_MONOTONIC.
pub fn now() -> u64 {
    Connecting::now().as_micros() as u64
}

/// What the kernel says once.
#[derive(Default)]
pub struct Said {
    /// The peer has closed its end: the first bytes that are sent afterwards are lost, without an error.
    pub closed: AtomicBool,
    /// The peer has broken the connection: ECONNRESET.
    pub reset: AtomicBool,
}

/// What the daemon has to know.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub role: Role,
    pub connecting: Connecting,
    /// When the connection was there, on CLOCK_MONOTONIC.
    pub begun: Duration,
    /// Number of its report; 0 if there is none.
    pub report: u64,
    /// Tries to change over that failed because the kernel counts otherwise.
    pub mismatches: u32,
    pub reason: &'static str,
    /// Where its ends meet for their channels.
    pub meeting: Option<Meeting>,
    /// Channels that it has had.
    pub channels: u32,
    /// Its channel, the newest if there are two.
    pub channel: u64,
    /// The segment that its rings lie in.
    pub segment: &'static str,
    /// The connection's number in the report.
    pub number: u64,
    /// Own address and the peer's, once they were needed.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
}

/// A socket. The memory of one that has ended is used for another one and never for anything else, so a thread that has looked it up
/// late finds at worst another socket, and notices by [`Socket::life`]; calls of the program have it for as long as they last.
pub struct Socket {
    /// Calls of the program that are in it, and of those the ones that use its descriptor; see `table`.
    pub calls: AtomicU32,
    pub using: AtomicU32,
    /// Counts the sockets that have had this memory.
    pub life: AtomicU64,
    /// Descriptors of this process.
    pub fds: AtomicU32,
    stage: AtomicU8,
    /// Calls have more to do than the kernel or the ring does: to report, to join, to change over.
    pub attention: AtomicBool,
    growth: AtomicU8,
    /// Another process has it, or is to get it, or the peer's; and it has gone back to the kernel for that. See `passing`.
    is_passed: AtomicBool,
    pub is_back: AtomicBool,
    /// The kernel's number for it, once it has rings.
    pub cookie: AtomicU64,
    /// Calls that have sent.
    pub sends: AtomicU32,
    /// How often the peer's doorbell was rung.
    pub rings: AtomicU64,
    pub facts: Lock<Facts>,
    /// The copy that the daemon was lent with a report, as long as it may have it.
    pub loan: Lock<Option<Loan>>,
    pub sending: Direction<SocketSender>,
    pub receiving: Direction<SocketReceiver>,
    end: AtomicU8,
    /// The error with which the kernel has given it up.
    error: AtomicI32,
    /// The kernel is to give it up if what was sent is not acknowledged in time (TCP_USER_TIMEOUT).
    pub gives_up: AtomicBool,
    /// Since when its peer is known to be dead although its end has not come, in milliseconds; see `kernel::may_end_still`. 0: it is not.
    pub dead_since: AtomicU64,
    /// When the kernel was asked last whether it has, in microseconds.
    looked: AtomicU64,
    /// Threads that sleep at the kernel's socket, or take its wake bytes away.
    pub sleepers: AtomicU32,
    /// The thread that sleeps in a call that takes one away; 0: none.
    pub taker: AtomicI32,
    /// A call that does not wait has found no room.
    pub was_full: AtomicBool,
    /// What the program was told of the connection's end.
    pub said: Said,
    /// It has waited in `settle`.
    pub has_settled: AtomicBool,
    /// What the program has set of `change::DELAYS`, once the kernel's values are this library's.
    pub delays: [AtomicBool; 2],
    /// The number under which relatives have it too, after a fork, and that fork; see `family`.
    pub family: AtomicU32,
    pub fork: AtomicU32,
    /// Epoll instances that watch it.
    pub watchers: Watchers,
    /// 0: not known; 1: calls wait; 2: they do not.
    nonblocking: AtomicU8,
    /// What the last waits were like.
    pub patience: AtomicU32,
    /// Data bytes of the ring that it sends into.
    pub ring_bytes: AtomicU64,
    /// How often its ring had no room for what it sends.
    pub fulls: AtomicU32,
    /// Since when it has had none, in microseconds; 0: it has some.
    pub full_since: AtomicU64,
    /// How often a direction has gone back to the kernel, and when rings may be asked for after that, in microseconds.
    pub returns: AtomicU32,
    again_at: AtomicU64,
    /// How often the daemon had no room for its report.
    put_offs: AtomicU32,
    /// While the kernel is about to carry again: what it has carried at the end of the wake bytes,
    pub wakes_end: AtomicU64,
    /// and at the end of what comes once more after them.
    pub resume: AtomicU64,
    /// Bytes of the program that were received among wake bytes.
    pub stash: Lock<Vec<u8>>,
    /// What it has to do with caches.
    pub cache: Cache,
    /// The last descriptor that it was seen by, for who has none at hand.
    pub fd: AtomicI32,
}

impl crate::table::Entry for Socket {
    fn calls(&self) -> &AtomicU32 {
        &self.calls
    }
}

impl Socket {
    pub fn new() -> Self {
        Self {
            calls: AtomicU32::new(0),
            using: AtomicU32::new(0),
            life: AtomicU64::new(0),
            fds: AtomicU32::new(0),
            stage: AtomicU8::new(Stage::New as u8),
            attention: AtomicBool::new(false),
            growth: AtomicU8::new(Growth::None as u8),
            is_passed: AtomicBool::new(false),
            is_back: AtomicBool::new(false),
            cookie: AtomicU64::new(0),
            sends: AtomicU32::new(0),
            rings: AtomicU64::new(0),
            facts: Lock::new(NO_FACTS),
            loan: Lock::new(None),
            sending: Direction::new(),
            receiving: Direction::new(),
            end: AtomicU8::new(End::None as u8),
            error: AtomicI32::new(0),
            gives_up: AtomicBool::new(false),
            dead_since: AtomicU64::new(0),
            looked: AtomicU64::new(0),
            sleepers: AtomicU32::new(0),
            taker: AtomicI32::new(0),
            was_full: AtomicBool::new(false),
            said: Said::default(),
            has_settled: AtomicBool::new(false),
            delays: [const { AtomicBool::new(false) }; 2],
            family: AtomicU32::new(crate::family::ALONE),
            fork: AtomicU32::new(0),
            watchers: Watchers::new(),
            nonblocking: AtomicU8::new(0),
            patience: AtomicU32::new(0),
            ring_bytes: AtomicU64::new(0),
            fulls: AtomicU32::new(0),
            full_since: AtomicU64::new(0),
            returns: AtomicU32::new(0),
            again_at: AtomicU64::new(0),
            put_offs: AtomicU32::new(0),
            wakes_end: AtomicU64::new(0),
            resume: AtomicU64::new(0),
            stash: Lock::new(Vec::new()),
            cache: Cache::new(),
            fd: AtomicI32::new(-1),
        }
    }

    /// Makes it as new, for another descriptor.
    pub fn begin(&self, fd: c_int) {
        self.life.fetch_add(1, Ordering::Relaxed);
        *self.facts.lock() = NO_FACTS;
        *self.loan.lock() = None;
        self.set_growth(Growth::None);
        for flag in [&self.is_passed, &self.is_back] {
            flag.store(false, Ordering::Relaxed);
        }
        self.sends.store(0, Ordering::Relaxed);
        self.rings.store(0, Ordering::Relaxed);
        self.sending.reset();
        self.receiving.reset();
        self.end.store(End::None as u8, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.gives_up.store(false, Ordering::Relaxed);
        self.dead_since.store(0, Ordering::Relaxed);
        self.sleepers.store(0, Ordering::Relaxed);
        self.taker.store(0, Ordering::Relaxed);
        self.was_full.store(false, Ordering::Relaxed);
        self.said.closed.store(false, Ordering::Relaxed);
        self.said.reset.store(false, Ordering::Relaxed);
        self.has_settled.store(false, Ordering::Relaxed);
        self.family.store(crate::family::ALONE, Ordering::Relaxed);
        self.fork.store(0, Ordering::Relaxed);
        self.watchers.clear();
        self.nonblocking.store(0, Ordering::Relaxed);
        self.patience.store(0, Ordering::Relaxed);
        self.ring_bytes.store(0, Ordering::Relaxed);
        self.fulls.store(0, Ordering::Relaxed);
        self.full_since.store(0, Ordering::Relaxed);
        self.returns.store(0, Ordering::Relaxed);
        self.again_at.store(0, Ordering::Relaxed);
        self.put_offs.store(0, Ordering::Relaxed);
        self.stash.lock().clear();
        self.cache.reset();
        self.set_stage(Stage::New);
        self.fd.store(fd, Ordering::Relaxed);
        self.fds.store(1, Ordering::Relaxed);
    }

    #[inline]
    pub fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::New,
            1 => Stage::Listening,
            2 => Stage::Native,
            3 => Stage::Reported,
            4 => Stage::Joined,
            _ => Stage::Stays,
        }
    }

    pub fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Release);
        let attention = matches!(stage, Stage::Native | Stage::Reported | Stage::Joined);
        self.attention.store(attention, Ordering::Release);
    }

    /// Whether calls have more to do than to move bytes.
    #[inline]
    pub fn needs_attention(&self) -> bool {
        self.attention.load(Ordering::Acquire)
    }

    /// Both directions are where they are to be.
    pub fn leave_alone(&self) {
        self.attention.store(false, Ordering::Release);
    }

    /// Another process is to get it: it gets no rings any more.
    pub fn set_passed(&self) {
        self.is_passed.store(true, Ordering::Relaxed);
    }

    /// Whether another process has it, or is to get it.
    pub fn is_passed(&self) -> bool {
        self.is_passed.load(Ordering::Relaxed)
    }

    /// The kernel's number for it, since it has rings.
    pub fn cookie(&self) -> u64 {
        self.cookie.load(Ordering::Relaxed)
    }

    /// Its rings are too small: calls attend to that from now on.
    #[cold]
    pub fn grow(&self) {
        let (none, wanted) = (Growth::None as u8, Growth::Wanted as u8);
        // ORDER preload.growth: either this thread's attention is the last, or whoever leaves the socket alone sees the wish, because both
        // write before they read. Pairs with: `Socket::leave_grown`.
        if self.growth.compare_exchange(none, wanted, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            self.attention.store(true, Ordering::SeqCst);
        }
    }

    /// Its rings are as large as they are to be, unless somebody has just said otherwise, or the kernel carries again.
    pub fn leave_grown(&self) {
        self.attention.store(false, Ordering::SeqCst);
        // ORDER preload.growth: see `Socket::grow`.
        if self.growth.load(Ordering::SeqCst) == Growth::Wanted as u8 || self.has_returned() {
            self.attention.store(true, Ordering::SeqCst);
        }
    }

    /// Whether the kernel carries a direction again, after a ring did.
    pub fn has_returned(&self) -> bool {
        self.sending.has_returned() || self.receiving.has_returned()
    }

    /// The kernel carries a direction again. After a while, which is longer each time, calls ask for rings again.
    pub fn returned(&self) {
        self.returns.fetch_add(1, Ordering::Relaxed);
        self.pause();
        self.attention.store(true, Ordering::SeqCst);
    }

    /// Rings are not asked for again for a while.
    pub fn pause(&self) {
        let returns = self.returns.load(Ordering::Relaxed);
        let pause = (FIRST_PAUSE << returns.min(16)).min(LONGEST_PAUSE);
        self.again_at.store(now() + pause, Ordering::Relaxed);
    }

    /// The daemon had no room for its report: it is reported again after a while, which is longer each time.
    pub fn put_off(&self, reason: &'static str) {
        let times = self.put_offs.fetch_add(1, Ordering::Relaxed);
        self.again_at.store(now() + (FIRST_PAUSE << times.min(16)).min(LONGEST_PAUSE), Ordering::Relaxed);
        let mut facts = self.facts.lock();
        (facts.report, facts.reason) = (0, reason);
        drop(facts);
        self.set_stage(Stage::Native);
    }

    /// Whether it may be reported.
    pub fn is_report_due(&self) -> bool {
        self.put_offs.load(Ordering::Relaxed) == 0 || now() >= self.again_at.load(Ordering::Relaxed)
    }

    /// Whether rings may be asked for again.
    pub fn is_again_due(&self) -> bool {
        self.has_returned() && now() >= self.again_at.load(Ordering::Relaxed)
    }

    /// How far it has come with larger rings.
    #[inline]
    pub fn growth(&self) -> Growth {
        match self.growth.load(Ordering::Relaxed) {
            0 => Growth::None,
            1 => Growth::Wanted,
            2 => Growth::Asked,
            3 => Growth::Begun,
            _ => Growth::Over,
        }
    }

    pub fn set_growth(&self, growth: Growth) {
        self.growth.store(growth as u8, Ordering::Relaxed);
    }

    /// Whether neither the daemon nor another process has heard of it from this library: if it is forgotten, it is a connection over TCP of which
    /// nothing is known, and no more happens.
    pub fn is_plain(&self) -> bool {
        let is_unknown = matches!(self.stage(), Stage::New | Stage::Listening | Stage::Native | Stage::Stays);
        is_unknown && self.family.load(Ordering::Relaxed) == crate::family::ALONE
    }

    /// Whether either direction is not the kernel's alone.
    #[inline]
    pub fn is_joined(&self) -> bool {
        self.stage() == Stage::Joined
    }

    /// Whether the kernel has not been asked for a while whether the connection has ended.
    pub fn is_look_due(&self) -> bool {
        let now = now();
        let due = now.saturating_sub(self.looked.load(Ordering::Relaxed)) >= LOOK;
        if due {
            self.looked.store(now, Ordering::Relaxed);
        }
        due
    }

    /// How the kernel's connection has ended.
    pub fn end(&self) -> End {
        match self.end.load(Ordering::Acquire) {
            0 => End::None,
            1 => End::Fin,
            2 => End::Reset,
            _ => End::Lost,
        }
    }

    /// It has been seen to end. After an error the kernel says that it has ended in order, but the error stays what it was.
    pub fn set_end(&self, end: End) {
        self.end.fetch_max(end as u8, Ordering::AcqRel);
    }

    /// It has been seen to end with this error.
    pub fn set_error(&self, errno: Errno) {
        let is_lost = matches!(
            errno,
            Errno(
                libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EHOSTDOWN | libc::ENETDOWN
            )
        );
        self.error.store(errno.0, Ordering::Relaxed);
        self.set_end(if is_lost { End::Lost } else { End::Reset });
    }

    /// The error that the kernel would tell (SO_ERROR), had it not told this library.
    pub fn take_error(&self) -> Option<Errno> {
        match self.end() {
            End::Lost => self.tell(),
            End::Reset if !self.said.reset.load(Ordering::Relaxed) => {
                Some(Errno(self.error.swap(0, Ordering::Relaxed)))
            }
            _ => None,
        }
    }

    /// The error with which the kernel has given it up, unless the program was told.
    pub fn untold(&self) -> Option<Errno> {
        let is_untold = self.end() == End::Lost && !self.said.reset.load(Ordering::Relaxed);
        is_untold.then(|| Errno(self.error.load(Ordering::Relaxed)))
    }

    /// The same. The program is told now.
    pub fn tell(&self) -> Option<Errno> {
        self.untold().filter(|_| !self.said.reset.swap(true, Ordering::Relaxed))
    }

    /// The program has said whether calls wait.
    pub fn set_nonblocking(&self, nonblocking: Option<bool>) {
        self.nonblocking.store(nonblocking.map_or(0, |on| 1 + u8::from(on)), Ordering::Relaxed);
    }

    /// Whether calls wait.
    pub fn is_nonblocking(&self, fd: c_int) -> bool {
        match self.nonblocking.load(Ordering::Relaxed) {
            0 => {
                let on = crate::kernel::is_nonblocking(fd);
                self.set_nonblocking(Some(on));
                on
            }
            known => known == 2,
        }
    }

    /// It is the end of a connection from now on.
    pub fn connected(&self, role: Role, connecting: Connecting) {
        {
            let mut facts = self.facts.lock();
            (facts.role, facts.connecting, facts.begun) = (role, connecting, connecting.after);
            facts.number = crate::report::number();
        }
        self.set_stage(Stage::Native);
    }

    /// It stays on TCP, for this reason.
    pub fn stays(&'static self, reason: &'static str) {
        self.facts.lock().reason = reason;
        self.set_stage(Stage::Stays);
        crate::report::stays(self);
    }
}

const NO_FACTS: Facts = Facts {
    role: Role::Acceptor,
    connecting: Connecting { before: Duration::ZERO, after: Duration::ZERO },
    begun: Duration::ZERO,
    report: 0,
    mismatches: 0,
    reason: "",
    meeting: None,
    channels: 0,
    channel: 0,
    segment: "",
    number: 0,
    addresses: None,
};
