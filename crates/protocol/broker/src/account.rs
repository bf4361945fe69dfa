//! Accounts: who is charged for the resources of an endpoint, and how much each account uses.
//!
//! Each user of the host, and each VM, has an account in each segment. The limits apply to an account, so what one user takes
//! in one segment is not missing to another user or in another segment. A VM has one account in a segment for all its users,
//! because the daemon cannot verify which user a guest's program runs as.

mod charges;

use ginnel_layout::{HOST_MEMBER, Name};
use std::fmt;

/// The key of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    /// The member number.
    pub member: u32,
    /// The segment's name.
    pub segment: Name,
    /// The user number if the member is the host; otherwise 0.
    pub uid: u32,
}

impl Account {
    /// Returns the account of a user of a member in a segment.
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

/// The resources that an account is charged for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The number of endpoints.
    pub endpoints: u32,
    /// The number of channels that they have opened and that still hold memory.
    pub channels: u32,
    /// The memory of these channels, in bytes.
    pub bytes: u64,
    /// The number of blocks and synchronisation objects that they have made and that still hold memory.
    pub blocks: u32,
    /// The memory of these blocks and objects, in bytes.
    pub block_bytes: u64,
    /// The number of open handles of blocks and synchronisation objects.
    pub handles: u32,
    /// The number of holds of these endpoints.
    pub holds: u32,
}

impl Tally {
    const NOTHING: Self =
        Self { endpoints: 0, channels: 0, bytes: 0, blocks: 0, block_bytes: 0, handles: 0, holds: 0 };
    /// The charge for one endpoint.
    pub const ENDPOINT: Self = Self { endpoints: 1, ..Self::NOTHING };
    /// The charge for one handle.
    pub const HANDLE: Self = Self { handles: 1, ..Self::NOTHING };

    /// Returns the charge for this number of holds.
    pub fn holds(holds: usize) -> Self {
        Self { holds: holds as u32, ..Self::default() }
    }

    /// Returns the charge for one channel with this many bytes.
    pub fn channel(bytes: u64) -> Self {
        Self { channels: 1, bytes, ..Self::default() }
    }

    /// Returns the charge for one block or synchronisation object with this many bytes.
    pub fn block(block_bytes: u64) -> Self {
        Self { blocks: 1, block_bytes, ..Self::default() }
    }

    /// Returns the charge for bytes of channels alone.
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// Returns the sum of two charges.
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
