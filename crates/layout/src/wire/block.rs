//! Blocks, their handles, and the rights to them.

use crate::Name;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// What may be done with a block. Each right includes those below it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Rights(pub u32);

impl Rights {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Loads.
    pub const READ: Self = Self(1);
    /// Loads and stores.
    pub const READ_WRITE: Self = Self(2);
    /// The same, and nobody else has it open for stores meanwhile.
    pub const WRITE_EXCLUSIVE: Self = Self(3);

    /// Whether this release knows it.
    pub const fn is_known(self) -> bool {
        self.0 <= 3
    }

    /// Whether stores are allowed.
    pub const fn may_write(self) -> bool {
        self.0 >= 2
    }

    /// For people.
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

/// Makes a block of the segment and opens it. Its bytes are what they are: who wants zeros writes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockCreate {
    /// Its name; [`Name::NONE`] for a block without one.
    pub name: Name,
    /// Bytes wished for; at least 1. What it gets is a multiple of the segment's page.
    pub size: u64,
    /// Its offset is a multiple of this power of two, and of the segment's page; 0 means the latter.
    pub align: u64,
    /// How the creator opens it: [`Rights::READ_WRITE`] or [`Rights::WRITE_EXCLUSIVE`].
    pub rights: Rights,
    /// What those may who have not been granted anything else.
    pub others: Rights,
    /// [`BlockCreate::PERSISTENT`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
    /// As [`SyncOpen::nonce`](super::SyncOpen::nonce): the same request asked again yields the same handle.
    pub nonce: u64,
}
layout!(BlockCreate, 104 {
    name: 0, size: 64, align: 72, rights: 80, others: 84, flags: 88, reserved: 92, nonce: 96,
});

impl BlockCreate {
    /// The name outlives the endpoint that has made the block.
    pub const PERSISTENT: u32 = 1;
}

/// Opens a block by name.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockOpen {
    /// Its name.
    pub name: Name,
    /// The rights that are needed; not [`Rights::NONE`].
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
    /// Its bytes, as wished for.
    pub size: u64,
    /// Its bytes, a multiple of the segment's page: these may be mapped.
    pub span: u64,
    /// What this handle may do.
    pub rights: Rights,
    /// The endpoint that owns it; 0 if that has ended.
    pub owner: u32,
    /// Its member.
    pub owner_member: u32,
    /// Zero.
    pub reserved: u32,
}
layout!(Block, 56 {
    block: 0, handle: 8, offset: 16, size: 24, span: 32, rights: 40, owner: 44, owner_member: 48,
    reserved: 52,
});

/// Makes an open block longer or shorter. Longer only where there is room behind it, shorter only if nobody else has it
/// open.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockResize {
    /// [`Block::handle`].
    pub handle: u64,
    /// Bytes wished for.
    pub size: u64,
}
layout!(BlockResize, 16 { handle: 0, size: 8 });

/// Gives a name to a block of one's own that has none.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockLink {
    /// [`Block::block`].
    pub block: u64,
    /// Its name from now on.
    pub name: Name,
}
layout!(BlockLink, 72 { block: 0, name: 8 });

/// Says what somebody may do with a block of one's own, from now on.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockGrant {
    /// [`Block::block`].
    pub block: u64,
    /// A member.
    pub member: u32,
    /// One endpoint of it; 0 for all that have not been granted anything of their own.
    pub endpoint: u32,
    /// The most that it may open the block with. Handles that have more lose it.
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
}
layout!(BlockGrant, 24 { block: 0, member: 8, endpoint: 12, rights: 16, reserved: 20 });

/// A handle and what it may do: in `BLOCK_REVOKED` what is left, in `BLOCK_ACK` what is kept. A handle that is left
/// nothing is closed when that is acknowledged. In `BLOCK_CLOSE` the rights are [`Rights::NONE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BlockRights {
    /// [`Block::handle`].
    pub handle: u64,
    /// What it may do.
    pub rights: Rights,
    /// Zero.
    pub reserved: u32,
}
layout!(BlockRights, 16 { handle: 0, rights: 8, reserved: 12 });
