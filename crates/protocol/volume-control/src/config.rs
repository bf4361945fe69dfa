//! The configuration of a volume: a TOML file, flags with the same names, or both. It is checked as a whole before
//! anything is done.

mod disk;
mod kinds;
mod nvme;

use crate::{Limits, VolumePaths};
pub use disk::{Disk, DiskSpec, NvmePlace};
use ginnel_config::{Account, Bytes, LogFormat, Mode, Period, Problem, check_socket_path, from_toml};
pub use kinds::{BackendKind, Device, Direct, Lock, OnError, SandboxMode, Wait};
pub use nvme::{NVME_QUEUE_SIZE_MAX, NVME_QUEUES_MAX, NVME_SEGMENTS_MIN, attach_socket};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The largest number of queues of a volume. QEMU's own limit is 1024, and one for each virtual CPU is enough.
pub const QUEUES_MAX: u16 = 256;
/// The largest number of threads of a volume.
pub const THREADS_MAX: usize = 256;
/// The longest queue, in descriptors: virtio's limit for split rings.
pub const QUEUE_SIZE_MAX: u16 = 32768;
/// The largest number of LUNs of a target.
pub const DISKS_MAX: usize = 256;

/// A volume, as it is in the file. Only the key that says where the data is stored is required.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Spec {
    /// `blk` (one disk), `scsi` (a target with a LUN for each disk), or `nvme` (one disk).
    pub device: Device,
    /// The VM that gets it: `ginnel qemu-args` and `ginnel libvirt-xml` print the arguments for it.
    pub vm: Option<String>,
    /// Path of the socket for QEMU: vhost-user, or vfio-user for `nvme`.
    pub socket: Option<PathBuf>,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// Permissions of the socket for QEMU.
    pub socket_mode: Option<Mode>,
    /// Owner of the socket for QEMU: QEMU's user.
    pub socket_user: Option<Account>,
    /// Group of the socket for QEMU.
    pub socket_group: Option<Account>,
    /// Permissions of the control socket.
    pub control_mode: Option<Mode>,
    /// Owner of the control socket.
    pub control_user: Option<Account>,
    /// Group of the control socket: the volume's operators.
    pub control_group: Option<Account>,
    /// Number of request queues.
    pub queues: Option<u16>,
    /// The longest queue that a front end may use, in descriptors or entries.
    pub queue_size: Option<u16>,
    /// Number of threads, over which the queues are distributed.
    pub threads: Option<usize>,
    /// One CPU for each thread.
    pub cpus: Vec<usize>,
    /// How threads wait for requests.
    pub wait: Wait,
    /// How long an adaptive thread polls before it sleeps.
    pub poll_for: Option<Period>,
    /// Whether the guest's memory is pinned, so that the kernel need not look up its pages for each request.
    pub pin_memory: Option<bool>,
    /// Whether packed virtqueues are offered.
    pub packed: Option<bool>,
    /// Largest number of segments in a request.
    pub segments: Option<u32>,
    /// The limits at the start.
    pub limits: Limits,
    /// Whether the process enters a sandbox.
    pub sandbox: SandboxMode,
    /// The user of the process once everything is open, if it was started as root.
    pub user: Option<Account>,
    /// The group of the process then. Default: the group of `user`.
    pub group: Option<Account>,
    /// The log level, in the form of `RUST_LOG`.
    pub log: Option<String>,
    /// The format of the log.
    pub log_format: LogFormat,
    /// The disks. `blk` and `nvme` have one; `scsi` has one for each LUN, from 0 on.
    pub disk: Vec<DiskSpec>,
}

/// Who may connect to a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// The mode of the socket.
    pub mode: Mode,
    /// The owner of the socket, if that is not the user who starts the volume.
    pub user: Option<Account>,
    /// The group of the socket, if that is not the group of the user who starts the volume.
    pub group: Option<Account>,
}

/// A volume after the checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the volume.
    pub name: String,
    /// The kind of device that the VM gets.
    pub device: Device,
    /// The VM that gets it.
    pub vm: Option<String>,
    /// Path of the socket for QEMU: vhost-user, or vfio-user for `nvme`.
    pub socket: PathBuf,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Who may connect to the socket for QEMU.
    pub front_ends: Permissions,
    /// Who may connect to the control socket.
    pub operators: Permissions,
    /// Number of request queues.
    pub queues: u16,
    /// The longest queue that a front end may use, in descriptors or entries.
    pub queue_size: u16,
    /// Number of threads.
    pub threads: usize,
    /// One CPU for each thread, or none at all.
    pub cpus: Vec<usize>,
    /// How threads wait for requests.
    pub wait: Wait,
    /// How long an adaptive thread polls before it sleeps.
    pub poll_for: Duration,
    /// Whether the guest's memory is pinned.
    pub pin_memory: bool,
    /// Whether packed virtqueues are offered.
    pub packed: bool,
    /// Largest number of data segments in a request.
    pub segments: u32,
    /// The limits at the start.
    pub limits: Limits,
    /// Whether the process enters a sandbox.
    pub sandbox: SandboxMode,
    /// The user of the process once everything is open.
    pub user: Option<Account>,
    /// The group of the process then.
    pub group: Option<Account>,
    /// The log level.
    pub log: String,
    /// The format of the log.
    pub log_format: LogFormat,
    /// The disks; exactly one for `blk` and `nvme`.
    pub disks: Vec<Disk>,
}

impl Spec {
    /// Parses a configuration. `path` appears in messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, Problem> {
        from_toml(text, path, "see ginnel-volume(8) for all keys")
    }

    /// Reads a configuration file.
    pub fn read(path: &Path) -> Result<Self, Problem> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Problem::new(path.display(), error, "write a configuration, or name another"))?;
        Self::parse(&text, path)
    }

    /// Checks everything that can be checked without opening a file. `place` appears in messages: it is the file, or
    /// the command line.
    pub fn check(&self, name: &str, paths: &VolumePaths, place: &str) -> Result<Config, Problem> {
        let bad = |key: &str, what: String, fix: &str| Problem::new(format!("{place}: {key}"), what, fix);
        check_name(name).map_err(|what| bad("name", what, "use letters, digits, `.`, `_` and `-`"))?;
        let socket = self.socket.clone().unwrap_or_else(|| paths.socket(name));
        let control = self.control.clone().unwrap_or_else(|| match &self.socket {
            Some(socket) => socket.with_extension("ctl"),
            None => paths.control(name),
        });
        for (key, path) in [("socket", &socket), ("control", &control)] {
            check_socket_path(path, format!("{place}: {key}"), "choose a shorter path")?;
        }
        if socket == control {
            return Err(bad("control", "it is the path of `socket`".into(), "choose another"));
        }
        let is_nvme = self.device == Device::Nvme;
        if is_nvme {
            self.check_nvme(place)?;
            let attach = nvme::attach_socket(&socket);
            check_socket_path(
                &attach,
                format!("{place}: socket"),
                "choose a shorter path for QEMU's socket",
            )?;
            if control == attach {
                return Err(bad("control", "the engine attaches at this path".into(), "choose another"));
            }
        }
        let range = |key: &str, value: u64, least: u64, most: u64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => {
                Err(bad(key, format!("{value} is not in {least} to {most}"), "choose a number in that range"))
            }
        };
        // OVMF's driver makes two pairs, or none.
        let queues = self.queues.unwrap_or(if is_nvme { 2 } else { 1 });
        range("queues", queues.into(), 1, if is_nvme { NVME_QUEUES_MAX } else { QUEUES_MAX }.into())?;
        let queue_size = self.queue_size.unwrap_or(1024);
        // A queue of NVMe always has one entry that is empty.
        let (shortest, longest) = if is_nvme { (2, NVME_QUEUE_SIZE_MAX) } else { (1, QUEUE_SIZE_MAX) };
        range("queue-size", queue_size.into(), shortest, longest.into())?;
        if !queue_size.is_power_of_two() {
            return Err(bad(
                "queue-size",
                format!("{queue_size} is not a power of two"),
                "choose one, such as 256",
            ));
        }
        let default_threads = if self.cpus.is_empty() { 1 } else { self.cpus.len() };
        let threads = self.threads.unwrap_or(default_threads.min(queues.into()));
        range("threads", threads as u64, 1, THREADS_MAX as u64)?;
        if threads > usize::from(queues) {
            let what = format!("{threads} threads for {queues} queues, and each queue has one owner");
            return Err(bad("threads", what, "have as many queues, or fewer threads"));
        }
        if !self.cpus.is_empty() && self.cpus.len() != threads {
            let what = format!("{} CPUs for {threads} threads", self.cpus.len());
            return Err(bad("cpus", what, "name one for each thread, or none"));
        }
        let (fewest, default) = if is_nvme { (NVME_SEGMENTS_MIN, nvme::NVME_SEGMENTS) } else { (1, 126) };
        let segments = self.segments.unwrap_or(default);
        range("segments", segments.into(), fewest.into(), 1024)?;
        if self.limits.burst.0 > Duration::from_secs(60) {
            let what = format!("{} is longer than a minute", self.limits.burst);
            return Err(bad("limits.burst", what, "choose a shorter one, such as 1s"));
        }
        Ok(Config {
            name: name.into(),
            device: self.device,
            vm: self.vm.clone(),
            socket,
            control,
            front_ends: Permissions {
                mode: self.socket_mode.unwrap_or(Mode(0o660)),
                user: self.socket_user.clone(),
                group: self.socket_group.clone(),
            },
            operators: Permissions {
                // The group of the user who starts the volume may be QEMU's, so it has no rights unless the
                // configuration names it.
                mode: self.control_mode.unwrap_or(Mode(if self.control_group.is_some() {
                    0o660
                } else {
                    0o600
                })),
                user: self.control_user.clone(),
                group: self.control_group.clone(),
            },
            queues,
            queue_size,
            threads,
            cpus: self.cpus.clone(),
            wait: self.wait,
            poll_for: self.poll_for.map_or(Duration::from_micros(50), |p| p.0),
            pin_memory: self.pin_memory.unwrap_or(false),
            packed: !is_nvme && self.packed.unwrap_or(true),
            segments,
            limits: self.limits,
            sandbox: self.sandbox,
            user: self.user.clone(),
            group: self.group.clone(),
            log: self.log.clone().unwrap_or_else(|| "info".into()),
            log_format: self.log_format,
            disks: self.disks(name, place)?,
        })
    }

    fn disks(&self, name: &str, place: &str) -> Result<Vec<Disk>, Problem> {
        let bad = |what: String, fix: &str| Err(Problem::new(format!("{place}: disk"), what, fix));
        match (self.device, self.disk.len()) {
            (_, 0) => {
                return bad(
                    "there is none".into(),
                    "say where the data is stored, such as path = \"/var/lib/a.img\"",
                );
            }
            (Device::Blk | Device::Nvme, 2..) => {
                let what = format!("a volume with device = \"{}\" has one disk", self.device);
                return bad(what, "write device = \"scsi\" for several");
            }
            (_, n) if n > DISKS_MAX => {
                return bad(format!("{n} are more than {DISKS_MAX}"), "split them into several volumes");
            }
            _ => {}
        }
        let check =
            |(i, disk): (usize, &DiskSpec)| disk.check(self.device, name, i, &format!("{place}: disk {i}"));
        let mut disks: Vec<Disk> = self.disk.iter().enumerate().map(check).collect::<Result<_, _>>()?;
        let places: Vec<NvmePlace> = disks.iter().filter_map(|disk| disk.nvme.clone()).collect();
        for place in disks.iter_mut().filter_map(|disk| disk.nvme.as_mut()) {
            place.end = places.iter().filter_map(|other| place.begins_behind(other)).min();
        }
        for (i, disk) in disks.iter().enumerate() {
            if let Some(path) = &disk.path
                && let Some(twin) = disks[..i].iter().position(|d| d.path.as_ref() == Some(path))
            {
                return bad(
                    format!("disks {twin} and {i} are both {}", path.display()),
                    "give each disk an image of its own",
                );
            }
            if let Some(place) = &disk.nvme
                && let Some(twin) = disks[..i].iter().position(|other| {
                    other.nvme.as_ref().is_some_and(|its| place.overlaps(disk.size, its, other.size))
                })
            {
                return bad(
                    format!("disks {twin} and {i} may have blocks of {} in common", place.pci),
                    "give each a namespace of its own, or an offset and a size",
                );
            }
        }
        Ok(disks)
    }

    /// Returns a configuration with one ram disk, for tests and examples.
    pub fn ram(size: u64) -> Self {
        let disk =
            DiskSpec { backend: Some(BackendKind::Ram), size: Some(Bytes(size)), ..Default::default() };
        Self { disk: vec![disk], ..Self::default() }
    }
}

/// Checks that `name` can be part of file names, unit names and QEMU's ids.
fn check_name(name: &str) -> Result<(), String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match name.chars().next() {
        None => Err("it is empty".into()),
        Some(first) if !first.is_ascii_alphanumeric() => {
            Err(format!("{name:?} does not begin with a letter or digit"))
        }
        _ if name.len() > 64 => Err(format!("{name:?} is longer than 64 bytes")),
        _ if !name.chars().all(good) => Err(format!("{name:?} has characters that are not allowed")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
