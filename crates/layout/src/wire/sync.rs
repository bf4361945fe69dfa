//! Synchronisation objects.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Opens a synchronisation object of the segment by name, as one more user of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SyncOpen {
    /// Its name. Those of synchronisation objects, blocks and listeners are apart.
    pub name: Name,
    /// [`crate::sync::SyncKind`].
    pub kind: u32,
    /// Semaphore: most permits. Barrier: parties. Else 0. For an object that is there: 0, or what it has.
    pub limit: u32,
    /// Semaphore: the permits that a new one has. Else 0.
    pub initial: u32,
    /// [`SyncOpen::CREATE`] and others.
    pub flags: u32,
    /// Chosen by the client, unique for the endpoint. The same request asked again (after the daemon has gone without an
    /// answer) with the same nonce yields the same slot.
    pub nonce: u64,
}
layout!(SyncOpen, 88 { name: 0, kind: 64, limit: 68, initial: 72, flags: 76, nonce: 80 });

impl SyncOpen {
    /// Make the object if it is not there.
    pub const CREATE: u32 = 1;
    /// With [`SyncOpen::CREATE`]: it must not be there ([`ErrorCode::IN_USE`](super::ErrorCode::IN_USE)).
    pub const EXCLUSIVE: u32 = 2;
    /// With [`SyncOpen::CREATE`]: a new object stays until it is unlinked; else it goes with its last user.
    pub const PERSISTENT: u32 = 4;
}

/// Answer to [`SyncOpen`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sync {
    /// Number of the object. Never used again.
    pub object: u64,
    /// Offset of its page from the start of the segment.
    pub offset: u64,
    /// [`crate::sync::SyncKind`].
    pub kind: u32,
    /// Its limit.
    pub limit: u32,
    /// The slot that is now this user's.
    pub slot: u32,
    /// The slot's epoch.
    pub epoch: u32,
    /// The endpoint's own doorbell as it stands in the slot: member << 16 | vector.
    pub bell: u32,
    /// 1 if the object was made by this request.
    pub created: u32,
}
layout!(Sync, 40 {
    object: 0, offset: 8, kind: 16, limit: 20, slot: 24, epoch: 28, bell: 32, created: 36,
});

/// Names a slot in `SYNC_CLOSE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SyncRef {
    /// [`Sync::object`].
    pub object: u64,
    /// [`Sync::slot`].
    pub slot: u32,
    /// [`Sync::epoch`].
    pub epoch: u32,
}
layout!(SyncRef, 16 { object: 0, slot: 8, epoch: 12 });
