//! The segments of this guest: their list, which comes from the host; their devices, which this daemon finds; and their
//! speeds, which it measures.

use super::dax::Kernel;
use super::memory_device::{MemoryDevice, MemoryDevices, Missing};
use super::speed::Speed;
use ginnel_layout::Name;
use ginnel_layout::relay::{self, MappingKind};
use std::collections::{HashMap, VecDeque};

/// The segments of this VM.
pub struct Segments {
    kernel: Kernel,
    list: Vec<relay::Segment>,
    devices: MemoryDevices,
    /// The speeds by segment and place. Each is measured once.
    speeds: HashMap<([u8; 16], String), Speed>,
    /// The segments to be measured when there is time.
    due: VecDeque<Name>,
}

/// Makes the message that tells the host about a segment.
fn mapped(name: Name, kind: MappingKind, trusts_members: bool, speed: Option<Speed>) -> relay::Mapped {
    let (read_mb_s, write_mb_s) = speed.map_or((0, 0), |speed| (speed.read, speed.write));
    relay::Mapped { name, kind, trusts_members: trusts_members.into(), read_mb_s, write_mb_s }
}

impl Segments {
    /// Starts without segments.
    pub fn new(kernel: Kernel) -> Self {
        let (devices, due) = (MemoryDevices::default(), VecDeque::new());
        Self { kernel, list: Vec::new(), devices, speeds: HashMap::new(), due }
    }

    /// Takes over the host's list, and looks for the devices. Returns the messages that can be sent at once: about the segments
    /// that are missing here. The others come from [`Segments::measure_next`].
    pub fn learn(&mut self, body: &[u8]) -> Vec<relay::Mapped> {
        let (segments, rest) = body.as_chunks::<{ size_of::<relay::Segment>() }>();
        if !rest.is_empty() {
            tracing::error!(
                "the host daemon's list of segments has {} bytes; is it another release?",
                body.len()
            );
            return Vec::new();
        }
        self.list = segments.iter().map(|bytes| zerocopy::transmute!(*bytes)).collect();
        self.due.clear();
        self.scan();
        let trusting: Vec<_> = self
            .list
            .iter()
            .filter(|segment| self.trusts_members(segment))
            .map(|s| s.name.as_str())
            .collect();
        if !trusting.is_empty() {
            tracing::warn!(
                "the module nd_pmem is loaded, so when this VM boots its kernel trusts all members of the segments that \
                 come by DAX ({}); keep it from loading, see ginneld(8)",
                trusting.join(", ")
            );
        }
        let mut missing = Vec::new();
        for segment in &self.list {
            match self.devices.find(segment) {
                Ok(_) => self.due.push_back(segment.name),
                Err(why) => {
                    tracing::warn!("segment {} is missing in this VM: {why}", segment.name);
                    missing.push(mapped(segment.name, MappingKind::NONE, self.trusts_members(segment), None));
                }
            }
        }
        missing
    }

    fn scan(&mut self) {
        match MemoryDevices::scan(&self.kernel, &self.list) {
            Ok(devices) => self.devices = devices,
            Err(error) => tracing::error!("{error:#}"),
        }
    }

    /// Returns the device of the segment with this name; `None` if this VM has no such segment. Looks again if the device was
    /// missing or has gone: devices may be plugged in and unplugged.
    pub fn named(&mut self, name: &Name) -> Option<Result<&MemoryDevice, Missing>> {
        let segment = *self.list.iter().find(|segment| segment.name == *name)?;
        if !self.devices.find(&segment).is_ok_and(MemoryDevice::is_there) {
            self.scan();
            // A missing segment is reported too, so that the host checks the memory in front of the segment's arena.
            if !self.due.contains(name) {
                self.due.push_back(*name);
            }
        }
        Some(self.devices.find(&segment))
    }

    /// Returns the device of the segment with this uuid.
    pub fn with_uuid(&mut self, uuid: &[u8; 16]) -> Result<&MemoryDevice, Missing> {
        let name = self.list.iter().find(|segment| segment.uuid == *uuid).map(|segment| segment.name);
        name.and_then(|name| self.named(&name)).unwrap_or(Err(Missing::NoDevice))
    }

    /// Returns whether a segment remains to be measured.
    pub fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Measures the next segment, and returns the message for the host. Takes some ten milliseconds.
    pub fn measure_next(&mut self) -> Option<relay::Mapped> {
        let name = self.due.pop_front()?;
        let segment = self.list.iter().find(|segment| segment.name == name)?;
        let trusts = self.trusts_members(segment);
        let Ok(device) = self.devices.find(segment) else {
            return Some(mapped(name, MappingKind::NONE, trusts, None));
        };
        let key = (segment.uuid, device.place.clone());
        if let Some(speed) = self.speeds.get(&key) {
            return Some(mapped(name, device.kind, trusts, Some(*speed)));
        }
        let speed = match Speed::measure(device) {
            Ok(speed) => speed,
            Err(error) => {
                tracing::warn!("segment {name} cannot be measured: {error:#}");
                return Some(mapped(name, device.kind, trusts, None));
            }
        };
        let Speed { read, write, private } = speed;
        tracing::info!(read_mb_s = read, write_mb_s = write, "segment {name} is {}", device.place);
        if speed.looks_uncached() {
            tracing::warn!(
                "segment {name} is slow (reads {read} MB/s, writes {write} MB/s, private memory {private} MB/s): its mapping looks uncached; a \
                 device that is passed through to this VM can be the cause, and a virtio-pmem device is always cached"
            );
        }
        self.speeds.insert(key, speed);
        Some(mapped(name, device.kind, trusts, Some(speed)))
    }

    /// Returns whether a kernel that boots in this VM trusts the segment's info block, into which its members can write.
    fn trusts_members(&self, segment: &relay::Segment) -> bool {
        segment.kind == MappingKind::DAX && self.kernel.probes_by_itself()
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory_device::tests::{add, header, segment};
    use super::super::pci::tests::Tree;
    use super::*;
    use zerocopy::IntoBytes;

    const SIZE: u64 = 4 << 20;

    fn named(name: &str, uuid: u8) -> relay::Segment {
        relay::Segment { name: Name::new(name).unwrap(), ..segment(uuid, SIZE) }
    }

    #[test]
    fn the_list_is_matched_with_the_devices() {
        let tree = Tree::new();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        let mut segments = Segments::new(tree.kernel());
        let missing = segments.learn([named("here", 5), named("gone", 6)].as_bytes());
        let gone = Name::new("gone").unwrap();
        assert_eq!(missing.iter().map(|m| (m.name, m.kind)).collect::<Vec<_>>(), [(gone, MappingKind::NONE)]);
        assert!(segments.named(&Name::new("here").unwrap()).unwrap().is_ok());
        assert!(segments.named(&gone).unwrap().is_err());
        assert!(segments.named(&Name::new("never").unwrap()).is_none());
        assert!(segments.with_uuid(&[5; 16]).is_ok() && segments.with_uuid(&[7; 16]).is_err());

        let told = segments.measure_next().unwrap();
        assert_eq!((told.name.as_str(), told.kind), ("here", MappingKind::BAR));
        assert!(told.read_mb_s > 0 && told.write_mb_s > 0);
        // It was found missing again meanwhile.
        let told = segments.measure_next().unwrap();
        assert_eq!((told.name, told.kind), (gone, MappingKind::NONE));
        assert!(!segments.is_due() && segments.measure_next().is_none());
    }

    #[test]
    fn a_device_that_is_plugged_in_later_is_found_on_request() {
        let tree = Tree::new();
        let mut segments = Segments::new(tree.kernel());
        assert_eq!(segments.learn([named("late", 5)].as_bytes()).len(), 1);
        // The host is told each time that it is found missing.
        for _ in 0..2 {
            assert!(segments.named(&Name::new("late").unwrap()).unwrap().is_err());
            assert_eq!(segments.measure_next().unwrap().kind, MappingKind::NONE);
            assert!(!segments.is_due());
        }
        add(&tree, "0000:00:05.0", SIZE, header(5));
        assert!(segments.named(&Name::new("late").unwrap()).unwrap().is_ok());
        assert_eq!(segments.measure_next().unwrap().kind, MappingKind::BAR);
    }

    #[test]
    fn a_list_of_the_wrong_length_changes_nothing() {
        let tree = Tree::new();
        let mut segments = Segments::new(tree.kernel());
        segments.learn([named("a", 5)].as_bytes());
        assert!(segments.learn(&[1; size_of::<relay::Segment>() - 1]).is_empty());
        assert!(segments.named(&Name::new("a").unwrap()).is_some());
    }

    #[test]
    fn measuring_changes_nothing() {
        use ginnel_layout::segment::RESERVED;
        use std::os::unix::fs::FileExt;
        let tree = Tree::new();
        add(&tree, "0000:00:05.0", SIZE, header(5));
        let path = tree.path().join("bus/pci/devices/0000:00:05.0/resource2");
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let arena = vec![0xa5; (SIZE - ginnel_layout::segment::ARENA) as usize];
        file.write_all_at(&arena, ginnel_layout::segment::ARENA).unwrap();
        file.write_all_at(&[0x5a; 8192], 0).unwrap();
        file.write_all_at(&[0xa5; 4096], RESERVED + 4096).unwrap();
        let mut before = vec![0; SIZE as usize];
        file.read_exact_at(&mut before, 0).unwrap();
        let mut segments = Segments::new(tree.kernel());
        segments.learn([named("a", 5)].as_bytes());
        segments.measure_next().unwrap();
        let mut after = vec![0; SIZE as usize];
        file.read_exact_at(&mut after, 0).unwrap();
        assert!(before == after, "not a byte has changed");
    }
}
