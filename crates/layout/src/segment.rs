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
//! The first 2 MiB belong to the memory device (virtio-pmem's DAX info block), for both kinds of device, so that one
//! layout serves both. Only the host's daemon maps them; everybody else's mapping begins at [`RESERVED`], which is where
//! a DAX device begins too. Offsets are counted from the segment's start all the same.
//!
//! The header is a copy for readers: the daemon writes it, and only looks whether it is still what it has written.

use crate::Name;
use core::mem::offset_of;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes reserved in front of every segment and slice. The header stands right behind them.
pub const RESERVED: u64 = 2 << 20;

/// Sizes of segments are multiples of this.
pub const SIZE_UNIT: u64 = 2 << 20;

/// The smallest segment: the reserved part and one unit for use.
pub const MIN_SIZE: u64 = 2 * SIZE_UNIT;

/// The smallest segment that comes to a VM by DAX. Of a smaller region Linux makes a DAX device only by itself, as its info
/// block says, and not by hand, as its own administrator says.
pub const MIN_DAX_SIZE: u64 = 16 << 20;

/// Where the arena begins, counted from the start of the segment.
pub const ARENA: u64 = RESERVED + (64 << 10);

/// First word of a [`SegmentHeader`]: `GINNELSG`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"GINNELSG");

/// Version of the segment format. Zero in memory means "not ready yet".
pub const VERSION: u32 = 1;

/// What stands at [`RESERVED`] in every segment. `version` is published last (release) and read first (acquire).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SegmentHeader {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`], published last; zero while the daemon is writing.
    pub version: u32,
    /// Page in which rights and mappings of this segment are counted, in bytes.
    pub page: u32,
    /// Names this segment among all. A secret of its members: it is how a guest tells its memory devices apart, and a
    /// neighbour who is not a member cannot forge it.
    pub uuid: [u8; 16],
    /// Bytes of the whole segment.
    pub size: u64,
    /// [`ARENA`].
    pub arena: u64,
    /// Bytes of the arena.
    pub arena_len: u64,
    /// Counts the starts of the daemon that wrote this.
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

/// How a segment's bytes reach a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct MappingKind(pub u32);

impl MappingKind {
    /// Not found in the guest.
    pub const NONE: Self = Self(0);
    /// `ivshmem-plain`, mapped from sysfs `resource2`.
    pub const BAR: Self = Self(1);
    /// `virtio-pmem`, mapped from `/dev/dax*`.
    pub const DAX: Self = Self(2);
    /// The file itself, on the host.
    pub const FILE: Self = Self(3);
}

/// What a member may do with a segment's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Access(pub u32);

impl Access {
    /// Loads and stores.
    pub const READ_WRITE: Self = Self(0);
    /// Loads only. In a guest nothing enforces it that a program would notice: the hypervisor throws stores away. So a
    /// program must map it without `PROT_WRITE`.
    pub const READ_ONLY: Self = Self(1);

    /// Whether stores are forbidden. Values of later releases are taken for the lesser right.
    pub const fn is_read_only(self) -> bool {
        self.0 != Self::READ_WRITE.0
    }
}

/// Rounds a wished size up to one that both kinds of memory device can take: a multiple of [`SIZE_UNIT`] and, because
/// a PCI BAR needs it, a power of two if `bar`. `None` if no such size exists.
pub const fn usable_size(wish: u64, bar: bool) -> Option<u64> {
    let wish = if wish < MIN_SIZE { MIN_SIZE } else { wish };
    match wish.checked_next_multiple_of(SIZE_UNIT) {
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
