//! Accounts: who is charged for what an endpoint takes, and how much that is.
//!
//! Each user of the host, and each VM, has an account in each segment. The limits hold for an account, so what one user takes
//! in one segment is not missing to another user, nor in another segment. A VM has one account in a segment, whatever users it
//! has: which user a guest's program runs as is a claim of that guest.

use super::books::{Books, Endpoint};
use ginnel_layout::{HOST_MEMBER, Name};
use std::fmt;

/// Who is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    /// The member.
    pub member: u32,
    /// The segment.
    pub segment: Name,
    /// The user, if the member is the host; else 0.
    pub uid: u32,
}

impl Account {
    /// The account of a user of a member in a segment.
    pub fn new(member: u32, segment: Name, uid: u32) -> Self {
        Self { member, segment, uid: if member == HOST_MEMBER { uid } else { 0 } }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.member {
            HOST_MEMBER => write!(f, "user {} of the host in segment {}", self.uid, self.segment),
            member => write!(f, "member {member} in segment {}", self.segment),
        }
    }
}

/// What an account is charged with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Endpoints.
    pub endpoints: u32,
    /// Channels that they have opened and that still hold memory.
    pub channels: u32,
    /// That memory, in bytes.
    pub bytes: u64,
    /// Blocks and synchronisation objects that they have made and that still hold memory.
    pub blocks: u32,
    /// That memory, in bytes.
    pub block_bytes: u64,
    /// Handles of blocks and synchronisation objects that they have open.
    pub handles: u32,
    /// Holds of them.
    pub holds: u32,
}

impl Tally {
    const NOTHING: Self =
        Self { endpoints: 0, channels: 0, bytes: 0, blocks: 0, block_bytes: 0, handles: 0, holds: 0 };
    /// One endpoint.
    pub const ENDPOINT: Self = Self { endpoints: 1, ..Self::NOTHING };
    /// One handle.
    pub const HANDLE: Self = Self { handles: 1, ..Self::NOTHING };

    /// So many holds.
    pub fn holds(holds: usize) -> Self {
        Self { holds: holds as u32, ..Self::default() }
    }

    /// One channel with so much memory.
    pub fn channel(bytes: u64) -> Self {
        Self { channels: 1, bytes, ..Self::default() }
    }

    /// One block or synchronisation object with so much memory.
    pub fn block(block_bytes: u64) -> Self {
        Self { blocks: 1, block_bytes, ..Self::default() }
    }

    /// Memory that belongs to channels.
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// Both together.
    pub fn plus(self, more: Self) -> Self {
        Self {
            endpoints: self.endpoints + more.endpoints,
            channels: self.channels + more.channels,
            bytes: self.bytes + more.bytes,
            blocks: self.blocks + more.blocks,
            block_bytes: self.block_bytes + more.block_bytes,
            handles: self.handles + more.handles,
            holds: self.holds + more.holds,
        }
    }

    fn minus(self, less: Self) -> Self {
        Self {
            endpoints: self.endpoints - less.endpoints,
            channels: self.channels - less.channels,
            bytes: self.bytes - less.bytes,
            blocks: self.blocks - less.blocks,
            block_bytes: self.block_bytes - less.block_bytes,
            handles: self.handles - less.handles,
            holds: self.holds - less.holds,
        }
    }
}

impl Endpoint {
    /// Who is charged for it, and for what it makes.
    pub fn account(&self) -> Account {
        Account::new(self.member, self.segment, self.uid)
    }
}

impl Books {
    pub(super) fn charge(&mut self, account: Account, more: Tally) {
        let tally = self.tallies.entry(account).or_default();
        *tally = tally.plus(more);
    }

    pub(super) fn discharge(&mut self, account: Account, less: Tally) {
        let Some(tally) = self.tallies.get_mut(&account) else { return };
        *tally = tally.minus(less);
        if *tally == Tally::default() {
            self.tallies.remove(&account);
        }
    }

    /// What an account is charged with.
    pub fn tally(&self, account: Account) -> Tally {
        self.tallies.get(&account).copied().unwrap_or_default()
    }

    /// The accounts of a member.
    pub fn accounts_of(&self, member: u32) -> impl Iterator<Item = (&Account, &Tally)> {
        let first = Account { member, segment: Name::NONE, uid: 0 };
        self.tallies.range(first..).take_while(move |(account, _)| account.member == member)
    }

    /// Whether a member is charged with anything.
    pub fn has_accounts(&self, member: u32) -> bool {
        self.accounts_of(member).next().is_some()
    }

    /// What all accounts of a member are charged with.
    pub fn tally_of(&self, member: u32) -> Tally {
        self.accounts_of(member).fold(Tally::default(), |sum, (_, tally)| sum.plus(*tally))
    }
}
