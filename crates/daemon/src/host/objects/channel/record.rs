//! Records of channels and listeners.

use crate::host::account::Account;
use crate::host::record::Text;
use ginnel_layout::channel::Capacities;
use serde::{Deserialize, Serialize};

/// One change, as [`crate::host::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Somebody listens.
    Listen {
        /// Number of the listener.
        listener: u32,
        /// Whose it is.
        endpoint: u32,
        /// At which name.
        name: Text,
        /// Kind of its channels.
        kind: u32,
        /// How many may wait.
        backlog: u32,
        /// The smallest ring from it; and to it, if nothing else is said.
        capacity: u64,
        /// The smallest ring to it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        input_capacity: Option<u64>,
    },
    /// Nobody listens there any more.
    Unlisten {
        /// Number of the listener.
        listener: u32,
    },
    /// A channel.
    #[serde(rename = "channel")]
    Opened(Channel),
    /// The acceptor has taken a channel.
    Accepted {
        /// Its number.
        channel: u64,
    },
    /// One side has closed a channel.
    Closed {
        /// Its number.
        channel: u64,
        /// Which side.
        initiator: bool,
    },
}

/// A channel, as long as a side of it may touch its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Channel {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: Text,
    /// The listener that it was opened to.
    pub listener: u32,
    /// Who has opened it.
    pub initiator: Side,
    /// Who was listening.
    pub acceptor: Side,
    /// Where its block lies.
    pub offset: u64,
    /// Data bytes of the ring that the initiator writes; and of the other, if nothing else is said.
    pub capacity: u64,
    /// Data bytes of the ring that the acceptor writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acceptor_capacity: Option<u64>,
    /// Kind of its rings.
    pub kind: u32,
    /// The initiator's own number for its request.
    pub nonce: u64,
    /// The initiator's user, who pays for it. Journals of before this was written have none; it is root's then.
    #[serde(default)]
    pub uid: u32,
    /// The acceptor has taken it.
    pub accepted: bool,
    /// A side cannot ring the other itself: the daemon passes on.
    pub relayed: bool,
}

/// One side of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// The endpoint.
    pub endpoint: u32,
    /// Its epoch.
    pub epoch: u32,
    /// Its member.
    pub member: u32,
    /// It has closed the channel, or has died.
    pub closed: bool,
}

impl Channel {
    /// Data bytes of its rings. They are valid in all channels of the books.
    pub fn capacities(&self) -> Capacities {
        Capacities { initiator: self.capacity, acceptor: self.acceptor_capacity.unwrap_or(self.capacity) }
    }

    /// Bytes of its block.
    pub fn block_len(&self) -> u64 {
        self.capacities().footprint() as u64
    }

    /// One side.
    pub fn side(&self, initiator: bool) -> &Side {
        if initiator { &self.initiator } else { &self.acceptor }
    }

    /// Who is charged for it: whoever has opened it.
    pub fn account(&self) -> Account {
        Account::new(self.initiator.member, self.segment.0, self.uid)
    }
}
