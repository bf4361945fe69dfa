//! The devices that join a VM.

use crate::inspect::Inspect;
use anyhow::{Context, Result};
use ginnel::Daemon;
use std::path::{Path, PathBuf};

/// What a VM needs.
pub struct Devices {
    /// Socket of its control device.
    pub socket: PathBuf,
    pub vectors: u32,
    pub memory: Vec<MemoryDevice>,
}

/// A segment as a device.
pub struct MemoryDevice {
    pub segment: String,
    pub file: PathBuf,
    pub size: u64,
}

impl Devices {
    /// Asks the daemon, which must be the host's.
    pub fn of(vm: &str) -> Result<Self> {
        let inspect = Inspect::ask(&mut Daemon::connect()?)?;
        Self::from(&inspect, vm)
    }

    fn from(inspect: &Inspect, vm: &str) -> Result<Self> {
        let member = inspect.vm(vm)?;
        let only_host = "only the host's daemon tells; run this on the host";
        let socket = member.socket.as_ref().context(only_host)?.into();
        let segments = inspect.segments.iter().filter(|segment| segment.members.iter().any(|m| m == vm));
        let memory = segments
            .map(|segment| {
                let file = segment.path.as_ref().context(only_host)?.into();
                Ok(MemoryDevice { segment: segment.name.clone(), file, size: segment.size })
            })
            .collect::<Result<_>>()?;
        Ok(Self { socket, vectors: member.vectors, memory })
    }
}

impl MemoryDevice {
    /// QEMU's id of it. Ids begin with a letter and have no `@`.
    pub fn id(&self) -> String {
        format!("ginnel-{}", self.segment)
    }

    /// The name by which libvirt finds its file in /dev/shm, if it lies there.
    pub fn in_dev_shm(&self) -> Option<&str> {
        self.file.parent().filter(|folder| *folder == Path::new("/dev/shm"))?;
        self.file.file_name()?.to_str()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Two segments, one of them not in /dev/shm.
    pub fn devices() -> Devices {
        let answer = r#"{
            "members": [{"number": 0, "name": "host"},
                        {"number": 1, "name": "vm-a", "socket": "/run/ginnel/vm-a.sock", "vectors": 32}],
            "segments": [
                {"name": "web", "size": 268435456, "path": "/dev/shm/ginnel-web", "members": ["host", "vm-a"]},
                {"name": "huge", "size": 1073741824, "path": "/mnt/a,b/ginnel-huge", "members": ["vm-a"]},
                {"name": "other", "size": 4194304, "path": "/dev/shm/ginnel-other", "members": ["host"]}]}"#;
        Devices::from(&Inspect::parse(answer).unwrap(), "vm-a").unwrap()
    }

    #[test]
    fn a_vm_gets_its_own_segments_only() {
        let devices = devices();
        let segments: Vec<_> = devices.memory.iter().map(|m| m.segment.as_str()).collect();
        assert_eq!(segments, ["web", "huge"]);
        assert_eq!(devices.memory[0].in_dev_shm(), Some("ginnel-web"));
        assert_eq!(devices.memory[1].in_dev_shm(), None);
    }

    #[test]
    fn an_unknown_vm_is_named_beside_the_known() {
        let answer = r#"{"members": [{"number": 0, "name": "host"}, {"number": 1, "name": "vm-a"}]}"#;
        let inspect = Inspect::parse(answer).unwrap();
        let error = Devices::from(&inspect, "vm-x").err().unwrap().to_string();
        assert!(error.contains("\"vm-x\"") && error.contains("vm-a") && !error.contains("host,"), "{error}");
        let error = Devices::from(&inspect, "vm-a").err().unwrap().to_string();
        assert!(error.contains("on the host"), "{error}");
    }
}
