//! Channels and listeners in the form in which they are shown.

use super::{Channel, Listener, Side};
use crate::host::books::Books;
use crate::host::inspect::member_name;
use ginnel_layout::channel::ChannelKind;
use ginnel_status as status;

impl Channel {
    /// Returns the channel in the form in which it is shown.
    pub fn inspect(&self, books: &Books) -> status::Channel {
        let side = |side: &Side| status::Side {
            endpoint: side.endpoint,
            epoch: side.epoch,
            member: member_name(books, side.member),
            closed: side.closed,
        };
        let state = match (self.accepted, self.initiator.closed || self.acceptor.closed) {
            (_, true) => "closing",
            (false, false) => "waiting",
            (true, false) => "open",
        };
        status::Channel {
            id: self.number,
            segment: self.segment.0.to_string(),
            kind: kind_name(ChannelKind(self.kind)).to_owned(),
            capacity: self.capacities().initiator,
            acceptor_capacity: self.capacities().acceptor,
            state: state.to_owned(),
            relayed: self.relayed,
            initiator: side(&self.initiator),
            acceptor: side(&self.acceptor),
        }
    }
}

impl Listener {
    /// Returns the listener in the form in which it is shown.
    pub fn inspect(&self) -> status::Listener {
        status::Listener {
            number: self.number,
            endpoint: self.endpoint,
            segment: self.segment.to_string(),
            name: self.name.to_string(),
            kind: kind_name(self.kind).to_owned(),
            backlog: self.backlog,
            waiting: self.waiting,
        }
    }
}

/// Returns the name of a kind of channel, for people.
pub(super) fn kind_name(kind: ChannelKind) -> &'static str {
    match kind {
        ChannelKind::MESSAGE => "message",
        ChannelKind::STREAM => "stream",
        ChannelKind::SOCKET => "socket",
        _ => "unknown",
    }
}
