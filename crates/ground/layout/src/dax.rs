//! The DAX info block, from which a Linux guest makes a `/dev/dax*` of a `virtio-pmem` device without further configuration.
//!
//! The host's daemon writes it at [`AT`] of every segment that is a DAX device. The guest's kernel reads it when it finds the
//! device, which is at boot. A kernel that finds the block damaged makes a block device of the segment instead, and one that
//! finds another `mode` keeps its own page structures in the segment. Therefore the daemon checks the block before each boot.
//! Exactly one block is correct for a segment, so the check is a comparison.
//!
//! The format is Linux's `struct nd_pfn_sb` (`drivers/nvdimm/pfn.h`), version 1.4.

use crate::segment::RESERVED;
use core::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Offset of the block from the start of the segment.
pub const AT: u64 = 4096;

/// First 16 bytes of a block.
pub const SIGNATURE: [u8; 16] = *b"NVDIMM_DAX_INFO\0";

/// Pages of 2 MiB: the guest maps the segment with large pages, and programs map it in multiples of this.
pub const LARGE_PAGE: u32 = 2 << 20;
/// Pages of 4 KiB.
pub const SMALL_PAGE: u32 = 4096;

/// The kernel's page structures lie in the guest's own memory. The format's other value (2) puts them into the segment, where
/// other members could write them.
pub const MODE_RAM: u32 = 1;

/// Bytes that `npfns` counts in.
const FRAME: u64 = 4096;

/// The DAX info block.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InfoBlock {
    /// [`SIGNATURE`].
    pub signature: [u8; 16],
    /// The segment's uuid. A guest reads it as `uuid` of the parent of `/sys/bus/dax/devices/dax*`.
    pub uuid: [u8; 16],
    /// Zero: the namespace has no label.
    pub parent_uuid: [u8; 16],
    /// Zero.
    pub flags: u32,
    /// Major version of the format: 1.
    pub version_major: u16,
    /// Minor version of the format: 4.
    pub version_minor: u16,
    /// Offset at which the data and therefore `/dev/dax*` begin: [`RESERVED`].
    pub dataoff: u64,
    /// Number of pages of 4 KiB from there on.
    pub npfns: u64,
    /// [`MODE_RAM`].
    pub mode: u32,
    /// Zero.
    pub start_pad: u32,
    /// Zero.
    pub end_trunc: u32,
    /// Unit of the guest's mappings: [`LARGE_PAGE`] or [`SMALL_PAGE`].
    pub align: u32,
    /// 4096. Linux ignores it in [`MODE_RAM`].
    pub page_size: u32,
    /// 64. Linux ignores it in [`MODE_RAM`].
    pub page_struct_size: u16,
    /// Zero.
    pub padding: [u8; 3994],
    /// [`fletcher64`] of the whole block with zero in this field.
    pub checksum: u64,
}

layout!(InfoBlock, 4096 {
    signature: 0, uuid: 16, parent_uuid: 32, flags: 48, version_major: 52, version_minor: 54,
    dataoff: 56, npfns: 64, mode: 72, start_pad: 76, end_trunc: 80, align: 84, page_size: 88,
    page_struct_size: 92, padding: 94, checksum: 4088,
});
const _: () = assert!(AT + size_of::<InfoBlock>() as u64 <= RESERVED);

impl InfoBlock {
    /// Returns the block for a segment with this uuid and of `size` bytes, which is mapped in units of `page` bytes.
    pub fn new(uuid: [u8; 16], size: u64, page: u32) -> Self {
        let mut block = Self {
            signature: SIGNATURE,
            uuid,
            parent_uuid: [0; 16],
            flags: 0,
            version_major: 1,
            version_minor: 4,
            dataoff: RESERVED,
            npfns: size.saturating_sub(RESERVED) / FRAME,
            mode: MODE_RAM,
            start_pad: 0,
            end_trunc: 0,
            align: page,
            page_size: FRAME as u32,
            page_struct_size: 64,
            padding: [0; 3994],
            checksum: 0,
        };
        block.checksum = block.sum();
        block
    }

    /// Returns the value that `checksum` should have.
    pub fn sum(&self) -> u64 {
        fletcher64(Self { checksum: 0, ..*self }.as_bytes())
    }

    /// Checks that this is the block that the segment should have. The error names the first field that is wrong.
    pub fn check(&self, uuid: [u8; 16], size: u64, page: u32) -> Result<(), Damage> {
        let right = Self::new(uuid, size, page);
        let other = |field, same| if same { Ok(()) } else { Err(Damage { field, values: None }) };
        let value = |field, found: u64, right: u64| {
            let values = Some((found, right));
            if found == right { Ok(()) } else { Err(Damage { field, values }) }
        };
        other("signature", self.signature == right.signature)?;
        other("uuid", self.uuid == right.uuid)?;
        other("parent_uuid", self.parent_uuid == right.parent_uuid)?;
        value("flags", self.flags.into(), right.flags.into())?;
        value("version_major", self.version_major.into(), right.version_major.into())?;
        value("version_minor", self.version_minor.into(), right.version_minor.into())?;
        value("dataoff", self.dataoff, right.dataoff)?;
        value("npfns", self.npfns, right.npfns)?;
        value("mode", self.mode.into(), right.mode.into())?;
        value("start_pad", self.start_pad.into(), right.start_pad.into())?;
        value("end_trunc", self.end_trunc.into(), right.end_trunc.into())?;
        value("align", self.align.into(), right.align.into())?;
        value("page_size", self.page_size.into(), right.page_size.into())?;
        value("page_struct_size", self.page_struct_size.into(), right.page_struct_size.into())?;
        other("padding", self.padding == right.padding)?;
        value("checksum", self.checksum, right.checksum)
    }
}

/// The first wrong field of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Name of the field.
    pub field: &'static str,
    /// The value found and the right value, if the field is a number.
    pub values: Option<(u64, u64)>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.values {
            Some((found, right)) => write!(f, "its {} is {found:#x} and should be {right:#x}", self.field),
            None => write!(f, "its {} is not what it should be", self.field),
        }
    }
}

/// Returns Linux's variant of the Fletcher checksum: over little-endian words of 32 bits, with the lower half of the sum
/// wrapping at 32 bits. Bytes after the last whole word do not count.
pub fn fletcher64(bytes: &[u8]) -> u64 {
    let (mut low, mut high) = (0u32, 0u64);
    for word in bytes.as_chunks::<4>().0 {
        low = low.wrapping_add(u32::from_le_bytes(*word));
        high = high.wrapping_add(low.into());
    }
    high << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString;

    const UUID: [u8; 16] = *b"0123456789abcdef";
    const SIZE: u64 = 64 << 20;

    fn block() -> InfoBlock {
        InfoBlock::new(UUID, SIZE, LARGE_PAGE)
    }

    #[test]
    fn known_sums() {
        assert_eq!(fletcher64(&[]), 0);
        assert_eq!(fletcher64(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]), 0x0000_000a_0000_0006);
        assert_eq!(
            fletcher64(&[0xff; 8]),
            0xffff_fffd_ffff_fffe,
            "the lower half wraps, the upper half does not"
        );
        // Computed by another program, from the table in docs/segment-format.md.
        assert_eq!(block().checksum, 0x3dc7_b09f_0ac5_946b);
        assert_eq!(InfoBlock::new(UUID, SIZE, SMALL_PAGE).checksum, 0xc0a6_609f_0aa5_a46b);
    }

    #[test]
    fn a_block_is_right_for_its_own_segment_only() {
        assert_eq!(block().check(UUID, SIZE, LARGE_PAGE), Ok(()));
        let field = |uuid, size, page| block().check(uuid, size, page).unwrap_err().field;
        assert_eq!(field([1; 16], SIZE, LARGE_PAGE), "uuid");
        assert_eq!(field(UUID, SIZE / 2, LARGE_PAGE), "npfns");
        assert_eq!(field(UUID, SIZE, SMALL_PAGE), "align");
        assert_eq!(block().npfns, (SIZE - RESERVED) / 4096);
    }

    #[test]
    fn damage_is_named() {
        let mut block = block();
        block.mode = 2;
        assert_eq!(
            block.check(UUID, SIZE, LARGE_PAGE).unwrap_err().to_string(),
            "its mode is 0x2 and should be 0x1"
        );
        block.checksum = block.sum();
        assert_eq!(
            block.check(UUID, SIZE, LARGE_PAGE).unwrap_err().field,
            "mode",
            "a right checksum does not hide other damage"
        );
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let right = block();
        for bit in 0..8 * size_of::<InfoBlock>() {
            let mut bytes = [0; size_of::<InfoBlock>()];
            bytes.copy_from_slice(right.as_bytes());
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut damaged: InfoBlock = zerocopy::transmute!(bytes);
            assert!(damaged.check(UUID, SIZE, LARGE_PAGE).is_err(), "bit {bit}");
            // The damage is found even if the checksum has been made to match.
            damaged.checksum = damaged.sum();
            assert_eq!(damaged.check(UUID, SIZE, LARGE_PAGE).is_ok(), bit / 8 >= 4088, "bit {bit}");
        }
    }
}
