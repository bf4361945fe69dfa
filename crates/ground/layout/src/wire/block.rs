//! Blocks, their handles, and the rights to them.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Rights to a block. Each right includes those with lower numbers.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Rights(pub u32);

impl Rights {
    /// No access.
    pub const NONE: Self = Self(0);
    /// Loads.
    pub const READ: Self = Self(1);
    /// Loads and stores.
    pub const READ_WRITE: Self = Self(2);
    /// Loads and stores, and no other handle has the block open for stores at the same time.
    pub const WRITE_EXCLUSIVE: Self = Self(3);

    /// Returns whether this release knows the value.
    pub const fn is_known(self) -> bool {
        self.0 <= 3
    }

    /// Returns whether stores are allowed.
    pub const fn may_write(self) -> bool {
        self.0 >= 2
    }

    /// Returns the name of the right for messages to people; `"?"` if it is unknown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NONE => "none",
            Self::READ => "read",
            Self::READ_WRITE => "read-write",
            Self::WRITE_EXCLUSIVE => "write-exclusive",
            _ => "?",
        }
    }
}

/// Allocates a block of the segment and opens it. The block is not cleared: a program that needs zeros writes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockCreate {
    /// Name of the block; [`Name::NONE`] for a block without a name.
    pub name: Name,
    /// Requested size in bytes, at least 1. It is rounded up to a multiple of the segment's page size.
    pub size: u64,
    /// Alignment of the block's offset: a power of two. The offset is also a multiple of the segment's page. 0 means only the
    /// latter.
    pub align: u64,
    /// Rights with which the creator opens the block: [`Rights::READ_WRITE`] or [`Rights::WRITE_EXCLUSIVE`].
    pub rights: Rights,
    /// Rights of all endpoints that have not been granted others.
    pub others: Rights,
    /// [`BlockCreate::PERSISTENT`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
    /// A number of the client's choice, as in [`SyncOpen::nonce`](super::SyncOpen::nonce): the same request sent again yields
    /// the same handle.
    pub nonce: u64,
}
layout!(BlockCreate, 104 {
    name: 0, size: 64, align: 72, rights: 80, others: 84, flags: 88, reserved: 92, nonce: 96,
});

impl BlockCreate {
    /// The name outlives the endpoint that made the block.
    pub const PERSISTENT: u32 = 1;
}

/// Opens a block by name.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockOpen {
    /// Name of the block.
    pub name: Name,
    /// Rights that the caller needs; not [`Rights::NONE`].
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
    /// As [`SyncOpen::nonce`](super::SyncOpen::nonce).
    pub nonce: u64,
}
layout!(BlockOpen, 80 { name: 0, rights: 64, reserved: 68, nonce: 72 });

/// An open block. Answer to [`BlockCreate`], [`BlockOpen`] and [`BlockResize`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Block {
    /// Number of the block. Never used again.
    pub block: u64,
    /// Number of this handle. Never used again.
    pub handle: u64,
    /// Offset of the block from the start of the segment.
    pub offset: u64,
    /// Size of the block in bytes, as requested.
    pub size: u64,
    /// Size of the block in bytes, rounded up to the segment's page size. All of these bytes may be mapped.
    pub span: u64,
    /// Rights of this handle.
    pub rights: Rights,
    /// Number of the endpoint that owns the block; 0 if it has ended.
    pub owner: u32,
    /// Member of the owner.
    pub owner_member: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Block, 56 {
    block: 0, handle: 8, offset: 16, size: 24, span: 32, rights: 40, owner: 44, owner_member: 48,
    reserved: 52,
});

/// Makes an open block of the caller's own longer or shorter. A block can grow only into free room behind it, and can shrink
/// only if no other handle to it is open.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockResize {
    /// [`Block::handle`].
    pub handle: u64,
    /// Requested size in bytes.
    pub size: u64,
}
layout!(BlockResize, 16 { handle: 0, size: 8 });

/// Gives a name to a block of the caller's own that has none.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockLink {
    /// [`Block::block`].
    pub block: u64,
    /// New name of the block.
    pub name: Name,
}
layout!(BlockLink, 72 { block: 0, name: 8 });

/// Sets the rights of a member or an endpoint to a block of the caller's own, from now on.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockGrant {
    /// [`Block::block`].
    pub block: u64,
    /// Number of the member.
    pub member: u32,
    /// Number of an endpoint of that member; 0 for all its endpoints that have not been granted other rights.
    pub endpoint: u32,
    /// The highest rights with which it may open the block. Open handles with higher rights are reduced.
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
}
layout!(BlockGrant, 24 { block: 0, member: 8, endpoint: 12, rights: 16, reserved: 20 });

/// A handle and its rights. In `BLOCK_REVOKED`, these are the rights that are left; in `BLOCK_ACK`, those that the client
/// keeps. A handle without rights is closed when the client acknowledges. In `BLOCK_CLOSE`, the rights are [`Rights::NONE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockRights {
    /// [`Block::handle`].
    pub handle: u64,
    /// Rights of the handle.
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
}
layout!(BlockRights, 16 { handle: 0, rights: 8, reserved: 12 });
