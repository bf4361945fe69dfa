//! The memory that the cgroups of this process leave to it.
//!
//! The memory of a file on a tmpfs is charged to the cgroup of the process that allocates it. If a cgroup has less than the file needs,
//! the kernel does not refuse the allocation: it kills a process of the cgroup, perhaps this daemon. So the daemon looks first.
//!
//! A limit holds for a cgroup and all those below it. In a container, the paths that the kernel shows may begin at other places than the
//! mounts, and a path or a name on the way may not be visible. Then the cgroup is found by its processes, and if it is not, the
//! topmost cgroup of the mount counts, because that is what the container was given.
//!
//! Memory that the kernel can take back counts as free: pages of files on disks, and
//! what can go to swap space.

use ginnel_config::{Bytes, Problem};
use std::ffi::OsString;
use std::fs::read_to_string;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// What the daemon itself may need meanwhile, in bytes.
const OWN: u64 = 8 << 20;

/// A larger limit is none: cgroups of version 1 have a huge number instead of a word for "none".
const UNLIMITED: u64 = 1 << 60;

/// How many cgroups are looked through for the one of this process.
const SEARCH: usize = 4096;

/// The limit of a cgroup.
#[derive(Debug, PartialEq, Eq)]
pub struct Limit {
    /// The file that contains the limit.
    pub file: PathBuf,
    pub bytes: u64,
    /// How much is left of it, in bytes.
    pub left: u64,
}

/// The names of the files and counters of a version of cgroups.
struct Version {
    limit: &'static str,
    used: &'static str,
    /// The limit and the use of swap space. In version 1 they include memory.
    swap: [&'static str; 2],
    swap_has_memory: bool,
    /// Counters of memory that can be taken back, in `memory.stat`.
    spare: &'static [&'static str],
}

const V1: Version = Version {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    swap: ["memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"],
    swap_has_memory: true,
    spare: &["total_inactive_file", "total_active_file"],
};

const V2: Version = Version {
    limit: "memory.max",
    used: "memory.current",
    swap: ["memory.swap.max", "memory.swap.current"],
    swap_has_memory: false,
    spare: &["inactive_file", "active_file", "slab_reclaimable"],
};

/// Checks that this process can allocate `bytes` bytes for what `place` declares.
pub fn check(bytes: u64, place: &str) -> Result<(), Problem> {
    check_below(Path::new("/"), bytes, place)
}

/// Does the same by what a model of `/` says.
fn check_below(root: &Path, bytes: u64, place: &str) -> Result<(), Problem> {
    let Some(limit) = tightest(root) else { return Ok(()) };
    if bytes.saturating_add(OWN) <= limit.left {
        return Ok(());
    }
    // What is left changes all the time. A message that does not name it is logged once.
    let what = format!(
        "{} of memory are to be allocated, and less is left of the {} that {} allows",
        Bytes(bytes),
        Bytes(limit.bytes),
        limit.file.display()
    );
    let fix = "raise this limit of the daemon's cgroup (MemoryMax= of its systemd unit), or make the segment smaller";
    Err(Problem::new(place, what, fix))
}

/// Returns the limit of which the least is left. `root` is `/`, or its model.
pub fn tightest(root: &Path) -> Option<Limit> {
    let own = read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let swap = free_swap(root);
    let limits = mounts.lines().filter_map(|line| hierarchy(line, &own));
    let limits = limits.flat_map(|(version, top, place)| {
        let folder = match place {
            Place::Known(below) => top.join(below),
            Place::Hidden { levels, below } => search(root, &top, levels, &below).unwrap_or(top.clone()),
        };
        // From the cgroup itself up to the top.
        let folders: Vec<PathBuf> =
            folder.ancestors().take_while(|at| at.starts_with(&top)).map(Path::to_owned).collect();
        folders.into_iter().filter_map(move |folder| limit(root, &folder, version, swap))
    });
    limits.min_by_key(|limit| limit.left)
}

/// Where the cgroup of this process is below a mount.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Known(PathBuf),
    /// It is `below` a folder that is this many levels deep, of which the names are not known.
    Hidden {
        levels: usize,
        below: PathBuf,
    },
}

/// Returns the version of cgroups that a line of `mountinfo` mounts, if it has limits of memory, its mount point, and where this process's
/// cgroup is below that. `own` is the text of `/proc/self/cgroup`.
fn hierarchy(line: &str, own: &str) -> Option<(&'static Version, PathBuf, Place)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ').skip(3);
    let (mounted, at) = (unescaped(fields.next()?), unescaped(fields.next()?));
    let mut system = system.split(' ');
    let (kind, options) = (system.next()?, system.nth(1)?);
    let has_memory = |names: &str| names.split(',').any(|name| name == "memory");
    // Each line of `own` is `number:controllers:path`; version 2 has the number 0 and no controllers.
    let mut lines = own.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let (version, path) = match kind {
        "cgroup2" => (&V2, lines.find(|(controllers, _)| controllers.is_empty())?.1),
        "cgroup" if has_memory(options) => (&V1, lines.find(|(controllers, _)| has_memory(controllers))?.1),
        _ => return None,
    };
    Some((version, at, place(&mounted, Path::new(path))))
}

/// Returns where the cgroup `own` is below a mount of the cgroup `mounted`. Both paths begin at the root of this process's cgroup
/// namespace, and with `..` if they lead out of it.
fn place(mounted: &Path, own: &Path) -> Place {
    let up = |path: &Path| path.components().filter(|part| *part == Component::ParentDir).count();
    let below = |path: &Path| path.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    let (mounted_up, own_up): (usize, usize) = (up(mounted), up(own));
    let mounted_below: PathBuf = below(mounted);
    if mounted_up > own_up && mounted_below.as_os_str().is_empty() {
        return Place::Hidden { levels: mounted_up - own_up, below: below(own) };
    }
    // A container may see only its own part of the tree, or another one. A path outside that part begins with `..`.
    let rest = own.strip_prefix(mounted).ok().filter(|rest| !rest.starts_with(".."));
    Place::Known(rest.unwrap_or(Path::new("")).to_owned())
}

/// Returns the folder of this process's cgroup, which is `below` a folder this many levels below `top`.
fn search(root: &Path, top: &Path, levels: usize, below: &Path) -> Option<PathBuf> {
    let is_own = |folder: &PathBuf| {
        let own = std::process::id().to_string();
        let processes = read_to_string(in_root(root, folder).join("cgroup.procs"));
        processes.is_ok_and(|processes| processes.lines().any(|process| process == own))
    };
    let mut folders = vec![top.to_owned()];
    for _ in 0..levels {
        let entries = folders.iter().flat_map(|folder| {
            let entries = in_root(root, folder).read_dir().into_iter().flatten().flatten();
            let entries = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            entries.map(|entry| folder.join(entry.file_name()))
        });
        folders = entries.take(SEARCH).collect();
    }
    folders.into_iter().map(|folder| folder.join(below)).find(is_own)
}

/// Returns a path of a line of `mountinfo`. The kernel writes spaces and the like as a backslash and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(&part.as_bytes()[3..]);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend(part.as_bytes());
            }
        }
    }
    OsString::from_vec(bytes).into()
}

/// Returns the place of a path in the model of `/`.
fn in_root(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the limit of the cgroup with this folder, if it has one.
fn limit(root: &Path, folder: &Path, version: &Version, free_swap: u64) -> Option<Limit> {
    let at = in_root(root, folder);
    // "max" is no number.
    let number = |name: &str| read_to_string(at.join(name)).ok()?.trim().parse::<u64>().ok();
    let bytes = number(version.limit).filter(|bytes| *bytes < UNLIMITED)?;
    let stat = read_to_string(at.join("memory.stat")).unwrap_or_default();
    let spare = stat.lines().filter_map(|line| line.split_once(' '));
    let spare = spare.filter(|(name, _)| version.spare.contains(name));
    let spare: u64 = spare.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum();
    let left_of = |bytes: u64, used: &str| bytes.saturating_sub(number(used).unwrap_or(0));
    let memory = left_of(bytes, version.used).saturating_add(spare);
    let [swap_limit, swap_used] = version.swap;
    let swap = number(swap_limit).map(|bytes| left_of(bytes, swap_used));
    let left = match swap {
        Some(both) if version.swap_has_memory => {
            memory.saturating_add(free_swap).min(both.saturating_add(spare))
        }
        Some(swap) => memory.saturating_add(free_swap.min(swap)),
        None => memory.saturating_add(free_swap),
    };
    Some(Limit { file: folder.join(version.limit), bytes, left })
}

/// Returns the free swap space of the machine, in bytes.
fn free_swap(root: &Path) -> u64 {
    let text = read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    const MIB: u64 = 1 << 20;

    /// A model of `/`.
    struct Root(TempDir);

    impl Root {
        fn new(own: &str, mounts: &str) -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            root.file("proc/self/cgroup", own);
            root.file("proc/self/mountinfo", mounts);
            root
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        /// Returns the file of the tightest limit, the limit, and what is left, in MiB.
        fn tightest(&self) -> Option<(String, u64, u64)> {
            let limit = tightest(self.0.path())?;
            Some((limit.file.display().to_string(), limit.bytes / MIB, limit.left / MIB))
        }
    }

    const UNIFIED: &str = "25 1 0:23 / /proc rw - proc proc rw\n30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn unified() -> Root {
        Root::new("0::/system.slice/ginneld.service\n", UNIFIED)
    }

    fn mib(n: u64) -> String {
        format!("{}\n", n * MIB)
    }

    #[test]
    fn the_tightest_cgroup_counts() {
        let root = unified();
        assert_eq!(root.tightest(), None);
        let (unit, slice) = ("sys/fs/cgroup/system.slice/ginneld.service", "sys/fs/cgroup/system.slice");
        root.file(&format!("{unit}/memory.max"), "max\n");
        root.file(&format!("{unit}/memory.current"), &mib(10));
        assert_eq!(root.tightest(), None);
        root.file(&format!("{slice}/memory.max"), &mib(1000));
        root.file(&format!("{slice}/memory.current"), &mib(600));
        let slice = "/sys/fs/cgroup/system.slice/memory.max".to_owned();
        assert_eq!(root.tightest(), Some((slice.clone(), 1000, 400)));
        root.file(&format!("{unit}/memory.max"), &mib(64));
        assert_eq!(root.tightest(), Some((format!("/{unit}/memory.max"), 64, 54)));
        root.file(&format!("{unit}/memory.max"), &mib(500));
        assert_eq!(root.tightest(), Some((slice, 1000, 400)));
    }

    #[test]
    fn what_can_be_taken_back_is_free() {
        let root = unified();
        let unit = "sys/fs/cgroup/system.slice/ginneld.service";
        root.file(&format!("{unit}/memory.max"), &mib(64));
        root.file(&format!("{unit}/memory.current"), &mib(60));
        let stat = format!("file {}inactive_file {}active_file {}", mib(50), mib(20), mib(10));
        root.file(&format!("{unit}/memory.stat"), &stat);
        assert_eq!(root.tightest().unwrap().2, 34);
        root.file("proc/meminfo", "SwapTotal: 9999999 kB\nSwapFree:   102400 kB\n");
        assert_eq!(root.tightest().unwrap().2, 134);
        root.file(&format!("{unit}/memory.swap.max"), &mib(50));
        root.file(&format!("{unit}/memory.swap.current"), &mib(45));
        assert_eq!(root.tightest().unwrap().2, 39);
        root.file(&format!("{unit}/memory.swap.max"), "0\n");
        assert_eq!(root.tightest().unwrap().2, 34);
    }

    #[test]
    fn version_1_has_a_hierarchy_for_memory() {
        let mounts = "31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let root = Root::new("4:memory:/a/b\n2:cpu,cpuacct:/x\n0::/\n", mounts);
        let top = "sys/fs/cgroup/memory";
        root.file(&format!("{top}/memory.limit_in_bytes"), "9223372036854771712\n");
        root.file(&format!("{top}/a/b/memory.limit_in_bytes"), "9223372036854771712\n");
        assert_eq!(root.tightest(), None);
        root.file(&format!("{top}/a/memory.limit_in_bytes"), &mib(100));
        root.file(&format!("{top}/a/memory.usage_in_bytes"), &mib(70));
        root.file(
            &format!("{top}/a/memory.stat"),
            &format!("inactive_file 0\ntotal_inactive_file {}", mib(5)),
        );
        root.file("proc/meminfo", "SwapFree: 102400 kB\n");
        let file = format!("/{top}/a/memory.limit_in_bytes");
        assert_eq!(root.tightest(), Some((file.clone(), 100, 135)));
        root.file(&format!("{top}/a/memory.memsw.limit_in_bytes"), &mib(110));
        root.file(&format!("{top}/a/memory.memsw.usage_in_bytes"), &mib(72));
        assert_eq!(root.tightest(), Some((file, 100, 43)));
    }

    #[test]
    fn a_container_sees_a_part_of_the_tree() {
        let root = Root::new("0::/docker/1f/ginnel\n", &UNIFIED.replace("0:26 /", "0:26 /docker/1f"));
        root.file("sys/fs/cgroup/ginnel/memory.max", &mib(32));
        assert_eq!(root.tightest(), Some(("/sys/fs/cgroup/ginnel/memory.max".into(), 32, 32)));
        // The process is outside the part that it sees.
        let root = Root::new("0::/../other\n", UNIFIED);
        root.file("sys/fs/cgroup/memory.max", &mib(32));
        assert_eq!(root.tightest(), Some(("/sys/fs/cgroup/memory.max".into(), 32, 32)));
    }

    #[test]
    fn a_container_whose_mount_begins_above_it_is_found_by_its_processes() {
        let mount = |root: &str| UNIFIED.replace("0:26 /", &format!("0:26 {root}"));
        let root = Root::new("0::/\n", &mount("/../.."));
        root.file("sys/fs/cgroup/other/1f/memory.max", &mib(16));
        root.file("sys/fs/cgroup/other/1f/cgroup.procs", "");
        root.file("sys/fs/cgroup/docker/2f/memory.max", &mib(32));
        root.file("sys/fs/cgroup/docker/2f/cgroup.procs", "");
        assert_eq!(root.tightest(), None);
        root.file("sys/fs/cgroup/docker/2f/cgroup.procs", &format!("1\n{}\n", std::process::id()));
        assert_eq!(root.tightest(), Some(("/sys/fs/cgroup/docker/2f/memory.max".into(), 32, 32)));
        root.file("sys/fs/cgroup/docker/memory.max", &mib(30));
        assert_eq!(root.tightest(), Some(("/sys/fs/cgroup/docker/memory.max".into(), 30, 30)));
        // It is below the root of its cgroup namespace.
        let root = Root::new("0::/ginnel\n", &mount("/.."));
        root.file("sys/fs/cgroup/1f/ginnel/cgroup.procs", &format!("{}\n", std::process::id()));
        root.file("sys/fs/cgroup/1f/ginnel/memory.max", &mib(32));
        assert_eq!(root.tightest(), Some(("/sys/fs/cgroup/1f/ginnel/memory.max".into(), 32, 32)));
    }

    #[test]
    fn the_topmost_cgroup_of_the_mount_counts_for_what_is_not_below_it() {
        for (own, mounted) in [
            ("/docker/1f", "/"),
            ("/docker/1f", "/docker/1f"),
            ("/docker/1f", "/docker/2f"),
            ("/../2f", "/"),
            ("/", "/.."),
            ("/", "/../2f"),
            ("/../..", "/../../x"),
        ] {
            let root =
                Root::new(&format!("0::{own}\n"), &UNIFIED.replace("0:26 /", &format!("0:26 {mounted}")));
            root.file("sys/fs/cgroup/memory.max", &mib(32));
            let top = Some(("/sys/fs/cgroup/memory.max".into(), 32, 32));
            assert_eq!(root.tightest(), top, "{own}, {mounted}");
        }
    }

    #[test]
    fn a_path_has_spaces() {
        let mounts = UNIFIED.replace("/sys/fs/cgroup", "/mnt/c\\040g").replace("0:26 /", "0:26 /a\\040b");
        let root = Root::new("0::/a b/c\n", &mounts);
        root.file("mnt/c g/c/memory.max", &mib(32));
        assert_eq!(root.tightest(), Some(("/mnt/c g/c/memory.max".into(), 32, 32)));
        assert_eq!(unescaped("\\04\\é\\777\\134"), Path::new("\\04\\é\\777\\"));
    }

    #[test]
    fn any_text_is_read() {
        for text in
            ["", "\n", "0", "0::", "::", "x y - z", "1 2 3 / / rw - cgroup2 c rw", " - cgroup a memory"]
        {
            assert_eq!(Root::new(text, text).tightest(), None, "{text}");
        }
    }

    #[test]
    fn a_segment_has_what_the_daemon_leaves_of_the_limit() {
        let root = unified();
        let unit = "sys/fs/cgroup/system.slice/ginneld.service";
        root.file(&format!("{unit}/memory.max"), &mib(100));
        root.file(&format!("{unit}/memory.current"), &mib(10));
        let left = tightest(root.0.path()).unwrap().left;
        assert!(check_below(root.0.path(), left - OWN, "segment.web").is_ok());
        let problem = check_below(root.0.path(), left - OWN + 1, "segment.web").unwrap_err().to_string();
        for part in ["segment.web", "100M", "ginneld.service/memory.max", "MemoryMax="] {
            assert!(problem.contains(part), "{problem}");
        }
    }
}
