//! The reports of sockets, and what their programs are told.

use super::{Waiting, account};
use crate::broker::Broker;
use crate::declared::Access;
use crate::effects::{ClientId, Who, World};
use crate::reply::{self, Refusal};
use ginnel_layout::wire::{
    self, ErrorCode, Kind, SocketFacts, SocketMatched, SocketReport, SocketRole, SocketStays, StaysReason,
};
use ginnel_layout::{HOST_MEMBER, Name};
use ginnel_tcp::{Clock, Connecting, Identity, Outcome, Owner, Report, Side, SynTime};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use zerocopy::{FromZeros, IntoBytes};

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
