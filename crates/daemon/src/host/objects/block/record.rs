//! Records of blocks.

use super::handles::{Grants, Handles};
use crate::host::record::Text;
use serde::{Deserialize, Serialize};

/// One change, as [`crate::host::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// A block.
    #[serde(rename = "block")]
    Made(Box<Block>),
    /// It has got a name.
    #[serde(rename = "block_linked")]
    Linked {
        /// Number of the block.
        block: u64,
        /// The name.
        name: Text,
    },
    /// Its name is gone, and the block if nobody has it open.
    #[serde(rename = "block_unlinked")]
    Unlinked {
        /// Number of the block.
        block: u64,
    },
    /// Somebody has opened it.
    #[serde(rename = "block_opened")]
    Opened {
        /// Number of the block.
        block: u64,
        /// The handle.
        handle: BlockHandle,
    },
    /// A handle is closed, and with the last one a block without a name is gone.
    #[serde(rename = "block_closed")]
    Closed {
        /// Number of the handle.
        handle: u64,
    },
    /// It is longer, or shorter.
    #[serde(rename = "block_resized")]
    Resized {
        /// Number of the block.
        block: u64,
        /// Bytes wished for.
        size: u64,
        /// Bytes that it has.
        span: u64,
    },
    /// Somebody may do something else with it.
    #[serde(rename = "block_granted")]
    Granted {
        /// Number of the block.
        block: u64,
        /// Who, and what.
        grant: BlockGrant,
    },
    /// What was granted to an endpoint alone ends with it.
    #[serde(rename = "block_grant_ended")]
    GrantEnded {
        /// Number of the block.
        block: u64,
        /// The endpoint.
        endpoint: u32,
    },
    /// Whoever has a handle knows that it has been left less.
    #[serde(rename = "block_acked")]
    Acked {
        /// Number of the handle.
        handle: u64,
    },
}

/// A block of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: Text,
    /// Its name, if it has one.
    pub name: Text,
    /// The endpoint that has made it.
    pub owner: u32,
    /// That endpoint's epoch.
    pub owner_epoch: u32,
    /// Its member, which pays for the block.
    pub member: u32,
    /// Its user.
    pub uid: u32,
    /// Where it lies.
    pub offset: u64,
    /// Bytes wished for.
    pub size: u64,
    /// Bytes that it has.
    pub span: u64,
    /// Its name outlives the endpoint.
    pub persistent: bool,
    /// When it was made, in seconds since 1970.
    pub made: u64,
    /// What those may ([`ginnel_layout::wire::Rights`]) who are not in `grants`.
    pub others: u32,
    /// What some may.
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    pub grants: Grants,
    /// Who has it open.
    pub handles: Handles,
}

/// What a member or an endpoint may do with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockGrant {
    /// The member.
    pub member: u32,
    /// Number of one of its endpoints. Journals of before this was written have none: there, the epoch tells which.
    #[serde(default)]
    pub endpoint: u32,
    /// Epoch of that endpoint; 0 if the grant is to all others of the member.
    pub epoch: u32,
    /// What it may do.
    pub rights: u32,
}

/// An open handle of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockHandle {
    /// Its number.
    pub number: u64,
    /// Whose it is.
    pub endpoint: u32,
    /// What it can do: what its library has mapped.
    pub rights: u32,
    /// What it has been left, until its library says that it has heard of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// The endpoint's own number for its request.
    pub nonce: u64,
}
