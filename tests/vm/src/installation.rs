//! Ginnel in a bed: a host daemon with its own folders, and VMs that have its devices and run its guest daemon.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::{Bed, HostJob, Job, Vm, VmBuilder};

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

/// What an installation consists of, before it starts.
#[must_use = "a plan starts nothing"]
pub struct Plan<'b> {
    bed: &'b Bed,
    vms: Vec<String>,
    segments: Vec<(String, u64, Vec<String>)>,
    more: String,
}

impl<'b> Plan<'b> {
    /// Nothing yet, in the folder of `bed`.
    pub fn new(bed: &'b Bed) -> Self {
        Self { bed, vms: Vec::new(), segments: Vec::new(), more: String::new() }
    }

    /// A VM.
    pub fn vm(mut self, name: &str) -> Self {
        self.vms.push(name.into());
        self
    }

    /// A segment of `mib` MiB (a power of two) and its members; `host` is one that can be named.
    pub fn segment(mut self, name: &str, mib: u64, members: &[&str]) -> Self {
        self.segments.push((name.into(), mib, members.iter().map(|m| (*m).into()).collect()));
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
        for vm in &self.vms {
            writeln!(text, "[vm.{vm}]")?;
        }
        for (name, mib, members) in &self.segments {
            writeln!(text, "[segment.{name}]\nsize = \"{mib}M\"\nmembers = {members:?}")?;
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
    bed: &'b Bed,
    dir: PathBuf,
    shm: tempfile::TempDir,
    config: PathBuf,
    segments: Vec<(String, u64, Vec<String>)>,
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

    /// QEMU's arguments for the devices of a VM.
    pub fn devices(&self, vm: &str) -> String {
        let socket = self.dir.join(format!("run/{vm}.sock"));
        let mut line = format!(
            "-chardev socket,path={},id=ginnel -device ivshmem-doorbell,chardev=ginnel,vectors={VECTORS}",
            socket.display()
        );
        for (name, mib, members) in &self.segments {
            if members.iter().any(|m| m == vm) {
                let file = self.segment_file(name);
                let file = file.display();
                line += &format!(
                    " -object memory-backend-file,id={name},share=on,mem-path={file},size={mib}M,dump=off \
                     -device ivshmem-plain,memdev={name}"
                );
            }
        }
        line
    }

    /// Describes a VM of this installation: its devices, interrupts (an IOMMU), network, and the programs `ginneld` and
    /// `ginnel`.
    pub fn vm(&self, name: &str) -> Result<VmBuilder> {
        Ok(self
            .bed
            .vm(name)
            .iommu()
            .network()
            .module("vfio-pci")
            .program(program("ginneld")?)
            .program(program("ginnel")?)
            .qemu_args(&self.devices(name)))
    }

    /// Starts the guest daemon in a VM that has booted, and waits until it serves.
    pub fn start_guest(&self, vm: &Vm) -> Result<Job> {
        let job = vm.spawn("mkdir -p /run/ginnel && exec ginneld guest")?;
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
