//! The disks that volumes give to a VM, from the volumes' configurations.

use crate::machine::Ports;
use crate::qemu_version::QemuVersion;
use crate::vm_devices::escaped;
use anyhow::{Context, Result, bail};
use ginnel_config::Bytes;
use ginnel_volume_control::VolumePaths;
use ginnel_volume_control::config::{Device, Spec};
use serde_json::json;
use std::path::PathBuf;

/// A volume as a device of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeDevice {
    pub volume: String,
    pub vm: Option<String>,
    pub device: Device,
    pub socket: PathBuf,
    pub queues: u16,
    /// Whether its configuration asks for packed rings.
    pub packed: bool,
}

/// Options that say where configurations and sockets are.
#[derive(clap::Args)]
pub struct VolumePathArgs {
    /// Folder of the configurations of volumes.
    #[arg(long, value_name = "DIR", env = "GINNEL_VOLUME_CONFIGS", hide_env_values = true)]
    volume_configs: Option<PathBuf>,
    /// Folder of the sockets of volumes.
    #[arg(long, value_name = "DIR", env = "GINNEL_VOLUME_SOCKETS", hide_env_values = true)]
    volume_sockets: Option<PathBuf>,
}

impl VolumePathArgs {
    fn paths(&self) -> VolumePaths {
        let standard = VolumePaths::default();
        VolumePaths {
            sockets: self.volume_sockets.clone().unwrap_or(standard.sockets),
            configurations: self.volume_configs.clone().unwrap_or(standard.configurations),
        }
    }

    /// Returns all volumes that have a configuration.
    pub fn volumes(&self) -> Result<Vec<VolumeDevice>> {
        let paths = self.paths();
        let names =
            paths.configured().with_context(|| format!("cannot read {}", paths.configurations.display()))?;
        names.iter().map(|name| VolumeDevice::read(&paths, name)).collect()
    }
}

impl VolumeDevice {
    fn read(paths: &VolumePaths, name: &str) -> Result<Self> {
        let file = paths.configuration(name);
        let spec = Spec::read(&file)?;
        let config = spec.check(name, paths, &file.display().to_string())?;
        Ok(Self {
            volume: name.into(),
            vm: config.vm,
            device: config.device,
            socket: config.socket,
            queues: config.queues,
            packed: spec.packed == Some(true),
        })
    }

    /// Returns QEMU's id for the connection to the volume.
    pub fn id(&self) -> String {
        format!("ginnel-volume-{}", self.volume)
    }

    /// Returns the value of QEMU's `-chardev`. An nvme device has none. QEMU tries to reconnect once a second when the
    /// volume was restarted; QEMU 7.2 does so only for blk.
    pub fn chardev(&self, qemu: QemuVersion) -> Option<String> {
        let socket = format!("socket,id={},path={}", self.id(), escaped(&self.socket));
        match self.device {
            Device::Blk => Some(format!("{socket},{}", qemu.reconnect())),
            Device::Scsi => Some(socket),
            Device::Nvme => None,
        }
    }

    /// Returns the model of QEMU's device.
    pub fn model(&self) -> &'static str {
        match self.device {
            Device::Blk => "vhost-user-blk-pci",
            Device::Scsi => "vhost-user-scsi-pci",
            Device::Nvme => NVME_MODEL,
        }
    }

    /// Returns QEMU's name for the number of queues. The guest asks an nvme device itself.
    pub fn queues_key(&self) -> Option<&'static str> {
        match self.device {
            Device::Blk => Some("num-queues"),
            Device::Scsi => Some("num_queues"),
            Device::Nvme => None,
        }
    }

    /// Returns the value of QEMU's `-device`, without its place.
    pub fn device(&self) -> String {
        let Some(queues) = self.queues_key() else { return self.nvme() };
        let packed = if self.packed { ",packed=on" } else { "" };
        format!("{},chardev={},{queues}={}{packed}", self.model(), self.id(), self.queues)
    }

    /// Returns the device of an nvme volume. QEMU takes a socket's address in JSON only. It has no id, so that no command
    /// for unplugging finds it by its name.
    fn nvme(&self) -> String {
        let device = json!({
            "driver": NVME_MODEL,
            "socket": { "type": "unix", "path": self.socket.display().to_string() },
            "x-msg-timeout": NVME_TIMEOUT_MS,
        });
        // White space would end the argument in `$(ginnel qemu-args ...)`. There is none but in the path.
        device.to_string().replace(' ', "\\u0020")
    }

    /// Returns the values of QEMU's `-device` that put the volume into a VM. `more` is for the one that is on the root bus.
    pub fn place(&self, ports: &mut Ports, more: &str) -> Vec<String> {
        match self.device {
            Device::Nvme => ports.place_for_good(self.device(), more),
            Device::Blk | Device::Scsi => ports.place(self.device(), more),
        }
    }
}

/// QEMU's device for a server of vfio-user.
pub const NVME_MODEL: &str = "vfio-user-pci";

/// How long QEMU waits for an answer of a volume's holder, in milliseconds. An answer that is late ends the device for good, and QEMU's
/// default is 5 seconds. The holder answers at once, unless it waits for the engine to let go of memory.
pub const NVME_TIMEOUT_MS: u64 = 120_000;

/// Refuses a QEMU that is too old for one of these volumes.
pub fn check_version(volumes: &[VolumeDevice], qemu: QemuVersion) -> Result<()> {
    match volumes.iter().find(|v| v.device == Device::Nvme) {
        Some(volume) if !qemu.has_vfio_user() => bail!(
            "volume {} is an nvme device, which takes QEMU 10.1 or later ({NVME_MODEL}), and this one is QEMU {qemu}: name a later one by \
             --qemu PATH or --qemu-version VERSION, or write device = \"blk\" in the volume's configuration",
            volume.volume
        ),
        _ => Ok(()),
    }
}

/// QEMU's id for the memory of the device that keeps a VM from migrating live.
pub const STAY: &str = "ginnel-no-migration";

/// Returns the arguments of a device that does nothing but keep a VM from migrating live. QEMU itself (11.1) lets a VM with an nvme
/// device migrate, reports success, and leaves the device behind. It refuses to migrate a VM that has an ivshmem device, as VMs with
/// segments have.
pub fn stay() -> [(&'static str, String); 2] {
    [
        ("-object", format!("memory-backend-ram,id={STAY},size=4K")),
        ("-device", format!("ivshmem-plain,memdev={STAY}")),
    ]
}

/// QEMU's id for the RAM that volumes access.
pub const RAM: &str = "ginnel-ram";

/// Returns the arguments with which QEMU shares the VM's RAM with its volumes. They are needed once for all volumes.
pub fn shared_ram(bytes: u64) -> [(&'static str, String); 2] {
    [
        ("-object", format!("memory-backend-memfd,id={RAM},size={},share=on", Bytes(bytes))),
        ("-machine", format!("memory-backend={RAM}")),
    ]
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns a disk with four queues, a scsi target, and a disk of another VM.
    pub fn volumes() -> Vec<VolumeDevice> {
        let volume = |name: &str, vm: &str, device, queues| VolumeDevice {
            volume: name.into(),
            vm: Some(vm.into()),
            device,
            socket: format!("/run/ginnel/volumes/{name}.sock").into(),
            queues,
            packed: false,
        };
        vec![
            volume("data", "a", Device::Blk, 4),
            volume("many", "a", Device::Scsi, 2),
            volume("other", "b", Device::Blk, 1),
        ]
    }

    /// Returns an nvme volume of the same VM.
    pub fn nvme() -> VolumeDevice {
        VolumeDevice {
            volume: "fast".into(),
            vm: Some("a".into()),
            device: Device::Nvme,
            socket: "/run/ginnel/volumes/fast.sock".into(),
            queues: 2,
            packed: false,
        }
    }

    #[test]
    fn devices_are_written_as_qemu_reads_them() {
        let volumes = volumes();
        assert_eq!(
            [volumes[0].chardev(QemuVersion::OLDEST).unwrap(), volumes[0].device()],
            [
                "socket,id=ginnel-volume-data,path=/run/ginnel/volumes/data.sock,reconnect=1",
                "vhost-user-blk-pci,chardev=ginnel-volume-data,num-queues=4",
            ]
        );
        assert_eq!(
            [volumes[1].chardev(QemuVersion::OLDEST).unwrap(), volumes[1].device()],
            [
                "socket,id=ginnel-volume-many,path=/run/ginnel/volumes/many.sock",
                "vhost-user-scsi-pci,chardev=ginnel-volume-many,num_queues=2",
            ]
        );
        assert_eq!(shared_ram(2 << 30)[0].1, "memory-backend-memfd,id=ginnel-ram,size=2G,share=on");
    }

    #[test]
    fn an_nvme_device_is_one_word_of_json() {
        let mut fast = nvme();
        assert_eq!(fast.chardev(QemuVersion::OLDEST), None);
        fast.socket = "/a \"b\",c.sock".into();
        let device = fast.device();
        assert!(!device.contains(char::is_whitespace), "{device}");
        let device: serde_json::Value = serde_json::from_str(&device).unwrap();
        assert_eq!(device["driver"], "vfio-user-pci");
        assert_eq!(device["socket"], json!({ "type": "unix", "path": "/a \"b\",c.sock" }));
        let version = |text: &str| check_version(&[fast.clone()], text.parse().unwrap());
        assert!(version("10.1").is_ok() && version("11.1.3").is_ok());
        let old = version("10.0").unwrap_err().to_string();
        assert!(old.starts_with("volume fast is an nvme device, which takes QEMU 10.1 or later"), "{old}");
        assert!(check_version(&volumes(), QemuVersion::OLDEST).is_ok());
    }

    #[test]
    fn configurations_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let args =
            VolumePathArgs { volume_configs: Some(folder.path().into()), volume_sockets: Some("/s".into()) };
        assert_eq!(args.volumes().unwrap(), []);
        let text = "vm = \"a\"\nqueues = 2\npacked = true\n[[disk]]\npath = \"/i\"";
        std::fs::write(folder.path().join("x.toml"), text).unwrap();
        let volumes = args.volumes().unwrap();
        assert_eq!(volumes[0].device(), "vhost-user-blk-pci,chardev=ginnel-volume-x,num-queues=2,packed=on");
        assert_eq!(volumes[0].socket, PathBuf::from("/s/x.sock"));
        std::fs::write(folder.path().join("y.toml"), "qeues = 1").unwrap();
        assert!(args.volumes().unwrap_err().to_string().contains("y.toml:1"));
    }
}
