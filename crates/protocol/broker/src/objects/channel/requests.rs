//! The requests to listen, connect, accept and close. Everything is checked before anything is changed.

use super::{Change, Channel, Side, kind_name};
use crate::books::Endpoint;
use crate::broker::Broker;
use crate::caller::Caller;
use crate::effects::{ClientId, Effect, FdRef, World};
use crate::reply::{self, Refusal, body, broken, checked};
use crate::service::{Request, Service};
use crate::text::Text;
use ginnel_config::Bytes;
use ginnel_layout::channel::{Capacities, ChannelKind};
use ginnel_layout::ring::{self, SideState};
use ginnel_layout::wire::{self, BellKind, ErrorCode, Fds, Kind};
use ginnel_layout::{Name, PAGE};
use tracing::debug;
use zerocopy::IntoBytes;

impl Service for Change {
    const REQUESTS: &[Request] = &[
        Request::write(Kind::LISTEN, |broker, world, caller, bytes| {
            broker.listen(world, caller, &body(bytes)?)
        }),
        Request::new(Kind::UNLISTEN, |broker, _, caller, bytes| broker.unlisten(caller, &body(bytes)?)),
        Request::write(Kind::CONNECT, |broker, world, caller, bytes| {
            broker.connect(world, caller, &body(bytes)?)
        }),
        Request::new(Kind::ACCEPTED, |broker, _, caller, bytes| broker.accepted(caller, &body(bytes)?)),
        Request::new(Kind::CLOSE, |broker, _, caller, bytes| broker.close(caller, &body(bytes)?)),
        Request::write(Kind::RESUME, |broker, _, caller, bytes| broker.resume(caller, &body(bytes)?)),
    ];

    fn mark_end(&self, broker: &mut Broker) {
        if let Self::Closed { channel, initiator } = *self {
            broker.mark(channel, initiator, SideState::DEAD);
        }
    }

    /// Announces again the channels that the endpoint has not accepted yet.
    fn greet(broker: &mut Broker, endpoint: u32, client: ClientId) {
        let waiting = broker.books.endpoints.get(&endpoint).map(|e| e.waiting.clone()).unwrap_or_default();
        for (_, channel) in waiting {
            broker.send_channel(client, Kind::INCOMING, 0, channel, false);
        }
    }

    fn lose(broker: &mut Broker, segment: &Name) {
        let lost = broker.books.channels.values().filter(|channel| channel.segment.0 == *segment);
        let mut words = Vec::new();
        for channel in lost {
            let (one, other) = channel.capacities().rings(true);
            for ring in [one, other] {
                words.extend(
                    [ring::PRODUCER_STATE, ring::CONSUMER_STATE]
                        .map(|word| channel.offset + (ring + word) as u64),
                );
            }
        }
        for at in words {
            broker.effect(Effect::Mark { segment: *segment, at, state: SideState::LOST });
        }
    }
}

impl Broker {
    pub(crate) fn listen(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        body: &wire::Listen,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, member) = (caller.segment, caller.member);
        let name = checked(&body.name, "listener")?;
        let kind = checked_kind(body.kind)?;
        if kind != ChannelKind::SOCKET && name.as_str().starts_with(wire::SECRET) {
            let text = format!(
                "names that begin with {:?} are for the ends of TCP connections: choose another name",
                wire::SECRET
            );
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        self.rounded(body.capacities())?;
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
            // The same request was repeated because the daemon ended before it had answered.
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
                let backlog = if body.backlog == 0 { self.limits.backlog } else { body.backlog };
                self.record(Change::Listen {
                    listener,
                    endpoint: number,
                    name: Text(name),
                    kind: kind.0,
                    backlog: backlog.min(self.limits.backlog),
                    capacity: body.capacity,
                    input_capacity: Some(body.input_capacity).filter(|&input| input != 0),
                })?;
                debug!(endpoint = number, %segment, %name, listener, "listening");
                listener
            }
        };
        let answer = wire::Listening { listener, reserved: 0 };
        self.answer(caller, Kind::LISTENING, answer.as_bytes(), vec![])
    }

    /// Closes channels that wait at a listener that has ended: the last daemon has ended between the end of the listener
    /// and the end of these channels. They must not be accepted by a later listener with the same number.
    pub fn close_unheard(&mut self) {
        let heard = |c: &Channel| {
            self.books.listeners.get(&c.listener).is_some_and(|l| l.endpoint == c.acceptor.endpoint)
        };
        let unheard = self.books.channels.values().filter(|c| !c.accepted && !c.acceptor.closed && !heard(c));
        for channel in unheard.map(|c| c.number).collect::<Vec<_>>() {
            // The channel is open in the books, so they cannot refuse this record.
            let _ = self.close_side(channel, false);
        }
    }

    pub(crate) fn unlisten(&mut self, caller: &Caller, body: &wire::Listening) -> Result<(), Refusal> {
        let number = caller.endpoint;
        if self.books.listeners.get(&body.listener).is_none_or(|l| l.endpoint != number) {
            let text = format!("endpoint {number} has no listener {}", body.listener);
            return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
        }
        self.record(Change::Unlisten { listener: body.listener })?;
        // Nobody will accept these any more.
        let at_it = (body.listener, 0)..=(body.listener, u64::MAX);
        let waiting = self.endpoint_of(caller)?.waiting.range(at_it).map(|(_, channel)| *channel);
        for channel in waiting.collect::<Vec<_>>() {
            self.close_side(channel, false)?;
        }
        self.ok(caller)
    }

    pub(crate) fn connect(
        &mut self,
        world: &mut dyn World,
        caller: &Caller,
        body: &wire::Connect,
    ) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let endpoint = self.endpoint_of(caller)?;
        let (segment, member) = (caller.segment, caller.member);
        let name = checked(&body.name, "listener")?;
        let kind = checked_kind(body.kind)?;
        let requested = self.rounded(body.capacities())?;
        if let Some(&channel) = endpoint.opened.get(&body.nonce) {
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
        let least = self.rounded(listener.capacities)?;
        let larger = |one: u64, other: u64| match one.max(other) {
            0 => self.limits.default_ring,
            n => n,
        };
        let capacities = Capacities {
            initiator: larger(requested.initiator, least.initiator),
            acceptor: larger(requested.acceptor, least.acceptor),
        };
        let len = capacities.footprint() as u64;
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
                     request smaller rings, or raise {key}",
                    Bytes(limit)
                );
                return Err(Refusal::new(ErrorCode::LIMIT, text));
            }
        }
        let arena = self.books.segments.get(&segment).map(|s| &s.arena);
        let Some(offset) = arena.and_then(|arena| arena.find(len, PAGE as u64)) else {
            let text = format!(
                "segment {segment} has no room for a channel of {len} bytes (its longest free run has {}): close \
                 channels, request smaller rings, or make the segment larger",
                arena.map_or(0, |arena| arena.longest())
            );
            return Err(Refusal::new(ErrorCode::NO_MEMORY, text));
        };
        let needs_daemon = |from: u32, to: &Endpoint| {
            let (kind, bell) = self.bell(from, to.member, to.vector);
            // Only the daemon itself has this vector.
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
            capacity: capacities.initiator,
            acceptor_capacity: Some(capacities.acceptor).filter(|&acceptor| acceptor != capacities.initiator),
            kind: kind.0,
            nonce: body.nonce,
            uid: caller.uid,
            accepted: false,
            relayed: needs_daemon(member, acceptor) || needs_daemon(acceptor.member, endpoint),
        };
        let (channel_number, acceptor) = (channel.number, acceptor.number);
        self.effect(Effect::Zero { segment, offset, capacities });
        self.record(Change::Opened(channel))?;
        debug!(channel = channel_number, %segment, %name, from = number, to = acceptor, ?capacities, "channel");
        self.send_channel(caller.client, Kind::CHANNEL, caller.request, channel_number, true);
        for client in self.connections(acceptor) {
            self.send_channel(client, Kind::INCOMING, 0, channel_number, false);
        }
        Ok(())
    }

    pub(crate) fn accepted(&mut self, caller: &Caller, body: &wire::ChannelRef) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let Some(channel) = self.books.channels.get(&body.channel).filter(|c| c.acceptor.endpoint == number)
        else {
            return Err(no_channel(number, body.channel));
        };
        if !channel.accepted && !channel.acceptor.closed {
            self.record(Change::Accepted { channel: body.channel })?;
        }
        self.ok(caller)
    }

    /// Lets another process of the endpoint continue with a channel.
    pub(crate) fn resume(&mut self, caller: &Caller, body: &wire::ChannelSide) -> Result<(), Refusal> {
        let (number, initiator) = (caller.endpoint, body.initiator == 1);
        let channel = self.books.channels.get(&body.channel);
        let own = |c: &&Channel| c.side(initiator).endpoint == number && !c.side(initiator).closed;
        let Some(channel) = channel.filter(own) else { return Err(no_channel(number, body.channel)) };
        // Its earlier process may have accepted the channel, and ended before it could say so.
        if !initiator && !channel.accepted {
            self.record(Change::Accepted { channel: body.channel })?;
        }
        self.send_channel(caller.client, Kind::CHANNEL, caller.request, body.channel, initiator);
        Ok(())
    }

    pub(crate) fn close(&mut self, caller: &Caller, body: &wire::ChannelRef) -> Result<(), Refusal> {
        let number = caller.endpoint;
        let channel = self.books.channels.get(&body.channel);
        let open = |initiator: bool| {
            channel.is_some_and(|c| c.side(initiator).endpoint == number && !c.side(initiator).closed)
        };
        // An endpoint that is connected to itself closes one side, then the other.
        let initiator = if open(true) {
            true
        } else if open(false) {
            false
        } else {
            return Err(no_channel(number, body.channel));
        };
        self.close_side(body.channel, initiator)?;
        self.ok(caller)
    }

    fn close_side(&mut self, number: u64, initiator: bool) -> Result<(), Refusal> {
        // An endpoint that is connected to itself has written into the rings already which side it closes, which is not known
        // here.
        let alone =
            self.books.channels.get(&number).is_some_and(|c| c.initiator.endpoint == c.acceptor.endpoint);
        if !alone {
            self.mark(number, initiator, SideState::FINISHED);
        }
        debug!(channel = number, initiator, "channel closed");
        self.record(Change::Closed { channel: number, initiator })
    }

    /// Rounds requested capacities to those that rings can have; 0 stays 0.
    fn rounded(&self, capacities: Capacities) -> Result<Capacities, Refusal> {
        Ok(Capacities {
            initiator: self.round(capacities.initiator)?,
            acceptor: self.round(capacities.acceptor)?,
        })
    }

    fn round(&self, capacity: u64) -> Result<u64, Refusal> {
        if capacity == 0 {
            return Ok(0);
        }
        let max = self.limits.max_ring;
        match capacity.max(ring::MIN_CAPACITY as u64).checked_next_power_of_two() {
            Some(capacity) if capacity <= max => Ok(capacity),
            _ => {
                let text = format!(
                    "rings of {capacity} bytes: at most {} are possible, or raise max_ring",
                    Bytes(max)
                );
                Err(Refusal::new(ErrorCode::INVALID, text))
            }
        }
    }

    /// Writes the state of one side into both rings of a channel, and wakes the other side.
    pub(crate) fn mark(&mut self, channel: u64, initiator: bool, state: SideState) {
        let Some(channel) = self.books.channels.get(&channel) else { return };
        if channel.side(initiator).closed {
            return;
        }
        let segment = channel.segment.0;
        let (output, input) = channel.capacities().rings(initiator);
        for (ring, word) in [(output, ring::PRODUCER_STATE), (input, ring::CONSUMER_STATE)] {
            self.effects.push(Effect::Mark { segment, at: channel.offset + (ring + word) as u64, state });
        }
        let peer = channel.side(!initiator);
        if !peer.closed {
            // The peer may consume from the one and produce into the other.
            let words = [output + ring::DATA_ARMED, input + ring::SPACE_ARMED];
            let words = words.map(|word| channel.offset + word as u64);
            let boards = self.books.boards.of(peer.endpoint, peer.epoch);
            if !boards.is_empty() {
                self.effects.push(Effect::Post { segment, words, boards });
            }
        }
        if !peer.closed
            && let Some(peer) = self.books.endpoints.get(&peer.endpoint)
        {
            self.effects.push(Effect::Ring { member: peer.member, vector: peer.vector });
        }
    }

    /// Sends a channel as one of its sides sees it, for `CHANNEL` and `INCOMING`.
    pub(crate) fn send_channel(
        &mut self,
        client: ClientId,
        kind: Kind,
        request: u32,
        channel: u64,
        initiator: bool,
    ) {
        let Some(channel) = self.books.channels.get(&channel) else { return };
        let peer = channel.side(!initiator);
        let Some(endpoint) = self.books.endpoints.get(&channel.side(initiator).endpoint) else { return };
        // The peer may have died since, and another endpoint may have its number.
        let there = self.books.endpoints.get(&peer.endpoint).filter(|e| e.epoch == peer.epoch);
        let (bell_kind, bell) =
            there.map_or((BellKind::NONE, 0), |t| self.bell(endpoint.member, t.member, t.vector));
        let (fds, bits) = match there {
            Some(there) if bell_kind == BellKind::EVENT => {
                (vec![FdRef::Event(there.member, there.vector)], Fds::PEER_EVENT)
            }
            _ => (vec![], 0),
        };
        let (capacity, input_capacity) = channel.capacities().of(initiator);
        let answer = wire::Channel {
            channel: channel.number,
            offset: channel.offset,
            capacity,
            input_capacity,
            nonce: if initiator { channel.nonce } else { 0 },
            kind: channel.kind,
            initiator: initiator.into(),
            listener: channel.listener,
            bell_kind,
            bell,
            peer_member: peer.member,
            peer_endpoint: peer.endpoint,
            peer_epoch: peer.epoch,
            fds: Fds(bits),
            reserved: 0,
            peer_name: there.map_or(Name::NONE, |e| e.name),
            peer_member_name: self.books.members.get(&peer.member).map_or(Name::NONE, |m| m.name),
        };
        self.send(client, reply::packet(kind, request, answer.as_bytes()), fds);
    }
}

fn no_channel(endpoint: u32, channel: u64) -> Refusal {
    Refusal::new(ErrorCode::NOT_FOUND, format!("endpoint {endpoint} has no open channel {channel}"))
}

fn checked_kind(kind: u32) -> Result<ChannelKind, Refusal> {
    match ChannelKind(kind) {
        known @ (ChannelKind::MESSAGE | ChannelKind::STREAM | ChannelKind::SOCKET) => Ok(known),
        ChannelKind(other) => {
            Err(Refusal::new(ErrorCode::INVALID, format!("there is no kind {other} of channels: use 1 or 2")))
        }
    }
}
