//! The devices that connect a VM to its segments.

use crate::inspect::{Inspect, MemoryKind, Segment};
use anyhow::{Context, Result, bail};
use ginnel::Daemon;
use std::path::{Path, PathBuf};

/// Address space that a VM gets in addition to its RAM and segments: room for a segment that is plugged in later, and
/// for the gap that QEMU leaves in front of a segment on huge pages.
const SPARE: u64 = 1 << 30;

/// The devices of one VM.
pub struct Devices {
    pub vm: String,
    /// Socket of its control device.
    pub socket: PathBuf,
    pub vectors: u32,
    /// The QMP socket for the daemon.
    pub qmp: Option<PathBuf>,
    /// The process of the QEMU that already runs this VM.
    pub qemu: Option<u32>,
    pub memory: Vec<MemoryDevice>,
}

/// The memory device of one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryDevice {
    pub segment: String,
    pub file: PathBuf,
    /// Where it begins in the file, in bytes. QEMU supports this from 8.1 on.
    pub offset: u64,
    pub size: u64,
    /// Dax or bar, nothing else.
    pub kind: MemoryKind,
    /// Whether the VM may only read it.
    pub read_only: bool,
    /// Whether its file is known to have been truncated or replaced.
    pub broken: bool,
    /// Why it is out of service.
    pub why: Option<String>,
}

impl Devices {
    /// Returns the devices of a VM. Asks the daemon, which must be the host's.
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

    /// Returns how many bytes of address space QEMU's `maxmem` must have in addition to the VM's RAM.
    pub fn hot_pluggable(&self) -> u64 {
        let dax = self.memory.iter().filter(|memory| memory.kind == MemoryKind::Dax);
        dax.map(|memory| memory.size).fold(0, u64::saturating_add)
    }

    /// Returns a `maxmem` that suffices for a VM with `ram` bytes of RAM, or `None` if it needs none.
    pub fn max_memory(&self, ram: u64) -> Option<u64> {
        let more = self.hot_pluggable();
        (more > 0).then(|| ram.saturating_add(more).saturating_add(SPARE))
    }
}

/// Returns the value of QEMU's `-qmp` for a socket. A comma in a value is written twice.
pub fn control_socket(path: &Path) -> String {
    format!("unix:{},server=on,wait=off", path.display().to_string().replace(',', ",,"))
}

const ONLY_HOST: &str = "only the host's daemon knows this; run the command on the host";

impl MemoryDevice {
    /// Returns `None` if the VM has no share in the segment.
    fn of(segment: &Segment, vm: &str) -> Result<Option<Self>> {
        let read_only = segment.is_reader(vm);
        if !read_only && !segment.members.iter().any(|name| name == vm) {
            return Ok(None);
        }
        if segment.memory == MemoryKind::Unknown {
            bail!(
                "segment {} uses a kind of device that this version of `ginnel` does not know: use the daemon's version",
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
            why: segment.broken_why.clone(),
        }))
    }

    /// Returns QEMU's id for it. Ids begin with a letter and have no `@`.
    pub fn id(&self) -> String {
        format!("ginnel-{}", self.segment)
    }

    /// Returns the value of QEMU's `-object`. It is excluded from core dumps of QEMU, since it is not the VM's own
    /// memory.
    pub fn object(&self) -> String {
        let mut text =
            format!("memory-backend-file,id={},share=on,mem-path={}", self.id(), escaped(&self.file));
        if self.offset > 0 {
            text += &format!(",offset={}", self.offset);
        }
        text += &format!(",size={},dump=off", self.size);
        if self.read_only {
            // The guest sees ROM. This also holds for QEMU from 8.2 on, whose `rom` has the value of `readonly` by
            // default.
            text += ",readonly=on";
        }
        text
    }

    /// Returns the value of QEMU's `-device`.
    pub fn device(&self) -> String {
        let model = if self.kind == MemoryKind::Dax { "virtio-pmem-pci" } else { "ivshmem-plain" };
        format!("{model},memdev={}", self.id())
    }
}

/// Escapes a path for a value of QEMU: a comma is written twice.
pub fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns five segments: one of each kind, one on a hugetlbfs, a slice that may only be read, and a read-only BAR.
    /// The answer also has a segment of other members.
    pub fn devices() -> Devices {
        let answer = r#"{
            "members": [{"number": 0, "name": "host"},
                        {"number": 1, "name": "vm-a", "socket": "/run/ginnel/vm-a.sock", "vectors": 32,
                         "qmp": "/run/ginnel/vm-a.qmp"}],
            "segments": [
                {"name": "web", "size": 268435456, "path": "/dev/shm/ginnel/web", "members": ["host", "vm-a"],
                 "memory": "dax", "page": 2097152},
                {"name": "old", "size": 4194304, "path": "/dev/shm/ginnel/old", "members": ["host", "vm-a"],
                 "memory": "bar", "page": 4096},
                {"name": "huge", "size": 1073741824, "path": "/mnt/a,b/ginnel/huge", "members": ["vm-a"],
                 "memory": "bar"},
                {"name": "news.vm-a", "size": 6291456, "offset": 6291456, "path": "/dev/shm/ginnel/news",
                 "members": ["host"], "readers": ["vm-a"], "memory": "dax"},
                {"name": "quiet", "size": 4194304, "path": "/dev/shm/ginnel/quiet", "members": ["host"],
                 "readers": ["vm-a"], "memory": "bar"},
                {"name": "other", "size": 4194304, "path": "/dev/shm/ginnel/other", "members": ["host"]}]}"#;
        Devices::from(&crate::inspect::parse(answer).unwrap(), "vm-a").unwrap()
    }

    #[test]
    fn a_vm_gets_its_own_segments_only() {
        let devices = devices();
        let segments: Vec<_> = devices.memory.iter().map(|m| m.segment.as_str()).collect();
        assert_eq!(segments, ["web", "old", "huge", "news.vm-a", "quiet"]);
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
