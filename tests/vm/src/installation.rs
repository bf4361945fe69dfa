//! Ginnel in a bed: a host daemon with its own folders, and VMs that have its devices and run its guest daemon.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::{HostJob, Job, TestBed, Vm, VmBuilder};

/// How long a daemon may take to serve.
const START: Duration = Duration::from_secs(20);
/// Doorbell vectors of each member.
const VECTORS: u32 = 32;

/// A program of this workspace, built beside the running one.
pub fn program(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let mut folder = this.parent().context("a program without a folder")?;
    if folder.ends_with("deps") || folder.ends_with("examples") {
        folder = folder.parent().context("a program without a folder")?;
    }
    // Guests are emulated on many machines: they get the optimised programs if there are any.
    let optimised = folder.parent().map(|target| target.join("release"));
    for folder in optimised.iter().map(PathBuf::as_path).chain([folder]) {
        let path = folder.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!("{} is not built; `cargo build --release --workspace` builds it", folder.join(name).display())
}

/// Puts `libibverbs.so.1` and `librdmacm.so.1` of this workspace into a folder, from the same kind of build as `ginneld`.
pub fn verbs_libraries(to: &Path) -> Result<()> {
    let built = program("ginneld")?.parent().context("a program without a folder")?.to_owned();
    let is_optimised = built.ends_with("release");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/verbs-capi");
    let made = Command::new("make")
        .args(["--no-print-directory", "-s", "-C"])
        .arg(crates)
        .arg(format!("PROFILE={}", if is_optimised { "release" } else { "dev" }))
        .arg(format!("OUT={}", to.display()))
        // Together with the others, as all are built already.
        .arg("PACKAGES=--workspace --lib")
        .env_remove("MAKEFLAGS")
        .env("CARGO_TARGET_DIR", built.parent().context("a folder without a parent")?)
        .status()?;
    ensure!(made.success(), "the libraries for RDMA verbs cannot be built");
    Ok(())
}

/// By which kind of device segments come to VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// `virtio-pmem`, as `/dev/dax*`.
    Dax,
    /// `ivshmem-plain`.
    Bar,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryKind::Dax => "dax",
            MemoryKind::Bar => "bar",
        })
    }
}

impl MemoryKind {
    /// The kinds with which a test is run whose subject is the same for both: DAX, and in the soak BAR as well.
    pub fn of_default_run() -> &'static [MemoryKind] {
        if std::env::var_os("GINNEL_SOAK").is_some() {
            &[MemoryKind::Dax, MemoryKind::Bar]
        } else {
            &[MemoryKind::Dax]
        }
    }
}

/// Makes of each of these functions, which take a [`MemoryKind`], a test for either kind: `NAME::dax` and `NAME::bar`.
#[macro_export]
macro_rules! test_both_memories {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use $crate::installation::MemoryKind;

            #[test]
            fn dax() -> anyhow::Result<()> {
                super::$name(MemoryKind::Dax)
            }

            #[test]
            fn bar() -> anyhow::Result<()> {
                super::$name(MemoryKind::Bar)
            }
        }
    )+};
}

struct Segment {
    name: String,
    mib: u64,
    memory: MemoryKind,
    members: Vec<String>,
    readers: Vec<String>,
    sockets: bool,
    verbs: bool,
}

/// What an installation consists of, before it starts.
#[must_use = "a plan starts nothing"]
pub struct Plan<'b> {
    bed: &'b TestBed,
    vms: Vec<(String, String)>,
    memory: MemoryKind,
    segments: Vec<Segment>,
    more: String,
}

impl<'b> Plan<'b> {
    /// Nothing yet, in the folder of `bed`.
    pub fn new(bed: &'b TestBed) -> Self {
        Self { bed, vms: Vec::new(), memory: MemoryKind::Dax, segments: Vec::new(), more: String::new() }
    }

    /// A VM.
    pub fn vm(self, name: &str) -> Self {
        self.vm_with(name, "")
    }

    /// A VM, and more lines for it.
    pub fn vm_with(mut self, name: &str, lines: &str) -> Self {
        self.vms.push((name.into(), lines.into()));
        self
    }

    /// The kind of the segments that follow; [`MemoryKind::Dax`] if not said.
    pub fn memory(mut self, memory: MemoryKind) -> Self {
        self.memory = memory;
        self
    }

    /// A segment of `mib` MiB (a power of two) and its members; `host` is one that can be named.
    pub fn segment(self, name: &str, mib: u64, members: &[&str]) -> Self {
        self.segment_with_readers(name, mib, members, &[])
    }

    /// A segment that `readers` may only read.
    pub fn segment_with_readers(mut self, name: &str, mib: u64, members: &[&str], readers: &[&str]) -> Self {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let (members, readers) = (names(members), names(readers));
        self.segments.push(Segment {
            name: name.into(),
            mib,
            memory: self.memory,
            members,
            readers,
            sockets: false,
            verbs: false,
        });
        self
    }

    /// TCP connections of unmodified programs may use the last segment, also if it has more than two members.
    pub fn with_sockets(mut self) -> Self {
        if let Some(segment) = self.segments.last_mut() {
            segment.sockets = true;
        }
        self
    }

    /// The last segment is an RDMA device.
    pub fn with_verbs(mut self) -> Self {
        if let Some(segment) = self.segments.last_mut() {
            segment.verbs = true;
        }
        self
    }

    /// More lines of the configuration.
    pub fn config(mut self, lines: &str) -> Self {
        self.more += lines;
        self.more += "\n";
        self
    }

    /// Writes the configuration and starts the host daemon.
    pub fn start(self) -> Result<Installation<'b>> {
        let dir = self.bed.dir().join("ginnel");
        for folder in ["run", "state", "shm"] {
            fs::create_dir_all(dir.join(folder))?;
        }
        // Segments must be on tmpfs; the bed's folder may be anywhere.
        let shm = tempfile::Builder::new().prefix("ginnel-test-").tempdir_in("/dev/shm")?;
        let mut text = format!(
            "[daemon]\nruntime_dir = {:?}\nstate_dir = {:?}\nshm_dir = {:?}\nvectors = {VECTORS}\n",
            dir.join("run"),
            dir.join("state"),
            shm.path()
        );
        for (vm, lines) in &self.vms {
            writeln!(text, "[vm.{vm}]\n{lines}")?;
        }
        for Segment { name, mib, memory, members, readers, sockets, verbs } in &self.segments {
            writeln!(
                text,
                "[segment.{name}]\nsize = \"{mib}M\"\nmemory = \"{memory}\"\nmembers = {members:?}"
            )?;
            if !readers.is_empty() {
                writeln!(text, "readers = {readers:?}")?;
            }
            if *sockets {
                writeln!(text, "sockets = true")?;
            }
            if *verbs {
                writeln!(text, "verbs = true")?;
            }
        }
        text += &self.more;
        let config = dir.join("ginneld.toml");
        fs::write(&config, text)?;
        let installation = Installation {
            bed: self.bed,
            dir,
            shm,
            config,
            segments: self.segments,
            daemon: Mutex::new(None),
        };
        installation.start_daemon()?;
        Ok(installation)
    }
}

/// A running installation. Its daemon ends with it.
pub struct Installation<'b> {
    bed: &'b TestBed,
    dir: PathBuf,
    shm: tempfile::TempDir,
    config: PathBuf,
    segments: Vec<Segment>,
    daemon: Mutex<Option<Arc<HostJob>>>,
}

impl Installation<'_> {
    /// Starts the host daemon and waits until it serves.
    pub fn start_daemon(&self) -> Result<()> {
        let mut command = Command::new(program("ginneld")?);
        command.args(["host", "--config"]).arg(&self.config);
        let job = self.bed.host_spawn_command("ginneld", command)?;
        let deadline = Instant::now() + START;
        while !serves(&self.socket()) {
            ensure!(job.is_running(), "ginneld ended: {:?}", job.wait(Duration::from_secs(1)));
            ensure!(Instant::now() < deadline, "ginneld does not serve: {:?}", job.said());
            std::thread::sleep(Duration::from_millis(2));
        }
        *self.daemon.lock().unwrap_or_else(PoisonError::into_inner) = Some(job);
        Ok(())
    }

    /// The host daemon.
    pub fn daemon(&self) -> Result<Arc<HostJob>> {
        self.daemon
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .context("the daemon was not started")
    }

    /// `kill -9` of the host daemon; returns when it is gone.
    pub fn kill_daemon(&self) -> Result<()> {
        let daemon = self.daemon()?;
        daemon.kill(9)?;
        daemon.wait(START)?;
        Ok(())
    }

    /// The socket where host programs attach; goes into `GINNEL_SOCKET`.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("run/ginnel.sock")
    }

    /// The file of a segment.
    pub fn segment_file(&self, name: &str) -> PathBuf {
        self.shm.path().join(format!("ginnel-{name}"))
    }

    /// The configuration file.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// A shell command line on the host with the environment that programs need.
    pub fn on_host(&self, command: &str) -> Result<String> {
        let bin = program("ginneld")?;
        let bin = bin.parent().context("a program without a folder")?;
        Ok(format!(
            "export PATH={}:$PATH GINNEL_SOCKET={}; {command}",
            bin.display(),
            self.socket().display()
        ))
    }

    /// QEMU's arguments for the devices of a VM, a line for each, as `ginnel qemu-args` prints them.
    pub fn devices(&self, vm: &str) -> Result<String> {
        Ok(self.bed.host(&self.on_host(&format!("ginnel qemu-args --quiet {vm}"))?)?.ok()?.stdout)
    }

    /// Address space that a VM needs beyond its RAM, in MiB: for all segments that are memory devices, in whole GiB as
    /// QEMU aligns them, and one more for what a test adds.
    pub fn device_memory_mib(&self) -> u64 {
        let dax = self.segments.iter().filter(|segment| segment.memory == MemoryKind::Dax);
        dax.map(|segment| segment.mib).sum::<u64>().next_multiple_of(1024) + 1024
    }

    /// Describes a VM of this installation: its devices, interrupts (an IOMMU), network, and the programs `ginneld` and
    /// `ginnel`. The drivers of its segments are there and not loaded: that is for the guest daemon.
    pub fn vm(&self, name: &str) -> Result<VmBuilder> {
        self.vm_with_devices(name, &self.devices(name)?)
    }

    /// The same with these devices in place of its own.
    pub fn vm_with_devices(&self, name: &str, devices: &str) -> Result<VmBuilder> {
        Ok(self
            .bed
            .vm(name)
            .iommu()
            .network()
            .module("vfio-pci")
            .device_memory_mib(self.device_memory_mib())
            .program(program("ginneld")?)
            .program(program("ginnel")?)
            .qemu_args(devices))
    }

    /// Starts the guest daemon in a VM that has booted, and waits until it serves.
    pub fn start_guest(&self, vm: &Vm) -> Result<Job> {
        self.start_guest_with(vm, "")
    }

    /// The same with these arguments, as a shell reads them.
    pub fn start_guest_with(&self, vm: &Vm, arguments: &str) -> Result<Job> {
        let job = vm.spawn(&format!("mkdir -p /run/ginnel && exec ginneld guest {arguments}"))?;
        let deadline = Instant::now() + START;
        // The daemon listens at once but knows its segments only when the host has told it.
        loop {
            let status = vm.run("ginnel status --json")?;
            if status.code() == Some(0) {
                break;
            }
            let said = || format!("{:?}; ginnel status: {}", job.said(), status.stderr);
            ensure!(job.is_running(), "the guest daemon of {} ended: {}", vm.name(), said());
            ensure!(
                Instant::now() < deadline,
                "the guest daemon of {} does not serve: {}",
                vm.name(),
                said()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(job)
    }
}

impl Drop for Installation<'_> {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = daemon.kill(9);
        }
        // The keeper is a process of its own; it goes when its socket's folder is gone only if it is told.
        let keeper = self.dir.join("run/keeper.pid");
        if let Some(pid) = fs::read_to_string(keeper).ok().and_then(|t| t.trim().parse().ok())
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Whether somebody accepts connections at a daemon's socket.
fn serves(socket: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(socket) else { return false };
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .is_ok_and(|fd| rustix::net::connect(&fd, &address).is_ok())
}
