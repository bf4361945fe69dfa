//! An installation of Ginnel in a test bed: a host daemon with its own folders, and VMs that have its devices and run its guest
//! daemon.

use crate::{HostJob, Job, TestBed, Vm, VmBuilder};
use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt::{self, Write as _};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a daemon may take until it serves.
const START: Duration = Duration::from_secs(60);
/// The number of doorbell vectors of each member.
const VECTORS: u32 = 32;

/// Returns the path of a program of this workspace, built beside the running one.
pub fn program(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let mut folder = this.parent().context("a program without a folder")?;
    if folder.ends_with("deps") || folder.ends_with("examples") {
        folder = folder.parent().context("a program without a folder")?;
    }
    // On many machines guests are emulated, so they get the optimised programs if these exist.
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
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/faces/verbs-capi");
    let made = Command::new("make")
        .args(["--no-print-directory", "-s", "-C"])
        .arg(crates)
        .arg(format!("PROFILE={}", if is_optimised { "release" } else { "dev" }))
        .arg(format!("OUT={}", to.display()))
        // All packages are built already, so building them together compiles nothing anew.
        .arg("PACKAGES=--workspace --lib")
        .env_remove("MAKEFLAGS")
        .env_remove("RUSTC_BOOTSTRAP")
        .env("CARGO_TARGET_DIR", built.parent().context("a folder without a parent")?)
        .status()?;
    ensure!(made.success(), "the libraries for RDMA verbs cannot be built");
    Ok(())
}

/// The kind of device through which segments reach VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// `virtio-pmem`, which the guest sees as `/dev/dax*`.
    Dax,
    /// `ivshmem-plain`, whose memory is a PCI BAR.
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
    /// Returns the kinds for a test whose subject does not depend on the kind: DAX, and in the soak BAR as well.
    pub fn of_default_run() -> &'static [MemoryKind] {
        if std::env::var_os("GINNEL_SOAK").is_some() {
            &[MemoryKind::Dax, MemoryKind::Bar]
        } else {
            &[MemoryKind::Dax]
        }
    }
}

/// Makes tests of each of these functions, which take a [`MemoryKind`]: `NAME::dax` and `NAME::bar`.
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

/// Makes a test of each of these functions, whose subject depends little on the kind of memory: it runs with
/// [`MemoryKind::of_default_run`].
#[macro_export]
macro_rules! test_default_memories {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            #[test]
            fn default() -> anyhow::Result<()> {
                $crate::installation::MemoryKind::of_default_run().iter().try_for_each(|&memory| super::$name(memory))
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

/// The description of an installation that is not started yet.
#[must_use = "a plan starts nothing"]
pub struct Plan<'b> {
    bed: &'b TestBed,
    vms: Vec<(String, String)>,
    memory: MemoryKind,
    segments: Vec<Segment>,
    more: String,
}

impl<'b> Plan<'b> {
    /// Makes an empty plan for an installation in the folder of `bed`.
    pub fn new(bed: &'b TestBed) -> Self {
        Self { bed, vms: Vec::new(), memory: MemoryKind::Dax, segments: Vec::new(), more: String::new() }
    }

    /// Adds a VM.
    pub fn vm(self, name: &str) -> Self {
        self.vm_with(name, "")
    }

    /// Adds a VM with further lines in its table of the configuration.
    pub fn vm_with(mut self, name: &str, lines: &str) -> Self {
        self.vms.push((name.into(), lines.into()));
        self
    }

    /// Sets the kind of memory of the segments that follow. The default is [`MemoryKind::Dax`].
    pub fn memory(mut self, memory: MemoryKind) -> Self {
        self.memory = memory;
        self
    }

    /// Adds a segment of `mib` MiB (a power of two) with its members. `host` is a possible member.
    pub fn segment(self, name: &str, mib: u64, members: &[&str]) -> Self {
        self.segment_with_readers(name, mib, members, &[])
    }

    /// Adds a segment that `readers` may only read.
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

    /// Lets TCP connections of unmodified programs use the last segment, even if it has more than two members.
    pub fn with_sockets(mut self) -> Self {
        if let Some(segment) = self.segments.last_mut() {
            segment.sockets = true;
        }
        self
    }

    /// Makes the last segment an RDMA device.
    pub fn with_verbs(mut self) -> Self {
        if let Some(segment) = self.segments.last_mut() {
            segment.verbs = true;
        }
        self
    }

    /// Adds lines to the configuration.
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
        // Segments must be on tmpfs; the folder of the test bed may be anywhere.
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

/// A running installation. Its daemon is killed when it is dropped.
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

    /// Returns the host daemon.
    pub fn daemon(&self) -> Result<Arc<HostJob>> {
        self.daemon
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .context("the daemon was not started")
    }

    /// Kills the host daemon with SIGKILL, and returns when it is gone.
    pub fn kill_daemon(&self) -> Result<()> {
        let daemon = self.daemon()?;
        daemon.kill(9)?;
        daemon.wait(START)?;
        Ok(())
    }

    /// Returns the path of the socket at which host programs attach, for `GINNEL_SOCKET`.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("run/ginnel.sock")
    }

    /// Returns the path of a segment's file.
    pub fn segment_file(&self, name: &str) -> PathBuf {
        self.shm.path().join("ginnel").join(name)
    }

    /// Returns the path of the configuration file.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Returns a shell command line for the host with the environment that programs need.
    pub fn on_host(&self, command: &str) -> Result<String> {
        let bin = program("ginneld")?;
        let bin = bin.parent().context("a program without a folder")?;
        Ok(format!(
            "export PATH={}:$PATH GINNEL_SOCKET={}; {command}",
            bin.display(),
            self.socket().display()
        ))
    }

    /// Returns QEMU's arguments for the devices of a VM, one line for each, as `ginnel qemu-args` prints them.
    pub fn devices(&self, vm: &str) -> Result<String> {
        Ok(self.bed.host(&self.on_host(&format!("ginnel qemu-args --quiet {vm}"))?)?.ok()?.stdout)
    }

    /// Returns the address space in MiB that a VM needs beyond its RAM: room for all segments that are memory devices, in whole
    /// GiB as QEMU aligns them, and one GiB more for devices that a test adds.
    pub fn device_memory_mib(&self) -> u64 {
        let dax = self.segments.iter().filter(|segment| segment.memory == MemoryKind::Dax);
        dax.map(|segment| segment.mib).sum::<u64>().next_multiple_of(1024) + 1024
    }

    /// Describes a VM of this installation: its devices, interrupts (an IOMMU), network, and the programs `ginneld` and
    /// `ginnel`. The drivers for its segments are in the image but not loaded, because the guest daemon loads them.
    pub fn vm(&self, name: &str) -> Result<VmBuilder> {
        Ok(self
            .bed
            .vm(name)
            .iommu()
            .network()
            .module("vfio-pci")
            .device_memory_mib(self.device_memory_mib())
            .program(program("ginneld")?)
            .program(program("ginnel")?)
            .qemu_args(&self.devices(name)?))
    }

    /// Starts the guest daemon in a VM that has booted, and waits until it serves.
    pub fn start_guest(&self, vm: &Vm) -> Result<Job> {
        self.start_guest_with(vm, "")
    }

    /// Does the same as [`Self::start_guest`], with further arguments, as a shell reads them.
    pub fn start_guest_with(&self, vm: &Vm, arguments: &str) -> Result<Job> {
        let job = vm.spawn(&format!("mkdir -p /run/ginnel && exec ginneld guest {arguments}"))?;
        let deadline = Instant::now() + START;
        // The daemon listens at once, but knows its segments only after the host has told it.
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
        // The keeper is a separate process. It does not end with the daemon, so it is killed as well.
        let keeper = self.dir.join("run/keeper.pid");
        if let Some(pid) = fs::read_to_string(keeper).ok().and_then(|t| t.trim().parse().ok())
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Returns whether a daemon accepts connections at its socket.
fn serves(socket: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(socket) else { return false };
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .is_ok_and(|fd| rustix::net::connect(&fd, &address).is_ok())
}
