//! The memory of a segment: the kind of device by which it reaches VMs, and the file that has it.

use ginnel_config::words;
use ginnel_layout::segment::MappingKind;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

words! {
    /// The kind of device by which a segment reaches VMs.
    MemoryKind {
        /// `virtio-pmem-pci`: `/dev/dax*` in the guest, always cached.
        #[default]
        Dax = "dax",
        /// `ivshmem-plain`: a PCI BAR. It can be unplugged, and needs no support by the guest's kernel.
        Bar = "bar",
    }
}

impl MemoryKind {
    /// Returns the number of this kind in the attach protocol.
    pub fn kind(self) -> MappingKind {
        match self {
            Self::Dax => MappingKind::DAX,
            Self::Bar => MappingKind::BAR,
        }
    }
}

/// The file that has the memory of a segment. Its name alone does not say whether it is the one that programs and VMs have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryFile {
    /// The one with its name: older daemons did not say which.
    #[default]
    Unrecorded,
    /// None yet, or it is not known. Whoever has memory of a file with its name has it from somewhere else.
    Unknown,
    /// The one with this device and inode.
    Is(u64, u64),
}

/// A part of a file, as long as the segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// The path of the file.
    pub file: PathBuf,
    /// The offset of the part in the file, in bytes.
    pub offset: u64,
}
