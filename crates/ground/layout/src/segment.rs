//! A segment: one shared file, and the header that lets a guest recognise its memory device.
//!
//! ```text
//! 0          4 KiB      8 KiB                2 MiB              2 MiB + 64 KiB                size
//! +----------+----------+--------------------+-----------------+-----------------------------+
//! | unused   | DAX info | unused             | SegmentHeader   | arena: channel blocks       |
//! |          | block    |                    | (+ spare pages) | (pages that the daemon      |
//! |          | (if dax) |                    |                 |  hands out)                 |
//! +----------+----------+--------------------+-----------------+-----------------------------+
//! ```
//!
//! The first 2 MiB are reserved for virtio-pmem's DAX info block. They exist for both kinds of memory device, so that one
//! layout serves both. Only the host's daemon maps them; all other mappings begin at [`RESERVED`], which is also where a DAX
//! device begins. Offsets are nevertheless counted from the start of the segment.
//!
//! The header is a copy for readers: the daemon writes it, and later only checks that it is unchanged.

use crate::Name;
use core::mem::offset_of;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes reserved in front of every segment and slice. The header follows directly.
pub const RESERVED: u64 = 2 << 20;

/// Unit of segment sizes: each is a multiple of this.
pub const SIZE_UNIT: u64 = 2 << 20;

/// Minimum size of a segment: the reserved part and one unit for use.
pub const MIN_SIZE: u64 = 2 * SIZE_UNIT;

/// Minimum size of a segment that reaches a VM as a DAX device. From a smaller region, Linux makes a DAX device only
/// automatically, from the info block, and not at an administrator's command.
pub const MIN_DAX_SIZE: u64 = 16 << 20;

/// Offset of the arena from the start of the segment.
pub const ARENA: u64 = RESERVED + (64 << 10);

/// First word of a [`SegmentHeader`]: `GINNELSG`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"GINNELSG");

/// Version of the segment format. Zero in memory means "not ready yet".
pub const VERSION: u32 = 1;

/// Header at [`RESERVED`] of every segment. The daemon publishes `version` last (release), and readers read it first
/// (acquire).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SegmentHeader {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`], published last; zero while the daemon writes the header.
    pub version: u32,
    /// Unit of rights to blocks and of mappings of this segment, in bytes.
    pub page: u32,
    /// Unique identifier of the segment. It is a secret of its members: a guest recognises its memory devices by it, and a
    /// VM that is not a member cannot forge it.
    pub uuid: [u8; 16],
    /// Bytes of the whole segment.
    pub size: u64,
    /// [`ARENA`].
    pub arena: u64,
    /// Bytes of the arena.
    pub arena_len: u64,
    /// Number of the start of the daemon that wrote this header.
    pub generation: u64,
    /// The segment's name.
    pub name: Name,
}

layout!(SegmentHeader, 128 {
    magic: 0, version: 8, page: 12, uuid: 16, size: 32, arena: 40, arena_len: 48, generation: 56,
    name: 64,
});

impl SegmentHeader {
    /// Offset of `version` from the start of the segment.
    pub const VERSION_AT: u64 = RESERVED + offset_of!(SegmentHeader, version) as u64;
}

/// The way in which a segment reaches a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct MappingKind(pub u32);

impl MappingKind {
    /// The guest has not found the segment.
    pub const NONE: Self = Self(0);
    /// `ivshmem-plain`, mapped from sysfs `resource2`.
    pub const BAR: Self = Self(1);
    /// `virtio-pmem`, mapped from `/dev/dax*`.
    pub const DAX: Self = Self(2);
    /// The file itself, mapped on the host.
    pub const FILE: Self = Self(3);
}

/// What a member may do with a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Access(pub u32);

impl Access {
    /// Loads and stores.
    pub const READ_WRITE: Self = Self(0);
    /// Loads only. In a guest, a program does not notice the restriction by itself: the hypervisor silently discards stores.
    /// Therefore the program must map the segment without `PROT_WRITE`.
    pub const READ_ONLY: Self = Self(1);

    /// Returns whether stores are forbidden. Unknown values of later releases count as read-only.
    pub const fn is_read_only(self) -> bool {
        self.0 != Self::READ_WRITE.0
    }
}

/// Rounds a requested size up to one that the memory device can have: a multiple of [`SIZE_UNIT`] and, if `bar`, a power of two,
/// because a PCI BAR needs it. `None` if no such size exists.
pub const fn usable_size(size: u64, bar: bool) -> Option<u64> {
    let size = if size < MIN_SIZE { MIN_SIZE } else { size };
    match size.checked_next_multiple_of(SIZE_UNIT) {
        Some(size) if bar => size.checked_next_power_of_two(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fit_the_devices() {
        assert_eq!(usable_size(0, true), Some(4 << 20));
        assert_eq!(usable_size(5 << 20, false), Some(6 << 20));
        assert_eq!(usable_size(5 << 20, true), Some(8 << 20));
        assert_eq!(usable_size(256 << 20, true), Some(256 << 20));
        assert_eq!(usable_size(u64::MAX, true), None);
    }
}
