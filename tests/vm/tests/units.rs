//! The units under a real systemd, which has its own process ids, mounts, network and cgroup hierarchy. The units start,
//! outlive a kill and stop, and confine their processes as configured.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtest::{Exit, HostJob, Output, TestBed, artifact, wait_until};

kit::test_that_skips_are_seen!();

const PROMPT: Duration = Duration::from_secs(60);

/// A running systemd and the means to control it.
struct Systemd<'b> {
    bed: &'b TestBed,
    place: PathBuf,
    /// A cgroup (version 2) of its own, which is the root of the hierarchy that this systemd sees.
    cgroup: PathBuf,
    pid: u32,
    job: Arc<HostJob>,
}

impl<'b> Systemd<'b> {
    fn start(bed: &'b TestBed) -> Result<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let built = ["ginneld", "ginnel", "ginnel-volume", "ginnel-cache"]
            .into_iter()
            .map(artifact)
            .collect::<Result<Vec<_>>>()?;
        let place = bed.dir().join("systemd");
        fs::create_dir(&place)?;
        let cgroup = cgroups().context("a hierarchy")?.join(format!("ginnel-units-{}", std::process::id()));
        let command = format!(
            "mkdir {cgroup} && echo $$ > {cgroup}/cgroup.procs && \
             exec unshare --mount --pid --cgroup --uts --ipc --net --fork --kill-child \
             {source}/tests/vm/tests/units/boot.sh {built} {source} {place}",
            cgroup = cgroup.display(),
            source = source.display(),
            built = built[0].parent().context("a folder")?.display(),
            place = place.display(),
        );
        let job = bed.host_spawn(&command)?;
        let mut systemd = Self { bed, place, cgroup, pid: 0, job };
        let booted = wait_until("systemd is running", PROMPT, || {
            ensure!(systemd.job.is_running(), "it has ended");
            if systemd.pid == 0 {
                // At first the parent is a shell with children of its own.
                let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", systemd.job.pid()))?;
                let name = |pid: &&str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let found = children.split_whitespace().find(|pid| name(pid).trim() == "systemd");
                systemd.pid = found.map_or(Ok(0), str::parse)?;
            }
            // The state may also be `degraded`, if a unit of the host cannot run here.
            Ok(systemd.pid != 0 && ["running", "degraded"].contains(&systemd.state()?.as_str()))
        });
        booted.with_context(|| format!("it is {:?}; {:?}", systemd.state(), systemd.job.said()))?;
        Ok(systemd)
    }

    fn state(&self) -> Result<String> {
        Ok(self.run("systemctl is-system-running")?.stdout.trim().to_owned())
    }

    /// Runs a command inside.
    fn run(&self, command: &str) -> Result<Output> {
        self.bed.host(&format!("exec nsenter -t {} -m -p -C -n -i -u {command}", self.pid))
    }

    /// Runs a command with the mounts of a process inside.
    fn run_as(&self, pid: &str, command: &str) -> Result<Output> {
        self.run(&format!("nsenter -t {pid} -m {command}"))
    }

    fn show(&self, unit: &str, property: &str) -> Result<String> {
        Ok(self.run(&format!("systemctl show -P {property} {unit}"))?.ok()?.stdout.trim().to_owned())
    }

    fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.place.join("etc").join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(fs::write(path, text)?)
    }

    /// Starts a unit, and returns the id of its process.
    fn start_unit(&self, unit: &str) -> Result<String> {
        let said = self.run(&format!("systemctl start {unit}"))?;
        ensure!(said.exit == Exit::Code(0), "{unit}: {}", self.journal(unit)?);
        ensure!(self.show(unit, "ActiveState")? == "active", "{unit} is not active");
        self.show(unit, "MainPID")
    }

    /// Kills the process of a unit, and waits for the next one. Returns its id.
    fn kill_unit(&self, unit: &str) -> Result<String> {
        let (old, begin) = (self.show(unit, "MainPID")?, Instant::now());
        self.run(&format!("kill -9 {old}"))?.ok()?;
        wait_until("the unit is active again", PROMPT, || {
            let pid = self.show(unit, "MainPID")?;
            Ok(pid != "0" && pid != old && self.show(unit, "ActiveState")? == "active")
        })?;
        println!("{unit}: active again within {:?} of a kill", begin.elapsed());
        ensure!(self.show(unit, "NRestarts")? == "1");
        self.show(unit, "MainPID")
    }

    fn stop_unit(&self, unit: &str) -> Result<()> {
        self.run(&format!("systemctl stop {unit}"))?.ok()?;
        let end =
            [self.show(unit, "ActiveState")?, self.show(unit, "Result")?, self.show(unit, "ExecMainStatus")?];
        ensure!(end == ["inactive", "success", "0"], "{unit}: {end:?}");
        Ok(())
    }

    /// Starts a unit with a configuration that makes no sense. The unit must report the mistake, and systemd must not start it
    /// again and again.
    fn refuse_unit(&self, unit: &str, mistake: &str) -> Result<()> {
        ensure!(self.run(&format!("systemctl start {unit}"))?.exit != Exit::Code(0), "{unit} has started");
        wait_until("the unit has failed", PROMPT, || Ok(self.show(unit, "ActiveState")? == "failed"))?;
        ensure!(self.show(unit, "ExecMainStatus")? == "2" && self.show(unit, "NRestarts")? == "0");
        let said = self.journal(unit)?;
        ensure!(said.contains(mistake), "{said}");
        Ok(())
    }

    fn journal(&self, unit: &str) -> Result<String> {
        self.run("journalctl --sync")?;
        Ok(self.run(&format!("journalctl -o cat -u {unit}"))?.stdout)
    }
}

impl Drop for Systemd<'_> {
    fn drop(&mut self) {
        let _ = self.job.kill(9).and_then(|()| self.job.wait(PROMPT));
        // Its processes end with it, some moments later.
        let _ = wait_until("its cgroup is empty", PROMPT, || Ok(remove_cgroup(&self.cgroup).is_ok()));
    }
}

fn remove_cgroup(cgroup: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

/// Returns the root of the cgroup hierarchy of version 2.
fn cgroups() -> Option<&'static Path> {
    let mut roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].into_iter().map(Path::new);
    roots.find(|root| root.join("cgroup.procs").exists())
}

/// Checks what a unit must not be able to do to the system, even as root with the mounts of its process.
fn is_held(systemd: &Systemd<'_>, pid: &str) -> Result<()> {
    for path in ["/etc/x", "/usr/local/x", "/run/x", "/sys/x", "/root/x", "/home/x"] {
        let said = systemd.run_as(pid, &format!("touch {path}"))?;
        ensure!(said.exit != Exit::Code(0), "{path} can be written");
    }
    let network = |pid: &str| anyhow::Ok(systemd.run(&format!("readlink /proc/{pid}/ns/net"))?.ok()?.stdout);
    ensure!(network(pid)? != network("1")?, "it has the system's network");
    Ok(())
}

/// Returns the words of a line of `/proc/PID/status`.
fn status(systemd: &Systemd<'_>, pid: &str, key: &str) -> Result<Vec<String>> {
    let said = systemd.run(&format!("cat /proc/{pid}/status"))?.ok()?.stdout;
    let line = said.lines().find_map(|line| line.strip_prefix(key)).context("a line of status")?;
    Ok(line.trim_start_matches(':').split_whitespace().map(str::to_owned).collect())
}

#[test]
fn the_units_run_under_systemd() -> Result<()> {
    kit::require!(rustix::process::geteuid().is_root(), "namespaces need root");
    kit::require!(Path::new("/lib/systemd/systemd").exists(), "no systemd (package systemd)");
    kit::require!(cgroups().is_some(), "no cgroups of version 2");
    let bed = TestBed::new("units")?;
    let systemd = Systemd::start(&bed)?;
    volume(&systemd)?;
    nvme_volume(&systemd)?;
    host_daemon(&systemd)?;
    cache(&systemd)?;
    own_users(&systemd)?;
    links(&systemd)?;
    devices(&systemd)?;
    own_file_system(&systemd)?;
    for unit in [
        "run-ginnel.mount",
        "ginnel-volume@data.service",
        "ginnel-volume@own.service",
        "ginnel-volume-holder@fast.service",
        "ginneld.service",
        "ginneld-guest.service",
        "ginnel-cache@main.service",
        "ginnel-cache@own.service",
    ] {
        let said = systemd.run(&format!("systemd-analyze verify --man=no {unit}"))?;
        ensure!(said.exit == Exit::Code(0) && said.stderr.is_empty(), "{said:?}");
        if unit.ends_with(".mount") {
            continue;
        }
        let score = systemd.run(&format!("systemd-analyze security --no-pager {unit}"))?.stdout;
        println!("{}", score.lines().last().unwrap_or_default());
    }
    Ok(())
}

fn volume(systemd: &Systemd<'_>) -> Result<()> {
    let unit = "ginnel-volume@data";
    systemd.write("ginnel/volumes/bad.toml", "queues = 0\n[[disk]]\npath = '/x'\n")?;
    systemd.refuse_unit("ginnel-volume@bad", "queues: 0 is not in 1 to 256")?;
    let config = "user = 'ginnel-volume'\nsandbox = 'require'\n[[disk]]\npath = '/var/lib/ginnel/data.img'\nsize = '64M'\n";
    systemd.write("ginnel/volumes/data.toml", config)?;
    systemd.run("install -d -m 700 /var/lib/ginnel")?.ok()?;
    systemd.run("truncate -s 64M /var/lib/ginnel/data.img")?.ok()?;
    let pid = systemd.start_unit(unit)?;

    // The process has no privileges and cannot gain any. Its own sandbox is the subject of other tests.
    let user = systemd.run("id -u ginnel-volume")?.ok()?.stdout.trim().to_owned();
    ensure!(status(systemd, &pid, "Uid")? == vec![user.clone(); 4], "its user");
    for set in ["CapPrm", "CapEff", "CapAmb"] {
        ensure!(status(systemd, &pid, set)? == ["0000000000000000"], "{set}");
    }
    ensure!(status(systemd, &pid, "NoNewPrivs")? == ["1"] && status(systemd, &pid, "Seccomp")? == ["2"]);
    ensure!(systemd.journal(unit)?.contains("sandbox=\"landlock+seccomp\""), "{}", systemd.journal(unit)?);
    is_held(systemd, &pid)?;

    // A front end keeps its disk over a kill, and over a stop and a start.
    let socket = format!("/proc/{}/root/run/ginnel/volumes/data.sock", systemd.pid);
    let bench = artifact("ginnel-volume-bench")?;
    let seconds = 8;
    let load = systemd.bed.host_spawn(&format!(
        "exec {} --socket {socket} --rw randrw --verify --flush-every 64 --reconnect 30 --seconds {seconds}",
        bench.display()
    ))?;
    let served = || {
        let said = systemd.run("/usr/local/bin/ginnel volume stat data --json")?.stdout;
        let stat = serde_json::from_str::<serde_json::Value>(&said).unwrap_or_default();
        ensure!(load.is_running(), "the load has ended: {:?}", load.said());
        Ok(stat["front_end"].is_object())
    };
    wait_until("the volume has a front end", PROMPT, served)?;
    // Nobody but root may list the folder of the sockets.
    let ordinary = "setpriv --reuid=65534 --clear-groups";
    ensure!(systemd.run(&format!("{ordinary} ls /run/ginnel/volumes"))?.exit != Exit::Code(0));
    let list = systemd.run(&format!("{ordinary} /usr/local/bin/ginnel volume list"))?.ok()?.stdout;
    ensure!(list.contains("data"), "{list}");
    systemd.kill_unit(unit)?;
    wait_until("the front end is back", PROMPT, served)?;
    systemd.stop_unit(unit)?;
    ensure!(systemd.journal(unit)?.contains("what was under way is done"), "{}", systemd.journal(unit)?);
    systemd.start_unit(unit)?;
    load.wait(PROMPT)?.ok()?;
    systemd.stop_unit(unit)
}

/// The two halves of an nvme volume: the engine may end in any way, the holder stays, and both go when the holder is stopped.
fn nvme_volume(systemd: &Systemd<'_>) -> Result<()> {
    let (engine, holder) = ("ginnel-volume@fast", "ginnel-volume-holder@fast");
    systemd.refuse_unit("ginnel-volume-holder@data", "a volume with device = \"blk\" has no holder")?;
    let config = "device = 'nvme'\nuser = 'ginnel-volume'\nsandbox = 'require'\n\
                  [[disk]]\npath = '/var/lib/ginnel/fast.img'\nsize = '64M'\n";
    systemd.write("ginnel/volumes/fast.toml", config)?;
    systemd.run("truncate -s 64M /var/lib/ginnel/fast.img")?.ok()?;
    systemd.run(&format!("systemctl enable {holder}"))?.ok()?;
    // The engine brings its holder along.
    let pid = systemd.start_unit(engine)?;
    let held = systemd.show(holder, "MainPID")?;
    let user = systemd.run("id -u ginnel-volume")?.ok()?.stdout.trim().to_owned();
    for pid in [&pid, &held] {
        ensure!(status(systemd, pid, "Uid")? == vec![user.clone(); 4], "its user");
        ensure!(
            status(systemd, pid, "CapEff")? == ["0000000000000000"]
                && status(systemd, pid, "Seccomp")? == ["2"]
        );
        is_held(systemd, pid)?;
    }
    systemd.kill_unit(engine)?;
    systemd.stop_unit(engine)?;
    ensure!(systemd.show(holder, "MainPID")? == held, "the holder has not outlived its engines");
    systemd.start_unit(engine)?;

    // If the holder dies, so does the engine, and both are started again.
    let old = systemd.show(engine, "MainPID")?;
    systemd.kill_unit(holder)?;
    wait_until("the engine has attached to the next holder", PROMPT, || {
        Ok(systemd.show(engine, "MainPID")? != old && systemd.show(engine, "ActiveState")? == "active")
    })?;
    systemd.stop_unit(holder)?;
    ensure!(systemd.show(engine, "ActiveState")? == "inactive", "the engine outlives an operator's stop");
    systemd.run(&format!("systemctl disable {holder}"))?.ok()?;
    Ok(())
}

fn host_daemon(systemd: &Systemd<'_>) -> Result<()> {
    systemd.write("ginnel/ginneld.toml", "nonsense = 1\n")?;
    systemd.refuse_unit("ginneld", "nonsense")?;
    systemd.write("ginnel/ginneld.toml", "[vm.a]\n[segment.s]\nsize = '16M'\nmembers = ['host', 'a']\n")?;
    let pid = systemd.start_unit("ginneld")?;
    is_held(systemd, &pid)?;
    systemd.kill_unit("ginneld")?;
    // A mistake in the configuration harms neither the descriptors that systemd stores, nor running programs.
    let good = "[vm.a]\n[segment.s]\nsize = '16M'\nmembers = ['host', 'a']\n";
    let status = || Ok::<_, anyhow::Error>(systemd.run("/usr/local/bin/ginnel status")?.ok()?.stdout);
    for mistake in ["mistake = 1\n", "[oops\n"] {
        systemd.write("ginnel/ginneld.toml", mistake)?;
        let old = systemd.show("ginneld", "MainPID")?;
        systemd.run(&format!("kill -9 {old}"))?.ok()?;
        wait_until("it serves", PROMPT, || {
            let pid = systemd.show("ginneld", "MainPID")?;
            Ok(pid != "0" && pid != old && systemd.show("ginneld", "ActiveState")? == "active")
        })?;
        let (said, told) = (status()?, systemd.show("ginneld", "StatusText")?);
        ensure!(said.contains("the configuration has a mistake") && said.contains("16 MiB"), "{said}");
        ensure!(told.contains("ginneld.toml"), "{told}");
    }
    ensure!(systemd.journal("ginneld")?.contains("accepted last is in effect"));
    systemd.write("ginnel/ginneld.toml", good)?;
    systemd.run("systemctl restart ginneld")?.ok()?;
    ensure!(!status()?.contains("mistake"), "{}", status()?);
    reload(systemd, good)?;
    // Without the configuration that was accepted last, the daemon waits.
    systemd.run("rm /var/lib/ginnel/accepted.toml")?.ok()?;
    systemd.write("ginnel/ginneld.toml", "mistake = 1\n")?;
    let old = systemd.show("ginneld", "MainPID")?;
    systemd.run(&format!("kill -9 {old}"))?.ok()?;
    wait_until("the daemon waits", PROMPT, || Ok(systemd.journal("ginneld")?.contains("waiting until")))?;
    let state = systemd.show("ginneld", "ActiveState")?;
    ensure!(state == "activating", "{state}: {}", systemd.journal("ginneld")?);
    systemd.write("ginnel/ginneld.toml", good)?;
    wait_until("it serves", PROMPT, || Ok(systemd.show("ginneld", "ActiveState")? == "active"))?;
    ensure!(systemd.journal("ginneld")?.matches("keeper started").count() == 0, "systemd is the keeper");
    let said = status()?;
    ensure!(said.contains("16 MiB"), "{said}");
    systemd.stop_unit("ginneld")
}

/// Checks that a running daemon obeys a new configuration, and that a mistake fails the reload.
fn reload(systemd: &Systemd<'_>, good: &str) -> Result<()> {
    let pid = systemd.show("ginneld", "MainPID")?;
    systemd.write("ginnel/ginneld.toml", &format!("{good}[vm.b]\nmistake = 1\n"))?;
    ensure!(systemd.run("systemctl reload ginneld")?.exit != Exit::Code(0), "a mistake is accepted");
    ensure!(systemd.journal("ginneld")?.contains("ginneld.toml:6"), "{}", systemd.journal("ginneld")?);
    systemd.write(
        "ginnel/ginneld.toml",
        &format!("{good}[vm.b]\n[segment.t]\nsize = '16M'\nmembers = ['b', 'host']\n"),
    )?;
    systemd.run("systemctl reload ginneld")?.ok()?;
    wait_until("the new segment", PROMPT, || {
        let said = systemd.run("/usr/local/bin/ginnel segment list")?.stdout;
        Ok(said.lines().any(|line| line.split_whitespace().next() == Some("t")))
    })?;
    wait_until("the unit is active", PROMPT, || Ok(systemd.show("ginneld", "ActiveState")? == "active"))?;
    ensure!(
        systemd.show("ginneld", "MainPID")? == pid && systemd.show("ginneld", "StatusText")? == "serving"
    );
    systemd.write("ginnel/ginneld.toml", good)?;
    systemd.run("systemctl reload ginneld")?.ok()?;
    wait_until("its end", PROMPT, || {
        Ok(systemd.journal("ginneld")?.contains("reloaded: segment.t is not declared any more"))
    })
}

/// Checks that a cache and a volume run as users of their own from their first instruction, with the drop-ins of the documentation.
fn own_users(systemd: &Systemd<'_>) -> Result<()> {
    for (kind, name) in [("cache", "own"), ("volume", "own"), ("volume", "fast"), ("volume-holder", "fast")] {
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../packaging/drop-ins/{kind}-user.conf"));
        let drop_in = format!("systemd/system/ginnel-{kind}@{name}.service.d/user.conf");
        systemd.write(&drop_in, &fs::read_to_string(source)?)?;
    }
    systemd.run("systemctl daemon-reload")?.ok()?;
    let is_ordinary = |unit: &str, user: &str, pid: &str| {
        let user = systemd.run(&format!("id -u {user}"))?.ok()?.stdout.trim().to_owned();
        ensure!(status(systemd, pid, "Uid")? == vec![user; 4], "{unit}: its user");
        for set in ["CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            ensure!(status(systemd, pid, set)? == ["0000000000000000"], "{unit}: {set}");
        }
        Ok(())
    };

    let config = "[segment.u]\nsize = '16M'\nmembers = ['host']\nallow_users = ['ginnel-cache']\n";
    systemd.write("ginnel/ginneld.toml", config)?;
    systemd.start_unit("ginneld")?;
    let unit = "ginnel-cache@own";
    let arguments = "--segment u --memory 8M --max-item-size 64K --unix /run/ginnel/caches/own/own.sock";
    systemd.write("ginnel/caches/own.env", &format!("ARGS={arguments}\n"))?;
    let pid = systemd.start_unit(unit)?;
    is_ordinary(unit, "ginnel-cache", &pid)?;
    let folders = systemd.run("stat -c '%U %a' /run/ginnel/caches /run/ginnel/caches/own")?.ok()?.stdout;
    ensure!(folders == "root 711\nginnel-cache 711\n", "{folders}");
    // It could not take the place of another cache.
    systemd.run("install -d -m 711 -o ginnel-cache /run/ginnel/caches/other")?.ok()?;
    let user = systemd.run("id -u ginnel-cache")?.ok()?.stdout;
    for (place, can) in [("own/other.sock", true), ("main.sock", false), ("other/other.sock", false)] {
        let made = format!("setpriv --reuid={} --clear-groups touch /run/ginnel/caches/{place}", user.trim());
        ensure!((systemd.run_as(&pid, &made)?.exit == Exit::Code(0)) == can, "{place}: {}", !can);
    }
    let cache = |what: &str| {
        Ok::<_, anyhow::Error>(systemd.run(&format!("/usr/local/bin/ginnel cache {what}"))?.ok()?.stdout)
    };
    cache("set u/own greeting hello")?;
    systemd.kill_unit(unit)?;
    // The daemon's successor knows the user too.
    systemd.kill_unit("ginneld")?;
    ensure!(cache("get u/own greeting")?.trim() == "hello");
    cache("--changes 'unix /run/ginnel/caches/own/own.sock' set u/own greeting again")?;
    systemd.stop_unit(unit)?;
    systemd.stop_unit("ginneld")?;

    let unit = "ginnel-volume@own";
    let config = "sandbox = 'require'\n[[disk]]\npath = '/var/lib/ginnel-volumes/own.img'\n";
    systemd.write("ginnel/volumes/own.toml", config)?;
    systemd.run("install -d -m 700 -o ginnel-volume -g ginnel-volume /var/lib/ginnel-volumes")?.ok()?;
    systemd.run("truncate -s 64M /var/lib/ginnel-volumes/own.img")?.ok()?;
    systemd.run("chown ginnel-volume: /var/lib/ginnel-volumes/own.img")?.ok()?;
    // One of root's runs beside it, and keeps its sockets and its lock.
    systemd.start_unit("ginnel-volume@data")?;
    // As an earlier version has left it: the folder is the user's, and the volume's lock is root's.
    systemd
        .run("sh -c 'chown ginnel-volume /run/ginnel/volumes; umask 077; touch /run/ginnel/volumes/own.sock.lock'")?
        .ok()?;
    let theirs = || {
        Ok::<_, anyhow::Error>(
            systemd.run("sh -c 'stat -c \"%n %U %a\" /run/ginnel/volumes/data.*'")?.ok()?.stdout,
        )
    };
    let before = theirs()?;
    let pid = systemd.start_unit(unit)?;
    is_ordinary(unit, "ginnel-volume", &pid)?;
    ensure!(theirs()? == before && before.lines().count() == 3, "before: {before}after: {}", theirs()?);
    let folder = systemd.run("stat -c '%U %G %a' /run/ginnel/volumes")?.ok()?.stdout;
    ensure!(folder.trim() == "root ginnel-volume 1731", "{folder}");
    systemd.stop_unit("ginnel-volume@data")?;
    systemd.start_unit("ginnel-volume@data")?;
    systemd.run("systemctl stop ginnel-volume@data")?.ok()?;
    is_held(systemd, &pid)?;
    let stat = systemd.run("/usr/local/bin/ginnel volume stat own --json")?.ok()?.stdout;
    ensure!(stat.contains("landlock+seccomp"), "{stat}");
    systemd.kill_unit(unit)?;
    systemd.stop_unit(unit)?;

    // Both halves of an nvme volume, which have left their names when they were started as root.
    let (engine, holder) = ("ginnel-volume@fast", "ginnel-volume-holder@fast");
    let config = "device = 'nvme'\nsandbox = 'require'\n[[disk]]\npath = '/var/lib/ginnel-volumes/own.img'\n";
    systemd.write("ginnel/volumes/fast.toml", config)?;
    let left = systemd.run("stat -c '%n %U' /run/ginnel/volumes/fast.sock.holder.lock")?.ok()?.stdout;
    ensure!(left.trim().ends_with(" root"), "{left}");
    for unit in [holder, engine] {
        is_ordinary(unit, "ginnel-volume", &systemd.start_unit(unit)?)?;
    }
    systemd.stop_unit(holder)?;
    let owner = systemd.run("stat -c %U /var/lib/ginnel")?.ok()?.stdout;
    ensure!(owner.trim() == "root", "the daemon's folder belongs to {owner}");
    Ok(())
}

/// Checks that no root of a unit follows a link in the place of a folder of sockets.
fn links(systemd: &Systemd<'_>) -> Result<()> {
    systemd.run("install -d -m 755 /tmp/theirs")?.ok()?;
    for (kind, unit) in [("volumes", "ginnel-volume@own"), ("caches", "ginnel-cache@own")] {
        let place = format!("/run/ginnel/{kind}");
        systemd.run(&format!("mv {place} {place}-away"))?.ok()?;
        systemd.run(&format!("ln -s /tmp/theirs {place}"))?.ok()?;
        systemd.run(&format!("systemctl start --no-block {unit}"))?.ok()?;
        let refused = format!("{place} is not a folder of its own");
        wait_until("the unit refuses", PROMPT, || Ok(systemd.journal(unit)?.contains(&refused)))?;
        systemd.run(&format!("systemctl stop {unit}"))?.ok()?;
        systemd.run(&format!("rm {place}"))?.ok()?;
        systemd.run(&format!("mv {place}-away {place}"))?.ok()?;
    }
    let theirs = systemd.run("find /tmp/theirs -printf '%p %u %g %m\\n'")?.ok()?.stdout;
    ensure!(theirs == "/tmp/theirs root root 755\n", "{theirs}");
    Ok(())
}

/// Checks what the guest's unit says about devices: character devices and those like `/dev/pmem0` can be opened, and other
/// block devices cannot.
fn devices(systemd: &Systemd<'_>) -> Result<()> {
    let unit = include_str!("../../../packaging/systemd/ginneld-guest.service");
    let settings: Vec<&str> = unit.lines().filter(|line| line.starts_with("Device")).collect();
    ensure!(settings.len() == 3, "{settings:?}");
    let unit = format!("[Service]\nType=oneshot\nExecStart=cat /tmp/%i\n{}\n", settings.join("\n"));
    systemd.write("systemd/system/devices@.service", &unit)?;
    systemd.run("systemctl daemon-reload")?.ok()?;
    // Nothing has these numbers, so a node that may be opened has no device.
    systemd.run("mknod /tmp/char c 240 250")?.ok()?;
    systemd.run("mknod /tmp/block b 240 250")?.ok()?;
    systemd.run("mknod /tmp/pmem b 259 1048000")?.ok()?;
    let open = |node: &str| {
        systemd.run(&format!("systemctl start devices@{node}"))?;
        systemd.journal(&format!("devices@{node}"))
    };
    for node in ["char", "pmem"] {
        let said = open(node)?;
        ensure!(said.contains("No such device"), "{node}: {said}");
    }
    let block = open("block")?;
    ensure!(block.contains("not permitted"), "{block}");
    Ok(())
}

/// Checks that no user can hold a lock of the folder of sockets: it is a file system of its own, in which nobody else may list a folder or
/// write. A mount hides no sockets that are there.
fn own_file_system(systemd: &Systemd<'_>) -> Result<()> {
    // Volumes and caches have their sockets there, so no daemon takes the folder away when it stops.
    for unit in ["ginneld", "ginneld-guest"] {
        ensure!(systemd.show(unit, "RuntimeDirectoryPreserve")? == "yes", "{unit}");
    }
    let place = "/run/ginnel";
    let root = format!("/proc/{}/root", systemd.pid);
    let open = systemd.run(&format!("find {place} -type d -perm /006"))?.ok()?.stdout;
    ensure!(open.is_empty(), "open to all: {open}");
    ensure!(systemd.run(&format!("stat -c %a {place}"))?.ok()?.stdout.trim() == "711");
    // This is the call that takes the locks of both folders, and looks at permissions later.
    systemd.run("install -d -m 777 /run/theirs")?.ok()?;
    fs::write(format!("{root}/run/theirs/file"), "")?;
    let rename = format!("{root}/tmp/rename.pl");
    fs::write(rename, "rename '/run/theirs/file', '/run/ginnel/file' or print \"$!\";")?;
    let said = systemd.run("setpriv --reuid=65534 --clear-groups perl /tmp/rename.pl")?.ok()?.stdout;
    ensure!(said.contains("cross-device"), "{said}");

    systemd.run("systemctl stop run-ginnel.mount")?.ok()?;
    systemd.run("touch /run/ginnel/of-an-older-version")?.ok()?;
    systemd.write("ginnel/ginneld.toml", "[vm.a]\n")?;
    systemd.start_unit("ginneld")?;
    ensure!(systemd.show("run-ginnel.mount", "ActiveState")? == "inactive", "it hides a file");
    systemd.stop_unit("ginneld")
}

/// Checks that a killed cache is started again by its unit and still has its items.
fn cache(systemd: &Systemd<'_>) -> Result<()> {
    let unit = "ginnel-cache@main";
    systemd.write("ginnel/caches/bad.env", "ARGS=--segment s --oops\n")?;
    systemd.refuse_unit("ginnel-cache@bad", "--oops")?;
    systemd.start_unit("ginneld")?;
    let arguments = "--segment s --memory 8M --max-item-size 64K --unix /run/ginnel/caches/main.sock";
    systemd.write("ginnel/caches/main.env", &format!("ARGS={arguments}\n"))?;
    systemd.start_unit(unit)?;
    let ginnel = |what: &str| -> Result<String> {
        Ok(systemd.run(&format!("/usr/local/bin/ginnel cache {what}"))?.ok()?.stdout)
    };
    ginnel("set s/main greeting hello")?;
    let pid = systemd.kill_unit(unit)?;
    for path in ["/etc/x", "/usr/local/x", "/sys/x", "/root/x", "/home/x"] {
        let said = systemd.run_as(&pid, &format!("touch {path}"))?;
        ensure!(said.exit != Exit::Code(0), "{path} can be written");
    }
    ensure!(ginnel("get s/main greeting")?.trim() == "hello");
    let over_socket = ginnel("--changes 'unix /run/ginnel/caches/main.sock' status s/main --json")?;
    ensure!(over_socket.contains("items"), "{over_socket}");
    systemd.stop_unit(unit)?;
    // Reading works without the server.
    ensure!(ginnel("get s/main greeting")?.trim() == "hello");
    systemd.stop_unit("ginneld")
}
