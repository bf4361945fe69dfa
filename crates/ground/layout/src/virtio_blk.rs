//! virtio-blk: configuration space and requests (virtio 1.2, section 5.2).
//!
//! A request is a [`RequestHeader`] (read by the device), the data, and one byte of [`Status`] (written by the device). The
//! driver may divide these bytes among any number of buffers, at any position.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector, the unit of all addresses and of the capacity, whatever the block size of the disk.
pub const SECTOR: u64 = 512;
/// Bytes of the answer to [`RequestKind::GET_ID`], padded with zeros.
pub const ID_LEN: usize = 20;

/// Feature bits (5.2.3).
pub mod feature {
    /// The field `size_max` is valid.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// The field `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// The field `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device supports [`RequestKind::FLUSH`](super::RequestKind::FLUSH).
    pub const FLUSH: u64 = 1 << 9;
    /// The fields with the topology (optimal sizes) are valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver can select write-back or write-through.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// The device has several queues.
    pub const MQ: u64 = 1 << 12;
    /// The device supports [`RequestKind::DISCARD`](super::RequestKind::DISCARD).
    pub const DISCARD: u64 = 1 << 13;
    /// The device supports [`RequestKind::WRITE_ZEROES`](super::RequestKind::WRITE_ZEROES).
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// The configuration space (5.2.4), up to the fields of write-zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Config {
    /// Capacity in sectors.
    pub capacity: u64,
    /// Maximum bytes of a segment.
    pub size_max: u32,
    /// Maximum number of segments of a request's data.
    pub seg_max: u32,
    /// Cylinders, heads and sectors; not used.
    pub geometry: u32,
    /// Bytes of a block.
    pub blk_size: u32,
    /// Number of logical blocks in a physical block, as a power of two.
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block.
    pub alignment_offset: u8,
    /// Suggested minimum size of a request, in blocks.
    pub min_io_size: u16,
    /// Optimal size of a request, in blocks.
    pub opt_io_size: u32,
    /// 1: write-back, 0: write-through. The driver may write it.
    pub writeback: u8,
    /// Zero.
    pub unused0: u8,
    /// Number of request queues.
    pub num_queues: u16,
    /// Maximum sectors of one discard.
    pub max_discard_sectors: u32,
    /// Maximum number of ranges of one discard request.
    pub max_discard_seg: u32,
    /// Alignment of discards, in sectors.
    pub discard_sector_alignment: u32,
    /// Maximum sectors of one write-zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Maximum number of ranges of one write-zeroes request.
    pub max_write_zeroes_seg: u32,
    /// 1: write-zeroes may deallocate the space.
    pub write_zeroes_may_unmap: u8,
    /// Zero.
    pub unused1: [u8; 3],
}
layout!(Config, 60 {
    capacity: 0, size_max: 8, seg_max: 12, geometry: 16, blk_size: 20, physical_block_exp: 24,
    alignment_offset: 25, min_io_size: 26, opt_io_size: 28, writeback: 32, unused0: 33, num_queues: 34,
    max_discard_sectors: 36, max_discard_seg: 40, discard_sector_alignment: 44,
    max_write_zeroes_sectors: 48, max_write_zeroes_seg: 52, write_zeroes_may_unmap: 56, unused1: 57,
});

/// Kind of a request (5.2.6). The device answers unknown kinds with [`Status::UNSUPP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct RequestKind(pub u32);

impl RequestKind {
    /// Reads sectors.
    pub const IN: Self = Self(0);
    /// Writes sectors.
    pub const OUT: Self = Self(1);
    /// Makes written data persistent.
    pub const FLUSH: Self = Self(4);
    /// Returns the disk's serial number, [`ID_LEN`] bytes.
    pub const GET_ID: Self = Self(8);
    /// Declares that the content of the ranges is no longer needed. The data are [`RangeSegment`]s.
    pub const DISCARD: Self = Self(11);
    /// Fills the ranges with zeros. The data are [`RangeSegment`]s.
    pub const WRITE_ZEROES: Self = Self(13);
}

/// Header of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RequestHeader {
    /// Kind of the request.
    pub kind: RequestKind,
    /// Priority; not used.
    pub reserved: u32,
    /// First sector of a read or write.
    pub sector: u64,
}
layout!(RequestHeader, 16 { kind: 0, reserved: 4, sector: 8 });

/// A range of sectors (5.2.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RangeSegment {
    /// First sector of the range.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// [`RangeSegment::UNMAP`].
    pub flags: u32,
}
layout!(RangeSegment, 16 { sector: 0, sectors: 8, flags: 12 });

impl RangeSegment {
    /// Write-zeroes: the device may deallocate the space.
    pub const UNMAP: u32 = 1;
}

/// Result of a request: the last byte of its writable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Status(pub u8);

impl Status {
    /// The request succeeded.
    pub const OK: Self = Self(0);
    /// The request failed, or was done only in part.
    pub const IOERR: Self = Self(1);
    /// The device does not support the request.
    pub const UNSUPP: Self = Self(2);
}
