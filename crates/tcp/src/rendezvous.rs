//! Finding the two ends of a connection among what many kernels report.
//!
//! Programs report their sockets, each to its own kernel's daemon, which adds what the kernel says. The host's daemon keeps the
//! reports here until both ends of a connection have come. Reports of a guest are that guest's claims, and a guest may claim
//! anything; so may a user who has made a network namespace. Two sockets are joined under these rules only:
//!
//! | the two sockets are in | mirrored addresses and |
//! |---|---|
//! | one network namespace | nothing more: there they name one connection |
//! | two namespaces of one kernel | a proof, addresses that mean the same in both, and neither namespace is a user's |
//! | two kernels | a proof, and addresses that mean the same in both |
//!
//! A socket for which two others would do is joined with nobody. Within a kernel, a proof does not tell two connections apart that have the
//! same addresses and ports in different namespaces and were made within some milliseconds, as in copies of one test network. So two
//! sockets of one kernel that are joined by proof wait for [`GRACE`], in which the ends of the other connection are reported too.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound;
use std::time::Duration;

use crate::identity::{Identity, Owner};
use crate::proof::{Clock, Connecting, SynTime};

/// Reports that are kept for a member. One more pushes out the oldest of that user of the member who has most.
pub const REPORTS_PER_MEMBER: usize = 4096;

/// Reports of one connection that a member may have: a kernel has one in each namespace. One more pushes the oldest of them out.
const SAME_ADDRESSES: usize = 4;

/// So many wrong proofs between two accounts (users of members) within a minute, and they are not joined for ten.
const WRONG_PROOFS: u32 = 8;
/// How long two sockets in different namespaces of a kernel wait for others that would do.
pub const GRACE: Duration = Duration::from_millis(50);
const MINUTE: Duration = Duration::from_secs(60);
const DISTRUST: Duration = Duration::from_secs(600);

/// Who made the connection, with what proves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Called `connect`.
    Connector {
        /// When.
        connecting: Connecting,
        /// The clock of its timestamps, if it has one.
        clock: Option<Clock>,
    },
    /// Accepted it.
    Acceptor {
        /// The clock in the SYN, if that was kept.
        syn: Option<SynTime>,
    },
}

/// A socket, as its kernel's daemon reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whose kernel it is.
    pub member: u32,
    /// The user there at whose expense it is kept; who cannot be believed about its users has one only.
    pub user: u32,
    /// Which connection.
    pub identity: Identity,
    /// Whose network namespace it is in.
    pub owner: Owner,
    /// Which end.
    pub side: Side,
}

/// A member, and a user there.
type Account = (u32, u32);

/// A socket's name among all: its member, and its cookie there.
pub type Socket = (u32, u64);

impl Report {
    /// The socket.
    pub fn socket(&self) -> Socket {
        (self.member, self.identity.cookie)
    }

    fn account(&self) -> Account {
        (self.member, self.user)
    }

    /// What the two sockets have to prove beside mirrored addresses.
    fn relation(&self, other: &Self) -> Relation {
        let one_kernel = self.member == other.member;
        if one_kernel && self.identity.namespace == other.identity.namespace {
            Relation::Same
        } else if self.identity.is_within_a_kernel()
            || (one_kernel && (self.owner == Owner::User || other.owner == Owner::User))
        {
            Relation::None
        } else {
            Relation::ByProof { one_kernel }
        }
    }

    /// Whether one of the two has sent the SYN that the other has received. `None`: one of them has nothing to show.
    fn proves(&self, other: &Self) -> Option<bool> {
        match (self.side, other.side) {
            (Side::Connector { connecting, clock: Some(clock) }, Side::Acceptor { syn: Some(syn) })
            | (Side::Acceptor { syn: Some(syn) }, Side::Connector { connecting, clock: Some(clock) }) => {
                Some(clock.proves(connecting, syn))
            }
            _ => None,
        }
    }

    fn are_both_ends(&self, other: &Self) -> bool {
        matches!(self.side, Side::Connector { .. }) != matches!(other.side, Side::Connector { .. })
            && self.identity.mirrors(&other.identity)
            && self.socket() != other.socket()
    }
}

#[derive(PartialEq)]
enum Relation {
    /// One namespace.
    Same,
    /// A kernel may use the same clock for the same addresses in all of its namespaces.
    ByProof { one_kernel: bool },
    /// Never.
    None,
}

/// The reports whose other end has not come. `T` is what the caller remembers with each.
#[derive(Debug)]
pub struct Rendezvous<T> {
    reports: HashMap<Socket, Entry<T>>,
    /// By local and remote address, oldest first.
    addresses: HashMap<(SocketAddr, SocketAddr), Vec<Socket>>,
    /// By account, in the order in which they came.
    order: BTreeMap<(Account, u64), Socket>,
    /// All, in that order.
    numbers: BTreeMap<u64, Socket>,
    counts: BTreeMap<Account, usize>,
    next: u64,
    suspicions: HashMap<(Account, Account), Suspicion>,
    /// Numbers of two reports that are joined at this time, unless a third one comes that would do.
    engaged: VecDeque<(Duration, [u64; 2])>,
}

#[derive(Debug)]
struct Entry<T> {
    report: Report,
    number: u64,
    what: T,
}

#[derive(Debug)]
struct Suspicion {
    since: Duration,
    wrong: u32,
    /// Until then the two are not joined.
    until: Duration,
}

/// What came of a report.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// The other end has not come; others may have been pushed out.
    Waits {
        /// What was remembered with those that will not be joined any more.
        dropped: Vec<T>,
    },
    /// The two ends of a connection, this report's first. Both are forgotten.
    Joined(T, T),
    /// More than one socket would do. All of them are forgotten, and not to be joined.
    Ambiguous(Vec<T>),
}

impl<T> Default for Rendezvous<T> {
    fn default() -> Self {
        Self {
            reports: HashMap::new(),
            addresses: HashMap::new(),
            order: BTreeMap::new(),
            numbers: BTreeMap::new(),
            counts: BTreeMap::new(),
            next: 1,
            suspicions: HashMap::new(),
            engaged: VecDeque::new(),
        }
    }
}

impl<T> Rendezvous<T> {
    /// Reports that wait.
    pub fn len(&self) -> usize {
        self.reports.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.reports.is_empty()
    }

    /// The socket that had the addresses of this one in its namespace before it. One socket at a time has them there, so the earlier
    /// one is gone, and nobody has said so yet: it is to be withdrawn before this one is reported.
    pub fn predecessor(&self, report: &Report) -> Option<Socket> {
        let Identity { local, remote, namespace, cookie } = report.identity;
        self.addresses.get(&(local, remote))?.iter().copied().find(|socket| {
            let is_in_namespace = self.reports[socket].report.identity.namespace == namespace;
            socket.0 == report.member && socket.1 != cookie && is_in_namespace
        })
    }

    /// Those that wait and have come after the one with this number, oldest first, each with its number. Numbers begin with 1.
    pub fn waiting(&self, after: u64) -> impl Iterator<Item = (u64, &Report, &T)> {
        self.numbers.range((Bound::Excluded(after), Bound::Unbounded)).filter_map(|(number, socket)| {
            self.reports.get(socket).map(|entry| (*number, &entry.report, &entry.what))
        })
    }

    /// A report has come at `now`, a time that only grows. An earlier one of the same socket is replaced. The work is bounded by
    /// the number of members.
    pub fn report(&mut self, now: Duration, report: Report, what: T) -> Outcome<T> {
        let mut dropped: Vec<T> = self.withdraw(report.socket()).into_iter().collect();
        let others = self.counterparts(now, &report);
        if let [other] = others[..] {
            // Somebody who was not believed when it came may wait for the other one too, and be believed by now.
            let theirs = self.reports[&other].report;
            let mut rivals = self.counterparts(now, &theirs);
            if rivals.is_empty() && report.relation(&theirs) == (Relation::ByProof { one_kernel: true }) {
                let number = self.reports[&other].number;
                dropped.extend(self.make_room(&report));
                self.engaged.push_back((now + GRACE, [self.next, number]));
                self.insert(report, what);
                return Outcome::Waits { dropped };
            }
            if rivals.is_empty() {
                return match self.withdraw(other) {
                    Some(theirs) => Outcome::Joined(what, theirs),
                    None => Outcome::Waits { dropped },
                };
            }
            rivals.push(other);
            let rivals = rivals.into_iter().filter_map(|socket| self.withdraw(socket));
            return Outcome::Ambiguous([what].into_iter().chain(rivals).collect());
        }
        if !others.is_empty() {
            let mut all = vec![what];
            all.extend(others.into_iter().filter_map(|socket| self.withdraw(socket)));
            return Outcome::Ambiguous(all);
        }
        dropped.extend(self.make_room(&report));
        self.insert(report, what);
        Outcome::Waits { dropped }
    }

    /// When two of those that wait may be joined, if there are such: a time as of [`Rendezvous::report`].
    pub fn settles_at(&self) -> Option<Duration> {
        self.engaged.front().map(|(at, _)| *at)
    }

    /// Two that have waited for others that would do, and none has come. Both are forgotten. `None`: there are no more at `now`.
    pub fn settle(&mut self, now: Duration) -> Option<(T, T)> {
        while self.settles_at().is_some_and(|at| at <= now) {
            let (_, numbers) = self.engaged.pop_front()?;
            let [Some(one), Some(other)] = numbers.map(|number| self.numbers.get(&number).copied()) else {
                continue;
            };
            let (ours, theirs) = (self.reports[&one].report, self.reports[&other].report);
            if self.counterparts(now, &ours) == [other]
                && self.counterparts(now, &theirs) == [one]
                && let (Some(one), Some(other)) = (self.withdraw(one), self.withdraw(other))
            {
                return Some((one, other));
            }
        }
        None
    }

    /// Forgets a socket; returns what was remembered with it.
    pub fn withdraw(&mut self, socket: Socket) -> Option<T> {
        let Entry { report, number, what } = self.reports.remove(&socket)?;
        self.order.remove(&(report.account(), number));
        self.numbers.remove(&number);
        let key = (report.identity.local, report.identity.remote);
        if let Some(sockets) = self.addresses.get_mut(&key) {
            sockets.retain(|other| *other != socket);
            if sockets.is_empty() {
                self.addresses.remove(&key);
            }
        }
        if let Some(count) = self.counts.get_mut(&report.account()) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&report.account());
            }
        }
        Some(what)
    }

    /// Forgets all of a member, whose kernel has gone.
    pub fn withdraw_member(&mut self, member: u32) -> Vec<T> {
        let all = ((member, 0), 0)..=((member, u32::MAX), u64::MAX);
        let sockets: Vec<_> = self.order.range(all).map(|(_, socket)| *socket).collect();
        self.suspicions.retain(|(one, other), _| one.0 != member && other.0 != member);
        sockets.into_iter().filter_map(|socket| self.withdraw(socket)).collect()
    }

    /// Those that may be the other end.
    fn counterparts(&mut self, now: Duration, report: &Report) -> Vec<Socket> {
        let key = (report.identity.remote, report.identity.local);
        let mut found = Vec::new();
        for socket in self.addresses.get(&key).into_iter().flatten() {
            let other = &self.reports[socket].report;
            if !report.are_both_ends(other) {
                continue;
            }
            let joins = match report.relation(other) {
                Relation::Same => true,
                Relation::None => false,
                Relation::ByProof { .. } => {
                    let (ours, theirs) = (report.account(), other.account());
                    let pair = (ours.min(theirs), ours.max(theirs));
                    let trusted = self.suspicions.get(&pair).is_none_or(|s| now >= s.until);
                    match report.proves(other) {
                        Some(true) => trusted,
                        Some(false) => {
                            suspect(&mut self.suspicions, pair, now);
                            false
                        }
                        None => false,
                    }
                }
            };
            if joins {
                found.push(*socket);
            }
        }
        found
    }

    /// Pushes out what is too much with one more.
    fn make_room(&mut self, report: &Report) -> Vec<T> {
        let key = (report.identity.local, report.identity.remote);
        let same = self.addresses.get(&key).into_iter().flatten();
        let same: Vec<_> = same.copied().filter(|(member, _)| *member == report.member).collect();
        let mut victims = Vec::new();
        if same.len() >= SAME_ADDRESSES {
            victims.push(same[0]);
        } else {
            victims.extend(self.oldest_of_who_has_most(report));
        }
        victims.into_iter().filter_map(|socket| self.withdraw(socket)).collect()
    }

    /// The report that makes room for another one, if there is none. So nobody is pushed out by users who have more.
    fn oldest_of_who_has_most(&self, report: &Report) -> Option<Socket> {
        let member = report.member;
        let users = self.counts.range((member, 0)..=(member, u32::MAX));
        if users.clone().map(|(_, count)| count).sum::<usize>() < REPORTS_PER_MEMBER {
            return None;
        }
        let (account, _) = users.max_by_key(|(account, count)| (**count, **account == report.account()))?;
        self.order.range((*account, 0)..=(*account, u64::MAX)).next().map(|(_, socket)| *socket)
    }

    fn insert(&mut self, report: Report, what: T) {
        let (socket, number) = (report.socket(), self.next);
        self.next += 1;
        self.order.insert((report.account(), number), socket);
        self.numbers.insert(number, socket);
        self.addresses.entry((report.identity.local, report.identity.remote)).or_default().push(socket);
        *self.counts.entry(report.account()).or_default() += 1;
        self.reports.insert(socket, Entry { report, number, what });
    }
}

/// Counts a wrong proof between two accounts. Neither can keep a third one from being believed.
fn suspect(suspicions: &mut HashMap<(Account, Account), Suspicion>, pair: (Account, Account), now: Duration) {
    let suspicion =
        suspicions.entry(pair).or_insert(Suspicion { since: now, wrong: 0, until: Duration::ZERO });
    if now.saturating_sub(suspicion.since) > MINUTE {
        (suspicion.since, suspicion.wrong) = (now, 0);
    }
    suspicion.wrong += 1;
    if suspicion.wrong >= WRONG_PROOFS {
        suspicion.until = now + DISTRUST;
    }
}

#[cfg(test)]
mod tests;
