//! A listener, as the books have it.

use super::record::Change;
use crate::text::Text;
use ginnel_layout::Name;
use ginnel_layout::channel::{Capacities, ChannelKind};

/// A name at which an endpoint listens.
#[derive(Clone, Debug, PartialEq)]
pub struct Listener {
    /// The listener's number.
    pub number: u32,
    /// The number of the endpoint that listens.
    pub endpoint: u32,
    /// The segment's name.
    pub segment: Name,
    /// The name of the listener.
    pub name: Name,
    /// The kind of its channels.
    pub kind: ChannelKind,
    /// The most channels that may wait to be accepted.
    pub backlog: u32,
    /// The smallest rings that the listener has requested.
    pub capacities: Capacities,
    /// The number of channels that wait to be accepted now.
    pub waiting: u32,
}

impl Listener {
    pub(super) fn dump(&self) -> Change {
        Change::Listen {
            listener: self.number,
            endpoint: self.endpoint,
            name: Text(self.name),
            kind: self.kind.0,
            backlog: self.backlog,
            capacity: self.capacities.acceptor,
            input_capacity: Some(self.capacities.initiator)
                .filter(|&input| input != self.capacities.acceptor),
        }
    }
}
