//! Descriptors that programs send. A program can hold the locks of what it sends, and so can make any call on it block for ever,
//! against all signals: a thread inside `send` on a TCP socket, or inside `recv` on a Unix stream socket, holds the socket's
//! lock while its buffer is a page that a file system of the program's own (FUSE) does not deliver. Closing may block too: for
//! a file on such a file system, and for a socket with `SO_LINGER`. So none of these descriptors ever gets into the daemon:
//!
//! - The daemon looks at a packet without taking it out of the connection's queue, and leaves it there if it carries
//!   descriptors ([`PacketSocket::hear`](crate::packet::PacketSocket::hear)).
//! - A **helper**, a process of its own for each user, takes such a packet, examines the descriptor, tells the daemon plain
//!   facts, and closes it.
//! - A helper that has not answered for ten seconds is killed, and not waited for. The connection whose packet it had ends; the
//!   other packets are given to another helper. While four helpers of a user that were killed have not ended, the daemon
//!   takes no descriptors from that user.
//! - A helper ends with the last connection of its user.

mod facts;
pub mod helper;
mod loan;

use crate::descriptors::is_kept_for_root;
use crate::poller::{Interest, Poller};
use crate::spawned::{Spawned, own_program};
pub use facts::Syns;
use ginnel_fdpass::{RecvFlags, SendFlags, receive, send};
use ginnel_layout::wire::{ErrorCode, SocketFacts, SocketReport, StaysReason};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tracing::{debug, warn};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// How long a helper may take for one packet. An honest program's takes microseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of helpers of one user that were killed and do not end, from which on no more are started.
const STUCK: usize = 4;
/// The time after which a helper that was killed counts as stuck. A busy machine needs some time to end a process.
const ENDING: Duration = Duration::from_secs(1);
/// The number of helpers of one user that were killed and have not ended, however short the time, from which on no more are started.
const MOST_ENDING: usize = 32;
/// The packets that a helper may have at a time. Each holds a connection, so this must fit into a socket's queue.
const WINDOW: usize = 16;

/// Why a connection ends whose descriptor holds up a helper.
const HELD_UP: &str = "a descriptor that this user has sent cannot be examined or closed, because that blocks (FUSE?): make the file \
     system answer, or unmount it";
/// Why a connection ends for whose descriptor there is no helper.
const NO_HELPER: &str =
    "a descriptor cannot be examined, because the daemon cannot start a helper process: its log says why";

/// Why a connection ends whose report has more descriptors than one.
const TOO_MANY: &str = "a report of a socket carries exactly one descriptor";

/// What a helper does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(transparent)]
pub struct Task(u64);

impl Task {
    /// Find out what the kernel says about the socket.
    pub const EXAMINE: Self = Self(1);
    /// Only close what the packet carries.
    pub const DISCARD: Self = Self(2);
}

/// A message to a helper. The connection goes with it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Request {
    serial: u64,
    task: Task,
}

/// The answer of a helper.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Answer {
    serial: u64,
    outcome: u32,
    /// Why the connection stays on TCP, after [`STAYS`].
    reason: u32,
    /// The facts; after [`STAYS`] only the report in them.
    facts: SocketFacts,
}

/// The outcomes: nothing was examined, the facts are known, the reason why not is known, or there was not exactly one descriptor.
const NOTHING: u32 = 0;
const FACTS: u32 = 1;
const STAYS: u32 = 2;
const NOT_ONE: u32 = 3;

const REQUEST: usize = size_of::<Request>();
const ANSWER: usize = size_of::<Answer>();

impl Answer {
    fn new(serial: u64, report: SocketReport, found: Found) -> Self {
        let only_report = SocketFacts { report, ..SocketFacts::new_zeroed() };
        let (outcome, reason, facts) = match found {
            Found::Nothing => (NOTHING, 0, only_report),
            Found::Facts(facts) => (FACTS, 0, facts),
            Found::Stays(reason) => (STAYS, reason.0, only_report),
            Found::NotOne => (NOT_ONE, 0, only_report),
        };
        Self { serial, outcome, reason, facts }
    }

    fn outcome(self) -> Outcome {
        let report = self.facts.report;
        match self.outcome {
            FACTS => Outcome::Found(report, Ok(self.facts)),
            STAYS => Outcome::Found(report, Err(StaysReason(self.reason))),
            NOT_ONE => Outcome::Ended(ErrorCode::PROTOCOL, TOO_MANY),
            _ => Outcome::Discarded,
        }
    }
}

/// What a helper has found in a packet.
#[derive(Clone, Copy, Debug)]
enum Found {
    /// Nothing was to be found.
    Nothing,
    /// What the kernel says about the socket.
    Facts(SocketFacts),
    /// The socket stays on TCP.
    Stays(StaysReason),
    /// There is not exactly one descriptor.
    NotOne,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// The packet is gone, and this is known about the socket that it reported.
    Found(SocketReport, Result<SocketFacts, StaysReason>),
    /// The packet is gone.
    Discarded,
    /// The connection must end, for this reason.
    Ended(ErrorCode, &'static str),
}

/// A packet that lies in the queue of a connection.
#[derive(Clone, Copy, Debug)]
struct Packet<Id> {
    connection: Id,
    task: Task,
}

/// A packet that a helper has.
#[derive(Debug)]
struct Given<Id> {
    serial: u64,
    /// `None` if the connection has ended.
    packet: Option<Packet<Id>>,
    since: Instant,
}

/// A helper that serves.
#[derive(Debug)]
struct Helper<Id> {
    uid: u32,
    socket: OwnedFd,
    process: Spawned,
    given: VecDeque<Given<Id>>,
}

/// Returns the command that starts a helper.
pub fn own_helper(uid: u32) -> Command {
    own_program(["helper", "--user", &uid.to_string()])
}

/// The packets of one user for which no helper has had room.
type Waiting<Id> = VecDeque<Packet<Id>>;

/// All helpers. `Id` is the number of a connection.
#[derive(Debug)]
pub struct Strangers<Id> {
    /// Makes a token for the poller from a number.
    token: fn(u64) -> u64,
    /// Makes the command that starts a helper for a user.
    command: fn(u32) -> Command,
    /// The helpers, by the tokens' numbers; the end of the process has the number after that.
    helpers: BTreeMap<u64, Helper<Id>>,
    of_user: BTreeMap<u32, u64>,
    /// Helpers that were killed and have not ended: their users, and since when.
    ending: BTreeMap<u64, (u32, Instant, Spawned)>,
    waiting: BTreeMap<u32, Waiting<Id>>,
    outcomes: Vec<(Id, Outcome)>,
    numbers: u64,
    serials: u64,
}

impl<Id: Copy + Ord> Strangers<Id> {
    /// Starts without helpers. `token` makes tokens for the poller, and `command` a command that runs [`helper::run`] for a user.
    pub fn new(token: fn(u64) -> u64, command: fn(u32) -> Command) -> Self {
        Self {
            token,
            command,
            helpers: BTreeMap::new(),
            of_user: BTreeMap::new(),
            ending: BTreeMap::new(),
            waiting: BTreeMap::new(),
            outcomes: Vec::new(),
            numbers: 0,
            serials: 0,
        }
    }

    /// Starts helpers by another command, because a test's own program is not this one.
    #[cfg(test)]
    pub fn start_by(&mut self, command: fn(u32) -> Command) {
        self.command = command;
    }

    /// Gives a helper the packet at the head of a connection's queue. [`Strangers::take_outcomes`] returns what became of it;
    /// until then the daemon must not read from the connection. `fd_of` returns the descriptor of a connection.
    pub fn give<'a>(
        &mut self,
        poller: &Poller,
        uid: u32,
        connection: Id,
        task: Task,
        fd_of: impl Fn(Id) -> Option<BorrowedFd<'a>>,
    ) {
        self.waiting.entry(uid).or_default().push_back(Packet { connection, task });
        self.hand_out(poller, uid, fd_of);
    }

    /// Returns whether so many helpers of a user are stuck that no more are started.
    fn is_held_up_by(&self, uid: u32) -> bool {
        let ending = self.ending.values().filter(|(user, ..)| *user == uid);
        let (mut all, mut stuck) = (0, 0);
        for (_, since, _) in ending {
            all += 1;
            stuck += usize::from(since.elapsed() >= ENDING);
        }
        stuck >= STUCK || all >= MOST_ENDING
    }

    /// Hands out packets of a user that wait, as far as the helper has room.
    fn hand_out<'a>(&mut self, poller: &Poller, uid: u32, fd_of: impl Fn(Id) -> Option<BorrowedFd<'a>>) {
        while let Some(packet) = self.waiting.get_mut(&uid).and_then(Waiting::pop_front) {
            let Some(connection) = fd_of(packet.connection) else { continue };
            let number = match self.of_user.get(&uid).copied() {
                Some(number) => number,
                None => match self.start(poller, uid) {
                    Ok(number) => number,
                    Err(error) => {
                        warn!(uid, %error, "no helper can be started for what this user's programs send");
                        self.outcomes.push((packet.connection, Outcome::Ended(ErrorCode::LIMIT, NO_HELPER)));
                        continue;
                    }
                },
            };
            let Some(helper) = self.helpers.get_mut(&number) else { continue };
            if helper.given.len() >= WINDOW {
                self.waiting.entry(uid).or_default().push_front(packet);
                break;
            }
            self.serials += 1;
            let request = Request { serial: self.serials, task: packet.task };
            match send(helper.socket.as_fd(), request.as_bytes(), &[connection], SendFlags::DONTWAIT) {
                Ok(_) => helper.given.push_back(Given {
                    serial: self.serials,
                    packet: Some(packet),
                    since: Instant::now(),
                }),
                // It has just ended. The event of that comes, and then the next helper gets this packet.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.waiting.entry(uid).or_default().push_front(packet);
                    break;
                }
                // Only a lack of resources does this to a socket with room.
                Err(errno) => {
                    warn!(uid, %errno, "a helper cannot be given what this user's programs send");
                    self.outcomes.push((packet.connection, Outcome::Ended(ErrorCode::LIMIT, NO_HELPER)));
                }
            }
        }
        if self.waiting.get(&uid).is_some_and(VecDeque::is_empty) {
            self.waiting.remove(&uid);
        }
    }

    fn start(&mut self, poller: &Poller, uid: u32) -> io::Result<u64> {
        if self.is_held_up_by(uid) {
            return Err(io::Error::other(format!("{STUCK} of them are stuck")));
        }
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        if uid != 0 && is_kept_for_root(&near) {
            return Err(Errno::MFILE.into());
        }
        let mut command = (self.command)(uid);
        command.stdin(Stdio::from(far)).stdout(Stdio::null());
        let number = self.numbers;
        let process = Spawned::start_with(&mut command, poller, (self.token)(number + 1))?;
        if let Err(error) = poller.add(&near, (self.token)(number), Interest::READ) {
            // It ends with its socket.
            self.ending.insert(number, (uid, Instant::now(), process));
            self.numbers += 2;
            return Err(error);
        }
        self.numbers += 2;
        debug!(uid, pid = process.id(), "helper started");
        self.helpers.insert(number, Helper { uid, socket: near, process, given: VecDeque::new() });
        self.of_user.insert(uid, number);
        Ok(number)
    }

    /// Kills a helper. Packets that it has wait for the next one, in their order.
    fn end(&mut self, poller: &Poller, number: u64) {
        let Some(helper) = self.helpers.remove(&number) else { return };
        let Helper { uid, socket, mut process, given } = helper;
        poller.remove(&socket);
        self.of_user.remove(&uid);
        process.kill();
        self.ending.insert(number, (uid, Instant::now(), process));
        let left = given.into_iter().filter_map(|given| given.packet);
        let waiting = self.waiting.entry(uid).or_default();
        left.rev().for_each(|packet| waiting.push_front(packet));
        if waiting.is_empty() {
            self.waiting.remove(&uid);
        }
    }

    /// Forgets a helper whose process has ended.
    fn bury(&mut self, poller: &Poller, number: u64) {
        if let Some((.., process)) = self.ending.remove(&number) {
            process.bury(poller);
        }
    }

    /// Handles an event with the token of this number.
    pub fn ready<'a>(&mut self, poller: &Poller, number: u64, fd_of: impl Fn(Id) -> Option<BorrowedFd<'a>>) {
        let (number, has_ended) = (number & !1, number & 1 == 1);
        let Some(helper) = self.helpers.get_mut(&number) else {
            return if has_ended {
                self.bury(poller, number)
            };
        };
        let uid = helper.uid;
        // What it has answered counts, whatever became of it.
        self.hear(poller, number);
        if has_ended {
            // Nobody has told it to end. If a packet was the reason, its connection ends.
            warn!(uid, "a helper has ended by itself");
            self.blame(number);
            self.end(poller, number);
            self.bury(poller, number);
        }
        self.hand_out(poller, uid, fd_of);
    }

    /// Ends the connection whose packet a helper has now.
    fn blame(&mut self, number: u64) {
        let Some(helper) = self.helpers.get_mut(&number) else { return };
        if let Some(first) = helper.given.pop_front().and_then(|given| given.packet) {
            self.outcomes.push((first.connection, Outcome::Ended(ErrorCode::LIMIT, HELD_UP)));
        }
    }

    /// Takes the answers of a helper.
    fn hear(&mut self, poller: &Poller, number: u64) {
        let Some(helper) = self.helpers.get_mut(&number) else { return };
        let mut bytes = [0; ANSWER];
        while let Ok(got) = receive(helper.socket.as_fd(), &mut bytes, 0, RecvFlags::DONTWAIT) {
            let Ok(answer) = Answer::read_from_bytes(&bytes[..got.len.min(ANSWER)]) else {
                // The event of its end comes, too.
                poller.remove(&helper.socket);
                return;
            };
            if helper.given.front().is_none_or(|given| given.serial != answer.serial) {
                continue;
            }
            let packet = helper.given.pop_front().and_then(|given| given.packet);
            if let Some(next) = helper.given.front_mut() {
                next.since = Instant::now();
            }
            if let Some(packet) = packet {
                self.outcomes.push((packet.connection, answer.outcome()));
            }
        }
    }

    /// Returns what became of packets, each once.
    pub fn take_outcomes(&mut self) -> Vec<(Id, Outcome)> {
        std::mem::take(&mut self.outcomes)
    }

    /// Notes that a connection has ended. `last` says whether it was the last one of its user.
    pub fn hung_up(&mut self, poller: &Poller, uid: u32, connection: Id, last: bool) {
        if let Some(waiting) = self.waiting.get_mut(&uid) {
            waiting.retain(|packet| packet.connection != connection);
            if waiting.is_empty() {
                self.waiting.remove(&uid);
            }
        }
        let Some(&number) = self.of_user.get(&uid) else { return };
        let Some(helper) = self.helpers.get_mut(&number) else { return };
        for given in &mut helper.given {
            given.packet.take_if(|packet| packet.connection == connection);
        }
        if last {
            self.end(poller, number);
        }
    }

    /// Kills the helpers that have not answered in time.
    pub fn end_stuck<'a>(&mut self, poller: &Poller, fd_of: impl Fn(Id) -> Option<BorrowedFd<'a>>) {
        if self.until_stuck().is_none_or(|left| !left.is_zero()) {
            return;
        }
        for number in self.helpers.keys().copied().collect::<Vec<_>>() {
            // This daemon may have slept, and the answers lie there.
            self.hear(poller, number);
            let Some(helper) = self.helpers.get(&number) else { continue };
            if helper.given.front().is_none_or(|first| first.since.elapsed() < PATIENCE) {
                continue;
            }
            let uid = helper.uid;
            warn!(uid, pid = helper.process.id(), "a helper is killed: {HELD_UP}");
            self.blame(number);
            self.end(poller, number);
            self.hand_out(poller, uid, &fd_of);
        }
    }

    /// Returns the time until [`Strangers::end_stuck`] has something to do.
    pub fn until_stuck(&self) -> Option<Duration> {
        let oldest = self.helpers.values().filter_map(|helper| helper.given.front()).map(|given| given.since);
        oldest.min().map(|since| PATIENCE.saturating_sub(since.elapsed()))
    }
}

#[cfg(test)]
mod tests;
