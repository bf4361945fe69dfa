//! The configuration of one disk of a volume.

use super::{BackendKind, Device, Direct, Lock, OnError};
use ginnel_config::{Bytes, Problem};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The largest length of a serial number: `VIRTIO_BLK_ID_BYTES`.
pub const SERIAL_MAX: usize = 20;

/// A disk, as it is in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct DiskSpec {
    /// Where its data is stored. Default: `file` if there is a `path`.
    pub backend: Option<BackendKind>,
    /// The image: a raw file or a block device, or for `uring-cmd` the character device of an NVMe namespace.
    pub path: Option<PathBuf>,
    /// For `vfio`: the PCI address of the NVMe device, such as 0000:01:00.0.
    pub pci: Option<String>,
    /// For `vfio`: the number of the namespace. Default: the only one.
    pub namespace: Option<u32>,
    /// For `vfio`: where the disk begins on the namespace. Default: at its beginning.
    pub offset: Option<Bytes>,
    /// Size of the disk; a shorter file grows. Default: the size of the file or device, or what there is from `offset` on.
    pub size: Option<Bytes>,
    /// Size of a sector: 512 or 4096.
    pub sector: Option<Bytes>,
    /// Whether the disk is read-only for the guest.
    pub read_only: bool,
    /// The serial number. Default: the volume's name (and the LUN).
    pub serial: Option<String>,
    /// Whether the kernel's page cache is bypassed.
    pub direct: Direct,
    /// Whether the guest sees a write cache, which it flushes. Without it, each write is durable before it is
    /// acknowledged.
    pub write_cache: Option<bool>,
    /// Whether the guest may discard blocks, and write zeroes, which makes holes in the image.
    pub discard: Option<bool>,
    /// What happens to requests that fail because the disk is full or has an error.
    pub on_error: OnError,
    /// Whether the device is polled for completions (`IORING_SETUP_IOPOLL`).
    pub iopoll: bool,
    /// Whether the image is locked against other volumes and QEMUs, and for how long.
    pub lock: Option<Lock>,
}

/// A place on an NVMe device that the volume drives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmePlace {
    /// The PCI address of the device.
    pub pci: String,
    /// The number of the namespace; `None` if there is only one.
    pub namespace: Option<u32>,
    /// Where the disk begins, in bytes.
    pub offset: u64,
    /// Where another disk begins behind it, in bytes, if one does.
    pub end: Option<u64>,
}

impl NvmePlace {
    /// Returns where the other disk begins, if it begins behind this one on the same namespace.
    pub(super) fn begins_behind(&self, other: &Self) -> Option<u64> {
        (self.may_be_beside(other) && other.offset > self.offset).then_some(other.offset)
    }

    /// Returns whether the other place may be on the same namespace.
    fn may_be_beside(&self, other: &Self) -> bool {
        let is_other = self.namespace.zip(other.namespace).is_some_and(|(one, other)| one != other);
        self.pci == other.pci && !is_other
    }

    /// Returns whether a disk of that size here and another there may have bytes in common. Without a size, a disk ends with the namespace.
    pub(super) fn overlaps(&self, size: Option<u64>, other: &Self, its: Option<u64>) -> bool {
        let ends_before = |start: u64, size: Option<u64>, next: u64| {
            size.and_then(|size| start.checked_add(size)).is_some_and(|end| end <= next)
        };
        self.may_be_beside(other)
            && !ends_before(self.offset, size, other.offset)
            && !ends_before(other.offset, its, self.offset)
    }
}

/// A disk after the checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The LUN.
    pub lun: u32,
    /// Where its data is stored.
    pub backend: BackendKind,
    /// The image. Present for `file`, `volatile` and `uring-cmd`.
    pub path: Option<PathBuf>,
    /// The place on an NVMe device. Present for `vfio`.
    pub nvme: Option<NvmePlace>,
    /// Size in bytes. Present for `ram` and `null`.
    pub size: Option<u64>,
    /// Size of a sector, in bytes.
    pub sector: u32,
    /// Whether the disk is read-only for the guest.
    pub read_only: bool,
    /// The serial number.
    pub serial: String,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// Whether the guest sees a write cache.
    pub write_cache: bool,
    /// Whether the guest may discard blocks.
    pub discard: bool,
    /// What happens to requests that fail because the disk is full or has an error.
    pub on_error: OnError,
    /// Whether the device is polled for completions.
    pub iopoll: bool,
    /// Whether the image is locked, and for how long.
    pub lock: Lock,
}

impl DiskSpec {
    pub(super) fn check(
        &self,
        device: Device,
        volume: &str,
        index: usize,
        place: &str,
    ) -> Result<Disk, Problem> {
        let bad =
            |key: &str, what: String, fix: &str| Err(Problem::new(format!("{place}: {key}"), what, fix));
        let backend = self.backend.unwrap_or_default();
        match (backend, &self.path, self.size) {
            (BackendKind::File | BackendKind::Volatile, None, _) => {
                return bad("path", format!("a {backend} disk has none"), "name the image");
            }
            (BackendKind::UringCmd, None, _) => {
                let fix = "name the character device of an NVMe namespace, such as /dev/ng0n1";
                return bad("path", format!("a {backend} disk has none"), fix);
            }
            (BackendKind::Vfio, Some(path), _) => {
                let what = format!("a {backend} disk has none, and here is {}", path.display());
                return bad("path", what, "name the device by its PCI address: pci = \"0000:01:00.0\"");
            }
            (BackendKind::Vfio, ..) if self.pci.is_none() => {
                let fix = "write the PCI address of the NVMe device, such as pci = \"0000:01:00.0\"";
                return bad("pci", format!("a {backend} disk needs one"), fix);
            }
            (BackendKind::Ram | BackendKind::Null, Some(path), _) => {
                let what = format!("a {backend} disk has no image, and here is {}", path.display());
                return bad("path", what, "remove it, or write backend = \"file\"");
            }
            (BackendKind::Ram | BackendKind::Null, _, None) => {
                return bad(
                    "size",
                    format!("a {backend} disk needs one"),
                    "write one, such as size = \"1G\"",
                );
            }
            _ => {}
        }
        if let Some(path) = &self.path
            && path
                .extension()
                .is_some_and(|e| ["qcow2", "qcow", "vmdk", "vdi", "vhdx"].iter().any(|f| e == *f))
        {
            let what =
                format!("{} looks like an image with a format, but volumes need raw images", path.display());
            return bad(
                "path",
                what,
                "convert it (`qemu-img convert -O raw`), or let qemu-storage-daemon serve it",
            );
        }
        if backend != BackendKind::Vfio {
            let keys = [
                ("pci", self.pci.is_some()),
                ("namespace", self.namespace.is_some()),
                ("offset", self.offset.is_some()),
            ];
            if let Some((key, _)) = keys.into_iter().find(|(_, is_there)| *is_there) {
                let what = format!("a {backend} disk has none");
                return bad(key, what, "remove it, or write backend = \"vfio\"");
            }
        }
        let sector = self.sector.map_or(512, |s| s.0);
        if ![512, 4096].contains(&sector) {
            return bad("sector", format!("{sector} is not a supported size"), "write 512 or 4096");
        }
        let size = self.size.map(|s| s.0);
        if let Some(size) = size
            && (size == 0 || !size.is_multiple_of(sector))
        {
            return bad("size", format!("{size} is not a multiple of the sector size, {sector}"), "round it");
        }
        let offset = self.offset.map_or(0, |offset| offset.0);
        if !offset.is_multiple_of(sector) {
            return bad(
                "offset",
                format!("{offset} is not a multiple of the sector size, {sector}"),
                "round it",
            );
        }
        let serial = self.serial.clone().unwrap_or_else(|| default_serial(device, volume, index));
        if serial.len() > SERIAL_MAX || !serial.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
            let what = format!("{serial:?} is longer than {SERIAL_MAX} bytes or not printable ASCII");
            return bad("serial", what, "choose a shorter one");
        }
        let can_poll = match backend {
            BackendKind::File => self.direct != Direct::Off,
            BackendKind::UringCmd => true,
            BackendKind::Vfio | BackendKind::Ram | BackendKind::Null | BackendKind::Volatile => false,
        };
        if self.iopoll && !can_poll {
            return bad(
                "iopoll",
                "it needs a file backend with direct I/O, or uring-cmd".into(),
                "remove it",
            );
        }
        if backend == BackendKind::Vfio && self.lock.is_some() {
            let what = "only one process can have a vfio device".into();
            return bad("lock", what, "remove it");
        }
        if [BackendKind::UringCmd, BackendKind::Vfio].contains(&backend) {
            if self.direct == Direct::Off {
                let what = "NVMe commands do not go through the page cache".into();
                return bad("direct", what, "remove it, or write backend = \"file\"");
            }
            if self.lock == Some(Lock::Vm) {
                let what = "a uring-cmd disk is claimed from the start of the volume to its end".into();
                return bad("lock", what, "remove it, or write backend = \"file\"");
            }
        }
        Ok(Disk {
            lun: index as u32,
            backend,
            path: self.path.clone(),
            nvme: self.pci.clone().map(|pci| NvmePlace { pci, namespace: self.namespace, offset, end: None }),
            size,
            sector: sector as u32,
            read_only: self.read_only,
            serial,
            direct: self.direct,
            write_cache: self.write_cache.unwrap_or(true),
            discard: self.discard.unwrap_or(true) && !self.read_only,
            on_error: self.on_error,
            iopoll: self.iopoll,
            lock: self.lock.unwrap_or_default(),
        })
    }
}

/// Returns the volume's name, shortened if necessary, followed by the LUN.
fn default_serial(device: Device, volume: &str, index: usize) -> String {
    let tail = if device == Device::Scsi { format!(".{index}") } else { String::new() };
    let head = volume.get(..SERIAL_MAX - tail.len()).unwrap_or(volume);
    format!("{head}{tail}")
}
