//! virtio-blk: configuration space and requests (virtio 1.2, section 5.2).
//!
//! A request is a [`RequestHeader`] (read by the device), the data, and one byte of [`Status`] (written by the device), in
//! any number of buffers, cut anywhere.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a sector: the unit of all addresses and of the capacity, whatever the size of the disk's own blocks.
pub const SECTOR: u64 = 512;
/// Bytes of the answer to [`RequestKind::GET_ID`], padded with zeros.
pub const ID_LEN: usize = 20;

/// Feature bits (5.2.3).
pub mod feature {
    /// The most bytes of a segment are in `size_max`.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// The most segments of a request are in `seg_max`.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk cannot be written.
    pub const RO: u64 = 1 << 5;
    /// The size of a block is in `blk_size`.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is [`RequestKind::FLUSH`](super::RequestKind::FLUSH).
    pub const FLUSH: u64 = 1 << 9;
    /// What is known of optimal sizes is in the fields of the topology.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver can choose between write-back and write-through.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// There are several queues.
    pub const MQ: u64 = 1 << 12;
    /// There is discard.
    pub const DISCARD: u64 = 1 << 13;
    /// There is write-zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// The configuration space (5.2.4), up to the fields of write-zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Config {
    /// In sectors.
    pub capacity: u64,
    /// Most bytes of a segment.
    pub size_max: u32,
    /// Most segments of a request's data.
    pub seg_max: u32,
    /// Cylinders, heads and sectors; not used.
    pub geometry: u32,
    /// Bytes of a block.
    pub blk_size: u32,
    /// Blocks of a physical block, as a power of two.
    pub physical_block_exp: u8,
    /// Offset of the first aligned block.
    pub alignment_offset: u8,
    /// Least good size of a request, in blocks.
    pub min_io_size: u16,
    /// Best size of a request, in blocks.
    pub opt_io_size: u32,
    /// 1: write-back, 0: write-through. The driver may write it.
    pub writeback: u8,
    /// Zero.
    pub unused0: u8,
    /// Request queues.
    pub num_queues: u16,
    /// Most sectors of one discard.
    pub max_discard_sectors: u32,
    /// Most ranges of one discard request.
    pub max_discard_seg: u32,
    /// Alignment of discards, in sectors.
    pub discard_sector_alignment: u32,
    /// Most sectors of one write-zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Most ranges of one write-zeroes request.
    pub max_write_zeroes_seg: u32,
    /// 1: write-zeroes may give the space back.
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

/// What a request asks for (5.2.6). Open: unknown kinds are answered with [`Status::UNSUPP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct RequestKind(pub u32);

impl RequestKind {
    /// Read.
    pub const IN: Self = Self(0);
    /// Write.
    pub const OUT: Self = Self(1);
    /// Make what was written stay.
    pub const FLUSH: Self = Self(4);
    /// The disk's serial, [`ID_LEN`] bytes.
    pub const GET_ID: Self = Self(8);
    /// What is there is not needed any more. The data are [`RangeSegment`]s.
    pub const DISCARD: Self = Self(11);
    /// Zeros from now on. The data are [`RangeSegment`]s.
    pub const WRITE_ZEROES: Self = Self(13);
}

/// In front of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RequestHeader {
    /// What is asked for.
    pub kind: RequestKind,
    /// Priority; not used.
    pub reserved: u32,
    /// Where, for reads and writes.
    pub sector: u64,
}
layout!(RequestHeader, 16 { kind: 0, reserved: 4, sector: 8 });

/// A range of sectors (5.2.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RangeSegment {
    /// The first.
    pub sector: u64,
    /// How many.
    pub sectors: u32,
    /// [`RangeSegment::UNMAP`].
    pub flags: u32,
}
layout!(RangeSegment, 16 { sector: 0, sectors: 8, flags: 12 });

impl RangeSegment {
    /// Write-zeroes: the space may be given back.
    pub const UNMAP: u32 = 1;
}

/// How a request ended, the last byte of its writable memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Status(pub u8);

impl Status {
    /// Done.
    pub const OK: Self = Self(0);
    /// Not done, or not all of it.
    pub const IOERR: Self = Self(1);
    /// There is no such request here.
    pub const UNSUPP: Self = Self(2);
}
