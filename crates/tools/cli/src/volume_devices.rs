//! The disks that volumes give to a VM, from the volumes' configurations.

use crate::qemu_version::QemuVersion;
use crate::vm_devices::escaped;
use anyhow::{Context, Result};
use ginnel_config::Bytes;
use ginnel_volume_control::VolumePaths;
use ginnel_volume_control::config::{Device, Spec};
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

    /// Returns the value of QEMU's `-chardev`. QEMU tries to reconnect once a second when the volume was restarted;
    /// QEMU 7.2 does so only for blk.
    pub fn chardev(&self, qemu: QemuVersion) -> String {
        let socket = format!("socket,id={},path={}", self.id(), escaped(&self.socket));
        if self.device == Device::Blk { format!("{socket},{}", qemu.reconnect()) } else { socket }
    }

    /// Returns the model of QEMU's device.
    pub fn model(&self) -> &'static str {
        match self.device {
            Device::Blk => "vhost-user-blk-pci",
            Device::Scsi => "vhost-user-scsi-pci",
            Device::Nvme => "vfio-user-pci",
        }
    }

    /// Returns QEMU's name for the number of queues.
    pub fn queues_key(&self) -> &'static str {
        match self.device {
            Device::Blk => "num-queues",
            Device::Scsi => "num_queues",
            Device::Nvme => "",
        }
    }

    /// Returns the value of QEMU's `-device`.
    pub fn device(&self) -> String {
        let packed = if self.packed { ",packed=on" } else { "" };
        format!("{},chardev={},{}={}{packed}", self.model(), self.id(), self.queues_key(), self.queues)
    }
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

    #[test]
    fn devices_are_written_as_qemu_reads_them() {
        let volumes = volumes();
        assert_eq!(
            [volumes[0].chardev(QemuVersion::OLDEST), volumes[0].device()],
            [
                "socket,id=ginnel-volume-data,path=/run/ginnel/volumes/data.sock,reconnect=1",
                "vhost-user-blk-pci,chardev=ginnel-volume-data,num-queues=4",
            ]
        );
        assert_eq!(
            [volumes[1].chardev(QemuVersion::OLDEST), volumes[1].device()],
            [
                "socket,id=ginnel-volume-many,path=/run/ginnel/volumes/many.sock",
                "vhost-user-scsi-pci,chardev=ginnel-volume-many,num_queues=2",
            ]
        );
        assert_eq!(shared_ram(2 << 30)[0].1, "memory-backend-memfd,id=ginnel-ram,size=2G,share=on");
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
