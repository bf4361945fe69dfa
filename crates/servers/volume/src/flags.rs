//! The command line of `ginnel-volume`: the keys of a configuration as flags.

use clap::Parser;
use ginnel_config::{Account, Bytes, LogFormat, Mode, Period, Problem};
use ginnel_volume_control::VolumePaths;
use ginnel_volume_control::config::{
    BackendKind, Config, Device, Direct, Lock, OnError, SandboxMode, Spec, Wait,
};
use std::path::PathBuf;

/// Serves a virtual disk to a VM over vhost-user, or as an NVMe device over vfio-user.
///
/// Reads /etc/ginnel/volumes/NAME.toml if that file exists, or the file that --config names. Flags override the keys of
/// the file. Runs until SIGTERM. See ginnel-volume(8).
#[derive(Debug, Default, Parser)]
#[command(name = "ginnel-volume", version, max_term_width = 100)]
pub struct Flags {
    /// The volume. Default: the name of the configuration or of the socket, without its extension.
    pub name: Option<String>,
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration and exit.
    #[arg(long)]
    pub check: bool,
    /// Create missing images, as sparse files of their disks' sizes.
    #[arg(long)]
    pub create: bool,

    /// Be the holder of an nvme volume: have QEMU's socket, and do no I/O. The engine, which is this program without this
    /// option, attaches to it.
    #[arg(long)]
    pub holder: bool,
    /// A holder ends when neither QEMU nor an engine has been there for ten seconds.
    #[arg(long, requires = "holder")]
    pub transient: bool,
    /// Also start a transient holder for an nvme volume that has none.
    #[arg(long)]
    pub start_holder: bool,

    /// blk, scsi for several disks (which needs a configuration), or nvme.
    #[arg(long)]
    pub device: Option<Device>,
    /// The same as --device nvme.
    #[arg(long, conflicts_with = "device")]
    pub nvme: bool,
    /// The socket for QEMU.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The control socket.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Permissions of the socket for QEMU, in octal.
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<Mode>,
    /// Owner of the socket for QEMU: QEMU's user.
    #[arg(long, value_name = "USER")]
    pub socket_user: Option<Account>,
    /// Group of the socket for QEMU.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<Account>,
    /// Permissions of the control socket, in octal.
    #[arg(long, value_name = "MODE")]
    pub control_mode: Option<Mode>,
    /// Owner of the control socket.
    #[arg(long, value_name = "USER")]
    pub control_user: Option<Account>,
    /// Group of the control socket. Its members may change limits and sizes.
    #[arg(long, value_name = "GROUP")]
    pub control_group: Option<Account>,
    /// Number of request queues.
    #[arg(long, value_name = "N")]
    pub queues: Option<u16>,
    /// Longest queue that the VM may use, in descriptors or entries.
    #[arg(long, value_name = "N")]
    pub queue_size: Option<u16>,
    /// Number of threads.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// One CPU for each thread, such as 2,3.
    #[arg(long, value_name = "CPU", value_delimiter = ',')]
    pub cpus: Vec<usize>,
    /// How threads wait for requests: adaptive, poll or interrupt.
    #[arg(long)]
    pub wait: Option<Wait>,
    /// How long an adaptive thread polls before it sleeps, such as 50us.
    #[arg(long, value_name = "TIME")]
    pub poll_for: Option<Period>,
    /// Whether the guest's memory is pinned, so that the kernel need not look up its pages for each request.
    #[arg(long, value_name = "BOOL")]
    pub pin_memory: Option<bool>,
    /// Whether packed virtqueues are offered.
    #[arg(long, value_name = "BOOL")]
    pub packed: Option<bool>,
    /// Largest number of segments in a request.
    #[arg(long, value_name = "N")]
    pub segments: Option<u32>,
    /// Limit of requests per second.
    #[arg(long, value_name = "N")]
    pub iops: Option<u64>,
    /// Limit of bytes per second, such as 200M.
    #[arg(long, value_name = "SIZE")]
    pub bandwidth: Option<Bytes>,
    /// How much unused allowance accumulates, such as 10ms.
    #[arg(long, value_name = "TIME")]
    pub burst: Option<Period>,
    /// auto, require or off.
    #[arg(long)]
    pub sandbox: Option<SandboxMode>,
    /// User to run as, if started as root.
    #[arg(long)]
    pub user: Option<Account>,
    /// Group to run as, if started as root.
    #[arg(long)]
    pub group: Option<Account>,
    /// Log level: error, warn, info, debug, trace.
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
    /// Format of the log: text or json.
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,

    /// Where the data of the first disk is stored: file, uring-cmd, vfio, ram, null, volatile.
    #[arg(long)]
    pub backend: Option<BackendKind>,
    /// Image of the first disk: a raw file or a block device.
    #[arg(long)]
    pub path: Option<PathBuf>,
    /// For --backend vfio: the PCI address of the NVMe device, such as 0000:01:00.0.
    #[arg(long, value_name = "ADDRESS")]
    pub pci: Option<String>,
    /// For --backend vfio: the number of the namespace.
    #[arg(long, value_name = "N")]
    pub namespace: Option<u32>,
    /// For --backend vfio: where the first disk begins on the namespace.
    #[arg(long, value_name = "SIZE")]
    pub offset: Option<Bytes>,
    /// Size of the first disk; a shorter file grows.
    #[arg(long)]
    pub size: Option<Bytes>,
    /// Size of a sector of the first disk: 512 or 4K.
    #[arg(long, value_name = "SIZE")]
    pub sector: Option<Bytes>,
    /// Make the first disk read-only for the guest.
    #[arg(long)]
    pub read_only: bool,
    /// Serial number of the first disk.
    #[arg(long)]
    pub serial: Option<String>,
    /// Whether the image is accessed without the page cache: auto, on, off.
    #[arg(long)]
    pub direct: Option<Direct>,
    /// Whether the guest sees a write cache.
    #[arg(long, value_name = "BOOL")]
    pub write_cache: Option<bool>,
    /// Whether the guest may discard blocks.
    #[arg(long, value_name = "BOOL")]
    pub discard: Option<bool>,
    /// What happens to requests that fail because the disk is full or has an error: report (the guest gets the error),
    /// or hold (they wait).
    #[arg(long, value_name = "WHAT")]
    pub on_error: Option<OnError>,
    /// Poll the device for completions.
    #[arg(long)]
    pub iopoll: bool,
    /// Whether the image is locked: true, false, or vm (only while a VM runs on it).
    #[arg(long, value_name = "BOOL|vm")]
    pub lock: Option<Lock>,
}

impl Flags {
    /// Returns the configuration that results from the flags and, if there is one, the file.
    pub fn config(&self, paths: &VolumePaths) -> Result<Config, Problem> {
        let stem = |path: &PathBuf| path.file_stem().map(|s| s.to_string_lossy().into_owned());
        let name = self
            .name
            .clone()
            .or_else(|| self.config.as_ref().and_then(stem))
            .or_else(|| self.socket.as_ref().and_then(stem))
            .ok_or_else(|| {
                Problem::new("command line", "it names no volume", "write a name or --socket PATH")
            })?;
        let standard = paths.configuration(&name);
        let (mut spec, place) = match &self.config {
            Some(file) => (Spec::read(file)?, file.display().to_string()),
            None if self.says_where_the_bytes_are() && !standard.exists() => {
                (Spec::default(), "command line".into())
            }
            None => (Spec::read(&standard)?, standard.display().to_string()),
        };
        self.apply(&mut spec);
        if self.holder && spec.device != Device::Nvme {
            let what = format!("a volume with device = \"{}\" has no holder", spec.device);
            return Err(Problem::new(format!("{place}: --holder"), what, "write --nvme, or leave it out"));
        }
        spec.check(&name, paths, &place)
    }

    fn says_where_the_bytes_are(&self) -> bool {
        self.path.is_some() || self.backend.is_some()
    }

    /// Overrides the keys of `spec` with the flags that are given.
    fn apply(&self, spec: &mut Spec) {
        fn over<T: Clone>(flag: &Option<T>, key: &mut Option<T>) {
            if flag.is_some() {
                key.clone_from(flag);
            }
        }
        fn instead<T: Clone>(flag: &Option<T>, key: &mut T) {
            if let Some(value) = flag {
                key.clone_from(value);
            }
        }
        instead(&self.nvme.then_some(Device::Nvme).or(self.device), &mut spec.device);
        over(&self.socket, &mut spec.socket);
        over(&self.control, &mut spec.control);
        over(&self.socket_mode, &mut spec.socket_mode);
        over(&self.socket_user, &mut spec.socket_user);
        over(&self.socket_group, &mut spec.socket_group);
        over(&self.control_mode, &mut spec.control_mode);
        over(&self.control_user, &mut spec.control_user);
        over(&self.control_group, &mut spec.control_group);
        over(&self.queues, &mut spec.queues);
        over(&self.queue_size, &mut spec.queue_size);
        over(&self.threads, &mut spec.threads);
        if !self.cpus.is_empty() {
            spec.cpus.clone_from(&self.cpus);
        }
        instead(&self.wait, &mut spec.wait);
        over(&self.poll_for, &mut spec.poll_for);
        over(&self.pin_memory, &mut spec.pin_memory);
        over(&self.packed, &mut spec.packed);
        over(&self.segments, &mut spec.segments);
        instead(&self.iops, &mut spec.limits.iops);
        instead(&self.bandwidth, &mut spec.limits.bandwidth);
        instead(&self.burst, &mut spec.limits.burst);
        instead(&self.sandbox, &mut spec.sandbox);
        over(&self.user, &mut spec.user);
        over(&self.group, &mut spec.group);
        over(&self.log, &mut spec.log);
        instead(&self.log_format, &mut spec.log_format);
        if self.says_where_the_bytes_are() && spec.disk.is_empty() {
            spec.disk.push(Default::default());
        }
        if let Some(disk) = spec.disk.first_mut() {
            over(&self.backend, &mut disk.backend);
            over(&self.path, &mut disk.path);
            over(&self.pci, &mut disk.pci);
            over(&self.namespace, &mut disk.namespace);
            over(&self.offset, &mut disk.offset);
            over(&self.size, &mut disk.size);
            over(&self.sector, &mut disk.sector);
            disk.read_only |= self.read_only;
            over(&self.serial, &mut disk.serial);
            instead(&self.direct, &mut disk.direct);
            over(&self.write_cache, &mut disk.write_cache);
            over(&self.discard, &mut disk.discard);
            instead(&self.on_error, &mut disk.on_error);
            disk.iopoll |= self.iopoll;
            over(&self.lock, &mut disk.lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn paths(folder: &tempfile::TempDir) -> VolumePaths {
        VolumePaths { sockets: folder.path().into(), configurations: folder.path().into() }
    }

    fn config(folder: &tempfile::TempDir, line: &str) -> Result<Config, Problem> {
        let words = std::iter::once("ginnel-volume").chain(line.split_whitespace());
        Flags::try_parse_from(words).expect("flags").config(&paths(folder))
    }

    #[test]
    fn the_command_line_is_sound() {
        Flags::command().debug_assert();
    }

    #[test]
    fn flags_alone_make_a_volume() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&folder, "--socket /tmp/x.sock --backend ram --size 64M --wait poll").unwrap();
        assert_eq!((config.name.as_str(), config.wait), ("x", Wait::Poll));
        assert_eq!((config.disks[0].size, config.control), (Some(64 << 20), "/tmp/x.ctl".into()));
    }

    #[test]
    fn flags_come_on_top_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = paths(&folder).configuration("web");
        std::fs::write(&file, "queues = 2\n[limits]\niops = 5\n[[disk]]\npath = \"/a\"\nserial = \"S\"")
            .unwrap();
        let config = config(&folder, "web --iops 7 --threads 2 --read-only").unwrap();
        assert_eq!((config.queues, config.threads, config.limits.iops), (2, 2, 7));
        assert_eq!(config.disks[0].serial, "S");
        assert!(config.disks[0].read_only);
        assert_eq!(config.socket, folder.path().join("web.sock"));
    }

    #[test]
    fn an_nvme_volume_has_a_holder() {
        let folder = tempfile::tempdir().unwrap();
        let disk = "--socket /tmp/x.sock --backend ram --size 64M";
        for flags in ["--nvme", "--device nvme", "--nvme --holder --transient", "--nvme --start-holder"] {
            assert_eq!(config(&folder, &format!("{disk} {flags}")).unwrap().device, Device::Nvme, "{flags}");
        }
        let problem = config(&folder, &format!("{disk} --holder")).unwrap_err().to_string();
        assert!(problem.contains("--holder: a volume with device = \"blk\" has no holder"), "{problem}");
        for flags in ["--nvme --device blk", "--transient"] {
            assert!(Flags::try_parse_from(std::iter::once("x").chain(flags.split(' '))).is_err(), "{flags}");
        }
    }

    #[test]
    fn missing_flags_are_named() {
        let folder = tempfile::tempdir().unwrap();
        for (line, part) in [
            ("", "names no volume"),
            ("web", "web.toml: No such file"),
            ("web --backend ram", "disk 0: size"),
            ("--config /no/such.toml", "/no/such.toml: No such file"),
        ] {
            let problem = config(&folder, line).unwrap_err().to_string();
            assert!(problem.contains(part), "{line:?}: {problem}");
        }
    }

    #[test]
    fn every_key_is_a_flag() {
        use ginnel_volume_control::config::DiskSpec;
        let keys = |value: serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let mut keys = [
            keys(serde_json::to_value(Spec::default()).unwrap()),
            keys(serde_json::to_value(DiskSpec::default()).unwrap()),
            keys(serde_json::to_value(ginnel_volume_control::Limits::default()).unwrap()),
        ]
        .concat();
        // Except tables, and the key that only `ginnel` reads.
        keys.retain(|key| !["disk", "limits", "vm"].contains(&key.as_str()));
        let command = Flags::command();
        let flags: Vec<_> = command.get_arguments().filter_map(|a| a.get_long()).collect();
        for key in keys {
            assert!(flags.contains(&key.as_str()), "no flag for {key}");
        }
    }
}
