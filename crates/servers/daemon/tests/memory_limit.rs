//! A cgroup with less memory than the segments need: the daemon serves all others and says which limit is too small. It is not killed.

use kit::daemon::*;
use kit::wait::wait_for;
use std::path::{Path, PathBuf};
use std::process::Command;

kit::test_that_skips_are_seen!();

const MIB: u64 = 1 << 20;

/// A cgroup with a limit of memory, which exists as long as this value.
struct Cgroup {
    folder: PathBuf,
    limit: PathBuf,
}

impl Cgroup {
    /// Makes a cgroup of either version. Returns `None` if this machine or this user has none.
    fn new(name: &str, bytes: u64) -> Option<Self> {
        let tops = [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/unified", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ];
        tops.iter().find_map(|(top, limit)| {
            let folder = Path::new(top).join(format!("ginnel-test-{}-{name}", std::process::id()));
            std::fs::create_dir(&folder).ok()?;
            // The guard removes the folder if it has no limit.
            let cgroup = Self { limit: folder.join(limit), folder };
            cgroup.set(bytes).ok().map(|()| cgroup)
        })
    }

    fn set(&self, bytes: u64) -> std::io::Result<()> {
        // Opened without O_CREAT: a folder that is no cgroup has no such file.
        let mut file = std::fs::OpenOptions::new().write(true).open(&self.limit)?;
        std::io::Write::write_all(&mut file, bytes.to_string().as_bytes())
    }

    /// Returns a command that is run inside.
    fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(self.folder.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args());
        inside
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last process may be about to end.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn a_segment_that_the_cgroup_has_no_memory_for_is_out_of_service() {
    let cgroup = Cgroup::new("own", 64 * MIB);
    kit::require!(cgroup.is_some(), "no cgroup with a limit of memory can be made here");
    let cgroup = cgroup.unwrap();
    let mut daemon = Daemon::prepare(
        "",
        "[segment.large]\nsize = \"256M\"\nmembers = [\"host\"]\n\
         [segment.web]\nsize = \"16M\"\nmembers = [\"host\"]\n",
    );
    daemon.start_by(cgroup.inside(&daemon.command()));
    // The other segment is served.
    drop(daemon.attach("web", "a"));
    let segment = |daemon: &Daemon| daemon.inspect()["segments"][0].clone();
    let large = segment(&daemon);
    let why = large["broken_why"].as_str().unwrap_or_default();
    let limit = cgroup.limit.display().to_string();
    for part in ["segment.large", "256M of memory", "the 64M that", &limit, "MemoryMax="] {
        assert!(why.contains(part), "{part} is missing in {why:?}: {}", daemon.log());
    }
    assert_eq!((&large["name"], large["size"].as_u64()), (&"large".into(), Some(256 * MIB)));
    let log = daemon.log();
    assert!(log.contains("segment out of service") && log.contains(&limit), "{log}");
    assert!(!daemon.shm("large").exists());

    // What exists needs no memory when the daemon starts again, and the daemon goes on by itself when the limit is raised.
    daemon.kill();
    daemon.start_by(cgroup.inside(&daemon.command()));
    drop(daemon.attach("web", "a"));
    cgroup.set(512 * MIB).unwrap();
    wait_for("the large segment", || (segment(&daemon)["broken"] == false).then_some(()));
    assert_eq!(segment(&daemon)["size"].as_u64(), Some(256 * MIB));
    drop(daemon.attach("large", "a"));
}

/// In a container with its own cgroup namespace, and with the cgroups of the host, the kernel does not tell the name of the own cgroup.
#[test]
fn a_container_with_the_cgroups_of_the_host_finds_its_limit() {
    let cgroup = Cgroup::new("container", 64 * MIB);
    kit::require!(cgroup.is_some(), "no cgroup with a limit of memory can be made here");
    let cgroup = cgroup.unwrap();
    let separates =
        Command::new("unshare").args(["--cgroup", "true"]).output().is_ok_and(|o| o.status.success());
    kit::require!(separates, "no cgroup namespace can be made here (unshare)");
    let mut daemon = Daemon::prepare("", "[segment.large]\nsize = \"256M\"\nmembers = [\"host\"]\n");
    let command = daemon.command();
    let mut container = Command::new("unshare");
    container.arg("--cgroup").arg(command.get_program()).args(command.get_args());
    daemon.start_by(cgroup.inside(&container));
    let large = daemon.inspect()["segments"][0].clone();
    let why = large["broken_why"].as_str().unwrap_or_default();
    let limit = cgroup.limit.display().to_string();
    assert!(why.contains(&limit), "{limit} is missing in {why:?}: {}", daemon.log());
}
