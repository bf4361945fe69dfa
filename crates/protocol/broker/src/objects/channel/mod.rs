//! Channels, and the listeners to which they are opened.

mod books;
mod record;
mod requests;

use super::{Class, Request};
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::broker::{Broker, ClientId, Effect};
use crate::relayed::{Reason, Relayed};
use crate::reply::body;
pub use books::Listener;
use ginnel_layout::Name;
use ginnel_layout::channel::{Capacities, ChannelKind};
use ginnel_layout::ring::{self, SideState};
use ginnel_layout::wire::Kind;
pub use record::{Change, Channel, Side};

impl Class for Change {
    const RECORDS: &[&str] = &["listen", "unlisten", "channel", "accepted", "closed"];
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

    fn apply(&self, books: &mut Books) -> Result<(), InvalidRecord> {
        match self {
            &Self::Listen { listener, endpoint, name, kind, backlog, capacity, input_capacity } => {
                let capacities = Capacities::seen(capacity, input_capacity.unwrap_or(capacity), false);
                books.listen(listener, endpoint, name.0, kind, backlog, capacities)
            }
            Self::Unlisten { listener } => books.unlisten(*listener),
            Self::Opened(channel) => books.channel(channel),
            Self::Accepted { channel } => books.accepted(*channel),
            Self::Closed { channel, initiator } => books.close(*channel, *initiator),
        }
    }

    fn gives(&self) -> bool {
        matches!(self, Self::Listen { .. } | Self::Opened(_))
    }

    fn dump(books: &Books) -> impl Iterator<Item = Self> {
        let listeners = books.listeners.values().map(Listener::dump);
        listeners.chain(books.channels.values().cloned().map(Self::Opened))
    }

    fn ends(books: &Books, endpoint: &Endpoint) -> impl Iterator<Item = Self> {
        let listeners = endpoint.listeners.iter().map(|&listener| Self::Unlisten { listener });
        // The endpoint may be both sides of a channel.
        let sides = endpoint.channels.iter().flat_map(|&channel| [(channel, true), (channel, false)]);
        let own = sides.filter(|(channel, initiator)| {
            let side = books.channels.get(channel).map(|channel| channel.side(*initiator));
            side.is_some_and(|side| side.endpoint == endpoint.number && !side.closed)
        });
        listeners.chain(own.map(|(channel, initiator)| Self::Closed { channel, initiator }))
    }

    fn mark_end(&self, broker: &mut Broker) {
        if let Self::Closed { channel, initiator } = *self {
            broker.mark(channel, initiator, SideState::DEAD);
        }
    }

    fn relay(&self, books: &Books, bells: &mut Relayed) {
        if let Self::Opened(channel) = self {
            channel.relay(books, bells);
        }
    }

    fn relay_all(books: &Books, bells: &mut Relayed) {
        let relayed = books.relayed.iter().filter_map(|number| books.channels.get(number));
        relayed.for_each(|channel| channel.relay(books, bells));
    }

    fn unrelay(&self, bells: &mut Relayed) {
        if let Self::Closed { channel, initiator } = *self {
            bells.remove(Reason::Channel(channel, initiator));
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

impl Channel {
    /// Adds the doorbells that the daemon must relay because of the channel.
    fn relay(&self, books: &Books, bells: &mut Relayed) {
        for (initiator, side) in [(true, self.initiator), (false, self.acceptor)] {
            let endpoint = books.endpoints.get(&side.endpoint).filter(|e| e.epoch == side.epoch);
            if let Some(endpoint) = endpoint.filter(|_| self.relayed && !side.closed) {
                bells.insert(Reason::Channel(self.number, initiator), (endpoint.member, endpoint.vector));
            }
        }
    }
}

/// Returns the name of a kind of channel, for people.
pub fn kind_name(kind: ChannelKind) -> &'static str {
    match kind {
        ChannelKind::MESSAGE => "message",
        ChannelKind::STREAM => "stream",
        ChannelKind::SOCKET => "socket",
        _ => "unknown",
    }
}
