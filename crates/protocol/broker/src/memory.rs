//! Kinds of memory devices.

use ginnel_config::words;
use ginnel_layout::segment::MappingKind;

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
