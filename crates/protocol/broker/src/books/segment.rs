//! A segment, as the books have it.

use crate::arena::Arena;
use crate::declared::SegmentSpec;
use crate::memory::{FilePart, MemoryFile, MemoryKind};
use crate::process::Process;
use crate::recipients::Recipients;
use crate::text::Hex16;
use ginnel_layout::Name;
use ginnel_layout::segment::Access;
use std::collections::{BTreeMap, BTreeSet};

/// A segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The segment's name.
    pub name: Name,
    /// The uuid in the segment's header and info block.
    pub uuid: Hex16,
    /// The size in bytes.
    pub size: u64,
    /// The numbers of all members that share it, including readers.
    pub members: BTreeSet<u32>,
    /// The numbers of those that may only read.
    pub readers: BTreeSet<u32>,
    /// The kind of device by which the segment reaches VMs.
    pub memory: MemoryKind,
    /// The unit in which the segment can be mapped, in bytes.
    pub page: u32,
    /// The part of a file that the segment is, if it shares the file with other slices.
    pub part: Option<FilePart>,
    /// The file is in the daemon's own folder. Older daemons made it in the folder above, and there it stays until it is removed.
    pub own_folder: bool,
    /// The file that has the segment's memory.
    pub file: MemoryFile,
    /// Who was given memory of that file. `None` if an older daemon has given it, which did not note to whom.
    pub recipients: Option<Recipients>,
    /// The declaration, if the segment was declared at run time.
    pub runtime: Option<SegmentSpec>,
    /// The allocator of the segment's memory.
    pub arena: Arena,
    /// The doorbell vectors of each member that serve its programs in this segment.
    pub vectors: BTreeMap<u32, Vec<u32>>,
    /// The file was truncated while it was in use. It may be as long as before, but the data that was cut off is lost.
    pub cut: bool,
    /// The processes of former members that may still have the file, with the names of their VMs. `None` if no member was removed since
    /// the file was new. While one of the processes runs, the segment is out of service.
    pub former: Option<BTreeMap<Process, Name>>,
}

impl Segment {
    /// Returns what a member of the segment may do.
    pub fn access(&self, member: u32) -> Access {
        if self.readers.contains(&member) { Access::READ_ONLY } else { Access::READ_WRITE }
    }

    /// Returns the offset in its file at which the segment begins.
    pub fn file_offset(&self) -> u64 {
        self.part.as_ref().map_or(0, |part| part.offset)
    }
}
