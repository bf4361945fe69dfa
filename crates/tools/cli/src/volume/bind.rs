//! `ginnel volume bind` and `ginnel volume unbind`: which driver an NVMe device has.

use crate::output;
use anyhow::{Context, Result, bail, ensure};
use ginnel_config::Account;
use ginnel_layout::nvme::PCI_CLASS;
use ginnel_vfio::{DRIVER, Function, Group};
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const SYSFS: &str = "/sys";
const DEV: &str = "/dev";

/// The kernel's driver of NVMe controllers.
const KERNELS: &str = "nvme";

/// Gives an NVMe device to a volume with backend = "vfio", until the machine restarts or `ginnel volume unbind`.
///
/// The kernel's driver lets it go, so its block devices disappear; vfio-pci takes it. Refuses if anybody uses the device: a file system,
/// swap, LVM, a volume, or any other process that has it open. Needs root and an IOMMU.
#[derive(clap::Args)]
pub struct Bind {
    /// PCI address of the device, such as 0000:01:00.0 (see `lspci -D`).
    #[arg(value_name = "ADDRESS")]
    address: String,
    /// The user who may open the device from now on: that of the volume. Default: only root.
    #[arg(long, value_name = "USER")]
    user: Option<Account>,
}

/// Gives an NVMe device back to the kernel's driver, which shows its block devices again.
///
/// Refuses if a volume has it.
#[derive(clap::Args)]
pub struct Unbind {
    /// PCI address of the device.
    #[arg(value_name = "ADDRESS")]
    address: String,
}

pub fn bind(args: &Bind) -> Result<()> {
    let function = find(&args.address)?;
    let owner = args.user.as_ref().map(|user| user.user("--user")).transpose()?;
    let Some(group) = function.iommu_group() else {
        bail!(
            "{function} has no IOMMU, so it could reach all memory; enable the IOMMU in the firmware and by the kernel's arguments \
             (intel_iommu=on)"
        );
    };
    for other in function.companions()?.iter().filter(|other| **other != function) {
        // Bridges stay with the kernel.
        if let Some(driver) = other.driver().filter(|driver| ![DRIVER, "pcieport"].contains(&driver.as_str()))
        {
            bail!(
                "{other} is in the same IOMMU group, {group}, and belongs to the driver {driver}; unbind it first"
            );
        }
    }
    // The file is for all devices of the group.
    let path = Path::new(DEV).join(format!("vfio/{group}"));
    let present = path.metadata().map_or(0, |meta| meta.uid());
    ensure!(
        present == 0 || Some(present) == owner,
        "user {present} may open {} already; unbind the devices of IOMMU group {group} first",
        path.display()
    );
    match function.driver().as_deref() {
        Some(DRIVER) => {}
        None => take(&function)?,
        Some(KERNELS) => {
            alone(&function)?;
            // Nobody can mount it, or use it exclusively in another way, while these are open.
            let _claims = claims(&function)?;
            take(&function)?;
        }
        Some(other) => {
            bail!("{function} belongs to the driver {other}, and not to {KERNELS}; unbind it first")
        }
    }
    // Between two volumes nobody uses it. If it were switched off then, it would lose what it has not written back.
    for (file, value) in [("power/control", "on"), ("d3cold_allowed", "0")] {
        // Not every kernel has the files.
        let _ = std::fs::write(function.path().join(file), value);
    }
    if let Some(owner) = owner {
        std::os::unix::fs::chown(&path, Some(owner), None)
            .with_context(|| format!("cannot give {} to user {owner}", path.display()))?;
    }
    output::line(format!("{function} belongs to {DRIVER}: {}", path.display()))
}

pub fn unbind(args: &Unbind) -> Result<()> {
    let function = find(&args.address)?;
    match function.driver().as_deref() {
        Some(DRIVER) => {
            let group = function.iommu_group().context("it has no IOMMU group any more")?;
            // Otherwise the kernel would wait until that process ends.
            let _group = Group::open(Path::new(DEV), group)
                .with_context(|| format!("{function} is in use: stop its volume first"))?;
            function.prefer(None)?;
            function.unbind()?;
        }
        Some(driver) => {
            return output::line(format!("{function} belongs to the driver {driver}; nothing is to be done"));
        }
        None => function.prefer(None)?,
    }
    function.probe(Path::new(SYSFS))?;
    match function.driver() {
        Some(driver) => output::line(format!("{function} belongs to the driver {driver}")),
        None => {
            bail!("no driver takes {function}; load the module {KERNELS}, and see the kernel's log (dmesg)")
        }
    }
}

fn find(address: &str) -> Result<Function> {
    let function = Function::find(Path::new(SYSFS), address)?;
    ensure!(function.class()? == PCI_CLASS, "{function} is no NVMe controller");
    Ok(function)
}

/// Gives the device to vfio-pci. If that fails, it is the kernel's again.
fn take(function: &Function) -> Result<()> {
    let sysfs = Path::new(SYSFS);
    ginnel_vfio::load_drivers(sysfs)?;
    function.prefer(Some(DRIVER))?;
    let taken = function.unbind().and_then(|()| function.bind(sysfs, DRIVER));
    if taken.is_err() {
        let _ = function.prefer(None).and_then(|()| function.probe(sysfs));
    }
    taken
}

/// Fails if other controllers have the same namespaces: the kernel would go on using these.
fn alone(function: &Function) -> Result<()> {
    for controller in listed(&function.path().join("nvme"))? {
        for subsystem in listed(&Path::new(SYSFS).join("class/nvme-subsystem")).unwrap_or_default() {
            let members = listed(&Path::new(SYSFS).join("class/nvme-subsystem").join(&subsystem))?;
            let is_controller = |name: &&String| {
                name.strip_prefix(KERNELS).is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
            };
            let controllers: Vec<_> = members.iter().filter(is_controller).collect();
            if controllers.contains(&&controller) && controllers.len() > 1 {
                bail!(
                    "{function} is one of several controllers of {subsystem} ({controllers:?}), and the kernel would go on using its \
                     namespaces through the others"
                );
            }
        }
    }
    Ok(())
}

/// Opens all block devices of a controller so that nobody else can use them. Fails if somebody does.
fn claims(function: &Function) -> Result<Vec<File>> {
    let mut claims = Vec::new();
    let mut numbers = BTreeSet::new();
    for name in namespaces(function)? {
        let path = Path::new(DEV).join(&name);
        let claim = OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_CLOEXEC).open(&path);
        let claim = claim.map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => anyhow::anyhow!("{} is in use{}", path.display(), used_by(&name)),
            _ => anyhow::Error::new(error).context(format!("cannot open {}", path.display())),
        })?;
        numbers.insert(claim.metadata()?.rdev());
        numbers.extend(partitions(&name));
        // The character device of the same namespace.
        let character = Path::new(DEV).join(name.replacen(KERNELS, "ng", 1));
        numbers.extend(character.metadata().ok().map(|meta| meta.rdev()));
        claims.push(claim);
    }
    if let Some((pid, program)) = opener(&numbers) {
        bail!("process {pid} ({program}) has a block device of {function} open; stop it first");
    }
    Ok(claims)
}

/// Returns the names of a controller's block devices.
fn namespaces(function: &Function) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for controller in listed(&function.path().join("nvme"))? {
        let folder = function.path().join("nvme").join(&controller);
        // With several paths to a namespace, the folder has this path, such as nvme0c1n2, and the block device is nvme0n2.
        names.extend(listed(&folder)?.iter().filter_map(|name| block_device(name)));
    }
    Ok(names)
}

/// Returns the name of the block device for a folder of a controller, if that is a namespace.
fn block_device(name: &str) -> Option<String> {
    let rest = name.strip_prefix(KERNELS)?;
    let (controller, namespace) = rest.split_once('n')?;
    let subsystem = controller.split('c').next()?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(subsystem) && is_number(namespace)).then(|| format!("{KERNELS}{subsystem}n{namespace}"))
}

/// Returns the device numbers of a disk's partitions.
fn partitions(name: &str) -> Vec<u64> {
    let folder = Path::new(SYSFS).join("class/block").join(name);
    let parts = listed(&folder).unwrap_or_default();
    let device = |part: String| Path::new(DEV).join(part).metadata().ok().map(|meta| meta.rdev());
    parts.into_iter().filter(|part| part.starts_with(name)).filter_map(device).collect()
}

/// Says who uses a disk, as far as that can be known.
fn used_by(name: &str) -> String {
    let sysfs = Path::new(SYSFS).join("class/block").join(name);
    let mut parts = listed(&sysfs).unwrap_or_default();
    parts.retain(|part| part.starts_with(name));
    parts.push(name.to_owned());
    let mut users = Vec::new();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    for part in &parts {
        let device = format!("/dev/{part}");
        let mounted = mounts.lines().filter_map(|line| line.split_once(' '));
        users.extend(mounted.filter(|(what, _)| *what == device).map(|(_, rest)| {
            format!("{device} is mounted at {}", rest.split(' ').next().unwrap_or_default())
        }));
        if swaps.lines().any(|line| line.split_whitespace().next() == Some(&device)) {
            users.push(format!("{device} is swap"));
        }
        let holders = Path::new(SYSFS).join("class/block").join(part).join("holders");
        users.extend(
            listed(&holders).unwrap_or_default().iter().map(|by| format!("{device} is held by {by}")),
        );
    }
    if users.is_empty() { " by a process; see `fuser`".to_owned() } else { format!(": {}", users.join("; ")) }
}

/// Returns the number of the device to which a path leads. Asks no file system, which may be anybody's and never answer.
fn device(path: &Path) -> Option<u64> {
    let stat = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
    Some(makedev(stat.stx_rdev_major, stat.stx_rdev_minor))
}

/// Finds a process, other than this one, that has one of these devices open.
fn opener(numbers: &BTreeSet<u64>) -> Option<(u32, String)> {
    let own = std::process::id();
    let pids = listed(Path::new("/proc")).ok()?;
    let pids = pids.iter().filter_map(|pid| pid.parse::<u32>().ok()).filter(|pid| *pid != own);
    for pid in pids {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let Ok(fds) = listed(&folder.join("fd")) else { continue };
        let has = |fd: &String| {
            let fd = folder.join("fd").join(fd);
            // Elsewhere no block device is expected.
            let is_device = std::fs::read_link(&fd).is_ok_and(|path| path.starts_with(DEV));
            is_device && device(&fd).is_some_and(|number| numbers.contains(&number))
        };
        if fds.iter().any(has) {
            let program = std::fs::read_to_string(folder.join("comm")).unwrap_or_default();
            return Some((pid, program.trim().to_owned()));
        }
    }
    None
}

fn listed(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::block_device;

    #[test]
    fn namespaces_are_told_from_other_folders() {
        let found = ["nvme0n1", "nvme12c3n4", "ng0n1", "nvme0", "power", "nvme0n1p2", "nvmen1", "hwmon1"]
            .map(|name| block_device(name).unwrap_or_default());
        assert_eq!(found, ["nvme0n1", "nvme12n4", "", "", "", "", "", ""]);
    }
}
