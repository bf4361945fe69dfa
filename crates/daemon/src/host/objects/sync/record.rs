//! Records of synchronisation objects.

use crate::host::record::{Text, is_false};
use serde::{Deserialize, Serialize};

/// One change, as [`crate::host::record::Record`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// A synchronisation object.
    #[serde(rename = "sync")]
    Made(SyncObject),
    /// It has another user.
    #[serde(rename = "sync_opened")]
    Opened {
        /// Number of the object.
        object: u64,
        /// The user.
        user: SyncUser,
    },
    /// A user has gone, and the object with its last one, unless it is persistent and has its name.
    #[serde(rename = "sync_closed")]
    Closed {
        /// Number of the object.
        object: u64,
        /// The user's slot.
        slot: u32,
        /// It has died. Left out by earlier daemons, which recorded the end of its endpoint as a whole.
        #[serde(default, skip_serializing_if = "is_false")]
        died: bool,
    },
    /// Its name is gone.
    #[serde(rename = "sync_unlinked")]
    Unlinked {
        /// Number of the object.
        object: u64,
    },
}

/// A synchronisation object: a page of a segment, and who uses it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncObject {
    /// Its number.
    pub number: u64,
    /// In which segment.
    pub segment: Text,
    /// Its name; none once it is unlinked.
    pub name: Text,
    /// [`ginnel_layout::sync::SyncKind`].
    pub kind: u32,
    /// Most permits, or parties.
    pub limit: u32,
    /// Where its page lies.
    pub offset: u64,
    /// It stays without users.
    pub persistent: bool,
    /// Its last user has died, so it stays until it was used again: what a lock says of its dead owner must not get lost.
    #[serde(default)]
    pub bereaved: bool,
    /// Member of who has made it, and pays for it.
    pub member: u32,
    /// Its user. Journals of before this was written have none; it is root's then.
    #[serde(default)]
    pub uid: u32,
    /// Epoch of its next user.
    pub next_epoch: u16,
    /// Its users, by slot.
    pub users: Vec<SyncUser>,
}

/// A user of a synchronisation object: an open handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncUser {
    /// Its slot.
    pub slot: u32,
    /// Epoch of the slot.
    pub epoch: u16,
    /// Whose handle it is.
    pub endpoint: u32,
    /// The endpoint's own number for its request.
    pub nonce: u64,
}
