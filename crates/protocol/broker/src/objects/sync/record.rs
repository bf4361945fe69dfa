//! Records of synchronisation objects.

use crate::text::Text;
use ginnel_layout::sync::SyncKind;
use serde::{Deserialize, Serialize};

/// One change, as [`crate::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// A synchronisation object was made.
    #[serde(rename = "sync")]
    Made(SyncObject),
    /// The object has another user.
    #[serde(rename = "sync_opened")]
    Opened {
        /// The number of the object.
        object: u64,
        /// The new user.
        user: SyncUser,
    },
    /// A user has left. If it was the last one, the object was removed, unless it is persistent and has its name.
    #[serde(rename = "sync_closed")]
    Closed {
        /// The number of the object.
        object: u64,
        /// The user's slot.
        slot: u32,
        /// The user has died. Earlier daemons leave this out, because they recorded the end of its endpoint as a whole.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        died: bool,
    },
    /// The name of the object was removed.
    #[serde(rename = "sync_unlinked")]
    Unlinked {
        /// The number of the object.
        object: u64,
    },
}

/// A synchronisation object: a page of a segment, and its users.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncObject {
    /// The object's number.
    pub number: u64,
    /// The segment's name.
    pub segment: Text,
    /// The object's name; empty once it is unlinked.
    pub name: Text,
    /// The kind: a [`ginnel_layout::sync::SyncKind`].
    pub kind: u32,
    /// The most permits of a semaphore, or the parties of a barrier.
    pub limit: u32,
    /// The offset of the page in the segment.
    pub offset: u64,
    /// The object stays without users.
    pub persistent: bool,
    /// The last user has died, so the object stays until it has been used again. Otherwise the information in a lock that its owner
    /// died would be lost.
    #[serde(default)]
    pub bereaved: bool,
    /// The number of the member that made it, for the account.
    pub member: u32,
    /// The number of the user that made it, for the account. Older journals do not have it; there it counts as root's.
    #[serde(default)]
    pub uid: u32,
    /// The epoch of the next user.
    pub next_epoch: u16,
    /// The users by slot.
    pub users: Vec<SyncUser>,
}

/// A user of a synchronisation object: an open handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncUser {
    /// The slot.
    pub slot: u32,
    /// The epoch of the slot.
    pub epoch: u16,
    /// The number of the endpoint that has the handle.
    pub endpoint: u32,
    /// The nonce that the endpoint has chosen for its request.
    pub nonce: u64,
}

/// Returns the kind of an object.
pub fn kind_of(object: &SyncObject) -> SyncKind {
    SyncKind(object.kind)
}
