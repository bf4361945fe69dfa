//! Channels, and the listeners to which they are opened.

mod books;
pub(crate) mod listener;
pub(crate) mod record;
mod requests;

use super::class::Class;
use crate::books::{Books, Endpoint, InvalidRecord};
use crate::relayed::{Reason, Relayed};
use ginnel_layout::channel::{Capacities, ChannelKind};
pub use listener::Listener;
pub use record::{Change, Channel, Side};

impl Class for Change {
    const RECORDS: &[&str] = &["listen", "unlisten", "channel", "accepted", "closed"];

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
