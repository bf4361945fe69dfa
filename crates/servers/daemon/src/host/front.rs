//! The part of a segment in front of its arena, which the daemon writes: the DAX info block for a guest's kernel, and the header
//! for its daemon. Every member can damage both, on purpose or with a tool (`ndctl`, `daxctl`). So the daemon checks them before
//! a guest reads them, and repairs them. It compares their contents with the books, and never trusts them.

use ginnel_broker::memory::MemoryKind;
use ginnel_layout::Name;
use ginnel_layout::dax::{self, InfoBlock};
use ginnel_layout::segment::{ARENA, MAGIC, RESERVED, SegmentHeader, VERSION};
use ginnel_shmem::{Mapping, SharedMemory as _};
use tracing::warn;
use zerocopy::{FromZeros, IntoBytes};

/// The correct values of this part of a segment.
#[derive(Clone, Copy, Debug)]
pub struct Front {
    /// The segment's name.
    pub name: Name,
    /// The uuid in the header and info block.
    pub uuid: [u8; 16],
    /// The size of the segment in bytes.
    pub size: u64,
    /// The kind of device by which the segment reaches VMs.
    pub memory: MemoryKind,
    /// The unit in which the segment can be mapped, in bytes.
    pub page: u32,
    /// The number of starts of the daemon.
    pub generation: u64,
}

/// The damage that has been found and repaired so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// The number of repairs of the DAX info block.
    pub info_block: u64,
    /// The number of repairs of the header.
    pub header: u64,
}

impl Front {
    fn header(&self) -> SegmentHeader {
        SegmentHeader {
            magic: MAGIC,
            version: VERSION,
            page: self.page,
            uuid: self.uuid,
            size: self.size,
            arena: ARENA,
            arena_len: self.size - ARENA,
            generation: self.generation,
            name: self.name,
        }
    }

    fn info_block(&self) -> InfoBlock {
        InfoBlock::new(self.uuid, self.size, self.page)
    }

    /// Writes the header, and the info block if it is `new`: [`Front::repair`] checks an existing one.
    pub fn write(&self, mapping: &Mapping, new: bool) {
        if new {
            let none = InfoBlock::new_zeroed();
            write_info_block(mapping, if self.memory == MemoryKind::Dax { self.info_block() } else { none });
        }
        self.write_header(mapping);
    }

    fn write_header(&self, mapping: &Mapping) {
        let version = SegmentHeader::VERSION_AT as usize;
        mapping.store_release_u32(version, 0);
        mapping.write(RESERVED as usize, SegmentHeader { version: 0, ..self.header() }.as_bytes());
        // ORDER segment.version: the whole header is written before the version. Pairs with: any program that looks for the segment.
        mapping.store_release_u32(version, VERSION);
    }

    /// Checks the info block and the header, and rewrites each of them that is wrong.
    pub fn repair(&self, mapping: &Mapping, repairs: &mut Repairs) {
        let segment = &self.name;
        if self.memory == MemoryKind::Dax {
            let mut bytes = [0; size_of::<InfoBlock>()];
            mapping.read(dax::AT as usize, &mut bytes);
            let block: InfoBlock = zerocopy::transmute!(bytes);
            if let Err(damage) = block.check(self.uuid, self.size, self.page) {
                repairs.info_block += 1;
                warn!(%segment, repairs = repairs.info_block, "its DAX info block was damaged and has been repaired: {damage}; root on a member has done this (with ndctl, for example)");
                write_info_block(mapping, self.info_block());
            }
        }
        let mut bytes = [0; size_of::<SegmentHeader>()];
        mapping.read(RESERVED as usize, &mut bytes);
        if bytes != self.header().as_bytes() {
            repairs.header += 1;
            warn!(%segment, repairs = repairs.header, "its header was damaged and has been repaired: a member has done this, or a guest has made RAM of its device (daxctl)");
            self.write_header(mapping);
        }
    }
}

fn write_info_block(mapping: &Mapping, block: InfoBlock) {
    mapping.write(dax::AT as usize, block.as_bytes());
}
