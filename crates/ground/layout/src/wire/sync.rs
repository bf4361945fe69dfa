//! Synchronisation objects.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Opens a synchronisation object of the segment by name. The endpoint becomes one more user of the object.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SyncOpen {
    /// Name of the object. Synchronisation objects, blocks and listeners have separate name spaces.
    pub name: Name,
    /// [`crate::sync::SyncKind`].
    pub kind: u32,
    /// Semaphore: maximum permits. Barrier: parties. Otherwise 0. For an object that exists, 0 or its limit.
    pub limit: u32,
    /// Semaphore: permits of a new object. Otherwise 0.
    pub initial: u32,
    /// [`SyncOpen::CREATE`], [`SyncOpen::EXCLUSIVE`] and [`SyncOpen::PERSISTENT`].
    pub flags: u32,
    /// A number of the client's choice, unique for the endpoint. If the daemon has ended without an answer and the client
    /// sends the same request again with the same nonce, it gets the same slot.
    pub nonce: u64,
}
layout!(SyncOpen, 88 { name: 0, kind: 64, limit: 68, initial: 72, flags: 76, nonce: 80 });

impl SyncOpen {
    /// Makes the object if it does not exist.
    pub const CREATE: u32 = 1;
    /// With [`SyncOpen::CREATE`]: fails with [`ErrorCode::IN_USE`](super::ErrorCode::IN_USE) if the object exists.
    pub const EXCLUSIVE: u32 = 2;
    /// With [`SyncOpen::CREATE`]: a new object stays until it is unlinked. Without this flag, it ends with its last user.
    pub const PERSISTENT: u32 = 4;
}

/// Answer to [`SyncOpen`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sync {
    /// Number of the object. Never used again.
    pub object: u64,
    /// Offset of the object's page from the start of the segment.
    pub offset: u64,
    /// [`crate::sync::SyncKind`].
    pub kind: u32,
    /// Limit of the object.
    pub limit: u32,
    /// Slot of this user.
    pub slot: u32,
    /// Epoch of the slot.
    pub epoch: u32,
    /// Doorbell of the endpoint, as the slot contains it: member << 16 | vector.
    pub bell: u32,
    /// 1 if this request made the object.
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
