//! Records of channels and listeners.

use crate::account::Account;
use crate::text::Text;
use ginnel_layout::channel::Capacities;
use serde::{Deserialize, Serialize};

/// One change, as [`crate::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// An endpoint listens at a name.
    Listen {
        /// The number of the listener.
        listener: u32,
        /// The number of the endpoint.
        endpoint: u32,
        /// The name.
        name: Text,
        /// The kind of its channels.
        kind: u32,
        /// The most channels that may wait to be accepted.
        backlog: u32,
        /// The smallest ring from the listener, in data bytes; also the smallest ring to it, if `input_capacity` is missing.
        capacity: u64,
        /// The smallest ring to the listener, in data bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        input_capacity: Option<u64>,
    },
    /// A listener has ended.
    Unlisten {
        /// The number of the listener.
        listener: u32,
    },
    /// A channel was opened.
    #[serde(rename = "channel")]
    Opened(Channel),
    /// The acceptor has taken a channel.
    Accepted {
        /// The number of the channel.
        channel: u64,
    },
    /// One side has closed a channel.
    Closed {
        /// The number of the channel.
        channel: u64,
        /// Whether the side is the initiator.
        initiator: bool,
    },
}

/// A channel, as long as one of its sides may touch its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Channel {
    /// The channel's number.
    pub number: u64,
    /// The segment's name.
    pub segment: Text,
    /// The number of the listener to which it was opened.
    pub listener: u32,
    /// The side that opened it.
    pub initiator: Side,
    /// The side that listened.
    pub acceptor: Side,
    /// The offset of its block in the segment.
    pub offset: u64,
    /// Data bytes of the ring that the initiator writes; also of the other ring, if `acceptor_capacity` is missing.
    pub capacity: u64,
    /// Data bytes of the ring that the acceptor writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceptor_capacity: Option<u64>,
    /// The kind of its rings.
    pub kind: u32,
    /// The nonce that the initiator has chosen for its request.
    pub nonce: u64,
    /// The number of the initiator's user, for the account. Older journals do not have it; there it counts as root's.
    #[serde(default)]
    pub uid: u32,
    /// The acceptor has taken the channel.
    pub accepted: bool,
    /// One side cannot ring the other directly, so the daemon relays the ring.
    pub relayed: bool,
}

/// One side of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// The number of the endpoint.
    pub endpoint: u32,
    /// The epoch of the endpoint.
    pub epoch: u32,
    /// The number of its member.
    pub member: u32,
    /// The endpoint has closed the channel, or has died.
    pub closed: bool,
}

impl Channel {
    /// Returns the data bytes of its rings. They are valid in all channels of the books.
    pub fn capacities(&self) -> Capacities {
        Capacities { initiator: self.capacity, acceptor: self.acceptor_capacity.unwrap_or(self.capacity) }
    }

    /// Returns the bytes of its block.
    pub fn block_len(&self) -> u64 {
        self.capacities().footprint() as u64
    }

    /// Returns one side.
    pub fn side(&self, initiator: bool) -> &Side {
        if initiator { &self.initiator } else { &self.acceptor }
    }

    /// Returns the account that is charged for the channel: the initiator's.
    pub fn account(&self) -> Account {
        Account::new(self.initiator.member, self.segment.0, self.uid)
    }
}
