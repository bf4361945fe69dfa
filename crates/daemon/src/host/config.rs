//! The configuration: a TOML file, checked as a whole before anything is done.

use ginnel_config::{Account, Bytes, LogFormat, Mode, Problem, check_socket_path, from_toml, words};
use ginnel_layout::dax::{LARGE_PAGE, SMALL_PAGE};
use ginnel_layout::{Name, segment};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

mod limits;
mod memory;
mod slices;
mod sockets;

use limits::{AllLimitsSpec, limits};
pub use limits::{
    Limits, LimitsSpec, MAX_BOARDS, MAX_HOLDS, MAX_MEMBER, MAX_OWNERS, MAX_SEGMENTS_PER_MEMBER, MemberLimits,
};
pub use memory::MemoryKind;
pub use slices::SliceFiles;
pub use sockets::SocketsSpec;

words! {
    /// What is done about a VM whose guest hangs.
    OnHang {
        /// It is shown by `ginnel status --json`, and nothing else.
        Nothing = "nothing",
        /// And logged.
        #[default]
        Warn = "warn",
        /// And its endpoints are declared dead: their locks are handed on, their blocks and channels come back. Its programs
        /// find that out when it goes on, and attach anew. If the daemon can speak to its QEMU, the VM is stopped before.
        Fence = "fence",
    }
}

/// A VM, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmSpec {
    /// Its member number; else the daemon chooses one, and remembers it.
    pub number: Option<u32>,
    /// Owner of its ivshmem socket.
    pub user: Option<Account>,
    /// Group of its ivshmem socket.
    pub group: Option<Account>,
    /// Mode of its ivshmem socket.
    pub socket_mode: Option<Mode>,
    /// Size of its home segment, shared with the host alone.
    pub home: Option<Bytes>,
    /// By which kind of device that segment comes.
    pub home_memory: Option<MemoryKind>,
    /// Seconds of silence after which its guest counts as hanging; 0, the default: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hang_after: Option<u32>,
    /// What is done then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_hang: Option<OnHang>,
    /// A control socket (QMP) of its QEMU that is left to the daemon: to stop the VM before it is fenced, and to hear of resets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qmp: Option<PathBuf>,
    /// Its own bounds.
    pub limits: LimitsSpec,
}

/// A segment, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SegmentSpec {
    /// Wished size.
    pub size: Option<Bytes>,
    /// Who shares it: names of VMs, and `host`.
    pub members: Vec<String>,
    /// Who sees it and cannot write; none of the members.
    pub readers: Vec<String>,
    /// Who gets a segment `NAME.MEMBER` alone with the members and readers, instead of this one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<String>,
    /// Whether those lie in one file.
    #[serde(skip_serializing_if = "is_default")]
    pub slice_files: SliceFiles,
    /// By which kind of device it comes to VMs.
    pub memory: Option<MemoryKind>,
    /// `tmpfs` (in `shm_dir`), or a folder on a hugetlbfs.
    pub backing: Option<String>,
    /// Owner of the file.
    pub owner: Option<Account>,
    /// Group of the file.
    pub group: Option<Account>,
    /// Mode of the file.
    pub mode: Option<Mode>,
    /// Users whose host programs may attach, beside root and the daemon's own.
    pub allow_users: Vec<Account>,
    /// Groups whose members' host programs may attach.
    pub allow_groups: Vec<Account>,
    /// Whether programs' TCP connections may go over it. Without a word they may if it has no more than two members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<bool>,
    /// Whether it is an RDMA device for those who share it.
    #[serde(skip_serializing_if = "is_default")]
    pub verbs: bool,
    /// Unit in which it may be mapped: 2M or 4K (a BAR, and for verbs: 4K).
    pub page: Option<Bytes>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HostSpec {
    qemu: PathBuf,
}

impl Default for HostSpec {
    fn default() -> Self {
        Self { qemu: format!("qemu-system-{}", std::env::consts::ARCH).into() }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DaemonSpec {
    runtime_dir: PathBuf,
    state_dir: PathBuf,
    shm_dir: PathBuf,
    socket_mode: Mode,
    socket_group: Option<Account>,
    admin_group: Option<Account>,
    vectors: u32,
    log: String,
    log_format: LogFormat,
}

impl Default for DaemonSpec {
    fn default() -> Self {
        Self {
            runtime_dir: "/run/ginnel".into(),
            state_dir: "/var/lib/ginnel".into(),
            shm_dir: "/dev/shm".into(),
            socket_mode: Mode(0o666),
            socket_group: None,
            admin_group: None,
            vectors: 32,
            log: "info".into(),
            log_format: LogFormat::Text,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct FileSpec {
    daemon: DaemonSpec,
    host: HostSpec,
    limits: AllLimitsSpec,
    sockets: SocketsSpec,
    vm: BTreeMap<String, VmSpec>,
    segment: BTreeMap<String, SegmentSpec>,
}

/// A VM, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Its name.
    pub name: Name,
    /// Its member number, if configured.
    pub number: Option<u32>,
    /// Owner of its socket.
    pub user: Option<u32>,
    /// Group of its socket.
    pub group: Option<u32>,
    /// Mode of its socket.
    pub socket_mode: u32,
    /// Silence after which its guest counts as hanging.
    pub hang_after: Option<Duration>,
    /// What is done then.
    pub on_hang: OnHang,
    /// A control socket of its QEMU.
    pub qmp: Option<PathBuf>,
    /// Its bounds.
    pub limits: MemberLimits,
}

/// Which host programs may attach to a segment, beside root and the daemon's own user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// These users.
    pub users: BTreeSet<u32>,
    /// And members of these groups.
    pub groups: BTreeSet<u32>,
    /// Whether programs' TCP connections may go over the segment, if that is configured.
    pub sockets: Option<bool>,
    /// Whether the segment is an RDMA device.
    pub verbs: bool,
}

/// A segment, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its name.
    pub name: Name,
    /// Its size, usable for its kind of device.
    pub size: u64,
    /// The size that was wished for.
    pub wished: u64,
    /// Who shares it and may write.
    pub members: BTreeSet<Name>,
    /// Who may only read.
    pub readers: BTreeSet<Name>,
    /// By which kind of device it comes to VMs.
    pub memory: MemoryKind,
    /// Its file.
    pub path: PathBuf,
    /// Where in that file it begins, if it shares the file with other slices.
    pub offset: Option<u64>,
    /// The file that a slice should share.
    pub shared_file: Option<PathBuf>,
    /// What is said of that.
    pub slice_files: SliceFiles,
    /// Owner of the file.
    pub owner: Option<u32>,
    /// Group of the file.
    pub group: Option<u32>,
    /// Mode of the file.
    pub mode: u32,
    /// Which host programs may attach.
    pub access: Access,
    /// Unit in which it may be mapped, in bytes.
    pub page: u32,
}

/// The whole configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where it was read from.
    pub file: PathBuf,
    /// What is wrong with that file by now, so that an earlier state of it counts.
    pub mistake: Option<String>,
    /// Sockets.
    pub runtime_dir: PathBuf,
    /// Journal.
    pub state_dir: PathBuf,
    /// Segments.
    pub shm_dir: PathBuf,
    /// Mode of the attach socket.
    pub socket_mode: u32,
    /// Group of the attach socket.
    pub socket_group: Option<u32>,
    /// Who may use ADMIN beside root.
    pub admin_group: Option<u32>,
    /// Doorbell vectors of each member.
    pub vectors: u32,
    /// The QEMU that VMs run with, in PATH or as a full path. It is only asked for its version.
    pub qemu: PathBuf,
    /// Level of the log.
    pub log: String,
    /// Form of the log.
    pub log_format: LogFormat,
    /// Bounds.
    pub limits: Limits,
    /// Which programs' TCP connections may leave TCP.
    pub sockets: SocketsSpec,
    /// VMs.
    pub vms: BTreeMap<Name, Vm>,
    /// Segments, the homes among them.
    pub segments: BTreeMap<Name, Segment>,
}

/// Name of the host as a member.
pub const HOST: &str = "host";

impl Config {
    /// Reads and checks a file.
    pub fn read(file: &Path) -> Result<Self, Problem> {
        Self::of_text(&Self::text_of(file)?, file)
    }

    /// What is in a file.
    pub fn text_of(file: &Path) -> Result<String, Problem> {
        std::fs::read_to_string(file).map_err(|error| {
            let fix = match error.kind() {
                std::io::ErrorKind::NotFound => {
                    "write one (packaging/ginneld.toml is an example) or name it with --config"
                }
                std::io::ErrorKind::PermissionDenied => "let the daemon's user read it",
                _ => "name a readable text file with --config",
            };
            Problem::new(file.display(), format!("cannot read the configuration: {error}"), fix)
        })
    }

    /// Checks a text that was read from `file`, and decides what depends on this host.
    pub fn of_text(text: &str, file: &Path) -> Result<Self, Problem> {
        let mut config = Self::parse(text, file)?;
        config.decide_slice_files()?;
        Ok(config)
    }

    /// Checks a text that was read from `file`.
    pub fn parse(text: &str, file: &Path) -> Result<Self, Problem> {
        let spec: FileSpec = from_toml(text, file, "correct this line")?;
        let place = |key: &str| format!("{}: {key}", file.display());
        let daemon = spec.daemon;
        let group = |account: &Option<Account>, key: &str| {
            account.as_ref().map(|account| account.group(place(key))).transpose()
        };
        let mut config = Self {
            file: file.to_owned(),
            mistake: None,
            socket_group: group(&daemon.socket_group, "daemon.socket_group")?,
            admin_group: group(&daemon.admin_group, "daemon.admin_group")?,
            runtime_dir: daemon.runtime_dir,
            state_dir: daemon.state_dir,
            shm_dir: daemon.shm_dir,
            socket_mode: daemon.socket_mode.0,
            vectors: daemon.vectors,
            qemu: spec.host.qemu,
            log: daemon.log,
            log_format: daemon.log_format,
            limits: Limits::default(),
            sockets: spec.sockets,
            vms: BTreeMap::new(),
            segments: BTreeMap::new(),
        };
        config.limits = limits(&spec.limits, &place("limits"))?;
        if !(2..=64).contains(&config.vectors) {
            let what = format!("{} vectors", config.vectors);
            return Err(Problem::new(
                place("daemon.vectors"),
                what,
                "choose 2 to 64, and the same for each VM's device",
            ));
        }
        if !["error", "warn", "info", "debug", "trace"].contains(&config.log.as_str()) {
            let what = format!("there is no log level {:?}", config.log);
            return Err(Problem::new(place("daemon.log"), what, "choose error, warn, info, debug or trace"));
        }
        for (key, dir) in [
            ("runtime_dir", &config.runtime_dir),
            ("state_dir", &config.state_dir),
            ("shm_dir", &config.shm_dir),
        ] {
            if !dir.is_absolute() {
                let what = format!("{} is a relative path", dir.display());
                return Err(Problem::new(
                    place(&format!("daemon.{key}")),
                    what,
                    "write it from the root: /...",
                ));
            }
        }
        for (name, vm) in &spec.vm {
            let place = place(&format!("vm.{name}"));
            let (vm, home) = config.vm(name, vm, &place)?;
            if let Some(other) =
                config.vms.values().find(|other| other.number.is_some() && other.number == vm.number)
            {
                let what = format!("{} has number {} already", other.name, vm.number.unwrap_or(0));
                return Err(Problem::new(place, what, "give each VM a number of its own, or none"));
            }
            if let Some(home) = home {
                if spec.segment.contains_key(home.name.as_str()) {
                    let what =
                        format!("its home is the segment {0}, and there is a [segment.{0}]", home.name);
                    return Err(Problem::new(place, what, "rename that segment, or remove `home`"));
                }
                config.segments.insert(home.name, home);
            }
            config.vms.insert(vm.name, vm);
        }
        for (name, spec) in &spec.segment {
            let place = place(&format!("segment.{name}"));
            for segment in config.segments_of(name, spec, &place)? {
                if let Some(stranger) =
                    segment.sharers().find(|m| m.as_str() != HOST && !config.vms.contains_key(*m))
                {
                    let key = match segment.members.contains(stranger) {
                        _ if spec.slices.iter().any(|slice| slice == stranger.as_str()) => "slice",
                        true => "member",
                        false => "reader",
                    };
                    let fix = format!("declare it with [vm.{stranger}], or remove it from `{key}s`");
                    return Err(Problem::new(
                        place,
                        format!("{key} {stranger:?} is no VM of this file"),
                        fix,
                    ));
                }
                let name = segment.name;
                if config.segments.insert(name, segment).is_some() {
                    let what = format!("there is another segment {name}");
                    return Err(Problem::new(place, what, "rename one; a slice is called SEGMENT.MEMBER"));
                }
            }
        }
        for (name, spec) in config.sockets.user_segments() {
            let place = place("sockets.users");
            let segment = config.segment(&name, &spec, &place)?;
            if config.segments.insert(segment.name, segment).is_some() {
                let what = format!("there is another segment {name}");
                return Err(Problem::new(
                    place,
                    what,
                    "name each user once, and rename [segment.sockets.USER]",
                ));
            }
        }
        for vm in config.vms.keys() {
            let n = config.segments.values().filter(|s| s.sharers().any(|m| m == vm)).count();
            if n > MAX_SEGMENTS_PER_MEMBER {
                let what =
                    format!("it has a share in {n} segments, at most {MAX_SEGMENTS_PER_MEMBER} are possible");
                return Err(Problem::new(
                    place(&format!("vm.{vm}")),
                    what,
                    "let it share fewer and larger ones",
                ));
            }
        }
        check_socket_path(&config.socket(), place("daemon.runtime_dir"), SHORTER)?;
        Ok(config)
    }

    /// Checks a VM, and the home segment that it may have.
    pub fn vm(&self, name: &str, spec: &VmSpec, place: &str) -> Result<(Vm, Option<Segment>), Problem> {
        let name = checked_name(name, place)?;
        if name.as_str() == HOST {
            return Err(Problem::new(place, "`host` is the host itself", "choose another name for this VM"));
        }
        // Its socket stands beside the daemon's own.
        if [SOCKET_NAME, KEEPER_NAME].contains(&format!("{name}.sock").as_str()) {
            return Err(Problem::new(
                place,
                format!("the socket {name}.sock is the daemon's own"),
                "choose another name",
            ));
        }
        if let Some(number) = spec.number
            && !(1..=MAX_MEMBER).contains(&number)
        {
            let fix = format!("choose 1 to {MAX_MEMBER}, or leave the choice to the daemon");
            return Err(Problem::new(place, format!("number {number} is not possible"), fix));
        }
        let vm = Vm {
            name,
            number: spec.number,
            user: spec.user.as_ref().map(|a| a.user(place)).transpose()?,
            group: spec.group.as_ref().map(|a| a.group(place)).transpose()?,
            socket_mode: spec.socket_mode.map_or(0o660, |m| m.0),
            hang_after: spec.hang_after.filter(|&s| s > 0).map(|s| Duration::from_secs(s.into())),
            on_hang: spec.on_hang.unwrap_or_default(),
            qmp: spec.qmp.clone(),
            limits: self.limits.member.with(&spec.limits, &format!("{place}.limits"))?,
        };
        check_socket_path(&self.vm_socket(&name), place, SHORTER)?;
        if let Some(qmp) = &vm.qmp {
            let place = format!("{place}.qmp");
            if !qmp.is_absolute() {
                let what = format!("{:?} is no full path", qmp.display().to_string());
                return Err(Problem::new(place, what, "write one, like qmp = \"/run/ginnel/VM.qmp\""));
            }
            check_socket_path(qmp, &place, SHORTER)?;
        }
        let home = match spec.home {
            None => None,
            Some(size) => {
                let spec = SegmentSpec {
                    size: Some(size),
                    memory: spec.home_memory,
                    members: vec![HOST.into(), name.to_string()],
                    owner: spec.user.clone(),
                    group: spec.group.clone(),
                    ..SegmentSpec::default()
                };
                Some(self.segment(&format!("home-{name}"), &spec, &format!("{place}.home"))?)
            }
        };
        Ok((vm, home))
    }

    /// Checks a segment without slices; not whether its members exist.
    pub fn segment(&self, name: &str, spec: &SegmentSpec, place: &str) -> Result<Segment, Problem> {
        let name = checked_name(name, place)?;
        if !spec.slices.is_empty() {
            let what = "slices are declared in the configuration file only";
            return Err(Problem::new(place, what, "declare a segment for each of them here"));
        }
        let wished = match spec.size {
            None => return Err(Problem::new(place, "`size` is missing", "write one, like size = \"256M\"")),
            Some(Bytes(0)) => {
                return Err(Problem::new(place, "its size is 0", "write one, like size = \"256M\""));
            }
            Some(Bytes(size)) => size,
        };
        let memory = spec.memory.unwrap_or_default();
        if spec.members.is_empty() {
            return Err(Problem::new(
                place,
                "it has no members",
                "write who shares it: members = [\"host\", \"VM\"]",
            ));
        }
        let members = names(&spec.members, "member", place)?;
        let readers = names(&spec.readers, "reader", place)?;
        if let Some(both) = members.intersection(&readers).next() {
            let what = format!("{both:?} stands in `members` and in `readers`");
            return Err(Problem::new(
                place,
                what,
                "leave it in `members` if it shall write, else in `readers`",
            ));
        }
        let of_vm = members.union(&readers).any(|member| member.as_str() != HOST);
        let least = if of_vm && memory == MemoryKind::Dax { segment::MIN_DAX_SIZE } else { 0 };
        // More than 2^46 bytes cannot be mapped anyway.
        let size = segment::usable_size(wished.max(least), memory == MemoryKind::Bar);
        let Some(size) = size.filter(|&size| size <= 1 << 46) else {
            return Err(Problem::new(
                place,
                format!("size {} is too large", Bytes(wished)),
                "choose at most 64T",
            ));
        };
        let page = match (spec.page.map(|page| page.0), memory) {
            (Some(PAGE_2M), _) if spec.verbs => {
                let what =
                    "its page is 2M, and memory is registered with an RDMA device (verbs) in pages of 4K";
                return Err(Problem::new(place, what, "leave `page` out, or `verbs`"));
            }
            (None, MemoryKind::Dax) if spec.verbs => SMALL_PAGE,
            (None | Some(PAGE_2M), MemoryKind::Dax) => LARGE_PAGE,
            (Some(PAGE_4K), MemoryKind::Dax) | (None | Some(PAGE_4K), MemoryKind::Bar) => SMALL_PAGE,
            (Some(PAGE_2M), MemoryKind::Bar) => {
                let what = "its page is 2M, and a BAR (memory = \"bar\") is mapped in pages of 4K";
                return Err(Problem::new(place, what, "leave `page` out, or write memory = \"dax\""));
            }
            (Some(page), _) => {
                let what = format!("page {} is not possible", Bytes(page));
                return Err(Problem::new(place, what, "choose 4K or 2M"));
            }
        };
        let dir = match spec.backing.as_deref() {
            None | Some("tmpfs") => self.shm_dir.clone(),
            Some(dir) if spec.verbs => {
                let what = format!(
                    "backing {dir:?} has large pages, and memory is registered with an RDMA device (verbs) in \
                                    pages of 4K"
                );
                return Err(Problem::new(place, what, "leave `backing` out, or `verbs`"));
            }
            Some(dir) if dir.starts_with('/') => PathBuf::from(dir),
            Some(other) => {
                let fix = "write \"tmpfs\", or the full path of a folder on a hugetlbfs";
                return Err(Problem::new(place, format!("backing {other:?} is neither"), fix));
            }
        };
        // A third member would see what two of them say to each other.
        let sockets = spec.sockets.unwrap_or(members.len() + readers.len() <= 2);
        let users = spec.allow_users.iter().map(|a| a.user(place)).collect::<Result<_, _>>()?;
        let groups = spec.allow_groups.iter().map(|a| a.group(place)).collect::<Result<_, _>>()?;
        Ok(Segment {
            name,
            size,
            wished,
            members,
            readers,
            memory,
            path: dir.join(format!("ginnel-{name}")),
            offset: None,
            shared_file: None,
            slice_files: SliceFiles::Auto,
            owner: spec.owner.as_ref().map(|a| a.user(place)).transpose()?,
            group: spec.group.as_ref().map(|a| a.group(place)).transpose()?,
            mode: spec.mode.map_or(0o660, |m| m.0),
            access: Access { users, groups, sockets: Some(sockets), verbs: spec.verbs },
            page,
        })
    }

    /// The attach socket.
    pub fn socket(&self) -> PathBuf {
        self.runtime_dir.join(SOCKET_NAME)
    }

    /// The keeper's socket.
    pub fn keeper_socket(&self) -> PathBuf {
        self.runtime_dir.join(KEEPER_NAME)
    }

    /// The ivshmem socket of a VM.
    pub fn vm_socket(&self, name: &Name) -> PathBuf {
        self.runtime_dir.join(format!("{name}.sock"))
    }
}

impl Segment {
    /// All who have a share in it: members and readers.
    pub fn sharers(&self) -> impl Iterator<Item = &Name> {
        self.members.iter().chain(&self.readers)
    }
}

const PAGE_2M: u64 = LARGE_PAGE as u64;
const PAGE_4K: u64 = SMALL_PAGE as u64;

const SHORTER: &str = "choose a shorter path, daemon.runtime_dir or name";
const SOCKET_NAME: &str = "ginnel.sock";
const KEEPER_NAME: &str = "keeper.sock";

fn names(list: &[String], what: &str, place: &str) -> Result<BTreeSet<Name>, Problem> {
    let mut names = BTreeSet::new();
    for name in list {
        if !names.insert(checked_name(name, place)?) {
            return Err(Problem::new(place, format!("{what} {name:?} stands there twice"), "remove one"));
        }
    }
    Ok(names)
}

fn checked_name(text: &str, place: &str) -> Result<Name, Problem> {
    let name = Name::new(text)
        .map_err(|error| Problem::new(place, format!("{text:?}: {error}"), "choose another name"))?;
    // `SERVICE@MEMBER` is how a listener says whose it is.
    if text.contains('@') {
        return Err(Problem::new(place, format!("{text:?} contains @"), "choose a name without it"));
    }
    Ok(name)
}

#[cfg(test)]
mod tests;
