//! PCI devices in user space.
//!
//! A [`Function`] is a device as sysfs shows it: its driver, its IOMMU group, and how it is bound to another driver. Bound to
//! `vfio-pci`, it can be opened through VFIO (linux/vfio.h): a [`Container`] is a set of addresses for devices (an IOMMU domain), to
//! which a [`Group`] belongs, from which a [`Device`] is opened.
//!
//! A group can be opened by one process at a time. When the last descriptor of a device is closed, the kernel turns bus mastering off and
//! resets the device, so a process that is killed leaves no access to memory behind.
//!
//! All functions block only in the kernel, as long as a system call takes: binding, and mapping memory, may take long.
#![allow(unsafe_code)] // For VFIO's ioctls; no maintained crate wraps the few that are needed without pulling in a whole VMM.

mod container;
mod device;
mod function;
mod ioctl;

pub use container::{Access, Container, Group};
pub use device::{Device, Region};
pub use function::Function;

/// The driver of devices that user space opens.
pub const DRIVER: &str = "vfio-pci";

/// Loads [`DRIVER`] and VFIO's type 1 IOMMU if they are not loaded. `sysfs` is `/sys`.
pub fn load_drivers(sysfs: &std::path::Path) -> anyhow::Result<()> {
    use anyhow::{Context, ensure};
    let there = |path: &str| sysfs.join(path).exists();
    if there("bus/pci/drivers/vfio-pci") && there("module/vfio_iommu_type1") {
        return Ok(());
    }
    for module in ["vfio_iommu_type1", DRIVER] {
        let output =
            std::process::Command::new("modprobe").arg(module).output().context("cannot run modprobe")?;
        ensure!(
            output.status.success() || there("bus/pci/drivers/vfio-pci"),
            "modprobe {module} failed: {}; install the kernel's modules",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
