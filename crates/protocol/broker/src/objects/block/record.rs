//! Records of blocks.

use super::handles::{BlockGrant, BlockHandle, Grants, Handles};
use crate::text::Text;
use serde::{Deserialize, Serialize};

/// One change, as [`crate::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// A block was made.
    #[serde(rename = "block")]
    Made(Box<Block>),
    /// A block has got a name.
    #[serde(rename = "block_linked")]
    Linked {
        /// The number of the block.
        block: u64,
        /// The new name.
        name: Text,
    },
    /// The name of a block was removed, and the block too if nobody has it open.
    #[serde(rename = "block_unlinked")]
    Unlinked {
        /// The number of the block.
        block: u64,
    },
    /// An endpoint has opened a block.
    #[serde(rename = "block_opened")]
    Opened {
        /// The number of the block.
        block: u64,
        /// The new handle.
        handle: BlockHandle,
    },
    /// A handle was closed. If it was the last one of a block without a name, the block was removed.
    #[serde(rename = "block_closed")]
    Closed {
        /// The number of the handle.
        handle: u64,
    },
    /// A block has become longer or shorter.
    #[serde(rename = "block_resized")]
    Resized {
        /// The number of the block.
        block: u64,
        /// The requested size in bytes.
        size: u64,
        /// The size in whole pages, in bytes.
        span: u64,
    },
    /// The rights of a member or an endpoint have changed.
    #[serde(rename = "block_granted")]
    Granted {
        /// The number of the block.
        block: u64,
        /// The member or endpoint, and its rights.
        grant: BlockGrant,
    },
    /// A grant to an endpoint has ended with the endpoint.
    #[serde(rename = "block_grant_ended")]
    GrantEnded {
        /// The number of the block.
        block: u64,
        /// The number of the endpoint.
        endpoint: u32,
    },
    /// A holder has acknowledged that its rights were reduced.
    #[serde(rename = "block_acked")]
    Acked {
        /// The number of the handle.
        handle: u64,
    },
}

/// A block of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// The block's number.
    pub number: u64,
    /// The segment's name.
    pub segment: Text,
    /// The block's name; empty if it has none.
    pub name: Text,
    /// The number of the endpoint that made it.
    pub owner: u32,
    /// The epoch of that endpoint.
    pub owner_epoch: u32,
    /// The number of that endpoint's member, which is charged for the block.
    pub member: u32,
    /// The user number of that endpoint.
    pub uid: u32,
    /// The offset in the segment, in bytes.
    pub offset: u64,
    /// The requested size in bytes.
    pub size: u64,
    /// The size in whole pages, in bytes.
    pub span: u64,
    /// The name outlives the endpoint.
    pub persistent: bool,
    /// The time at which it was made, in seconds since 1970.
    pub made: u64,
    /// The rights ([`ginnel_layout::wire::Rights`]) of everybody who is not in `grants`.
    pub others: u32,
    /// The rights of particular members and endpoints.
    #[serde(default, skip_serializing_if = "Grants::is_empty")]
    pub grants: Grants,
    /// The open handles.
    pub handles: Handles,
}
