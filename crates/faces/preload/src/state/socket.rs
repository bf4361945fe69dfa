//! The state that the library keeps for each TCP socket.

use crate::cache::Cache;
use crate::process::lock::Lock;
use crate::state::direction::Direction;
use crate::state::known::{Fact, Known};
use crate::state::lowat::Lowat;
use crate::state::sleepers::Sleepers;
use crate::state::watchers::Watchers;
use crate::system::clock;
use crate::system::errno::Errno;
use ginnel::{Loan, Meeting, SocketReceiver, SocketSender};
use ginnel_tcp::{Connecting, Role};
use libc::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// The stage that a socket has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// The socket is not connected.
    New,
    /// The socket listens.
    Listening,
    /// The socket is connected, and not reported to the daemon.
    Native,
    /// The daemon has the socket's report, and looks for the other end.
    Reported,
    /// The socket has its rings. Each direction changes over when it can.
    Joined,
    /// The socket stays on TCP.
    Stays,
}

/// The state of a connection's change to larger rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Growth {
    /// No larger rings have been asked for.
    None,
    /// One of the rings is too small.
    Wanted,
    /// The daemon has been asked for larger rings.
    Asked,
    /// The larger rings are there. Each direction changes to its larger ring when it can.
    Begun,
    /// There will be no larger rings.
    Over,
}

/// The way in which the peer's end of the kernel's connection has ended, as far as this library has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum End {
    /// It has not ended.
    None,
    /// In order, with a FIN.
    Fin,
    /// With a reset.
    Reset,
    /// The kernel has given the connection up, because it has heard nothing from the peer for too long (SO_KEEPALIVE,
    /// TCP_USER_TIMEOUT), or has no route to it.
    Lost,
}

/// The shortest time between two looks at the kernel's socket, in microseconds.
const LOOK: u64 = 100;

/// How long the kernel carries after a ring before the library asks for rings again, in microseconds. The time is doubled at each
/// return.
const FIRST_PAUSE: u64 = 25_000;
const LONGEST_PAUSE: u64 = 10_000_000;

/// Counts the round trips of a connection: how often this end has sent after it had received. Several threads that count at the same
/// time may count too little.
#[derive(Default)]
pub struct Turns {
    count: AtomicU32,
    has_received: AtomicBool,
}

impl Turns {
    fn reset(&self) {
        self.count.store(0, Ordering::Relaxed);
        self.has_received.store(false, Ordering::Relaxed);
    }

    #[inline]
    pub fn received(&self) {
        if !self.has_received.load(Ordering::Relaxed) {
            self.has_received.store(true, Ordering::Relaxed);
        }
    }

    #[inline]
    pub fn sent(&self) {
        if self.has_received.load(Ordering::Relaxed) {
            self.has_received.store(false, Ordering::Relaxed);
            self.count.store(self.count().wrapping_add(1), Ordering::Relaxed);
        }
    }

    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }
}

/// Facts about a connection: those that the library reports to the daemon, and those in the daemon's answers.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub role: Role,
    pub connecting: Connecting,
    /// The time at which the connection was established, on CLOCK_MONOTONIC.
    pub begun: Duration,
    /// The number of the connection's report; 0 if there is none.
    pub report: u64,
    /// The time at which the connection was first reported, in microseconds; 0 if it was not.
    pub reported: u64,
    /// The number of tries to change over that failed because the kernel's count differs from the library's.
    pub mismatches: u32,
    pub reason: &'static str,
    /// The place where the connection's two ends meet to open their channels.
    pub meeting: Option<Meeting>,
    /// The number of channels that the connection has had.
    pub channels: u32,
    /// The connection's channel, or the newest one if there are two.
    pub channel: u64,
    /// The name of the segment that contains the connection's rings.
    pub segment: &'static str,
    /// The connection's number in this process's own report (module `report`).
    pub number: u64,
    /// The socket's own address and the peer's, once they were needed.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
}

/// A socket. The memory of a socket that has ended is used for other sockets, and never for anything else. So a thread that has
/// looked the memory up too late finds at worst another socket, and notices that by [`Socket::life`]. A call of the program keeps
/// the socket until it returns.
pub struct Socket {
    /// The number of the program's calls that use the socket, and the number of those that use its descriptor; see `table`.
    pub calls: AtomicU32,
    pub using: AtomicU32,
    /// Counts the sockets that have had this memory.
    pub life: AtomicU64,
    /// Counts the connections of the sockets that have had this memory: a socket can be connected anew.
    pub connection: AtomicU64,
    /// The number of descriptors of this process that refer to the socket.
    pub fds: AtomicU32,
    stage: AtomicU8,
    /// True if calls have to do more than the kernel or the ring does: to report, to join, or to change over.
    pub attention: AtomicBool,
    growth: AtomicU8,
    /// The socket has returned to the kernel because another process gets it. See `passing`.
    pub is_back: AtomicBool,
    /// The kernel's cookie of the socket (SO_COOKIE), once the socket has rings.
    pub cookie: AtomicU64,
    /// The process that has opened the socket's first rings.
    pub opened_by: AtomicI32,
    /// The round trips over the kernel's connection.
    pub turns: Turns,
    /// How often this side has rung the peer's doorbell.
    pub rings: AtomicU64,
    pub facts: Lock<Facts>,
    /// The copy of the socket that was lent to the daemon with a report, for as long as the daemon may have it.
    pub loan: Lock<Option<Loan>>,
    pub sending: Direction<SocketSender>,
    pub receiving: Direction<SocketReceiver>,
    end: AtomicU8,
    /// The error with which the kernel has ended the connection.
    error: AtomicI32,
    /// True if the kernel gives the connection up when sent bytes are not acknowledged in time (TCP_USER_TIMEOUT).
    pub gives_up: AtomicBool,
    /// True if the program wants to know with each message how many bytes are left (TCP_INQ).
    pub tells_inq: AtomicBool,
    /// The time since which the peer is known to be dead although the connection's end has not come, in milliseconds; 0 if it is
    /// not known to be dead. See `connection::may_end_still`.
    pub dead_since: AtomicU64,
    /// The time at which the kernel was asked last whether the connection has ended, in microseconds.
    looked: AtomicU64,
    /// Who sleeps at the kernel's socket, or takes its wake bytes.
    pub asleep: Sleepers,
    /// The thread that sleeps in a call which consumes a wake byte; 0 if there is none.
    pub taker: AtomicI32,
    /// The thread that sends a message for which the ring has no room at once; 0 if there is none. See `output::Turn`.
    pub turn: AtomicI32,
    /// What this process knows of the connection. Relatives may know more.
    pub(super) known: Known,
    /// True if the socket has waited in `settle`.
    pub has_settled: AtomicBool,
    /// The values of `delays::DELAYS` that the program has set, while the kernel has this library's values.
    pub delays: [AtomicBool; 2],
    /// The number under which relatives also have the socket after a fork, and the number of that fork; see `family`.
    pub family: AtomicU32,
    pub fork: AtomicU32,
    /// SO_RCVLOWAT.
    pub lowat: Lowat,
    /// The epoll instances that watch the socket.
    pub watchers: Watchers<Socket>,
    /// A wait point may have the socket as its resident; see `waiting::points`.
    pub is_resident: AtomicBool,
    /// 0: not known; 1: calls wait; 2: calls do not wait.
    nonblocking: AtomicU8,
    /// Which timeouts the socket is known not to have (bits 0 and 1), and how often one may have been set (the bits above).
    timeouts: AtomicU32,
    /// A count of waits without success, from which `wait` decides whether to spin before the next sleep.
    pub patience: AtomicU32,
    /// The number of data bytes in the ring that the socket sends into.
    pub ring_bytes: AtomicU64,
    /// How often that ring had no room for the bytes to send.
    pub fulls: AtomicU32,
    /// The time since which that ring has had no room, in microseconds; 0 if it has room.
    pub full_since: AtomicU64,
    /// How often a direction has returned to the kernel, and when the library may ask for rings after that, in microseconds.
    pub returns: AtomicU32,
    again_at: AtomicU64,
    /// How often the daemon had no room for the socket's report.
    put_offs: AtomicU32,
    /// While the kernel is about to carry again: the number of bytes that it will have carried at the end of the bytes that it carries once
    /// more, behind the wake bytes ([`Direction::wakes_end`]).
    pub resume: AtomicU64,
    /// The socket's state in the cache.
    pub cache: Cache,
    /// The descriptor by which the socket was used last, for callers that have none at hand.
    pub fd: AtomicI32,
}

impl crate::state::table::Entry for Socket {
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
            connection: AtomicU64::new(0),
            fds: AtomicU32::new(0),
            stage: AtomicU8::new(Stage::New as u8),
            attention: AtomicBool::new(false),
            growth: AtomicU8::new(Growth::None as u8),
            is_back: AtomicBool::new(false),
            cookie: AtomicU64::new(0),
            opened_by: AtomicI32::new(0),
            turns: Turns::default(),
            rings: AtomicU64::new(0),
            facts: Lock::new(NO_FACTS),
            loan: Lock::new(None),
            sending: Direction::new(),
            receiving: Direction::new(),
            end: AtomicU8::new(End::None as u8),
            error: AtomicI32::new(0),
            gives_up: AtomicBool::new(false),
            tells_inq: AtomicBool::new(false),
            dead_since: AtomicU64::new(0),
            looked: AtomicU64::new(0),
            asleep: Sleepers::new(),
            taker: AtomicI32::new(0),
            turn: AtomicI32::new(0),
            known: Known::default(),
            has_settled: AtomicBool::new(false),
            delays: [const { AtomicBool::new(false) }; 2],
            family: AtomicU32::new(crate::state::common::ALONE),
            fork: AtomicU32::new(0),
            lowat: Lowat::new(),
            watchers: Watchers::new(),
            is_resident: AtomicBool::new(false),
            nonblocking: AtomicU8::new(0),
            timeouts: AtomicU32::new(0),
            patience: AtomicU32::new(0),
            ring_bytes: AtomicU64::new(0),
            fulls: AtomicU32::new(0),
            full_since: AtomicU64::new(0),
            returns: AtomicU32::new(0),
            again_at: AtomicU64::new(0),
            put_offs: AtomicU32::new(0),
            resume: AtomicU64::new(0),
            cache: Cache::new(),
            fd: AtomicI32::new(-1),
        }
    }

    /// Resets the socket for another descriptor.
    pub fn begin(&self, fd: c_int) {
        self.life.fetch_add(1, Ordering::Relaxed);
        self.connection.fetch_add(1, Ordering::Relaxed);
        self.sending.reset();
        self.receiving.reset();
        self.asleep.clear();
        self.taker.store(0, Ordering::Relaxed);
        self.turn.store(0, Ordering::Relaxed);
        self.family.store(crate::state::common::ALONE, Ordering::Relaxed);
        self.fork.store(0, Ordering::Relaxed);
        self.watchers.clear();
        self.is_resident.store(false, Ordering::Relaxed);
        self.nonblocking.store(0, Ordering::Relaxed);
        self.may_have_timeouts();
        self.lowat.reset();
        self.cache.reset();
        self.renew();
        self.set_stage(Stage::New);
        self.fd.store(fd, Ordering::Relaxed);
        self.fds.store(1, Ordering::Relaxed);
    }

    /// Resets what is known of a connection, so that the socket can get another one. The directions are reset by the caller. What
    /// belongs to the socket, or to threads in calls on it, stays.
    pub fn renew(&self) {
        *self.facts.lock() = NO_FACTS;
        *self.loan.lock() = None;
        self.set_growth(Growth::None);
        self.is_back.store(false, Ordering::Relaxed);
        self.turns.reset();
        self.rings.store(0, Ordering::Relaxed);
        self.end.store(End::None as u8, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.gives_up.store(false, Ordering::Relaxed);
        self.tells_inq.store(false, Ordering::Relaxed);
        self.dead_since.store(0, Ordering::Relaxed);
        self.known.reset();
        self.has_settled.store(false, Ordering::Relaxed);
        self.patience.store(0, Ordering::Relaxed);
        self.ring_bytes.store(0, Ordering::Relaxed);
        self.fulls.store(0, Ordering::Relaxed);
        self.full_since.store(0, Ordering::Relaxed);
        self.returns.store(0, Ordering::Relaxed);
        self.again_at.store(0, Ordering::Relaxed);
        self.put_offs.store(0, Ordering::Relaxed);
    }

    /// Returns the number of the connection that the socket has now. A call remembers it, and ends when the number has changed.
    #[inline]
    pub fn connection(&self) -> u64 {
        self.connection.load(Ordering::Relaxed)
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

    /// Returns whether calls have more to do than to move bytes.
    #[inline]
    pub fn needs_attention(&self) -> bool {
        self.attention.load(Ordering::Acquire)
    }

    /// Clears the attention flag, because both directions have the carrier that they are meant to have.
    pub fn leave_alone(&self) {
        self.attention.store(false, Ordering::Release);
    }

    /// Returns the kernel's cookie of the socket, once the socket has rings.
    pub fn cookie(&self) -> u64 {
        self.cookie.load(Ordering::Relaxed)
    }

    /// Notes that the rings are too small. Calls attend to that from now on.
    #[cold]
    pub fn grow(&self) {
        let (none, wanted) = (Growth::None as u8, Growth::Wanted as u8);
        // ORDER preload.growth: either this thread is the last to set the attention flag, or the thread that clears it sees
        // `Growth::Wanted`, because both write before they read. Pairs with: `Socket::leave_grown`.
        if self.growth.compare_exchange(none, wanted, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            self.attention.store(true, Ordering::SeqCst);
        }
    }

    /// Clears the attention flag because the rings are as large as they should be, unless a thread has just found them too small,
    /// or the kernel carries again.
    pub fn leave_grown(&self) {
        self.attention.store(false, Ordering::SeqCst);
        // ORDER preload.growth: see `Socket::grow`.
        if self.growth.load(Ordering::SeqCst) == Growth::Wanted as u8 || self.has_returned() {
            self.attention.store(true, Ordering::SeqCst);
        }
    }

    /// Returns whether the kernel carries a direction again, after a ring did.
    pub fn has_returned(&self) -> bool {
        self.sending.has_returned() || self.receiving.has_returned()
    }

    /// Notes that the kernel carries a direction again. Calls ask for rings again after a pause, which is longer each time.
    pub fn returned(&self) {
        self.returns.fetch_add(1, Ordering::Relaxed);
        self.pause();
        self.attention.store(true, Ordering::SeqCst);
    }

    /// Begins a pause in which the library does not ask for rings again.
    pub fn pause(&self) {
        let returns = self.returns.load(Ordering::Relaxed);
        let pause = (FIRST_PAUSE << returns.min(16)).min(LONGEST_PAUSE);
        self.again_at.store(clock::now() + pause, Ordering::Relaxed);
    }

    /// Puts the report off, because the daemon had no room for it, if the condition holds while no other thread changes the stage.
    /// The socket is reported again after a pause, which is longer each time.
    pub fn put_off_if(&self, reason: &'static str, condition: impl FnOnce() -> bool) {
        let mut facts = self.facts.lock();
        if !condition() {
            return;
        }
        let times = self.put_offs.fetch_add(1, Ordering::Relaxed);
        self.again_at
            .store(clock::now() + (FIRST_PAUSE << times.min(16)).min(LONGEST_PAUSE), Ordering::Relaxed);
        (facts.report, facts.reason) = (0, reason);
        self.set_stage(Stage::Native);
    }

    /// Returns whether the socket may be reported now.
    pub fn is_report_due(&self) -> bool {
        self.put_offs.load(Ordering::Relaxed) == 0 || clock::now() >= self.again_at.load(Ordering::Relaxed)
    }

    /// Returns whether the library may ask for rings again.
    pub fn is_again_due(&self) -> bool {
        self.has_returned() && clock::now() >= self.again_at.load(Ordering::Relaxed)
    }

    /// Returns the state of the change to larger rings.
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

    /// Returns whether neither the daemon nor another process has heard about the socket from this library. If such a socket is
    /// forgotten, it is simply a connection over TCP that the library does not know.
    pub fn is_plain(&self) -> bool {
        let is_unknown = matches!(self.stage(), Stage::New | Stage::Listening | Stage::Native | Stage::Stays);
        is_unknown && !self.may_be_shared()
    }

    /// Returns whether relatives may have the socket too.
    #[inline]
    pub fn may_be_shared(&self) -> bool {
        self.family.load(Ordering::Relaxed) != crate::state::common::ALONE
    }

    /// Returns whether the kernel carries the connection, and it may change over, here or in a relative.
    pub fn may_change(&self) -> bool {
        match self.stage() {
            Stage::Native | Stage::Reported => true,
            Stage::Stays => self.may_be_shared(),
            Stage::New | Stage::Listening | Stage::Joined => false,
        }
    }

    /// Notes that the program may have set SO_RCVTIMEO or SO_SNDTIMEO.
    pub fn may_have_timeouts(&self) {
        let next = |timeouts: u32| Some((timeouts | 0b11).wrapping_add(1));
        let _ = self.timeouts.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next);
    }

    /// Returns the timeout in this option. `ask` asks the kernel for it, once for all calls as long as there is none.
    pub fn timeout(&self, option: c_int, ask: impl FnOnce() -> Option<Duration>) -> Option<Duration> {
        let bit = if option == libc::SO_RCVTIMEO { 0b01 } else { 0b10 };
        let before = self.timeouts.load(Ordering::Acquire);
        // Whoever else has the socket may set it too.
        if self.may_be_shared() || self.has(Fact::Passed) {
            return ask();
        }
        if before & bit != 0 {
            return None;
        }
        let timeout = ask();
        if timeout.is_none() {
            // Fails if it was set meanwhile.
            let _ = self.timeouts.compare_exchange(before, before | bit, Ordering::AcqRel, Ordering::Relaxed);
        }
        timeout
    }

    /// Returns what the processes share that have the socket, if there are several.
    fn shared(&self) -> Option<&'static Known> {
        self.sending.common().map(|common| &common.known)
    }

    /// Returns whether a fact about the connection is known, in this process or a relative.
    #[inline]
    pub fn has(&self, fact: Fact) -> bool {
        self.known.has(fact) || self.shared().is_some_and(|shared| shared.has(fact))
    }

    /// Notes a fact, for relatives too. Returns whether it is new.
    pub fn note(&self, fact: Fact) -> bool {
        let is_new = self.known.note(fact);
        // ORDER preload.known: see `family::share`.
        fence(Ordering::SeqCst);
        self.shared().is_none_or(|shared| shared.note(fact)) && is_new
    }

    /// Takes back a fact that this process has noted and that has turned out wrong.
    pub fn forget(&self, fact: Fact) {
        self.known.forget(fact);
        if let Some(shared) = self.shared() {
            shared.forget(fact);
        }
    }

    /// Returns the number of calls that have reported that there is no room. Those of relatives count too, because the kernel tells all
    /// that wait when there is room again.
    pub fn calls_without_room(&self) -> &AtomicU32 {
        &self.shared().unwrap_or(&self.known).without_room
    }

    /// Returns whether the socket has rings, so that the kernel may not be the only carrier of its directions.
    #[inline]
    pub fn is_joined(&self) -> bool {
        self.stage() == Stage::Joined
    }

    /// Returns whether the kernel has not been asked for a while whether the connection has ended. If so, the caller is to ask now.
    pub fn is_look_due(&self) -> bool {
        let now = clock::now();
        let due = now.saturating_sub(self.looked.load(Ordering::Relaxed)) >= LOOK;
        if due {
            self.looked.store(now, Ordering::Relaxed);
        }
        due
    }

    /// Returns how the kernel's connection has ended.
    pub fn end(&self) -> End {
        match self.end.load(Ordering::Acquire) {
            0 => End::None,
            1 => End::Fin,
            2 => End::Reset,
            _ => End::Lost,
        }
    }

    /// Records an end that was seen. After an error, the kernel reports an end in order, but the recorded error stays.
    pub fn set_end(&self, end: End) {
        self.end.fetch_max(end as u8, Ordering::AcqRel);
    }

    /// Records that the connection has ended with this error.
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

    /// Returns the error that SO_ERROR would give the program if the kernel had not given it to this library already.
    pub fn take_error(&self) -> Option<Errno> {
        match self.end() {
            End::Lost => self.tell(),
            End::Reset if !self.has(Fact::ToldReset) => Some(Errno(self.error.swap(0, Ordering::Relaxed))),
            _ => None,
        }
    }

    /// Returns the error with which the kernel has given the connection up, unless the program was told.
    pub fn untold(&self) -> Option<Errno> {
        let is_untold = self.end() == End::Lost && !self.has(Fact::ToldReset);
        is_untold.then(|| Errno(self.error.load(Ordering::Relaxed)))
    }

    /// Returns the same error, and records that the program is told now.
    pub fn tell(&self) -> Option<Errno> {
        self.untold().filter(|_| self.note(Fact::ToldReset))
    }

    /// Records whether calls wait, as the program has set it; `None` if that is not known.
    pub fn set_nonblocking(&self, nonblocking: Option<bool>) {
        self.nonblocking.store(nonblocking.map_or(0, |on| 1 + u8::from(on)), Ordering::Relaxed);
    }

    /// Returns whether calls do not wait. That belongs to the open file description, so a relative may have changed it; then the kernel
    /// is asked.
    pub fn is_nonblocking(&self, fd: c_int) -> bool {
        if self.may_be_shared() && !crate::system::confined::is_confined() {
            self.set_nonblocking(None);
        }
        self.seems_nonblocking(fd)
    }

    /// Returns whether calls do not wait, as far as this process knows.
    #[inline]
    pub fn seems_nonblocking(&self, fd: c_int) -> bool {
        match self.nonblocking.load(Ordering::Relaxed) {
            0 => {
                let on = crate::system::kernel::is_nonblocking(fd);
                self.set_nonblocking(Some(on));
                on
            }
            known => known == 2,
        }
    }

    /// Records that the socket is an end of a connection from now on.
    pub fn connected(&self, role: Role, connecting: Connecting) {
        {
            let mut facts = self.facts.lock();
            (facts.role, facts.connecting, facts.begun) = (role, connecting, connecting.after);
            facts.number = CONNECTIONS.fetch_add(1, Ordering::Relaxed) + 1;
        }
        self.set_stage(Stage::Native);
    }

    /// Leaves the socket on TCP for this reason if the condition holds while no other thread changes the stage. Returns whether it
    /// does; then the caller reports it.
    pub fn stays_if(&self, reason: &'static str, condition: impl FnOnce() -> bool) -> bool {
        // A thread that brings rings, reports or closes takes the same lock first.
        let mut facts = self.facts.lock();
        if !condition() {
            return false;
        }
        facts.reason = reason;
        self.set_stage(Stage::Stays);
        true
    }
}

/// The number of connections that this process has had. They are numbered from 1.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

const NO_FACTS: Facts = Facts {
    role: Role::Acceptor,
    connecting: Connecting { before: Duration::ZERO, after: Duration::ZERO },
    begun: Duration::ZERO,
    report: 0,
    reported: 0,
    mismatches: 0,
    reason: "",
    meeting: None,
    channels: 0,
    channel: 0,
    segment: "",
    number: 0,
    addresses: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;

    /// A thread that brings rings, and one whose call leaves the socket on TCP: one of them is first, and the other one sees that.
    #[test]
    fn no_call_leaves_a_socket_on_tcp_that_gets_its_rings() {
        const ROUNDS: usize = 20_000;
        let socket: &'static Socket = Box::leak(Box::new(Socket::new()));
        let (begin, end) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            let joins = scope.spawn(|| {
                let join = |_| {
                    begin.wait();
                    let facts = socket.facts.lock();
                    let joins = socket.stage() == Stage::Reported;
                    if joins {
                        socket.set_stage(Stage::Joined);
                    }
                    drop(facts);
                    end.wait();
                    joins
                };
                (0..ROUNDS).map(join).collect::<Vec<_>>()
            });
            let stages = (0..ROUNDS).map(|_| {
                socket.set_stage(Stage::Reported);
                begin.wait();
                crate::daemon::session::stays(socket, "a call");
                end.wait();
                socket.stage()
            });
            let stages: Vec<_> = stages.collect();
            for (joins, stage) in joins.join().unwrap().into_iter().zip(stages) {
                assert_eq!(stage, if joins { Stage::Joined } else { Stage::Stays });
            }
        });
    }
}
