//! The configuration: a TOML file, which is checked as a whole before the daemon acts on it.

use ginnel_broker::declared::{Access, OnHang, SegmentSpec, SliceFiles, VmSpec};
use ginnel_broker::limits::{
    AllLimitsSpec, Limits, MAX_MEMBER, MAX_SEGMENTS_PER_MEMBER, MemberLimits, limits,
};
use ginnel_broker::memory::MemoryKind;
use ginnel_config::{Account, Bytes, LogFormat, Mode, Problem, check_socket_path, from_toml};
use ginnel_layout::dax::{LARGE_PAGE, SMALL_PAGE};
use ginnel_layout::{Name, segment};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub mod doubts;
mod slices;
mod sockets;

pub use sockets::SocketsSpec;

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

/// A VM as checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// The VM's name.
    pub name: Name,
    /// The member number, if configured.
    pub number: Option<u32>,
    /// The user number of the socket's owner.
    pub user: Option<u32>,
    /// The number of the socket's group.
    pub group: Option<u32>,
    /// The mode of the socket.
    pub socket_mode: u32,
    /// The silence after which the guest counts as hanging.
    pub hang_after: Option<Duration>,
    /// What the daemon does about a guest that hangs.
    pub on_hang: OnHang,
    /// The path of a QMP socket of the VM's QEMU.
    pub qmp: Option<PathBuf>,
    /// The VM's limits.
    pub limits: MemberLimits,
}

/// A segment as checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The segment's name.
    pub name: Name,
    /// The size in bytes, rounded to one that its kind of device can have.
    pub size: u64,
    /// The requested size in bytes.
    pub requested: u64,
    /// The names of the members that may write.
    pub members: BTreeSet<Name>,
    /// The names of the members that may only read.
    pub readers: BTreeSet<Name>,
    /// The kind of device by which the segment reaches VMs.
    pub memory: MemoryKind,
    /// The path of the file.
    pub path: PathBuf,
    /// The daemon's own folder, in which the file is; `None` if it is at its old place, in the folder above.
    pub folder: Option<PathBuf>,
    /// The offset in that file at which the segment begins, if it shares the file with other slices.
    pub offset: Option<u64>,
    /// The file that a slice should share.
    pub shared_file: Option<PathBuf>,
    /// The setting `slice_files`.
    pub slice_files: SliceFiles,
    /// The user number of the file's owner.
    pub owner: Option<u32>,
    /// The number of the file's group.
    pub group: Option<u32>,
    /// The mode of the file.
    pub mode: u32,
    /// The host programs that may attach.
    pub access: Access,
    /// The unit in which the segment can be mapped, in bytes.
    pub page: u32,
}

/// The whole configuration as checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file that it was read from.
    pub file: PathBuf,
    /// A mistake that this file has now, if it has one; then an earlier state of the file is in effect.
    pub mistake: Option<String>,
    /// The folder of the sockets.
    pub runtime_dir: PathBuf,
    /// The folder of the journal.
    pub state_dir: PathBuf,
    /// The folder of the segments' files.
    pub shm_dir: PathBuf,
    /// The mode of the attach socket.
    pub socket_mode: u32,
    /// The group of the attach socket.
    pub socket_group: Option<u32>,
    /// The group that may use ADMIN, besides root.
    pub admin_group: Option<u32>,
    /// The number of doorbell vectors of each member.
    pub vectors: u32,
    /// The QEMU program of the VMs, found in PATH or given as a full path. The daemon only asks it for its version.
    pub qemu: PathBuf,
    /// The level of the log.
    pub log: String,
    /// The form of the log.
    pub log_format: LogFormat,
    /// The limits.
    pub limits: Limits,
    /// Which programs' TCP connections may leave TCP.
    pub sockets: SocketsSpec,
    /// The VMs by name.
    pub vms: BTreeMap<Name, Vm>,
    /// The segments by name, including home segments.
    pub segments: BTreeMap<Name, Segment>,
}

/// The name of the folder of the daemon's own in which the files of segments are.
pub const OWN_FOLDER: &str = "ginnel";
/// The name of the host as a member.
pub const HOST: &str = "host";

impl Config {
    /// Reads and checks a file.
    pub fn read(file: &Path) -> Result<Self, Problem> {
        Self::of_text(&Self::text_of(file)?, file)
    }

    /// Returns the text of a file.
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

    /// Checks a text that was read from `file`, and makes the decisions that depend on this host.
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
                        format!("{key} {stranger:?} is not a VM of this file"),
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

    /// Checks a VM, and its home segment if it has one.
    pub fn vm(&self, name: &str, spec: &VmSpec, place: &str) -> Result<(Vm, Option<Segment>), Problem> {
        let name = checked_name(name, place)?;
        if name.as_str() == HOST {
            return Err(Problem::new(place, "`host` is the host itself", "choose another name for this VM"));
        }
        // The VM's socket is in the same folder as the daemon's own.
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
                let what = format!("{:?} is not a full path", qmp.display().to_string());
                let fix = "write one in a folder where QEMU's user may make it, like qmp = \"/var/lib/libvirt/qemu/VM.qmp\"";
                return Err(Problem::new(place, what, fix));
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

    /// Checks a segment without slices. Does not check whether its members exist.
    pub fn segment(&self, name: &str, spec: &SegmentSpec, place: &str) -> Result<Segment, Problem> {
        let name = checked_name(name, place)?;
        if !spec.slices.is_empty() {
            let what = "slices are declared in the configuration file only";
            return Err(Problem::new(place, what, "declare a segment for each of them here"));
        }
        let requested = match spec.size {
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
                "name its members: members = [\"host\", \"VM\"]",
            ));
        }
        let members = names(&spec.members, "member", place)?;
        let readers = names(&spec.readers, "reader", place)?;
        if let Some(both) = members.intersection(&readers).next() {
            let what = format!("{both:?} is in `members` and in `readers`");
            return Err(Problem::new(
                place,
                what,
                "leave it in `members` if it must write, otherwise in `readers`",
            ));
        }
        let of_vm = members.union(&readers).any(|member| member.as_str() != HOST);
        let least = if of_vm && memory == MemoryKind::Dax { segment::MIN_DAX_SIZE } else { 0 };
        // More than 2^46 bytes cannot be mapped anyway.
        let size = segment::usable_size(requested.max(least), memory == MemoryKind::Bar);
        let Some(size) = size.filter(|&size| size <= 1 << 46) else {
            return Err(Problem::new(
                place,
                format!("size {} is too large", Bytes(requested)),
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
        let folder = dir.join(OWN_FOLDER);
        // A third member could read what two of them send to each other.
        let sockets = spec.sockets.or((members.len() + readers.len() > 2).then_some(false));
        let users = spec.allow_users.iter().map(|a| a.user(place)).collect::<Result<_, _>>()?;
        let groups = spec.allow_groups.iter().map(|a| a.group(place)).collect::<Result<_, _>>()?;
        Ok(Segment {
            name,
            size,
            requested,
            members,
            readers,
            memory,
            path: folder.join(name.as_str()),
            folder: Some(folder),
            offset: None,
            shared_file: None,
            slice_files: SliceFiles::Auto,
            owner: spec.owner.as_ref().map(|a| a.user(place)).transpose()?,
            group: spec.group.as_ref().map(|a| a.group(place)).transpose()?,
            mode: spec.mode.map_or(0o660, |m| m.0),
            access: Access { users, groups, sockets, verbs: spec.verbs },
            page,
        })
    }

    /// Returns the daemon's own folder in `shm_dir`.
    pub fn own_folder(&self) -> PathBuf {
        self.shm_dir.join(OWN_FOLDER)
    }

    /// Returns the path of the attach socket.
    pub fn socket(&self) -> PathBuf {
        self.runtime_dir.join(SOCKET_NAME)
    }

    /// Returns the path of the keeper's socket.
    pub fn keeper_socket(&self) -> PathBuf {
        self.runtime_dir.join(KEEPER_NAME)
    }

    /// Returns the path of a VM's ivshmem socket.
    pub fn vm_socket(&self, name: &Name) -> PathBuf {
        self.runtime_dir.join(format!("{name}.sock"))
    }
}

impl Segment {
    /// Returns the names of all who share the segment: members and readers.
    pub fn sharers(&self) -> impl Iterator<Item = &Name> {
        self.members.iter().chain(&self.readers)
    }

    /// Returns the folder that the administrator has named for its file.
    pub fn named_folder(&self) -> &Path {
        self.folder.as_deref().unwrap_or(&self.path).parent().unwrap_or(Path::new("/"))
    }

    /// Returns the same segment with its file where older daemons made it. Its file must not be there already.
    pub fn at_old_place(&self) -> Self {
        let folder = self.named_folder();
        let old = |path: &Path| {
            let mut name = OsString::from("ginnel-");
            name.push(path.file_name().unwrap_or_default());
            folder.join(name)
        };
        Self {
            path: old(&self.path),
            shared_file: self.shared_file.as_deref().map(old),
            folder: None,
            ..self.clone()
        }
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
            return Err(Problem::new(place, format!("{what} {name:?} is listed twice"), "remove one"));
        }
    }
    Ok(names)
}

fn checked_name(text: &str, place: &str) -> Result<Name, Problem> {
    let name = Name::new(text)
        .map_err(|error| Problem::new(place, format!("{text:?}: {error}"), "choose another name"))?;
    // `SERVICE@MEMBER` is how a program names a listener of a particular member.
    if text.contains('@') {
        return Err(Problem::new(place, format!("{text:?} contains @"), "choose a name without it"));
    }
    Ok(name)
}

#[cfg(test)]
mod tests;
