//! Channels and listeners in the form in which they are shown.

use crate::host::inspect::member_name;
use ginnel_broker::books::Books;
use ginnel_broker::objects::channel::{Channel, Listener, Side, kind_name};
use ginnel_layout::channel::ChannelKind;
use ginnel_status as status;

/// Returns a channel in the form in which it is shown.
pub fn channel(channel: &Channel, books: &Books) -> status::Channel {
    let side = |side: &Side| status::Side {
        endpoint: side.endpoint,
        epoch: side.epoch,
        member: member_name(books, side.member),
        closed: side.closed,
    };
    let state = match (channel.accepted, channel.initiator.closed || channel.acceptor.closed) {
        (_, true) => "closing",
        (false, false) => "waiting",
        (true, false) => "open",
    };
    status::Channel {
        id: channel.number,
        segment: channel.segment.0.to_string(),
        kind: kind_name(ChannelKind(channel.kind)).to_owned(),
        capacity: channel.capacities().initiator,
        acceptor_capacity: channel.capacities().acceptor,
        state: state.to_owned(),
        relayed: channel.relayed,
        initiator: side(&channel.initiator),
        acceptor: side(&channel.acceptor),
    }
}

/// Returns a listener in the form in which it is shown.
pub fn listener(listener: &Listener) -> status::Listener {
    status::Listener {
        number: listener.number,
        endpoint: listener.endpoint,
        segment: listener.segment.to_string(),
        name: listener.name.to_string(),
        kind: kind_name(listener.kind).to_owned(),
        backlog: listener.backlog,
        waiting: listener.waiting,
    }
}
