//! The devices that join a VM.

use crate::inspect::{Inspect, MemoryKind, Segment};
use anyhow::{Context, Result, bail};
use ginnel::Daemon;
use std::path::{Path, PathBuf};

/// Address space that a VM gets beyond its RAM and segments: room for a segment that is plugged in later, and for the
/// gap that QEMU leaves in front of one on huge pages.
const SPARE: u64 = 1 << 30;

/// What a VM needs.
pub struct Devices {
    pub vm: String,
    /// Socket of its control device.
    pub socket: PathBuf,
    pub vectors: u32,
    /// QEMU's control socket for the daemon.
    pub qmp: Option<PathBuf>,
    /// The QEMU that it runs in already.
    pub qemu: Option<u32>,
    pub memory: Vec<MemoryDevice>,
}

/// A segment as a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryDevice {
    pub segment: String,
    pub file: PathBuf,
    /// Where in the file it begins; QEMU from 8.1 on can.
    pub offset: u64,
    pub size: u64,
    /// Dax or bar, nothing else.
    pub kind: MemoryKind,
    /// The VM may read only.
    pub read_only: bool,
    /// Its file is known not to be what it was.
    pub broken: bool,
}

impl Devices {
    /// Asks the daemon, which must be the host's.
    pub fn of(vm: &str) -> Result<Self> {
        let inspect = crate::inspect::ask(&mut Daemon::connect()?)?;
        Self::from(&inspect, vm)
    }

    pub fn from(inspect: &Inspect, vm: &str) -> Result<Self> {
        let member = crate::inspect::vm(inspect, vm)?;
        let socket = member.socket.as_ref().context(ONLY_HOST)?.into();
        let memory = inspect.segments.iter().filter_map(|segment| MemoryDevice::of(segment, vm).transpose());
        Ok(Self {
            vm: vm.into(),
            socket,
            vectors: member.vectors,
            qmp: member.qmp.as_ref().map(Into::into),
            qemu: member.qemu_pid,
            memory: memory.collect::<Result<_>>()?,
        })
    }

    /// Bytes of address space that QEMU's `maxmem` must have beyond the VM's RAM.
    pub fn hot_pluggable(&self) -> u64 {
        let dax = self.memory.iter().filter(|memory| memory.kind == MemoryKind::Dax);
        dax.map(|memory| memory.size).fold(0, u64::saturating_add)
    }

    /// A `maxmem` that does for a VM with `ram` bytes of RAM. `None` if it needs none.
    pub fn max_memory(&self, ram: u64) -> Option<u64> {
        let more = self.hot_pluggable();
        (more > 0).then(|| ram.saturating_add(more).saturating_add(SPARE))
    }
}

/// The value of QEMU's `-qmp` for a socket. A comma in a value is written twice.
pub fn control_socket(path: &Path) -> String {
    format!("unix:{},server=on,wait=off", path.display().to_string().replace(',', ",,"))
}

const ONLY_HOST: &str = "only the host's daemon tells; run this on the host";

impl MemoryDevice {
    /// `None` if the VM has no share in the segment.
    fn of(segment: &Segment, vm: &str) -> Result<Option<Self>> {
        let read_only = segment.is_reader(vm);
        if !read_only && !segment.members.iter().any(|name| name == vm) {
            return Ok(None);
        }
        if segment.memory == MemoryKind::Unknown {
            bail!(
                "segment {} comes by a device that this version of `ginnel` does not know: use the daemon's version",
                segment.name
            );
        }
        Ok(Some(Self {
            segment: segment.name.clone(),
            file: segment.path.as_ref().context(ONLY_HOST)?.into(),
            offset: segment.offset,
            size: segment.size,
            kind: segment.memory,
            read_only,
            broken: segment.broken,
        }))
    }

    /// QEMU's id of it. Ids begin with a letter and have no `@`.
    pub fn id(&self) -> String {
        format!("ginnel-{}", self.segment)
    }

    /// The name by which libvirt finds its file in /dev/shm, if it lies there.
    pub fn in_dev_shm(&self) -> Option<&str> {
        self.file.parent().filter(|folder| *folder == Path::new("/dev/shm"))?;
        self.file.file_name()?.to_str()
    }

    /// The value of QEMU's `-object`. Not part of core dumps of QEMU: it is not the VM's own memory.
    pub fn object(&self) -> String {
        let mut text =
            format!("memory-backend-file,id={},share=on,mem-path={}", self.id(), escaped(&self.file));
        if self.offset > 0 {
            text += &format!(",offset={}", self.offset);
        }
        text += &format!(",size={},dump=off", self.size);
        if self.read_only {
            // The guest sees ROM, also in QEMU from 8.2 on, whose `rom` follows `readonly` unless told otherwise.
            text += ",readonly=on";
        }
        text
    }

    /// The value of QEMU's `-device`.
    pub fn device(&self) -> String {
        let model = if self.kind == MemoryKind::Dax { "virtio-pmem-pci" } else { "ivshmem-plain" };
        format!("{model},memdev={}", self.id())
    }
}

/// As part of a value of QEMU: a comma is written twice.
pub fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Five segments: one of each kind, one on a hugetlbfs, a slice that may only be read, and a read-only BAR. And one
    /// of others.
    pub fn devices() -> Devices {
        let answer = r#"{
            "members": [{"number": 0, "name": "host"},
                        {"number": 1, "name": "vm-a", "socket": "/run/ginnel/vm-a.sock", "vectors": 32,
                         "qmp": "/run/ginnel/vm-a.qmp"}],
            "segments": [
                {"name": "web", "size": 268435456, "path": "/dev/shm/ginnel-web", "members": ["host", "vm-a"],
                 "memory": "dax", "page": 2097152},
                {"name": "old", "size": 4194304, "path": "/dev/shm/ginnel-old", "members": ["host", "vm-a"],
                 "memory": "bar", "page": 4096},
                {"name": "huge", "size": 1073741824, "path": "/mnt/a,b/ginnel-huge", "members": ["vm-a"],
                 "memory": "bar"},
                {"name": "news.vm-a", "size": 6291456, "offset": 6291456, "path": "/dev/shm/ginnel-news",
                 "members": ["host"], "readers": ["vm-a"], "memory": "dax"},
                {"name": "quiet", "size": 4194304, "path": "/dev/shm/ginnel-quiet", "members": ["host"],
                 "readers": ["vm-a"], "memory": "bar"},
                {"name": "other", "size": 4194304, "path": "/dev/shm/ginnel-other", "members": ["host"]}]}"#;
        Devices::from(&crate::inspect::parse(answer).unwrap(), "vm-a").unwrap()
    }

    #[test]
    fn a_vm_gets_its_own_segments_only() {
        let devices = devices();
        let segments: Vec<_> = devices.memory.iter().map(|m| m.segment.as_str()).collect();
        assert_eq!(segments, ["web", "old", "huge", "news.vm-a", "quiet"]);
        assert_eq!(devices.memory[0].in_dev_shm(), Some("ginnel-web"));
        assert_eq!(devices.memory[2].in_dev_shm(), None);
        let readers: Vec<_> =
            devices.memory.iter().filter(|m| m.read_only).map(|m| m.segment.as_str()).collect();
        assert_eq!(readers, ["news.vm-a", "quiet"]);
    }

    #[test]
    fn address_space_is_for_dax_alone() {
        let mut devices = devices();
        assert_eq!(devices.hot_pluggable(), (256 << 20) + (6 << 20));
        assert_eq!(devices.max_memory(2 << 30), Some((3 << 30) + (262 << 20)));
        assert_eq!(devices.max_memory(u64::MAX), Some(u64::MAX));
        devices.memory.retain(|m| m.kind == MemoryKind::Bar);
        assert_eq!(devices.max_memory(2 << 30), None);
    }

    #[test]
    fn a_kind_of_the_future_is_named() {
        let answer = r#"{"members": [{"number": 1, "name": "a", "socket": "/s"}],
            "segments": [{"name": "web", "path": "/x", "members": ["a"], "memory": "cxl"}]}"#;
        let error = Devices::from(&crate::inspect::parse(answer).unwrap(), "a").err().unwrap().to_string();
        assert!(error.contains("segment web") && error.contains("version"), "{error}");
    }

    #[test]
    fn an_unknown_vm_is_named_beside_the_known() {
        let answer = r#"{"members": [{"number": 0, "name": "host"}, {"number": 1, "name": "vm-a"}]}"#;
        let inspect = crate::inspect::parse(answer).unwrap();
        let error = Devices::from(&inspect, "vm-x").err().unwrap().to_string();
        assert!(error.contains("\"vm-x\"") && error.contains("vm-a") && !error.contains("host,"), "{error}");
        let error = Devices::from(&inspect, "vm-a").err().unwrap().to_string();
        assert!(error.contains("on the host"), "{error}");
    }
}
