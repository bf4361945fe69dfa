//! Devices: registers, interrupts, and the configuration space.

use crate::container::Group;
use crate::ioctl::{self, DeviceInfo, IrqInfo, RegionInfo, checked, structure};
use anyhow::{Context, Result};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

const CONFIG_REGION: u32 = 7;
const MSIX_INDEX: u32 = 2;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_TRIGGER: u32 = 1 << 5;

// PCI configuration space.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// An open device.
#[derive(Debug)]
pub struct Device {
    file: File,
}

/// A part of a device: a base address register (0 to 5), or the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its length in bytes; 0 if the device has no such register.
    pub size: u64,
    /// Where it lies in the device's file.
    pub offset: u64,
    /// Whether it can be mapped.
    pub can_be_mapped: bool,
}

impl Device {
    /// Opens a device of a group by its PCI address.
    pub fn open(group: &Group, address: &str) -> Result<Self> {
        let name = CString::new(address).context("a PCI address with a zero byte")?;
        // SAFETY: the kernel reads the zero-terminated name.
        let fd = unsafe { libc::ioctl(group.file.as_raw_fd(), ioctl::GROUP_GET_DEVICE_FD, name.as_ptr()) };
        checked(fd).with_context(|| format!("cannot get PCI device {address} from VFIO"))?;
        // SAFETY: the kernel has just made this descriptor for us, and nothing else knows it.
        let device = unsafe { OwnedFd::from_raw_fd(fd) };
        // VFIO opens the descriptor without this flag.
        rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC).context("setting close-on-exec")?;
        Ok(Self { file: device.into() })
    }

    /// Returns whether a descriptor is that of a device.
    pub fn is_one(fd: &OwnedFd) -> bool {
        structure(fd, ioctl::DEVICE_GET_INFO, &mut DeviceInfo::default()).is_ok()
    }

    /// Returns a base address register.
    pub fn region(&self, index: u32) -> Result<Region> {
        let mut info = RegionInfo { index, ..RegionInfo::default() };
        structure(&self.file, ioctl::DEVICE_GET_REGION_INFO, &mut info)
            .with_context(|| format!("asking for region {index}"))?;
        let RegionInfo { size, offset, flags, .. } = info;
        Ok(Region { size, offset, can_be_mapped: flags & RegionInfo::MMAP != 0 })
    }

    /// Returns the number of its MSI-X vectors.
    pub fn vectors(&self) -> Result<u32> {
        let mut irq = IrqInfo { index: MSIX_INDEX, ..IrqInfo::default() };
        structure(&self.file, ioctl::DEVICE_GET_IRQ_INFO, &mut irq)
            .context("asking for the number of vectors")?;
        Ok(irq.count)
    }

    /// Connects each vector i to eventfd i.
    pub fn connect_vectors<F: AsRawFd>(&self, events: &[F]) -> Result<()> {
        // struct vfio_irq_set: argsz, flags, index, start, count, then the descriptors.
        let argsz = (4 * (5 + events.len())) as u32;
        let mut set = vec![argsz, DATA_EVENTFD | ACTION_TRIGGER, MSIX_INDEX, 0, events.len() as u32];
        set.extend(events.iter().map(|event| event.as_raw_fd() as u32));
        // SAFETY: the kernel reads `argsz` bytes, which is the length of `set`.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), ioctl::DEVICE_SET_IRQS, set.as_ptr()) };
        checked(result).map(drop).with_context(|| {
            format!(
                "cannot route {} MSI-X vectors; does the IOMMU remap interrupts (intremap=on)?",
                events.len()
            )
        })
    }

    /// Makes the device a bus master, or no longer. VFIO does not do this. Without it the device reaches no memory, and no MSI-X message
    /// leaves it.
    pub fn set_bus_master(&self, on: bool) -> Result<()> {
        let region = self.region(CONFIG_REGION)?;
        let at = region.offset + COMMAND;
        let mut command = [0; 2];
        self.file.read_exact_at(&mut command, at).context("reading the PCI command register")?;
        let master = if on { COMMAND_BUS_MASTER } else { 0 };
        let command = u16::from_le_bytes(command) & !COMMAND_BUS_MASTER | COMMAND_MEMORY | master;
        self.file.write_all_at(&command.to_le_bytes(), at).context("writing the PCI command register")
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<Device> for OwnedFd {
    fn from(device: Device) -> Self {
        device.file.into()
    }
}
