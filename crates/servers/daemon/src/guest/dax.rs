//! Segments that come as virtio-pmem devices, as sysfs shows them.
//!
//! Three drivers turn such a device into a file that can be mapped. `virtio_pmem` makes a region with a namespace of it,
//! `dax_pmem` makes a DAX device as the info block in the region describes it, and `device_dax` gives that its node,
//! `/dev/dax0.0`. This daemon tells the kernel what the info block must contain ([`claim`]). In a kernel with the driver
//! `nd_pmem` the info block itself decides that, and the segment's members must be trusted with it. The uuid of the info block
//! identifies the segment; the numbers in the names of the devices do not. The stage at which a device gets stuck tells a user
//! what to do.

mod claim;

use anyhow::{Context, Result, bail};
use ginnel_layout::dax::{self, InfoBlock};
use ginnel_layout::relay;
use ginnel_layout::segment::{MIN_DAX_SIZE, RESERVED};
use rustix::fs::{Advice, Mode, OFlags, fadvise};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fmt, io};
use zerocopy::{FromZeros, IntoBytes};

/// The contents of `device` of a virtio-pmem device.
const VIRTIO_PMEM: &str = "0x001b";
/// The modules that are needed, each with the place where it shows that it is loaded.
const DRIVERS: [(&str, &str); 3] = [
    ("virtio_pmem", "bus/virtio/drivers/virtio_pmem"),
    ("dax_pmem", claim::DRIVER),
    ("device_dax", "bus/dax/drivers/device_dax"),
];
/// The driver that looks for an info block itself and follows it.
const SELF_PROBING: &str = "bus/nd/drivers/nd_pmem";
/// The driver that makes ordinary memory of a DAX device.
const SYSTEM_RAM: &str = "kmem";
const LARGE_PAGE: u64 = dax::LARGE_PAGE as u64;

/// The places where a kernel's devices are seen, and the program that loads its modules. Tests use others.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// `/sys`.
    pub sysfs: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// `modprobe`.
    pub modprobe: PathBuf,
}

impl Default for Kernel {
    fn default() -> Self {
        Self { sysfs: "/sys".into(), dev: "/dev".into(), modprobe: "modprobe".into() }
    }
}

/// A DAX device that was made from an info block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaxDevice {
    /// The device's node, such as `/dev/dax0.0`.
    pub node: PathBuf,
    /// The uuid of its info block.
    pub uuid: [u8; 16],
    /// The bytes of the whole segment: those of the device, and the front that the info block reserves.
    pub len: u64,
    /// The unit in which the device is mapped, in bytes.
    pub page: u32,
    driver: Option<String>,
    /// The place of the kernel's page structures: `ram`, or `pmem`, which is the segment.
    mode: String,
    /// The bytes of the region in front of the device.
    front: u64,
}

impl DaxDevice {
    /// Checks that the device has its node and is what the segment's info block should have made of it.
    pub fn check(&self, segment: &relay::Segment) -> Result<(), Trouble> {
        let place = self.node.display().to_string();
        if self.mode != "ram" {
            return Err(Trouble::PageStructures { place, mode: self.mode.clone() });
        }
        // A device that is too short is reported by `MemoryDevices`, which knows both lengths.
        if self.front != RESERVED || self.len > segment.size {
            return Err(Trouble::Displaced { place, front: self.front, len: self.len - RESERVED });
        }
        match self.driver.as_deref() {
            Some("device_dax") => Ok(()),
            Some(SYSTEM_RAM) => Err(Trouble::SystemRam { place }),
            Some(other) => Err(Trouble::OtherDriver { place, driver: other.into() }),
            None => Err(Trouble::NoDriver { place, module: "device_dax", why: String::new() }),
        }
    }

    /// Opens the device. The file can only be mapped, and only for reading if `read_only`.
    pub fn open(&self, read_only: bool) -> Result<OwnedFd> {
        let file = File::options().read(true).write(!read_only).open(&self.node);
        Ok(file.with_context(|| format!("cannot open {}", self.node.display()))?.into())
    }
}

/// The reason why there is no DAX device for a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// There is no virtio-pmem device that could be the segment.
    NoDevice,
    /// A driver is missing.
    NoDriver {
        /// The device that waits for the driver.
        place: String,
        /// The module that contains the driver.
        module: &'static str,
        /// The reason why the module could not be loaded.
        why: String,
    },
    /// The kernel has not found the info block, so it has made a block device.
    Damaged {
        /// The device.
        place: String,
        /// The block device that it has become.
        node: String,
        /// A program has the block device open, or it is mounted.
        in_use: bool,
    },
    /// The kernel uses the DAX device as ordinary memory.
    SystemRam {
        /// The DAX device.
        place: String,
    },
    /// Another driver has taken the DAX device.
    OtherDriver {
        /// The DAX device.
        place: String,
        /// The driver that has it.
        driver: String,
    },
    /// The device does not begin where large pages can begin.
    Misaligned {
        /// The device.
        place: String,
        /// Its physical address in the guest.
        start: u64,
    },
    /// A driver has refused the device.
    Refused {
        /// The device.
        place: String,
    },
    /// The info block belongs to another segment, or asks for something that a segment must not have.
    WrongBlock {
        /// The device.
        place: String,
        /// The kernel's error.
        why: String,
    },
    /// The kernel keeps its page structures in the segment.
    PageStructures {
        /// The DAX device.
        place: String,
        /// The kernel's word for that place.
        mode: String,
    },
    /// The info block has placed the DAX device elsewhere in the segment.
    Displaced {
        /// The DAX device.
        place: String,
        /// The bytes in front of it.
        front: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The device is smaller than those of which a kernel makes DAX devices through sysfs.
    Small {
        /// The device.
        place: String,
    },
    /// The DAX device cannot be opened or mapped.
    Unusable {
        /// The DAX device.
        place: String,
        /// The reason.
        why: String,
    },
    /// The info block is right, but what follows it is not a segment's header.
    NoHeader {
        /// The DAX device.
        place: String,
    },
}

impl Trouble {
    /// Adds to a missing driver why its module was not loaded, if it is among those that failed.
    pub fn because(&mut self, failures: &Failures) {
        if let Self::NoDriver { module, why, .. } = self
            && let Some((_, reason)) = failures.modules.iter().find(|(failed, _)| failed == module)
        {
            why.clone_from(reason);
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => write!(
                f,
                "this VM has no virtio-pmem device for it; start its QEMU with the lines that `ginnel qemu-args` prints \
                 on the host (-m SIZE,maxmem=MORE -object memory-backend-file,... -device virtio-pmem-pci,memdev=...)"
            ),
            Self::NoDriver { place, module, why } => {
                write!(f, "{place} has no driver: the module {module} is not loaded")?;
                if !why.is_empty() {
                    write!(f, " ({why})")?;
                }
                write!(
                    f,
                    "; run `modprobe {module}` as root, or boot a kernel that has it (CONFIG_VIRTIO_PMEM, \
                     CONFIG_NVDIMM_DAX, CONFIG_DEV_DAX_PMEM), or set memory = \"bar\" for the segment"
                )
            }
            Self::Damaged { place, node, in_use } => {
                write!(
                    f,
                    "{place} has become the block device {node}, because its DAX info block was damaged"
                )?;
                if *in_use {
                    return write!(f, ", and {node} is in use; unmount it");
                }
                write!(f, "; the host's daemon repairs it: try again, or shut the VM down and start it")
            }
            Self::SystemRam { place } => write!(
                f,
                "{place} was turned into system RAM of this VM (driver {SYSTEM_RAM}; by daxctl?), which has \
                 overwritten it; reboot this VM"
            ),
            Self::OtherDriver { place, driver } => write!(
                f,
                "{place} is bound to the driver {driver}; unbind it and bind device_dax, or reboot this VM"
            ),
            Self::Misaligned { place, start } => write!(
                f,
                "{place} lies at {start:#x}, which is not a multiple of 2 MiB; QEMU places memory devices one after the other, so give all of this VM's sizes that are multiples of 2 MiB"
            ),
            Self::Refused { place } => {
                write!(f, "the kernel could not make a DAX device of {place}; its log says why (dmesg)")
            }
            Self::WrongBlock { place, why } => write!(
                f,
                "the kernel has not accepted the DAX info block of {place} ({why}); a member of the segment may have \
                 overwritten it. The host's daemon repairs it: try again"
            ),
            Self::PageStructures { place, mode } => write!(
                f,
                "{place} has the mode '{mode}': a member of the segment had changed its DAX info block, and this kernel \
                 has read that by itself and keeps page structures where the member can write them. Shut this VM down, \
                 keep the module nd_pmem from loading (see ginneld(8)), and start it"
            ),
            Self::Displaced { place, front, len } => write!(
                f,
                "{place} begins {front} bytes behind the start of its region and has {len} bytes, which is not where \
                 the segment's data are; a member of the segment had changed its DAX info block: shut this VM down \
                 and start it"
            ),
            Self::Small { place } => write!(
                f,
                "{place} has less than 16 MiB, and of that a kernel makes a DAX device only if the module nd_pmem is \
                 loaded, which trusts all members of the segment; make the segment larger, or load nd_pmem"
            ),
            Self::Unusable { place, why } => write!(f, "{place} cannot be used: {why}"),
            Self::NoHeader { place } => write!(
                f,
                "{place} has the right uuid, but no header of a segment at its beginning; a member of the segment has \
                 overwritten it: shut this VM down and start it, or restart ginneld on the host"
            ),
        }
    }
}

impl Kernel {
    /// Returns all DAX devices that were made from an info block, in the order of their names.
    pub fn dax_devices(&self) -> Result<Vec<DaxDevice>> {
        let mut devices = Vec::new();
        for path in children(&self.sysfs.join("bus/dax/devices"), "dax")? {
            match self.dax_device(&path) {
                Ok(device) => devices.extend(device),
                // The device may have been removed just now.
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
        Ok(devices)
    }

    /// Returns `None` if the device is not made of persistent memory.
    fn dax_device(&self, path: &Path) -> Result<Option<DaxDevice>> {
        // The device is a link to a folder inside that of the info block's device.
        let Some(uuid) = uuid(&path.join(".."))? else { return Ok(None) };
        let name = path.file_name().context("a device without a name")?;
        let page = number(path, "align").unwrap_or(LARGE_PAGE);
        let page = u32::try_from(page).with_context(|| format!("{}: align {page}", path.display()))?;
        let len = number(path, "size")?.saturating_add(RESERVED);
        let made = path.join("..");
        let region = path.canonicalize().with_context(|| format!("cannot follow {}", path.display()))?;
        let region = region.ancestors().nth(2).context("a device without a region")?;
        let front = number(&made, "resource")?.wrapping_sub(number(region, "resource")?);
        let (node, mode, driver) = (self.dev.join(name), text(&made, "mode")?, driver(path));
        Ok(Some(DaxDevice { node, uuid, len, page, driver, mode, front }))
    }

    /// Returns whether this kernel reads info blocks itself. If it does, this VM must trust the members of a DAX segment with the
    /// info block when it boots.
    pub fn probes_by_itself(&self) -> bool {
        self.sysfs.join(SELF_PROBING).exists()
    }

    /// Does what can be done to get a DAX device for each of these segments: loads modules, and makes the devices.
    /// Returns what has failed.
    pub fn bring_up(&self, segments: &[relay::Segment]) -> Result<Failures> {
        let mut failures = Failures::default();
        if self.pmems()?.is_empty() {
            return Ok(failures);
        }
        self.settle(); // This may be early in the boot.
        for (module, driver) in DRIVERS {
            if !self.sysfs.join(driver).exists() {
                match self.load(module) {
                    Ok(()) => tracing::info!("loaded the module {module}"),
                    Err(error) => failures.modules.push((module, format!("{error:#}"))),
                }
                self.settle();
            }
        }
        if !self.sysfs.join(claim::DRIVER).exists() {
            return Ok(failures);
        }
        for pmem in self.pmems()? {
            if let Err(error) = self.make(&pmem, segments, &mut failures) {
                tracing::warn!("{}: {error:#}", pmem.place);
            }
        }
        Ok(failures)
    }

    /// Makes a DAX device of this device, if it is one of these segments and has no DAX device yet.
    fn make(&self, pmem: &Pmem, segments: &[relay::Segment], failures: &mut Failures) -> Result<()> {
        let Some(region) = pmem.region()? else { return Ok(()) };
        if children(&region, "dax")?.iter().any(|made| driver(made).is_some()) {
            return Ok(());
        }
        if let Some(block_device) = self.block_device(pmem)? {
            let repaired = |segment: &&relay::Segment| block_device.holds(segment);
            let Some(segment) = segments.iter().find(repaired) else { return Ok(()) };
            self.remake(&region, &block_device, segment)?;
            tracing::info!(
                "{}: the info block of segment {} has been repaired, so it is not a block device any more",
                pmem.place,
                segment.name
            );
            return Ok(());
        }
        let size = number(&region, "size")?;
        for segment in segments.iter().filter(|segment| segment.size == size) {
            match self.claim(&region, segment) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    let why = failures.claims.entry((pmem.place.clone(), segment.uuid)).or_default();
                    *why = format!("{error:#}");
                }
            }
        }
        Ok(())
    }

    /// Returns why there is no DAX device for this segment, after [`Kernel::bring_up`] has had these failures.
    pub fn trouble(&self, segment: &relay::Segment, failures: &Failures) -> Trouble {
        for pmem in self.pmems().unwrap_or_default() {
            match self.trouble_with(&pmem, segment, failures) {
                Ok(Some(trouble)) => return trouble,
                Ok(None) => {}
                Err(error) => tracing::warn!("{}: {error:#}", pmem.place),
            }
        }
        Trouble::NoDevice
    }

    /// Returns `None` if this device is another segment, or if it cannot be identified and its size differs.
    fn trouble_with(
        &self,
        pmem: &Pmem,
        segment: &relay::Segment,
        failures: &Failures,
    ) -> Result<Option<Trouble>> {
        let place = pmem.place.clone();
        let no_driver =
            |module| Ok(Some(Trouble::NoDriver { place: place.clone(), module, why: String::new() }));
        if driver(&pmem.path).is_none() {
            return no_driver("virtio_pmem");
        }
        let Some(region) = pmem.region()? else { return Ok(Some(Trouble::Refused { place })) };
        // These are the devices made from the info block, with or without a driver. Instances without a namespace are seeds.
        for made in children(&region, "dax")? {
            if text(&made, "namespace").is_ok_and(|claimed| claimed.is_empty()) {
                continue;
            }
            match uuid(&made)? {
                Some(uuid) if uuid != segment.uuid => return Ok(None),
                Some(_) if driver(&made).is_some() => return Ok(Some(Trouble::Refused { place })),
                _ => {}
            }
        }
        if let Some(block_device) = self.block_device(pmem)? {
            let claims = block_device.block.uuid == segment.uuid;
            let node = block_device.node.display().to_string();
            let damaged = Trouble::Damaged { place, node, in_use: block_device.in_use };
            return Ok((claims || block_device.len == segment.size).then_some(damaged));
        }
        if number(&region, "size")? != segment.size {
            return Ok(None);
        }
        if !self.sysfs.join(claim::DRIVER).exists() {
            return no_driver("dax_pmem");
        }
        let start = number(&region, "resource")?;
        if !start.is_multiple_of(LARGE_PAGE) {
            return Ok(Some(Trouble::Misaligned { place, start }));
        }
        if segment.size < MIN_DAX_SIZE {
            return Ok(Some(Trouble::Small { place }));
        }
        Ok(Some(match failures.claims.get(&(place.clone(), segment.uuid)) {
            Some(why) => Trouble::WrongBlock { place, why: why.clone() },
            None => Trouble::Refused { place },
        }))
    }

    /// Returns all virtio-pmem devices.
    fn pmems(&self) -> Result<Vec<Pmem>> {
        let mut pmems = Vec::new();
        for path in children(&self.sysfs.join("bus/virtio/devices"), "virtio")? {
            if text(&path, "device").is_ok_and(|device| device == VIRTIO_PMEM) {
                let real =
                    path.canonicalize().with_context(|| format!("cannot follow {}", path.display()))?;
                let parent = real.parent().and_then(Path::file_name).unwrap_or_default();
                let place = format!("virtio-pmem device {}", parent.display());
                pmems.push(Pmem { path, place });
            }
        }
        Ok(pmems)
    }

    /// Returns the block device that a device has become.
    fn block_device(&self, pmem: &Pmem) -> Result<Option<BlockDevice>> {
        let Some(region) = pmem.region()? else { return Ok(None) };
        let Some(namespace) = children(&region, "namespace")?.pop() else { return Ok(None) };
        let Some(block) = children(&namespace.join("block"), "pmem")?.pop() else { return Ok(None) };
        let node = self.dev.join(block.file_name().context("a device without a name")?);
        let mut device = BlockDevice {
            namespace,
            node,
            len: number(&region, "size")?,
            block: InfoBlock::new_zeroed(),
            in_use: false,
        };
        // With `EXCL`, opening fails while the device is mounted.
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        let file = match rustix::fs::open(&device.node, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::BUSY) => return Ok(Some(BlockDevice { in_use: true, ..device })),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot open {}", device.node.display()));
            }
        };
        // The page cache may have contents from before the repair.
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
        file.read_exact_at(device.block.as_mut_bytes(), dax::AT)
            .with_context(|| format!("cannot read {}", device.node.display()))?;
        Ok(Some(device))
    }

    /// Takes the region away from the driver of block devices and makes a DAX device of it.
    fn remake(&self, region: &Path, device: &BlockDevice, segment: &relay::Segment) -> Result<()> {
        let name = device.namespace.file_name().and_then(|name| name.to_str()).context("no name")?;
        let driver = self.sysfs.join(SELF_PROBING);
        fs::write(driver.join("unbind"), name).with_context(|| format!("cannot unbind {name}"))?;
        self.claim(region, segment).or_else(|error| {
            // Either this driver finds the info block, and leaves the namespace to the driver of the DAX device, and binding
            // fails with ENXIO; or the region becomes a block device again.
            let bound = fs::write(driver.join("bind"), name);
            self.settle();
            match bound {
                Err(bound) if bound.raw_os_error() == Some(libc::ENXIO) => Ok(()),
                _ => Err(error),
            }
        })
    }

    fn load(&self, module: &str) -> Result<()> {
        let modprobe = self.modprobe.display();
        let output = Command::new(&self.modprobe).arg(module).output();
        let output = output.with_context(|| format!("cannot run {modprobe}"))?;
        if !output.status.success() {
            bail!("{modprobe} {module}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Waits until the kernel has tried its drivers on all devices that it knows.
    fn settle(&self) {
        for bus in children(&self.sysfs.join("bus/nd/devices"), "ndbus").unwrap_or_default() {
            let _ = text(&bus, "wait_probe"); // Reading this file waits.
        }
    }
}

/// The things that [`Kernel::bring_up`] could not do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// The modules that could not be loaded, with the reason.
    modules: Vec<(&'static str, String)>,
    /// The reason why a device did not become the DAX device of a segment, by the device's place and the segment's uuid.
    claims: BTreeMap<(String, [u8; 16]), String>,
}

/// A virtio-pmem device.
struct Pmem {
    path: PathBuf,
    /// The device's name, for people.
    place: String,
}

impl Pmem {
    fn region(&self) -> Result<Option<PathBuf>> {
        let Some(bus) = children(&self.path, "ndbus")?.pop() else { return Ok(None) };
        Ok(children(&bus, "region")?.pop())
    }
}

/// A block device, which a virtio-pmem device becomes if its info block is damaged.
struct BlockDevice {
    namespace: PathBuf,
    node: PathBuf,
    len: u64,
    /// The info block that is on the device now.
    block: InfoBlock,
    in_use: bool,
}

impl BlockDevice {
    /// Returns whether the segment's proper info block is on the device now.
    fn holds(&self, segment: &relay::Segment) -> bool {
        self.len == segment.size && self.block.check(segment.uuid, segment.size, segment.page).is_ok()
    }
}

/// Returns the entries of a folder whose names are `prefix` and a number, sorted. Returns none if there is no such folder.
fn children(folder: &Path, prefix: &str) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot list {}", folder.display())),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_prefix(prefix));
        if name.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn driver(path: &Path) -> Option<String> {
    Some(fs::read_link(path.join("driver")).ok()?.file_name()?.to_str()?.to_owned())
}

fn text(folder: &Path, file: &str) -> Result<String> {
    let path = folder.join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Parses a file that contains a decimal number, or a hexadecimal one with `0x`.
fn number(folder: &Path, file: &str) -> Result<u64> {
    let text = text(folder, file)?;
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.with_context(|| format!("{}/{file} says '{text}', which is not a number", folder.display()))
}

/// Returns `None` if there is no uuid, or if the file has none because nothing has been made of the device.
fn uuid(folder: &Path) -> Result<Option<[u8; 16]>> {
    if !folder.join("uuid").exists() {
        return Ok(None);
    }
    Ok(super::parse_uuid(&text(folder, "uuid")?))
}

#[cfg(test)]
mod tests;
