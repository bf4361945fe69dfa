//! The requests of the attach protocol, one by one. Everything is checked before anything is changed.

use super::account::Account;
use super::books::Endpoint;
use super::broker::{Broker, Caller, ClientId, Effect, FdRef, World};
use super::record::{Attach, Channel, Hex16, Record, Side, Text};
use super::reply::{self, Refusal};
use ginnel_config::Bytes;
use ginnel_layout::channel::ChannelKind;
use ginnel_layout::ring::{self, SideState};
use ginnel_layout::segment::{self, MappingKind};
use ginnel_layout::wire::{self, ErrorCode, Fds, Kind};
use ginnel_layout::{HOST_MEMBER, Name, PAGE};
use tracing::{debug, info};
use zerocopy::IntoBytes;

impl Broker {
    pub(super) fn attach(
        &mut self,
        world: &mut dyn World,
        id: ClientId,
        request: u32,
        wish: &wire::Attach,
    ) -> Result<(), Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        if client.endpoint.is_some() {
            return Err(Refusal::new(
                ErrorCode::PROTOCOL,
                "this connection is an endpoint already: open another",
            ));
        }
        let segment = checked(&wish.segment, "segment")?;
        let name = checked(&wish.name, "endpoint")?;
        let returned = wish.endpoint != 0;
        let number =
            if returned { self.returning(id, wish)? } else { self.arriving(world, id, segment, name)? };
        let Some(endpoint) = self.books.endpoints.get(&number) else { return Ok(()) };
        let Some(books) = self.books.segments.get(&endpoint.segment) else { return Ok(()) };
        let member = endpoint.member;
        let access = books.access(member);
        let mut answer = wire::Attached {
            member,
            endpoint: number,
            epoch: endpoint.epoch,
            vector: endpoint.vector,
            token: endpoint.token.0,
            uuid: books.uuid.0,
            segment_len: books.size,
            map_offset: segment::RESERVED + books.file_offset(),
            fds: Fds(0),
            page: books.page,
            // A guest's daemon says which device it has found instead.
            kind: MappingKind::FILE,
            access,
        };
        let mut fds = Vec::new();
        if member == HOST_MEMBER {
            // Who comes back to a broken segment has its doorbell and its channels, but there is no memory to give.
            if !world.is_broken(&segment) {
                answer.fds.0 |= Fds::MEMORY;
                fds.push(match access.is_read_only() {
                    true => FdRef::ReadOnlyMemory(segment),
                    false => FdRef::Memory(segment),
                });
            }
            answer.fds.0 |= Fds::EVENT;
            fds.push(FdRef::Event(member, endpoint.vector));
        }
        // What it has not accepted yet is announced again, after the answer.
        let waiting: Vec<u64> = endpoint.waiting.iter().map(|(_, channel)| *channel).collect();
        if let Some(client) = self.clients.get_mut(&id) {
            (client.endpoint, client.returned) = (Some(number), returned);
        }
        let cut = returned && books.cut;
        self.bind(number, id);
        self.send(id, reply::packet(Kind::ATTACHED, request, answer.as_bytes()), fds);
        if cut {
            self.send_cut(id);
        }
        for channel in waiting {
            self.send_channel(id, Kind::INCOMING, 0, channel, false);
        }
        self.revocations.tell_again(number);
        Ok(())
    }

    /// A new endpoint.
    fn arriving(
        &mut self,
        world: &mut dyn World,
        id: ClientId,
        segment: Name,
        name: Name,
    ) -> Result<u32, Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(0) };
        let who = client.who.clone();
        let host = who.member == HOST_MEMBER;
        if self.books.segments.get(&segment).is_none_or(|s| !s.members.contains(&who.member)) {
            let text = match host {
                true => format!("the host has no segment {segment:?}: `ginnel status` lists those it has"),
                false => format!(
                    "this VM has no segment {segment:?}: add it to that segment's members on the host"
                ),
            };
            return Err(Refusal::new(ErrorCode::NO_SEGMENT, text));
        }
        if host && !self.may_attach(&segment, who.uid, &who.groups) {
            let text = format!(
                "user {} may not use segment {segment}: add the user to allow_users, or a group to allow_groups, of \
                 [segment.{segment}]",
                who.uid
            );
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        if world.is_broken(&segment) {
            return Err(world.why_broken(&segment).map_or_else(
                || broken(&segment),
                |why| Refusal::new(ErrorCode::BROKEN, format!("segment {segment} is out of service: {why}")),
            ));
        }
        let limit = self.limits_of(who.member).endpoints_per_member;
        let account = Account::new(who.member, segment, who.uid);
        let endpoints = self.books.tally(account).endpoints;
        if endpoints >= limit {
            let text = format!(
                "{account} has {endpoints} endpoints, which is the limit: end some, or raise endpoints_per_member"
            );
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        let Some((endpoint, epoch)) = self.books.numbers.vacant() else {
            return Err(Refusal::new(ErrorCode::LIMIT, "there are 4294967295 endpoints: end some"));
        };
        let attach = Attach {
            endpoint,
            epoch,
            token: Hex16(world.random()),
            member: who.member,
            segment: Text(segment),
            name: Text(name),
            vector: self.books.quietest_vector(&segment, who.member, self.vectors),
            process: who.process,
            uid: who.uid,
        };
        self.record(Record::Attach(attach))?;
        info!(endpoint, epoch, member = who.member, %segment, %name, pid = who.process.pid, uid = who.uid, "endpoint");
        if host {
            self.effect(Effect::Watch { endpoint, epoch, process: who.process });
        }
        Ok(endpoint)
    }

    /// An endpoint that is there: its process has lost the connection, or another process wants to own it too.
    fn returning(&mut self, id: ClientId, wish: &wire::Attach) -> Result<u32, Refusal> {
        let Some(client) = self.clients.get(&id) else { return Ok(0) };
        let number = wish.endpoint;
        let stale = |why: &str| {
            let text = format!("endpoint {number} of epoch {}: {why}; attach anew", wish.epoch);
            Err(Refusal::new(ErrorCode::STALE, text))
        };
        let known = self.books.endpoints.get(&number).filter(|e| e.epoch == wish.epoch && !e.is_ending);
        let Some(endpoint) = known else {
            return stale("it is not known (any more)");
        };
        // One answer for all that is wrong: it tells a guesser nothing.
        if endpoint.member != client.who.member
            || endpoint.segment != wish.segment
            || !Self::token_matches(&endpoint.token, &wish.token)
        {
            return stale("segment, member or token are not its own");
        }
        let process = client.who.process;
        self.owner_returns(number, process)?;
        Ok(number)
    }

    /// Whether a user of the host may attach to a segment.
    pub(super) fn may_attach(&self, segment: &Name, uid: u32, groups: &[u32]) -> bool {
        let access = self.access.get(segment);
        uid == 0
            || uid == self.own_uid
            || access.is_some_and(|a| a.users.contains(&uid) || groups.iter().any(|g| a.groups.contains(g)))
    }

    pub(super) fn listen(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        wish: &wire::Listen,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, member) = (caller.segment, caller.member);
        let name = checked(&wish.name, "listener")?;
        let kind = checked_kind(wish.kind)?;
        self.rounded(wish.capacity)?;
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        if let Some((_, at)) = name.as_str().rsplit_once('@') {
            let own = self.books.members.get(&member).map_or(Name::NONE, |m| m.name);
            if at != own.as_str() {
                let text =
                    format!("{name} belongs to member {at:?}, and this is {own}: listen at another name");
                return Err(Refusal::new(ErrorCode::DENIED, text));
            }
        }
        let taken = self.books.names.get(&(segment, name)).and_then(|n| self.books.listeners.get(n));
        let listener = match taken {
            // The same request again, because the daemon had gone before it answered.
            Some(old) if old.endpoint == number && old.kind == kind && caller.returned => old.number,
            Some(old) => {
                let text = format!(
                    "endpoint {} listens at {segment}/{name} already: choose another name",
                    old.endpoint
                );
                return Err(Refusal::new(ErrorCode::IN_USE, text));
            }
            None => {
                let limit = self.limits_of(member).listeners_per_endpoint;
                if endpoint.listeners.len() >= limit as usize {
                    let text = format!(
                        "endpoint {number} listens at {limit} names, which is its limit: raise listeners_per_endpoint"
                    );
                    return Err(Refusal::new(ErrorCode::LIMIT, text));
                }
                let listener = self.books.free_listener();
                let backlog = if wish.backlog == 0 { self.limits.backlog } else { wish.backlog };
                self.record(Record::Listen {
                    listener,
                    endpoint: number,
                    name: Text(name),
                    kind: kind.0,
                    backlog: backlog.min(self.limits.backlog),
                    capacity: wish.capacity,
                })?;
                debug!(endpoint = number, %segment, %name, listener, "listening");
                listener
            }
        };
        let answer = wire::Listening { listener, reserved: 0 };
        self.answer(caller, Kind::LISTENING, answer.as_bytes(), vec![])
    }

    /// Closes channels that wait where nobody listens any more: the last daemon has ended between the end of their listener
    /// and theirs. A later listener of the same number must not be taken for it.
    pub(super) fn close_unheard(&mut self) {
        let heard = |c: &Channel| {
            self.books.listeners.get(&c.listener).is_some_and(|l| l.endpoint == c.acceptor.endpoint)
        };
        let unheard = self.books.channels.values().filter(|c| !c.accepted && !c.acceptor.closed && !heard(c));
        for channel in unheard.map(|c| c.number).collect::<Vec<_>>() {
            // Known to be open, so this cannot be refused.
            let _ = self.close_side(channel, false);
        }
    }

    pub(super) fn unlisten(&mut self, caller: &Caller, wish: &wire::Listening) -> Result<(), Refusal> {
        let number = caller.endpoint;
        if self.books.listeners.get(&wish.listener).is_none_or(|l| l.endpoint != number) {
            let text = format!("endpoint {number} has no listener {}", wish.listener);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        self.record(Record::Unlisten { listener: wish.listener })?;
        // Nobody will accept these any more.
        let at_it = (wish.listener, 0)..=(wish.listener, u64::MAX);
        let waiting = self.endpoint_of(caller)?.waiting.range(at_it).map(|(_, channel)| *channel);
        for channel in waiting.collect::<Vec<_>>() {
            self.close_side(channel, false)?;
        }
        self.ok(caller)
    }

    pub(super) fn connect(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        wish: &wire::Connect,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, member) = (caller.segment, caller.member);
        let name = checked(&wish.name, "listener")?;
        let kind = checked_kind(wish.kind)?;
        let wished = self.rounded(wish.capacity)?;
        if let Some(&channel) = endpoint.opened.get(&wish.nonce) {
            self.send_channel(caller.client, Kind::CHANNEL, caller.request, channel, true);
            return Ok(());
        }
        if world.is_broken(&segment) {
            return Err(broken(&segment));
        }
        let Some(listener) = self.books.names.get(&(segment, name)).and_then(|n| self.books.listeners.get(n))
        else {
            return Err(Refusal::new(ErrorCode::REFUSED, format!("nobody listens at {segment}/{name}")));
        };
        if listener.kind != kind {
            let text = format!(
                "{segment}/{name} takes {} channels and this is a {} channel: use the same kind on both sides",
                kind_name(listener.kind),
                kind_name(kind)
            );
            return Err(Refusal::new(ErrorCode::KIND, text));
        }
        if listener.waiting >= listener.backlog {
            let text =
                format!("{} connections wait at {segment}/{name} already: try again later", listener.waiting);
            return Err(Refusal::new(ErrorCode::LIMIT, text));
        }
        let acceptor = self.books.endpoint(listener.endpoint)?;
        let capacity = match wished.max(self.rounded(listener.capacity)?) {
            0 => self.limits.default_ring,
            n => n,
        };
        let len = ginnel_layout::channel::footprint(capacity as usize) as u64;
        let limits = self.limits_of(member);
        let over = |what: &str, key: &str| {
            Err(Refusal::new(
                ErrorCode::LIMIT,
                format!("{what}, which is the limit: close some, or raise {key}"),
            ))
        };
        for endpoint in [endpoint, acceptor] {
            let limit = self.limits_of(endpoint.member).channels_per_endpoint as usize;
            if endpoint.channels.len() >= limit {
                return over(
                    &format!("endpoint {} has {limit} channels", endpoint.number),
                    "channels_per_endpoint",
                );
            }
        }
        let account = caller.account();
        let tally = self.books.tally(account);
        if tally.channels >= limits.channels_per_member {
            return over(&format!("{account} has opened {} channels", tally.channels), "channels_per_member");
        }
        for (key, whom, used, limit) in [
            ("bytes_per_endpoint", format!("endpoint {number}"), endpoint.bytes, limits.bytes_per_endpoint),
            ("bytes_per_member", account.to_string(), tally.bytes, limits.bytes_per_member),
        ] {
            if used.saturating_add(len) > limit {
                let text = format!(
                    "{whom} has channels of {used} bytes, and {len} more are over the limit of {}: close channels, \
                     wish for smaller rings, or raise {key}",
                    Bytes(limit)
                );
                return Err(Refusal::new(ErrorCode::LIMIT, text));
            }
        }
        let arena = self.books.segments.get(&segment).map(|s| &s.arena);
        let Some(offset) = arena.and_then(|arena| arena.find(len, PAGE as u64)) else {
            let text = format!(
                "segment {segment} has no room for a channel of {len} bytes (its longest free run has {}): close \
                 channels, wish for smaller rings, or make the segment larger",
                arena.map_or(0, |arena| arena.longest())
            );
            return Err(Refusal::new(ErrorCode::NO_MEMORY, text));
        };
        let needs_daemon = |from: u32, to: &Endpoint| {
            let (kind, bell) = self.bell(from, to.member, to.vector);
            // The daemon's own vector is nobody else's.
            kind == wire::BellKind::REGISTER && bell == 0
        };
        let side =
            |e: &Endpoint| Side { endpoint: e.number, epoch: e.epoch, member: e.member, closed: false };
        let channel = Channel {
            number: self.books.next_channel.max(1),
            segment: Text(segment),
            listener: listener.number,
            initiator: side(endpoint),
            acceptor: side(acceptor),
            offset,
            capacity,
            kind: kind.0,
            nonce: wish.nonce,
            uid: caller.uid,
            accepted: false,
            relayed: needs_daemon(member, acceptor) || needs_daemon(acceptor.member, endpoint),
        };
        let (channel_number, acceptor) = (channel.number, acceptor.number);
        self.effect(Effect::Zero { segment, offset, capacity });
        self.record(Record::Channel(channel))?;
        debug!(channel = channel_number, %segment, %name, from = number, to = acceptor, capacity, "channel");
        self.send_channel(caller.client, Kind::CHANNEL, caller.request, channel_number, true);
        for client in self.connections(acceptor) {
            self.send_channel(client, Kind::INCOMING, 0, channel_number, false);
        }
        Ok(())
    }

    pub(super) fn accepted(&mut self, caller: &Caller, wish: &wire::ChannelRef) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let Some(channel) = self.books.channels.get(&wish.channel).filter(|c| c.acceptor.endpoint == number)
        else {
            return Err(no_channel(number, wish.channel));
        };
        if !channel.accepted && !channel.acceptor.closed {
            self.record(Record::Accepted { channel: wish.channel })?;
        }
        self.ok(caller)
    }

    pub(super) fn close(&mut self, caller: &Caller, wish: &wire::ChannelRef) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let channel = self.books.channels.get(&wish.channel);
        let open = |initiator: bool| {
            channel.is_some_and(|c| c.side(initiator).endpoint == number && !c.side(initiator).closed)
        };
        // An endpoint that is connected to itself closes one side, then the other.
        let initiator = if open(true) {
            true
        } else if open(false) {
            false
        } else {
            return Err(no_channel(number, wish.channel));
        };
        self.close_side(wish.channel, initiator)?;
        self.ok(caller)
    }

    fn close_side(&mut self, number: u64, initiator: bool) -> Result<(), Refusal> {
        // Who is connected to itself has said so in the rings already, and we cannot know which side is meant.
        let alone =
            self.books.channels.get(&number).is_some_and(|c| c.initiator.endpoint == c.acceptor.endpoint);
        if !alone {
            self.mark(number, initiator, SideState::FINISHED);
        }
        debug!(channel = number, initiator, "channel closed");
        self.record(Record::Closed { channel: number, initiator })
    }

    /// A wished capacity as one that a ring can have; 0 stays 0.
    fn rounded(&self, wish: u64) -> Result<u64, Refusal> {
        if wish == 0 {
            return Ok(0);
        }
        let max = self.limits.max_ring;
        match wish.max(ring::MIN_CAPACITY as u64).checked_next_power_of_two() {
            Some(capacity) if capacity <= max => Ok(capacity),
            _ => {
                let text =
                    format!("rings of {wish} bytes: at most {} are possible, or raise max_ring", Bytes(max));
                Err(Refusal::new(ErrorCode::INVALID, text))
            }
        }
    }
}

fn no_channel(endpoint: u32, channel: u64) -> Refusal {
    Refusal::new(ErrorCode::NOT_FOUND, format!("endpoint {endpoint} has no open channel {channel}"))
}

pub(super) fn broken(segment: &Name) -> Refusal {
    let text = format!(
        "the memory of segment {segment} is broken (its file was truncated or replaced): stop its VMs, remove the \
         segment and create it anew"
    );
    Refusal::new(ErrorCode::BROKEN, text)
}

pub(super) fn checked(name: &Name, what: &str) -> Result<Name, Refusal> {
    match name.checked() {
        Ok(_) => Ok(*name),
        Err(error) => Err(Refusal::new(ErrorCode::PROTOCOL, format!("the {what}'s name: {error}"))),
    }
}

fn checked_kind(kind: u32) -> Result<ChannelKind, Refusal> {
    match ChannelKind(kind) {
        known @ (ChannelKind::MESSAGE | ChannelKind::STREAM) => Ok(known),
        ChannelKind(other) => {
            Err(Refusal::new(ErrorCode::INVALID, format!("there is no kind {other} of channels: use 1 or 2")))
        }
    }
}

/// For people.
pub(super) fn kind_name(kind: ChannelKind) -> &'static str {
    match kind {
        ChannelKind::MESSAGE => "message",
        ChannelKind::STREAM => "stream",
        _ => "unknown",
    }
}
