//! The books: the members, the segments, and who owns what in them.
//!
//! They change only by [`Record`](crate::record::Record)s ([`Books::apply`]), and each record goes into the journal. So reading the journal
//! makes the same books again: there is no second way to reach a state.
//!
//! What the books consist of lies below the records and the changes of objects; `apply`, `begin` and `dump` lie above them.

mod apply;
mod begin;
mod dump;
mod endpoint;
mod index;
mod member;
mod segment;

use crate::account::{Account, Tally};
use crate::numbers::Numbers;
use crate::objects::block::record::Block;
use crate::objects::board::boards::Boards;
use crate::objects::channel::listener::Listener;
use crate::objects::channel::record::Channel;
use crate::objects::sync::record::SyncObject;
use crate::text::Hex16;
pub use endpoint::Endpoint;
use ginnel_layout::{HOST_MEMBER, Name};
pub use index::Index;
pub use member::{Member, Qemu, Session};
pub use segment::Segment;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// The error for a record that does not fit the books. Only a damaged journal, or a bug of the daemon, makes such a record.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct InvalidRecord(pub(crate) &'static str);

/// The whole state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Books {
    /// The boot identity of the host.
    pub boot_id: Hex16,
    /// The number of starts of the daemon.
    pub generation: u64,
    /// The number of the next listener, if it is free.
    pub next_listener: u32,
    /// The number of the next channel.
    pub next_channel: u64,
    /// The number of the next synchronisation object or block.
    pub next_object: u64,
    /// The members by number.
    pub members: BTreeMap<u32, Member>,
    /// The charges of each account; accounts without charges are not in it.
    pub(crate) tallies: BTreeMap<Account, Tally>,
    /// The segments by name.
    pub segments: BTreeMap<Name, Segment>,
    /// The endpoints by number.
    pub endpoints: BTreeMap<u32, Endpoint>,
    /// The numbers that endpoints have had so far.
    pub(crate) numbers: Numbers,
    /// The listeners by number.
    pub listeners: BTreeMap<u32, Listener>,
    /// The channels by number.
    pub channels: BTreeMap<u64, Channel>,
    /// The readiness boards.
    pub(crate) boards: Boards,
    /// The listeners by segment and name.
    pub names: BTreeMap<(Name, Name), u32>,
    /// The channels whose doorbells the daemon relays.
    pub relayed: BTreeSet<u64>,
    /// The synchronisation objects by number.
    pub syncs: BTreeMap<u64, SyncObject>,
    /// The synchronisation objects by segment and name.
    pub sync_names: BTreeMap<(Name, Name), u64>,
    /// The blocks by number.
    pub blocks: BTreeMap<u64, Block>,
    /// The blocks by segment and name.
    pub block_names: BTreeMap<(Name, Name), u64>,
    /// The block of each handle.
    pub handles: BTreeMap<u64, u64>,
    /// The endpoints by other keys than their number.
    pub index: Index,
}

impl Books {
    /// Returns the member with this name.
    pub fn member_named(&self, name: &Name) -> Option<&Member> {
        self.members.values().find(|m| m.name == *name)
    }

    /// Returns the members that share a segment with this one, including the host.
    pub fn neighbours(&self, member: u32) -> BTreeSet<u32> {
        let shared = self.segments.values().filter(|s| s.members.contains(&member));
        let mut all: BTreeSet<u32> = shared.flat_map(|s| s.members.iter().copied()).collect();
        all.insert(HOST_MEMBER);
        all.remove(&member);
        all
    }

    /// Returns the segments with allocated memory. Truncating the file of such a segment may harm its users.
    pub fn segments_in_use(&self) -> Vec<Name> {
        self.segments.values().filter(|s| s.arena.used() > 0).map(|s| s.name).collect()
    }

    /// Returns whether there are any such segments.
    pub fn is_memory_used(&self) -> bool {
        self.segments.values().any(|s| s.arena.used() > 0)
    }

    /// Returns the member number for a VM with this name: the one that it had, or else the lowest that no member ever had, or
    /// else the lowest that no member has now. `None` if all are taken.
    pub fn number_for(&self, name: &Name, reserved: &BTreeSet<u32>) -> Option<u32> {
        if let Some(member) = self.member_named(name) {
            return Some(member.number);
        }
        let numbers = || (1..=crate::limits::MAX_MEMBER).filter(|n| !reserved.contains(n));
        // The search for a number that was never used is limited to small numbers, so that the range of the doorbells stays
        // small.
        numbers().take_while(|&n| n <= 1024).find(|n| !self.members.contains_key(n)).or_else(|| {
            numbers().find(|n| self.members.get(n).is_none_or(|m| m.retired && !self.has_accounts(*n)))
        })
    }
}
