//! Kinds of memory devices.

use ginnel_config::words;
use ginnel_layout::segment::MappingKind;

words! {
    /// By which kind of device a segment comes to VMs.
    MemoryKind {
        /// `virtio-pmem-pci`: `/dev/dax*` in the guest, always cached.
        #[default]
        Dax = "dax",
        /// `ivshmem-plain`: a PCI BAR. Can be unplugged, and needs nothing of the guest's kernel.
        Bar = "bar",
    }
}

impl MemoryKind {
    /// The same on the wire.
    pub fn kind(self) -> MappingKind {
        match self {
            Self::Dax => MappingKind::DAX,
            Self::Bar => MappingKind::BAR,
        }
    }
}
