//! Interrupts of the control device: MSI-X vectors that become eventfds, through VFIO.
//!
//! VFIO is used for nothing else. In particular the registers and the memory are never mapped through it: a base address
//! register that VFIO has touched is busy, and sysfs then refuses to map it.
//!
//! The interrupts end when the last of the descriptors below is closed, and a group can be opened only once. So the
//! keeper gets all of them, and a restarted daemon takes them from there.

use super::pci::Function;
use anyhow::{Context, Result, bail, ensure};
use ginnel_vfio::{Container, Device, Group};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The interrupts of the control device: the descriptors that keep them, and the eventfds at which they arrive.
pub struct Interrupts {
    container: Arc<OwnedFd>,
    group: Arc<OwnedFd>,
    device: Arc<OwnedFd>,
    /// One eventfd for each vector.
    pub events: Vec<Arc<OwnedFd>>,
}

impl Interrupts {
    /// Binds the device to vfio-pci and connects its vectors to eventfds. `sysfs` and `dev` are `/sys` and `/dev`.
    pub fn set_up(function: &Function, vectors: u32, sysfs: &Path, dev: &Path) -> Result<Self> {
        let Some(number) = function.pci.iommu_group() else {
            bail!(
                "this VM has no IOMMU; give its QEMU -machine q35,kernel-irqchip=split -device intel-iommu,intremap=on \
                 and its kernel intel_iommu=on"
            );
        };
        ginnel_vfio::load_drivers(sysfs)?;
        function.pci.bind(sysfs, ginnel_vfio::DRIVER)?;

        let container = Container::open(dev)?;
        let group = Group::open(dev, number).context("is an old `ginneld keeper` still there?")?;
        ensure!(
            group.is_viable()?,
            "IOMMU group {number} has other devices too, with drivers of their own; put {function} directly on the \
             root bus (bus=pcie.0)"
        );
        container.add(&group)?;
        let device = Device::open(&group, function.address())?;

        let found = device.vectors()?;
        ensure!(
            found >= vectors,
            "{function} has {found} vectors and the host daemon uses {vectors}; give its -device ivshmem-doorbell \
             vectors={vectors}"
        );
        let events = (0..vectors).map(|_| eventfd()).collect::<Result<Vec<_>>>()?;
        device.connect_vectors(&events)?;
        // Without it no MSI-X message leaves the device.
        device.set_bus_master(true)?;
        let (container, group, device) = (container.into(), group.into(), device.into());
        Ok(Self { container: Arc::new(container), group: Arc::new(group), device: Arc::new(device), events })
    }

    /// Returns all descriptors that must outlive the daemon.
    pub fn to_keep(&self) -> Vec<Arc<OwnedFd>> {
        let vfio = [&self.container, &self.group, &self.device];
        vfio.into_iter().chain(&self.events).cloned().collect()
    }

    /// Takes over the interrupts of an earlier daemon. Returns `None` if these are not `vectors` vectors of a device.
    pub fn take_over(kept: Vec<OwnedFd>, vectors: u32) -> Option<Self> {
        let mut kept = kept.into_iter().map(Arc::new);
        let (container, group, device) = (kept.next()?, kept.next()?, kept.next()?);
        let events: Vec<_> = kept.collect();
        let is_whole = Device::is_one(&device) && events.len() == vectors as usize;
        is_whole.then_some(Self { container, group, device, events })
    }
}

fn eventfd() -> Result<Arc<OwnedFd>> {
    use rustix::event::{EventfdFlags, eventfd};
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("cannot make an eventfd")?;
    Ok(Arc::new(fd))
}
