//! The description of a region.

use ginnel_layout::vfio_user::{Area, RegionInfo, SparseMmap};
use zerocopy::IntoBytes;

/// What a client may know about a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Bytes of the region; zero if the device does not have it.
    pub size: u64,
    /// Whether the region can be written. It can always be read.
    pub writable: bool,
    /// The areas that can be mapped, at their offsets in the region and in the file alike. Each begins and ends at a page.
    pub areas: Vec<Area>,
}

impl Region {
    /// Returns the body of the answer to a client that takes `argsz` bytes, and whether the file must come with it.
    ///
    /// QEMU asks twice. It takes the file only with the second answer, but checks in the first one already where the
    /// capabilities begin.
    pub fn reply(&self, index: u32, argsz: u32) -> (Vec<u8>, bool) {
        let mut info = RegionInfo {
            argsz: size_of::<RegionInfo>() as u32,
            flags: 0,
            index,
            cap_offset: 0,
            size: self.size,
            offset: 0,
        };
        if self.size > 0 {
            info.flags |= RegionInfo::READ | if self.writable { RegionInfo::WRITE } else { 0 };
        }
        if self.areas.is_empty() {
            return (info.as_bytes().to_vec(), false);
        }
        let cap = SparseMmap {
            id: SparseMmap::ID,
            version: 1,
            next: 0,
            areas: self.areas.len() as u32,
            reserved: 0,
        };
        let caps = [cap.as_bytes(), self.areas.as_bytes()].concat();
        info.flags |= RegionInfo::MMAP | RegionInfo::CAPS;
        info.cap_offset = info.argsz;
        info.argsz += caps.len() as u32;
        if argsz < info.argsz {
            return (info.as_bytes().to_vec(), false);
        }
        ([info.as_bytes(), &caps].concat(), true)
    }
}
