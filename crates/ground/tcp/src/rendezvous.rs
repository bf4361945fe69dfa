//! Finds the two ends of a connection among the sockets that many kernels report.
//!
//! Each program reports its sockets to its own kernel's daemon, which adds the kernel's facts about them. The host's daemon keeps
//! the reports here until both ends of a connection have been reported. The reports of a guest are that guest's claims, and a
//! guest may claim anything. So may a user who has made a network namespace. Two sockets are joined under these rules only:
//!
//! | place of the two sockets | required in addition to mirrored addresses |
//! |---|---|
//! | one network namespace | nothing, because mirrored addresses name one connection there |
//! | two namespaces of one kernel | a proof, addresses that mean the same in both, and that neither namespace is a user's |
//! | two kernels | a proof, and addresses that mean the same in both |
//!
//! If two other sockets match a socket, it is joined with neither. Within a kernel, a proof cannot distinguish two connections
//! that have the same addresses and ports in different namespaces and were made within some milliseconds, as in copies of one
//! test network. Therefore two sockets of one kernel that match by proof wait for [`GRACE`] before they are joined. In this time,
//! the ends of the other connection are reported as well.

use crate::identity::{Identity, Owner};
use crate::proof::{Clock, Connecting, SynTime};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound;
use std::time::Duration;

/// The maximum number of reports that are kept for a member. One more report pushes out the oldest report of the member's user
/// with the most reports.
pub const REPORTS_PER_MEMBER: usize = 4096;

/// The maximum number of a member's reports with the same addresses. A kernel can have one such connection in each namespace. One
/// more report pushes out the oldest of them.
const SAME_ADDRESSES: usize = 4;

/// The number of wrong proofs between two accounts (users of members) within [`MINUTE`] after which their sockets are not joined
/// for [`DISTRUST`].
const WRONG_PROOFS: u32 = 8;
/// How long two sockets in different namespaces of a kernel wait, in case other sockets match them too.
pub const GRACE: Duration = Duration::from_millis(50);
const MINUTE: Duration = Duration::from_secs(60);
const DISTRUST: Duration = Duration::from_secs(600);

/// The side of the connection that a socket is, with the data for a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that called `connect`.
    Connector {
        /// When the program called `connect`.
        connecting: Connecting,
        /// The clock of the socket's timestamps, if the connection has timestamps.
        clock: Option<Clock>,
    },
    /// The side that accepted the connection.
    Acceptor {
        /// The connector's clock in the SYN, if the kernel kept the SYN.
        syn: Option<SynTime>,
    },
}

/// A socket, as the daemon of its kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The member whose kernel has the socket.
    pub member: u32,
    /// The user of that member to whom the report is charged. A member that cannot be trusted about its users has one user only.
    pub user: u32,
    /// The identity of the connection and of the socket.
    pub identity: Identity,
    /// The owner of the socket's network namespace.
    pub owner: Owner,
    /// The side of the connection that the socket is.
    pub side: Side,
}

/// A member, and a user of that member.
type Account = (u32, u32);

/// A name that identifies a socket among those of all members: its member, and its cookie there.
pub type Socket = (u32, u64);

impl Report {
    /// Returns the name of the reported socket.
    pub fn socket(&self) -> Socket {
        (self.member, self.identity.cookie)
    }

    fn account(&self) -> Account {
        (self.member, self.user)
    }

    /// Returns what two sockets with mirrored addresses need in addition.
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

    /// Returns whether one of the two sockets has sent the SYN that the other has received, or `None` if one of them has no data
    /// for a proof.
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
    /// The sockets are in one namespace and need nothing more.
    Same,
    /// The sockets need a proof. Within one kernel, a proof may hold for several connections, because a kernel may use the same
    /// clock for the same addresses in all of its namespaces.
    ByProof { one_kernel: bool },
    /// The sockets are never joined.
    None,
}

/// The reports of sockets whose other end has not been reported. `T` is the caller's data for each report.
#[derive(Debug)]
pub struct Rendezvous<T> {
    reports: HashMap<Socket, Entry<T>>,
    /// The sockets by local and remote address, oldest first.
    addresses: HashMap<(SocketAddr, SocketAddr), Vec<Socket>>,
    /// The sockets by account and number, and therefore in the order in which an account reported them.
    order: BTreeMap<(Account, u64), Socket>,
    /// All sockets by number, in the order in which they were reported.
    numbers: BTreeMap<u64, Socket>,
    /// The number of reports of each account.
    counts: BTreeMap<Account, usize>,
    /// The number of the next report.
    next: u64,
    suspicions: HashMap<(Account, Account), Suspicion>,
    /// The numbers of two reports that are joined at this time, unless a third report that matches comes first.
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
    /// The time until which sockets of the two accounts are not joined.
    until: Duration,
}

/// The result of a report.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// The other end has not been reported, or the two ends wait for [`Rendezvous::settle`]. Other reports may have been pushed out.
    Waits {
        /// The data of reports that will not be joined any more.
        dropped: Vec<T>,
    },
    /// The other end had been reported. The values are the data of both reports, this report's first. Both reports are forgotten.
    Joined(T, T),
    /// More than one socket matches. The values are the data of all these reports, which are forgotten and must not be joined.
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
    /// Returns the number of reports that wait.
    pub fn len(&self) -> usize {
        self.reports.len()
    }

    /// Returns whether no report waits.
    pub fn is_empty(&self) -> bool {
        self.reports.is_empty()
    }

    /// Returns the earlier socket with the addresses of this one in the same namespace. Only one socket at a time can have them
    /// there, so the earlier one is gone, although its end has not been reported yet. The caller must withdraw it before it
    /// reports this one.
    pub fn predecessor(&self, report: &Report) -> Option<Socket> {
        let Identity { local, remote, namespace, cookie } = report.identity;
        self.addresses.get(&(local, remote))?.iter().copied().find(|socket| {
            let is_in_namespace = self.reports[socket].report.identity.namespace == namespace;
            socket.0 == report.member && socket.1 != cookie && is_in_namespace
        })
    }

    /// Returns the waiting reports that came after the report with this number, oldest first, each with its number. Numbers begin
    /// with 1.
    pub fn waiting(&self, after: u64) -> impl Iterator<Item = (u64, &Report, &T)> {
        self.numbers.range((Bound::Excluded(after), Bound::Unbounded)).filter_map(|(number, socket)| {
            self.reports.get(socket).map(|entry| (*number, &entry.report, &entry.what))
        })
    }

    /// Adds a report, which replaces an earlier one of the same socket. `now` is the current time on a clock that never goes
    /// back. The work is bounded by the number of members.
    pub fn report(&mut self, now: Duration, report: Report, what: T) -> Outcome<T> {
        let mut dropped: Vec<T> = self.withdraw(report.socket()).into_iter().collect();
        let others = self.counterparts(now, &report);
        if let [other] = others[..] {
            // A report that was not trusted when it came may also wait for the other socket, and be trusted by now.
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

    /// Returns the time at which the next two waiting reports may be joined, or `None` if there are none. It is a time on the
    /// clock of [`Rendezvous::report`].
    pub fn settles_at(&self) -> Option<Duration> {
        self.engaged.front().map(|(at, _)| *at)
    }

    /// Returns the data of two reports that have waited for the time of grace (50 ms) without another match, and forgets both
    /// reports. Returns `None` if there are no more such reports at `now`.
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

    /// Forgets a socket's report. Returns its data.
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

    /// Forgets all reports of a member, whose kernel is gone. Returns their data.
    pub fn withdraw_member(&mut self, member: u32) -> Vec<T> {
        let all = ((member, 0), 0)..=((member, u32::MAX), u64::MAX);
        let sockets: Vec<_> = self.order.range(all).map(|(_, socket)| *socket).collect();
        self.suspicions.retain(|(one, other), _| one.0 != member && other.0 != member);
        sockets.into_iter().filter_map(|socket| self.withdraw(socket)).collect()
    }

    /// Returns the sockets that may be the other end of this one. Counts wrong proofs.
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

    /// Pushes out reports so that there is room for this one. Returns their data.
    fn make_room(&mut self, report: &Report) -> Vec<T> {
        let key = (report.identity.local, report.identity.remote);
        let same = self.addresses.get(&key).into_iter().flatten();
        let same: Vec<_> = same.copied().filter(|(member, _)| *member == report.member).collect();
        let mut victims = Vec::new();
        if same.len() >= SAME_ADDRESSES {
            victims.push(same[0]);
        } else {
            victims.extend(self.oldest_report_of_the_largest_reporter(report));
        }
        victims.into_iter().filter_map(|socket| self.withdraw(socket)).collect()
    }

    /// Returns the report that must be pushed out to make room for this one, or `None` if there is room. It is the oldest report
    /// of the member's user with the most reports, so a user never loses reports to users that have more.
    fn oldest_report_of_the_largest_reporter(&self, report: &Report) -> Option<Socket> {
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

/// Counts a wrong proof between two accounts. Counts are kept for each pair, so neither account can make a third one distrusted.
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
