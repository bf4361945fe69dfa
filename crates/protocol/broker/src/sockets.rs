//! TCP connections of programs: the daemon finds the two ends of a connection and tells them where to meet.
//!
//! A program sends its socket to its daemon, on the host or in a VM, which gets the facts about it from its kernel. The host's
//! daemon trusts a VM's for its own VM. [`ginnel_tcp::Rendezvous`] decides which two reports are
//! the ends of one connection. Both ends are told the name of a listener in a segment that both may use. Nobody else knows the
//! name, so a program that connects there is the other end, and from then on their channel is like any other.
//!
//! All of this is in private memory: after a restart of the daemon, programs report again.

use crate::allowance::{Allowance, REPORTS_OF_PROCESS, Rate};
use crate::broker::{Broker, ClientId, Who, World};
use crate::declared::Access;
use crate::process::Process;
use crate::reply::{self, Refusal};
use ginnel_layout::wire::{
    self, ErrorCode, Kind, SocketFacts, SocketMatched, SocketReport, SocketRole, SocketStays, StaysReason,
};
use ginnel_layout::{HOST_MEMBER, Name};
use ginnel_tcp::{Clock, Connecting, Identity, Outcome, Owner, Rendezvous, Report, Side, Socket, SynTime};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

/// The rate at which all processes of a user of the host, or of a VM, may report.
const REPORTS_OF_ALL: Rate = Rate { burst: 8000, interval: Duration::from_micros(250) };
/// The time between two searches for allowances that need not be kept.
const TIDY: Duration = Duration::from_secs(1);

/// Reports of TCP connections, and what is known about the programs that made them.
#[derive(Debug)]
pub struct Sockets {
    rendezvous: Rendezvous<Waiting>,
    /// The sockets of each session that wait for their other end, by the keys that the program has chosen.
    sessions: BTreeMap<ClientId, Session>,
    allowances: Allowances,
    /// Whether any program may leave TCP.
    enabled: bool,
}

/// How often each reporter may still report.
#[derive(Debug, Default)]
struct Allowances {
    of: BTreeMap<Reporter, Allowance>,
    tidied: Duration,
}

/// A reporter for which an allowance is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reporter {
    /// A process of a member.
    Process(u32, Process),
    /// All processes of a member that report on one account ([`account`]).
    All(u32, u32),
}

/// Returns the user on whose account a program reports. The daemon does not trust a VM's daemon about users, so all programs of a
/// VM have one account.
fn account(who: &Who) -> u32 {
    if who.is_relayed() { 0 } else { who.uid }
}

impl Allowances {
    /// Returns whether a program may report once more, and counts that report.
    fn take(&mut self, who: &Who, now: Duration) -> bool {
        if now.saturating_sub(self.tidied) >= TIDY {
            self.tidied = now;
            self.of.retain(|_, allowance| !allowance.is_full(now));
        }
        let all = Reporter::All(who.member, account(who));
        let process = Reporter::Process(who.member, who.process);
        [(process, REPORTS_OF_PROCESS), (all, REPORTS_OF_ALL)].into_iter().all(|(reporter, rate)| {
            self.of.entry(reporter).or_insert_with(|| Allowance::new(now)).take(rate, now)
        })
    }
}

#[derive(Debug, Default)]
struct Session {
    waiting: HashMap<u64, Socket>,
}

/// A report that waits for its other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting {
    client: ClientId,
    key: u64,
}

impl Default for Sockets {
    fn default() -> Self {
        Self {
            rendezvous: Rendezvous::default(),
            sessions: BTreeMap::new(),
            allowances: Allowances::default(),
            enabled: true,
        }
    }
}

#[cfg(test)]
impl Sockets {
    /// Returns whether no report is waiting.
    pub fn rendezvous_is_empty(&self) -> bool {
        self.rendezvous.is_empty()
    }

    /// Resets the allowances, as if nobody had reported.
    pub fn allow_more(&mut self) {
        self.allowances.of.clear();
    }
}

/// Converts what a member's daemon says about a socket of this member. Each member is responsible for its own programs.
fn believe(member: u32, user: u32, facts: &SocketFacts) -> Report {
    let address =
        |bytes: [u8; 16], port| SocketAddr::new(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical(), port);
    let identity = Identity {
        local: address(facts.local, facts.local_port),
        remote: address(facts.remote, facts.remote_port),
        cookie: facts.cookie,
        namespace: facts.namespace,
    };
    let has = |bit| facts.flags & bit != 0;
    let side = match facts.report.role {
        SocketRole::CONNECTOR => Side::Connector {
            connecting: connecting(&facts.report),
            clock: has(SocketFacts::CLOCK).then(|| Clock {
                value: facts.clock,
                before: Duration::from_nanos(facts.clock_before),
                after: Duration::from_nanos(facts.clock_after),
            }),
        },
        _ => Side::Acceptor { syn: has(SocketFacts::SYN).then_some(SynTime(facts.syn)) },
    };
    let owner = if has(SocketFacts::USER) { Owner::User } else { Owner::System };
    Report { member, user, identity, owner, side }
}

/// Returns when the program has called `connect`, as it says.
fn connecting(report: &SocketReport) -> Connecting {
    let [before, after] = [report.before, report.after].map(Duration::from_nanos);
    Connecting { before, after }
}

impl Broker {
    /// Checks a report that comes with a socket from a program of this host. Returns it if the daemon is to find out what the kernel says
    /// about the socket, and to pass that on with [`Broker::socket_found`].
    pub fn socket_packet(
        &mut self,
        world: &mut dyn World,
        client: ClientId,
        packet: &[u8],
    ) -> Option<SocketReport> {
        let (header, body) = wire::split(packet)?;
        match self.socket_reported(world, client, body) {
            Ok(report) => report,
            Err(refusal) => {
                self.send(client, reply::refusal(header.request, &refusal), vec![]);
                None
            }
        }
    }

    fn socket_reported(
        &mut self,
        world: &mut dyn World,
        client: ClientId,
        body: &[u8],
    ) -> Result<Option<SocketReport>, Refusal> {
        if !self.clients.get(&client).is_some_and(|client| client.greeted) {
            return Err(Refusal::new(ErrorCode::PROTOCOL, "say HELLO first"));
        }
        let report: SocketReport = reply::body(body)?;
        check_role(report.role)?;
        if let Some(reason) = self.turned_away(world, client) {
            self.stays(client, report.key, reason);
            return Ok(None);
        }
        Ok(Some(report))
    }

    /// Handles what was found out about a reported socket of this host, or why it stays on TCP. The result is sent as an event.
    pub fn socket_found(
        &mut self,
        world: &mut dyn World,
        client: ClientId,
        key: u64,
        found: Result<SocketFacts, StaysReason>,
    ) {
        let Some(user) = self.who(client).map(account) else { return };
        match found {
            Ok(facts) => self.look_for_other_end(world, client, key, believe(HOST_MEMBER, user, &facts)),
            Err(reason) => self.stays(client, key, reason),
        }
    }

    /// Handles a report of a socket in a VM, whose daemon has examined the socket.
    pub(crate) fn socket_relayed(
        &mut self,
        world: &mut dyn World,
        client: ClientId,
        body: &[u8],
    ) -> Result<(), Refusal> {
        let facts: SocketFacts = reply::body(body)?;
        check_role(facts.report.role)?;
        let Some(member) = self.who(client).filter(|who| who.is_relayed()).map(|who| who.member) else {
            let text = "a program of the host reports a socket by its descriptor";
            return Err(Refusal::new(ErrorCode::PROTOCOL, text));
        };
        match self.turned_away(world, client) {
            None => self.look_for_other_end(world, client, facts.report.key, believe(member, 0, &facts)),
            Some(reason) => self.stays(client, facts.report.key, reason),
        }
        Ok(())
    }

    /// Withdraws a report.
    pub(crate) fn socket_withdrawn(&mut self, client: ClientId, body: &[u8]) -> Result<(), Refusal> {
        let wire::SocketKey { key } = reply::body(body)?;
        let session = self.sockets.sessions.get_mut(&client);
        if let Some(socket) = session.and_then(|session| session.waiting.remove(&key)) {
            self.sockets.rendezvous.withdraw(socket);
        }
        Ok(())
    }

    /// Removes all reports of a session that has ended.
    pub(crate) fn forget_sockets(&mut self, client: ClientId) {
        let session = self.sockets.sessions.remove(&client);
        for socket in session.into_iter().flat_map(|session| session.waiting.into_values()) {
            self.sockets.rendezvous.withdraw(socket);
        }
    }

    /// Removes all reports of a member whose kernel has ended, and its sockets with it.
    pub(crate) fn forget_sockets_of(&mut self, member: u32) {
        for Waiting { client, key } in self.sockets.rendezvous.withdraw_member(member) {
            if let Some(session) = self.sockets.sessions.get_mut(&client) {
                session.waiting.remove(&key);
            }
        }
    }

    /// Sets whether programs may leave TCP.
    pub fn set_sockets(&mut self, enabled: bool) {
        self.sockets.enabled = enabled;
    }

    /// Returns the waiting reports that follow the one with this number: the number, the program that made it, and its contents.
    pub fn reports(&self, after: u64) -> impl Iterator<Item = (u64, &Who, &Report)> {
        let waiting = self.sockets.rendezvous.waiting(after);
        waiting.filter_map(|(number, report, who)| Some((number, self.who(who.client)?, report)))
    }

    /// Returns the features of this daemon beyond those of every daemon of its version.
    pub(crate) fn features(&self) -> u64 {
        if self.sockets.enabled { wire::features::SOCKETS } else { 0 }
    }

    /// Returns why a session's report is refused, or `None`.
    fn turned_away(&mut self, world: &mut dyn World, client: ClientId) -> Option<StaysReason> {
        let who = self.clients.get(&client).map(|client| &client.who)?;
        if !self.sockets.allowances.take(who, world.elapsed()) {
            return Some(StaysReason::TOO_MANY);
        }
        (!self.sockets.enabled).then_some(StaysReason::DISABLED)
    }

    fn look_for_other_end(&mut self, world: &mut dyn World, client: ClientId, key: u64, report: Report) {
        let now = world.elapsed();
        let waiting = Waiting { client, key };
        // This report replaces an earlier one with its key, an earlier one of its socket, and one of an earlier socket with the
        // same addresses.
        let earlier =
            self.sockets.sessions.get(&client).and_then(|session| session.waiting.get(&key).copied());
        let predecessor = self.sockets.rendezvous.predecessor(&report);
        for socket in earlier.into_iter().chain([report.socket()]).chain(predecessor) {
            if let Some(old) = self.sockets.rendezvous.withdraw(socket)
                && old != waiting
            {
                self.gives_up(old, StaysReason::TOO_MANY);
            }
        }
        match self.sockets.rendezvous.report(now, report, waiting) {
            Outcome::Waits { dropped } => {
                for old in dropped {
                    self.gives_up(old, StaysReason::TOO_MANY);
                }
                self.sockets.sessions.entry(client).or_default().waiting.insert(key, report.socket());
            }
            Outcome::Ambiguous(all) => {
                all.into_iter().for_each(|waiting| self.gives_up(waiting, StaysReason::AMBIGUOUS));
            }
            Outcome::Joined(one, other) => self.bring_together(world, one, other),
        }
    }

    /// Returns the time, as [`World::elapsed`] tells it, at which sockets that have waited for possible other matches can be joined; `None`
    /// if there are none.
    pub fn sockets_settle_at(&self) -> Option<Duration> {
        self.sockets.rendezvous.settles_at()
    }

    /// Joins the sockets that have waited for long enough.
    pub fn settle_sockets(&mut self, world: &mut dyn World) {
        let now = world.elapsed();
        while let Some((one, other)) = self.sockets.rendezvous.settle(now) {
            self.bring_together(world, one, other);
        }
    }

    /// Tells the two ends of a connection where to meet.
    fn bring_together(&mut self, world: &mut dyn World, one: Waiting, other: Waiting) {
        for Waiting { client, key } in [one, other] {
            if let Some(session) = self.sockets.sessions.get_mut(&client) {
                session.waiting.remove(&key);
            }
        }
        let segment = self.segment_for(world, one.client, other.client);
        let meeting = segment.and_then(|segment| Some((segment, secret(world.random())?)));
        for Waiting { client, key } in [one, other] {
            let Some((segment, listener)) = meeting else {
                self.stays(client, key, StaysReason::NO_SEGMENT);
                continue;
            };
            let event = SocketMatched { key, segment, listener };
            self.send(client, reply::packet(Kind::SOCK_MATCHED, 0, event.as_bytes()), vec![]);
        }
    }

    /// Returns the segment with the fewest members that allows sockets and that both may attach to and write. Among those with
    /// equally few members, it prefers one that no further users may attach to.
    fn segment_for(&self, world: &mut dyn World, one: ClientId, other: ClientId) -> Option<Name> {
        let (one, other) = (self.who(one)?, self.who(other)?);
        let may = |who: &Who, name: &Name| who.is_relayed() || self.may_attach(name, who.uid, &who.groups);
        // Root may attach to every segment, but other users must not see what root's programs send to each other.
        let of_root = [one, other].iter().all(|who| !who.is_relayed() && self.is_root(who.uid));
        let mut segments: Vec<_> = self
            .books
            .segments
            .values()
            .filter(|segment| {
                [one, other].iter().all(|who| {
                    segment.members.contains(&who.member)
                        && !segment.readers.contains(&who.member)
                        && may(who, &segment.name)
                }) && self.allows_sockets(&segment.name, segment.members.len())
                    && !(of_root && self.others_see(&segment.name))
            })
            .map(|segment| (segment.members.len(), self.others_see(&segment.name), segment.name))
            .collect();
        segments.sort_unstable();
        segments.into_iter().map(|(.., name)| name).find(|name| !world.is_broken(name))
    }

    /// Returns whether users of the host other than root may attach to a segment, unless it is configured for sockets.
    fn others_see(&self, segment: &Name) -> bool {
        let seen = |access: &Access| {
            let others = access.users.iter().any(|uid| !self.is_root(*uid)) || !access.groups.is_empty();
            others && access.sockets != Some(true)
        };
        self.access.get(segment).is_some_and(seen)
    }

    /// Returns whether a segment with this number of members may carry TCP connections. Unless that is configured, it may if no
    /// third member sees the bytes.
    fn allows_sockets(&self, segment: &Name, members: usize) -> bool {
        let configured = self.access.get(segment).and_then(|access| access.sockets);
        configured.unwrap_or(members <= 2)
    }

    fn gives_up(&mut self, waiting: Waiting, reason: StaysReason) {
        let Waiting { client, key } = waiting;
        if let Some(session) = self.sockets.sessions.get_mut(&client) {
            session.waiting.remove(&key);
        }
        self.stays(client, key, reason);
    }

    fn stays(&mut self, client: ClientId, key: u64, reason: StaysReason) {
        let event = SocketStays { key, reason, ..FromZeros::new_zeroed() };
        self.send(client, reply::packet(Kind::SOCK_STAYS, 0, event.as_bytes()), vec![]);
    }
}

fn check_role(role: SocketRole) -> Result<(), Refusal> {
    match role {
        SocketRole::CONNECTOR | SocketRole::ACCEPTOR => Ok(()),
        SocketRole(other) => {
            Err(Refusal::new(ErrorCode::INVALID, format!("there is no role {other} of a socket: use 1 or 2")))
        }
    }
}

/// Makes a name that nobody can guess.
fn secret(random: [u8; 16]) -> Option<Name> {
    let mut name = String::from(wire::SECRET);
    for byte in random {
        let _ = write!(name, "{byte:02x}");
    }
    Name::new(&name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(member: u32, pid: u32, uid: u32) -> Who {
        Who { member, process: Process { pid, started: 1 }, image: None, uid, groups: Vec::new() }
    }

    #[test]
    fn the_reports_of_a_process_and_of_an_account_are_limited() {
        let now = Duration::ZERO;
        let mut allowances = Allowances::default();
        let of_process = REPORTS_OF_PROCESS.burst as usize;
        let of_all = REPORTS_OF_ALL.burst as usize;
        let mut taken = |who: Who, at| (0..2 * of_process).filter(|_| allowances.take(&who, at)).count();
        let processes = (of_all / of_process) as u32;
        for pid in 1..=processes {
            assert_eq!(taken(who(HOST_MEMBER, pid, 1000), now), of_process);
        }
        assert_eq!(taken(who(HOST_MEMBER, processes + 1, 1000), now), 0, "its user has reported enough");
        assert_eq!(taken(who(HOST_MEMBER, processes + 2, 1001), now), of_process, "another has not");
        // A VM's daemon may claim that its programs belong to any users.
        let vm: usize = (1..=2 * processes).map(|n| taken(who(3, n, n), now)).sum();
        assert_eq!(vm, of_all);
        let later = now + Duration::from_secs(3600);
        assert_eq!(taken(who(HOST_MEMBER, 1, 1000), later), of_process);
        assert_eq!(allowances.of.len(), 2, "the others are full again");
    }
}
