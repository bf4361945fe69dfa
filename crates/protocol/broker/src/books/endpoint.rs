//! An endpoint, as the books have it.

use crate::hold::Hold;
use crate::process::Process;
use crate::text::Hex16;
use ginnel_layout::Name;
use std::collections::{BTreeMap, BTreeSet};

/// An endpoint, which one process has attached and others may have joined.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The endpoint's number.
    pub number: u32,
    /// The epoch of that number.
    pub epoch: u32,
    /// The secret with which a process proves that it belongs to the endpoint.
    pub token: Hex16,
    /// The number of the endpoint's member.
    pub member: u32,
    /// The name of the endpoint's segment.
    pub segment: Name,
    /// The name that the program has given itself.
    pub name: Name,
    /// The endpoint's doorbell vector.
    pub vector: u32,
    /// The processes that own the endpoint. If there are none, a connection that one of them has left open keeps it alive.
    pub owners: BTreeSet<Process>,
    /// The holds that keep the endpoint alive without owners, by token.
    pub holds: BTreeMap<Hex16, Hold>,
    /// The user number.
    pub uid: u32,
    /// The channels that the endpoint has not closed, whichever side has opened them.
    pub channels: BTreeSet<u64>,
    /// The endpoint's channels that wait to be accepted, as pairs of the listener's and the channel's number.
    pub waiting: BTreeSet<(u32, u64)>,
    /// The numbers of the endpoint's listeners.
    pub listeners: BTreeSet<u32>,
    /// The number of sides of existing channels that are or were the endpoint's own.
    pub sides: u32,
    /// The memory of the channels that the endpoint has opened, in bytes.
    pub bytes: u64,
    /// The channels that the endpoint has opened and not closed, by the nonce of the request.
    pub opened: BTreeMap<u64, u64>,
    /// The synchronisation objects that the endpoint uses, with its slots in them.
    pub syncs: BTreeSet<(u64, u32)>,
    /// The same objects and slots, by the nonce of the request.
    pub slots: BTreeMap<u64, (u64, u32)>,
    /// The endpoint's handles of blocks, by the nonce of the request.
    pub handles: BTreeMap<u64, u64>,
    /// The blocks that the endpoint owns.
    pub blocks: BTreeSet<u64>,
    /// The endpoint's blocks whose names end with it.
    pub ending_names: BTreeSet<u64>,
    /// The size in bytes of all blocks that the endpoint owns.
    pub block_bytes: u64,
    /// The blocks of which a right was granted to this endpoint alone.
    pub granted: BTreeSet<u64>,
    /// The endpoint has ended, and its objects are being given back.
    pub is_ending: bool,
}

impl Endpoint {
    /// Returns one of its processes, to show to people; 0 if none is known.
    pub fn pid(&self) -> u32 {
        self.owners.first().map_or(0, |process| process.pid)
    }
}
