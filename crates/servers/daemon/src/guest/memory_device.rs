//! Finds the memory of a segment in this guest, whichever kind of device carries it.
//!
//! The host says which segments there are ([`relay::Segment`]). A device says which segment it is by the uuid in its header, and
//! a virtio-pmem device also by the uuid in its info block. Only members can read these, and the list comes over the control
//! memory, which no other member sees. So a device with the right uuid is the right one, unless a member of another segment has
//! copied the uuid there. Then two devices have the same uuid, and neither is used.

use super::dax::{DaxDevice, Kernel, Trouble};
use super::pci::{self, Function};
use anyhow::{Context, Result, ensure};
use ginnel_layout::PAGE;
use ginnel_layout::relay::{self, MappingKind};
use ginnel_layout::segment::{self, SegmentHeader};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A device whose memory is a segment.
pub struct MemoryDevice {
    /// The kind of device.
    pub kind: MappingKind,
    /// The device's name, for people.
    pub place: String,
    /// The uuid of the segment in its header.
    uuid: [u8; 16],
    /// The length of the memory in bytes.
    len: u64,
    /// The file to map.
    pub memory: Arc<OwnedFd>,
    /// The offset in the file of the segment's byte [`segment::RESERVED`], its header, which is the first that is mapped.
    pub offset: u64,
    /// The unit in which the file can be mapped, in bytes.
    pub page: u32,
    /// The access for which the file can be mapped.
    pub protection: Protection,
}

impl MemoryDevice {
    /// Returns whether the device is still there. It may have been unplugged, and then its file cannot be mapped any more.
    pub fn is_there(&self) -> bool {
        Mapping::of_file(&self.memory, self.offset, self.page as usize, Protection::Read).is_ok()
    }
}

fn protection(segment: &relay::Segment) -> Protection {
    if segment.access.is_read_only() { Protection::Read } else { Protection::ReadWrite }
}

/// The reason why a segment cannot be used in this guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// No device has the segment's uuid.
    NoDevice,
    /// The segment should come as a DAX device, but does not.
    NoDax(Trouble),
    /// More than one device has the segment's uuid.
    Ambiguous(Vec<String>),
    /// The device is smaller than the segment.
    Short {
        /// The device's name.
        place: String,
        /// The device's length in bytes.
        has: u64,
        /// The segment's length in bytes.
        needs: u64,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => write!(
                f,
                "this VM has no memory device for it; add the lines that `ginnel qemu-args` prints on the host \
                 (-object memory-backend-file,... -device ivshmem-plain,memdev=...) to its QEMU"
            ),
            Self::NoDax(trouble) => trouble.fmt(f),
            Self::Ambiguous(places) => write!(
                f,
                "several devices claim to be it ({}); a member of another segment may have forged its header: \
                 look at who can write to these segments",
                places.join(", ")
            ),
            Self::Short { place, has, needs } => {
                write!(
                    f,
                    "{place} has {has} bytes of memory and the segment {needs}; give both the same size"
                )
            }
        }
    }
}

/// All memory devices of this guest.
#[derive(Default)]
pub struct MemoryDevices {
    devices: Vec<MemoryDevice>,
    /// The reasons why segments are missing, by uuid.
    troubles: Vec<([u8; 16], Trouble)>,
}

impl MemoryDevices {
    /// Looks for the devices of these segments, and loads modules if necessary. Ignores a device that is none of these segments,
    /// or not yet.
    pub fn scan(kernel: &Kernel, segments: &[relay::Segment]) -> Result<Self> {
        let mut found = Self::default();
        found.add_dax(kernel, segments)?;
        for function in pci::ivshmem_functions(&kernel.sysfs)? {
            match of_bar(&function, segments) {
                Ok(device) => found.devices.extend(device),
                Err(error) => tracing::warn!("{function} cannot be used: {error:#}"),
            }
        }
        let missing = found.missing(segments);
        if !missing.is_empty() {
            let failures = kernel.bring_up(&missing)?;
            found.add_dax(kernel, &missing)?;
            for segment in found.missing(&missing) {
                if !found.troubles.iter().any(|(uuid, _)| *uuid == segment.uuid) {
                    found.troubles.push((segment.uuid, kernel.trouble(&segment, &failures)));
                }
            }
            found.troubles.iter_mut().for_each(|(_, trouble)| trouble.because(&failures));
        }
        Ok(found)
    }

    fn add_dax(&mut self, kernel: &Kernel, segments: &[relay::Segment]) -> Result<()> {
        self.troubles.clear();
        for dax in kernel.dax_devices()? {
            let Some(segment) = segments.iter().find(|segment| segment.uuid == dax.uuid) else { continue };
            match of_dax(&dax, segment) {
                Ok(device) => self.devices.push(device),
                Err(trouble) => self.troubles.push((dax.uuid, trouble)),
            }
        }
        Ok(())
    }

    /// Returns the segments that should come as DAX devices, and for which there is no device.
    fn missing(&self, segments: &[relay::Segment]) -> Vec<relay::Segment> {
        let has = |uuid| self.devices.iter().any(|device| device.uuid == uuid);
        segments.iter().filter(|s| s.kind == MappingKind::DAX && !has(s.uuid)).copied().collect()
    }

    /// Returns the device of a segment.
    pub fn find(&self, segment: &relay::Segment) -> Result<&MemoryDevice, Missing> {
        let mut claims = self.devices.iter().filter(|device| device.uuid == segment.uuid);
        let Some(device) = claims.next() else {
            let trouble = self.troubles.iter().find(|(uuid, _)| *uuid == segment.uuid);
            return Err(trouble.map_or(Missing::NoDevice, |(_, trouble)| Missing::NoDax(trouble.clone())));
        };
        let others: Vec<_> = claims.map(|other| other.place.clone()).collect();
        if !others.is_empty() {
            return Err(Missing::Ambiguous([vec![device.place.clone()], others].concat()));
        }
        if device.len < segment.size {
            return Err(Missing::Short { place: device.place.clone(), has: device.len, needs: segment.size });
        }
        Ok(device)
    }
}

/// Makes a memory device of a DAX device, if its header has the segment's uuid too.
fn of_dax(dax: &DaxDevice, segment: &relay::Segment) -> Result<MemoryDevice, Trouble> {
    dax.check(segment)?;
    let place = dax.node.display().to_string();
    let unusable =
        |error: anyhow::Error| Trouble::Unusable { place: place.clone(), why: format!("{error:#}") };
    let memory = dax.open(segment.access.is_read_only()).map_err(unusable)?;
    let uuid = header(&memory, 0, dax.page as usize).map_err(unusable)?;
    if uuid != Some(segment.uuid) {
        return Err(Trouble::NoHeader { place });
    }
    Ok(MemoryDevice {
        kind: MappingKind::DAX,
        place,
        uuid: segment.uuid,
        len: dax.len,
        memory: Arc::new(memory),
        offset: 0,
        page: dax.page,
        protection: protection(segment),
    })
}

/// Makes a memory device of an `ivshmem-plain` whose BAR2 is one of these segments.
fn of_bar(function: &Function, segments: &[relay::Segment]) -> Result<Option<MemoryDevice>> {
    let Some(bar) = function.bar(2).filter(|_| !function.has_doorbells()) else { return Ok(None) };
    if bar.len < segment::MIN_SIZE {
        return Ok(None);
    }
    function.enable()?;
    let uuid = header(function.open_bar(2, true)?, segment::RESERVED, PAGE)
        .with_context(|| format!("{function} is no usable segment"))?;
    let Some(segment) = segments.iter().find(|segment| uuid == Some(segment.uuid)) else { return Ok(None) };
    Ok(Some(MemoryDevice {
        kind: MappingKind::BAR,
        place: function.to_string(),
        uuid: segment.uuid,
        len: bar.len,
        memory: Arc::new(function.open_bar(2, segment.access.is_read_only())?),
        offset: segment::RESERVED,
        page: PAGE as u32,
        protection: protection(segment),
    }))
}

/// Returns the uuid in the segment header at this offset of a device's file.
fn header(file: impl AsFd, offset: u64, page: usize) -> Result<Option<[u8; 16]>> {
    let header = Mapping::of_file(file, offset, page, Protection::Read).map_err(|error| {
        let why = pci::why_unmapped(&error);
        anyhow::Error::new(error).context(format!("cannot map its memory{why}"))
    })?;
    read_uuid(&header)
}

/// Reads the uuid of a segment's header. Returns `None` if this is not a header, or if it is not written yet. All members can
/// write there, so this daemon does not trust anything else in the header.
fn read_uuid(header: &impl SharedMemory) -> Result<Option<[u8; 16]>> {
    // ORDER segment.header: the version is published last. Pairs with: the host daemon's writing of it.
    let version = header.load_acquire_u32((SegmentHeader::VERSION_AT - segment::RESERVED) as usize);
    let mut bytes = [0; size_of::<SegmentHeader>()];
    header.read(0, &mut bytes);
    let header: SegmentHeader = zerocopy::transmute!(bytes);
    if header.magic != segment::MAGIC || version == 0 {
        return Ok(None);
    }
    ensure!(
        version == segment::VERSION,
        "its format has version {version}, this daemon knows {}; use the same release of ginneld on host and guest",
        segment::VERSION
    );
    Ok(Some(header.uuid))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::pci::tests::Tree;
    use super::*;
    use ginnel_layout::Name;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use zerocopy::{FromZeros, IntoBytes};

    const SIZE: u64 = 4 << 20;

    pub fn segment(uuid: u8, size: u64) -> relay::Segment {
        relay::Segment {
            name: Name::new("web").unwrap(),
            uuid: [uuid; 16],
            size,
            kind: MappingKind::BAR,
            page: 4096,
            access: relay::Access::READ_WRITE,
            reserved: 0,
        }
    }

    fn scan(tree: &Tree, segments: &[relay::Segment]) -> MemoryDevices {
        MemoryDevices::scan(&tree.kernel(), segments).unwrap()
    }

    pub fn header(uuid: u8) -> SegmentHeader {
        let mut header = SegmentHeader::new_zeroed();
        header.magic = segment::MAGIC;
        header.version = segment::VERSION;
        header.uuid = [uuid; 16];
        header
    }

    pub fn add(tree: &Tree, address: &str, len: u64, header: SegmentHeader) {
        let folder = tree.ivshmem(address, &[(0, 0xfebd_6000, 256), (2, 0x8_0000_0000, len)]);
        let memory = File::options().write(true).open(folder.join("resource2")).unwrap();
        memory.write_all_at(header.as_bytes(), segment::RESERVED).unwrap();
    }

    #[test]
    fn a_segment_is_found_by_its_uuid() {
        let tree = Tree::new();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        add(&tree, "0000:00:06.0", SIZE, header(6));
        let devices = scan(&tree, &[segment(5, SIZE), segment(6, SIZE)]);
        let device = devices.find(&segment(6, SIZE)).map_err(|e| e.to_string()).unwrap();
        assert_eq!((device.place.as_str(), device.kind), ("PCI device 0000:00:06.0", MappingKind::BAR));
        let memory = Mapping::of_file(&device.memory, device.offset, PAGE, Protection::ReadWrite).unwrap();
        assert_eq!(memory.load_relaxed_u64(0), segment::MAGIC);
    }

    #[test]
    fn the_error_for_a_missing_segment_says_how_to_fix_it() {
        let tree = Tree::new();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        let devices = scan(&tree, &[segment(5, SIZE), segment(6, SIZE)]);
        let missing = devices.find(&segment(6, SIZE)).err().unwrap();
        assert!(missing.to_string().contains("ginnel qemu-args"), "{missing}");
    }

    #[test]
    fn two_devices_of_one_uuid_are_both_refused() {
        let tree = Tree::new();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        add(&tree, "0000:00:06.0", SIZE, header(5));
        let devices = scan(&tree, &[segment(5, SIZE)]);
        let missing = devices.find(&segment(5, SIZE)).err().unwrap();
        assert_eq!(
            missing,
            Missing::Ambiguous(vec!["PCI device 0000:00:05.0".into(), "PCI device 0000:00:06.0".into()])
        );
    }

    #[test]
    fn a_device_smaller_than_its_segment_is_refused() {
        let tree = Tree::new();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        let devices = scan(&tree, &[segment(5, SIZE)]);
        let missing = devices.find(&segment(5, 2 * SIZE)).err().unwrap();
        assert!(matches!(missing, Missing::Short { has: SIZE, .. }), "{missing}");
    }

    #[test]
    fn a_device_that_is_not_a_segment_is_ignored() {
        let tree = Tree::new();
        let broken = |change: fn(&mut SegmentHeader)| {
            let mut header = header(5);
            change(&mut header);
            header
        };
        add(&tree, "0000:00:01.0", SIZE, broken(|h| h.magic = 1));
        add(&tree, "0000:00:02.0", SIZE, broken(|h| h.version = 0));
        add(&tree, "0000:00:03.0", SIZE, broken(|h| h.version = 99));
        tree.ivshmem("0000:00:04.0", &[(2, 0, 1 << 20)]);
        tree.ivshmem("0000:00:05.0", &[]);
        let devices = scan(&tree, &[segment(5, SIZE)]);
        assert!(devices.find(&segment(5, SIZE)).is_err());
    }
}
