//! Interrupts of the control device: MSI-X vectors that become eventfds, through VFIO.
//!
//! VFIO is used for nothing else. In particular the registers and the memory are never mapped through it: a base address
//! register that VFIO has touched is busy, and sysfs then refuses to map it.
//!
//! The interrupts end when the last of the descriptors below is closed, and a group can be opened only once. So the
//! keeper gets all of them, and a restarted daemon takes them from there.
#![allow(unsafe_code)] // For VFIO's ioctls; no maintained crate wraps the few that are needed without pulling in a whole VMM.

use super::pci::Function;
use anyhow::{Context, Result, bail, ensure};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

// From linux/vfio.h: `_IO(';', 100 + n)`.
const GET_API_VERSION: libc::c_ulong = 0x3b64;
const CHECK_EXTENSION: libc::c_ulong = 0x3b65;
const SET_IOMMU: libc::c_ulong = 0x3b66;
const GROUP_GET_STATUS: libc::c_ulong = 0x3b67;
const GROUP_SET_CONTAINER: libc::c_ulong = 0x3b68;
const GROUP_GET_DEVICE_FD: libc::c_ulong = 0x3b6a;
const DEVICE_GET_INFO: libc::c_ulong = 0x3b6b;
const DEVICE_GET_REGION_INFO: libc::c_ulong = 0x3b6c;
const DEVICE_GET_IRQ_INFO: libc::c_ulong = 0x3b6d;
const DEVICE_SET_IRQS: libc::c_ulong = 0x3b6e;

const API_VERSION: libc::c_int = 0;
const TYPE1V2_IOMMU: libc::c_ulong = 3;
const GROUP_VIABLE: u32 = 1;
const CONFIG_REGION: u32 = 7;
const MSIX_INDEX: u32 = 2;
const DATA_EVENTFD: u32 = 1 << 2;
const ACTION_TRIGGER: u32 = 1 << 5;

// PCI configuration space.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// The kernel writes into these structures, but never more than `argsz` bytes.
#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct DeviceInfo {
    argsz: u32,
    flags: u32,
    num_regions: u32,
    num_irqs: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
#[derive(Default)]
struct IrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

const _: () = assert!(size_of::<GroupStatus>() == 8 && size_of::<DeviceInfo>() == 16);
const _: () = assert!(size_of::<RegionInfo>() == 32 && size_of::<IrqInfo>() == 16);

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
        let Some(number) = function.iommu_group() else {
            bail!(
                "this VM has no IOMMU; give its QEMU -machine q35,kernel-irqchip=split -device intel-iommu,intremap=on \
                 and its kernel intel_iommu=on"
            );
        };
        load_drivers(sysfs)?;
        function.bind(sysfs, "vfio-pci")?;

        let container = open(&dev.join("vfio/vfio"))?;
        let version = plain(&container, GET_API_VERSION, 0).context("asking for VFIO's version")?;
        ensure!(
            version == API_VERSION,
            "this kernel has version {version} of VFIO, and this daemon knows version {API_VERSION}"
        );
        let type1 =
            plain(&container, CHECK_EXTENSION, TYPE1V2_IOMMU).context("asking for VFIO's kinds of IOMMU")?;
        ensure!(type1 == 1, "this kernel's VFIO knows no type 1 IOMMU; load its module vfio_iommu_type1");

        let group = open_group(&dev.join(format!("vfio/{number}")))?;
        let mut status = GroupStatus { argsz: size_of::<GroupStatus>() as u32, ..Default::default() };
        structure(&group, GROUP_GET_STATUS, &mut status).context("asking for the IOMMU group's state")?;
        ensure!(
            status.flags & GROUP_VIABLE != 0,
            "IOMMU group {number} has other devices too, with drivers of their own; put {function} directly on the \
             root bus (bus=pcie.0)"
        );
        let raw: libc::c_int = container.as_raw_fd();
        by_pointer(&group, GROUP_SET_CONTAINER, &raw).context("giving the IOMMU group to its container")?;
        plain(&container, SET_IOMMU, TYPE1V2_IOMMU).context("choosing the type 1 IOMMU")?;
        let device = open_device(&group, &function.address)?;

        let mut irq = IrqInfo { argsz: size_of::<IrqInfo>() as u32, index: MSIX_INDEX, ..Default::default() };
        structure(&device, DEVICE_GET_IRQ_INFO, &mut irq).context("asking for the number of vectors")?;
        ensure!(
            irq.count >= vectors,
            "{function} has {} vectors and the host daemon uses {vectors}; give its -device ivshmem-doorbell \
             vectors={vectors}",
            irq.count
        );
        let events = (0..vectors).map(|_| eventfd()).collect::<Result<Vec<_>>>()?;
        set_irqs(&device, &events)?;
        enable_bus_master(&device)?;
        let keep = |file: File| Arc::new(OwnedFd::from(file));
        Ok(Self { container: keep(container), group: keep(group), device: keep(device), events })
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
        let mut info = DeviceInfo { argsz: size_of::<DeviceInfo>() as u32, ..Default::default() };
        structure(&device, DEVICE_GET_INFO, &mut info).ok()?;
        (events.len() == vectors as usize).then_some(Self { container, group, device, events })
    }
}

/// Loads vfio-pci if it is not loaded.
fn load_drivers(sysfs: &Path) -> Result<()> {
    let there = |path: &str| sysfs.join(path).exists();
    if there("bus/pci/drivers/vfio-pci") && there("module/vfio_iommu_type1") {
        return Ok(());
    }
    for module in ["vfio_iommu_type1", "vfio-pci"] {
        let output = Command::new("modprobe").arg(module).output().context("cannot run modprobe")?;
        ensure!(
            output.status.success() || there("bus/pci/drivers/vfio-pci"),
            "modprobe {module} failed: {}; install the kernel's modules",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

fn open(path: &Path) -> Result<File> {
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

fn open_group(path: &Path) -> Result<File> {
    File::options().read(true).write(true).open(path).map_err(|error| {
        let why = match error.raw_os_error() {
            Some(libc::EBUSY) => {
                "; another process has it, see `fuser` for that file (an old `ginneld keeper`?)"
            }
            _ => "",
        };
        anyhow::Error::new(error).context(format!("cannot open {}{why}", path.display()))
    })
}

fn eventfd() -> Result<Arc<OwnedFd>> {
    use rustix::event::{EventfdFlags, eventfd};
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("cannot make an eventfd")?;
    Ok(Arc::new(fd))
}

fn open_device(group: &File, address: &str) -> Result<File> {
    let name = CString::new(address).context("a PCI address with a zero byte")?;
    // SAFETY: the kernel reads the zero-terminated name.
    let fd = unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD, name.as_ptr()) };
    checked(fd).with_context(|| format!("cannot get PCI device {address} from VFIO"))?;
    // SAFETY: the kernel has just made this descriptor for us, and nothing else knows it.
    let device = unsafe { OwnedFd::from_raw_fd(fd) };
    // VFIO opens the descriptor without this flag.
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC).context("setting close-on-exec")?;
    Ok(device.into())
}

/// Connects each vector i to eventfd i.
fn set_irqs(device: &File, events: &[Arc<OwnedFd>]) -> Result<()> {
    // struct vfio_irq_set: argsz, flags, index, start, count, then the descriptors.
    let argsz = (4 * (5 + events.len())) as u32;
    let mut set = vec![argsz, DATA_EVENTFD | ACTION_TRIGGER, MSIX_INDEX, 0, events.len() as u32];
    set.extend(events.iter().map(|event| event.as_raw_fd() as u32));
    // SAFETY: the kernel reads `argsz` bytes, which is the length of `set`.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), DEVICE_SET_IRQS, set.as_ptr()) };
    checked(result).map(drop).with_context(|| {
        format!("cannot route {} MSI-X vectors; does the IOMMU remap interrupts (intremap=on)?", events.len())
    })
}

/// Makes the device a bus master. VFIO does not do this, and without it no MSI-X message leaves the device.
fn enable_bus_master(device: &File) -> Result<()> {
    let mut region =
        RegionInfo { argsz: size_of::<RegionInfo>() as u32, index: CONFIG_REGION, ..Default::default() };
    structure(device, DEVICE_GET_REGION_INFO, &mut region).context("asking for the configuration space")?;
    let at = region.offset + COMMAND;
    let mut command = [0; 2];
    device.read_exact_at(&mut command, at).context("reading the PCI command register")?;
    let command = u16::from_le_bytes(command) | COMMAND_MEMORY | COMMAND_BUS_MASTER;
    device.write_all_at(&command.to_le_bytes(), at).context("enabling bus mastering")
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Calls an ioctl whose argument is a number.
fn plain(fd: &impl AsRawFd, request: libc::c_ulong, argument: libc::c_ulong) -> io::Result<libc::c_int> {
    debug_assert!([GET_API_VERSION, CHECK_EXTENSION, SET_IOMMU].contains(&request));
    // SAFETY: these requests take their argument by value.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) })
}

/// Calls an ioctl that reads an int.
fn by_pointer(fd: &impl AsRawFd, request: libc::c_ulong, argument: &libc::c_int) -> io::Result<libc::c_int> {
    debug_assert!(request == GROUP_SET_CONTAINER);
    // SAFETY: this request reads one int.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_ref(argument)) })
}

/// Calls an ioctl that fills a structure, which begins with its own size.
fn structure<T>(fd: &impl AsRawFd, request: libc::c_ulong, argument: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the callers' structures begin with `argsz`, set to their size, beyond which the kernel neither reads nor
    // writes; and any bytes are valid in their integer fields.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) })
}
