//! One virtual machine: its description, its boot, its use and its end.

use crate::accel::Accel;
use crate::agent_connection::AgentConnection;
use crate::image::{DAX, Overlay};
use crate::net::Place;
use crate::process::{Process, signal_of};
use crate::protocol::PORT;
use crate::qmp::Qmp;
use crate::record::{Output, Record, tail};
use crate::test_bed::Inner;
use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

/// The timeout of a command of [`Vm::run`].
const COMMAND: Duration = Duration::from_secs(60);
/// How long a guest may take to boot, unless the builder sets another time.
const BOOT: Duration = Duration::from_secs(120);
/// How long these may take: a job to get a process, QEMU to open its sockets or to die, a guest to power off.
const PROMPT: Duration = Duration::from_secs(30);

/// The description of a VM. [`boot`](VmBuilder::boot) or [`start`](VmBuilder::start) starts the VM.
#[must_use = "a description boots nothing"]
pub struct VmBuilder {
    bed: Arc<Inner>,
    name: String,
    memory_mib: u32,
    device_memory_mib: Option<u64>,
    cpus: u32,
    iommu: bool,
    network: bool,
    qemu: Option<PathBuf>,
    accel: Option<Accel>,
    overlay: Overlay,
    load: Vec<String>,
    shares: Vec<(PathBuf, String)>,
    host_files: bool,
    kernel_args: Vec<String>,
    qemu_args: Vec<String>,
    incoming: bool,
    boot_timeout: Duration,
}

impl VmBuilder {
    pub(crate) fn new(bed: Arc<Inner>, name: &str) -> VmBuilder {
        VmBuilder {
            bed,
            name: name.to_owned(),
            memory_mib: 256,
            device_memory_mib: None,
            cpus: 1,
            iommu: false,
            network: false,
            qemu: None,
            accel: None,
            overlay: Overlay::default(),
            load: Vec::new(),
            shares: Vec::new(),
            host_files: false,
            kernel_args: Vec::new(),
            qemu_args: Vec::new(),
            incoming: false,
            boot_timeout: BOOT,
        }
    }

    /// Sets the guest's memory in MiB. The default is 256. The guest's files are in this memory too.
    pub fn memory_mib(mut self, mib: u32) -> VmBuilder {
        self.memory_mib = mib;
        self
    }

    /// Makes room for memory devices such as virtio-pmem, in MiB: QEMU's `maxmem` is the memory plus this.
    pub fn device_memory_mib(mut self, mib: u64) -> VmBuilder {
        self.device_memory_mib = Some(mib);
        self
    }

    /// Sets the number of virtual processors. The default is 1.
    pub fn cpus(mut self, cpus: u32) -> VmBuilder {
        self.cpus = cpus;
        self
    }

    /// Adds an IOMMU with interrupt remapping, so that VFIO works in the guest.
    pub fn iommu(mut self) -> VmBuilder {
        self.iommu = true;
        self
    }

    /// Adds a virtio-net card with an address on the bridge of the test bed. Needs root.
    pub fn network(mut self) -> VmBuilder {
        self.network = true;
        self
    }

    /// Uses this QEMU instead of the test bed's.
    pub fn qemu(mut self, program: impl Into<PathBuf>) -> VmBuilder {
        self.qemu = Some(program.into());
        self
    }

    /// Uses this acceleration instead of the test bed's.
    pub fn accel(mut self, accel: Accel) -> VmBuilder {
        self.accel = Some(accel);
        self
    }

    /// Adds a host program with its libraries as `/usr/local/bin/NAME`.
    pub fn program(mut self, path: impl Into<PathBuf>) -> VmBuilder {
        self.overlay.programs.push(path.into());
        self
    }

    /// Adds a host library with the libraries that it needs as `/usr/local/lib/NAME`, where all programs of the guest look
    /// first.
    pub fn library(mut self, path: impl Into<PathBuf>) -> VmBuilder {
        self.overlay.libraries.push(path.into());
        self
    }

    /// Adds a host file at any path. If it is a program, its libraries are added too.
    pub fn file(mut self, host: impl Into<PathBuf>, guest: &str) -> VmBuilder {
        self.overlay.files.push((host.into(), guest.to_owned()));
        self
    }

    /// Adds a file with this content and these permissions.
    pub fn content(mut self, guest: &str, mode: u32, bytes: impl Into<Vec<u8>>) -> VmBuilder {
        self.overlay.contents.push((guest.to_owned(), mode, bytes.into()));
        self
    }

    /// Adds a kernel module, which is loaded at boot with all modules that it needs.
    pub fn module(mut self, name: &str) -> VmBuilder {
        self.overlay.modules.push(name.to_owned());
        self.load.push(name.to_owned());
        self
    }

    /// Adds the drivers that turn a virtio-pmem device into `/dev/dax*`, and loads them at boot.
    pub fn dax(self) -> VmBuilder {
        DAX.into_iter().fold(self, VmBuilder::module)
    }

    /// Mounts a host folder at boot through 9p.
    pub fn share(mut self, host: impl Into<PathBuf>, guest: &str) -> VmBuilder {
        self.shares.push((host.into(), guest.to_owned()));
        self
    }

    /// Mounts all files of the host at `/host`, read-only, so that a program of the host runs by `chroot /host` without a copy
    /// of it or of the files that it needs. There, `/dev`, `/proc`, `/run`, `/sys`, `/tmp` and `/usr/local` are the guest's
    /// own.
    pub fn host_files(mut self) -> VmBuilder {
        self.host_files = true;
        self
    }

    /// Adds one argument to the kernel's command line.
    pub fn kernel_arg(mut self, arg: &str) -> VmBuilder {
        self.kernel_args.push(arg.to_owned());
        self
    }

    /// Adds arguments to QEMU's command line, split at white space, such as those that `ginnel qemu-args` prints.
    pub fn qemu_args(mut self, line: &str) -> VmBuilder {
        self.qemu_args.extend(line.split_whitespace().map(str::to_owned));
        self
    }

    /// Adds one argument to QEMU's command line without changing it.
    pub fn qemu_arg(mut self, arg: &str) -> VmBuilder {
        self.qemu_args.push(arg.to_owned());
        self
    }

    /// Sets how long the guest may take to boot. The default is two minutes.
    pub fn boot_timeout(mut self, timeout: Duration) -> VmBuilder {
        self.boot_timeout = timeout;
        self
    }

    /// Does not boot a guest: the VM waits for one that arrives by [`Vm::migrate`]. Must be described in the same way as the VM
    /// from which the guest comes.
    pub fn incoming(mut self) -> VmBuilder {
        self.incoming = true;
        self
    }

    /// Starts the VM and waits until the guest can run commands.
    pub fn boot(self) -> Result<Vm> {
        let vm = self.start()?;
        vm.wait_ready()?;
        Ok(vm)
    }

    /// Starts the VM without waiting, so that several can boot at once. Call [`Vm::wait_ready`] afterwards.
    pub fn start(self) -> Result<Vm> {
        let name = self.name.clone();
        self.launch().with_context(|| format!("cannot start VM {name}"))
    }

    fn launch(self) -> Result<Vm> {
        let safe = |c: char| c.is_ascii_alphanumeric() || c == '-';
        ensure!(
            !self.name.is_empty() && self.name.chars().all(safe),
            "a VM's name is made of letters, digits and '-'"
        );
        self.bed.check_free(&self.name)?;
        let accel = match self.accel {
            Some(accel) => accel,
            None => self.bed.accel()?,
        };
        let place = if self.network { Some(self.bed.place(&self.name)?) } else { None };
        if let Some(place) = place {
            self.bed.network()?.attach(&self.bed.launcher, place)?;
        }

        let dir = self.bed.dir().join(&self.name);
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir(&dir)?;
        let paths = Paths::new(&dir);
        self.overlay(place).write_initrd(&self.bed.kernel, &paths.initrd)?;

        let mut command = self.command(accel, place, &paths);
        let log = File::create(&paths.log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let agent = AgentConnection::open(&paths.agent);
        let on_exit = agent.clone();
        let child = self.bed.launcher.spawn(command).inspect_err(|_| agent.close("QEMU was not started"))?;
        let process = Process::adopt(child, move |exit| on_exit.close(&format!("QEMU ended with {exit}")))?;
        let machine = Arc::new(Machine {
            name: self.name.clone(),
            place,
            accel,
            process,
            agent,
            qmp: Mutex::new(None),
            boot: Mutex::default(),
            boot_timeout: self.boot_timeout,
            paths,
            _bed: self.bed.clone(),
        });
        self.bed.enter(&self.name, &machine);
        let vm = Vm { machine };
        vm.machine.open_qmp().map_err(|e| vm.explain(e))?;
        Ok(vm)
    }

    fn overlay(&self, place: Option<Place>) -> Overlay {
        let mut conf = format!("VM_NAME='{}'\nVM_MODULES='{}'\n", self.name, self.load.join(" "));
        let address = place.map(Place::with_prefix).unwrap_or_default();
        conf += &format!("VM_ADDRESS='{address}'\n");
        let shares = self.shares.iter().enumerate().map(|(n, (_, guest))| format!("share{n}:{guest}"));
        conf += &format!("VM_SHARES='{}'\n", shares.collect::<Vec<_>>().join(" "));
        conf += &format!("VM_HOST_FILES='{}'\n", if self.host_files { "host" } else { "" });
        let mut overlay = self.overlay.clone();
        overlay.contents.push(("/etc/vm.conf".into(), 0o644, conf.into_bytes()));
        overlay.contents.push(("/etc/hosts".into(), 0o644, self.bed.hosts().into_bytes()));
        overlay
    }

    fn command(&self, accel: Accel, place: Option<Place>, paths: &Paths) -> Command {
        let mut command = Command::new(self.qemu.as_ref().unwrap_or(&self.bed.qemu));
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-name", &self.name]);
        command.args(accel.qemu_args());
        command.args(["-M", if self.iommu { "q35,kernel-irqchip=split" } else { "q35" }]);
        if self.iommu {
            command.args(["-device", "intel-iommu,intremap=on"]);
        }
        // At least two possible processors, even if only one runs: with a single one, TCG drops memory barriers and makes
        // atomic instructions non-atomic, which breaks memory that the guest shares with others.
        command.arg("-smp").arg(format!("{},maxcpus={}", self.cpus, self.cpus.max(2)));
        let max_memory = self.device_memory_mib.map(|mib| u64::from(self.memory_mib) + mib);
        let max_memory = max_memory.map(|mib| format!(",slots=8,maxmem={mib}M")).unwrap_or_default();
        command.arg("-m").arg(format!("{}M{max_memory}", self.memory_mib));
        command.arg("-kernel").arg(&self.bed.vmlinux).arg("-initrd").arg(&paths.initrd);
        let iommu = self.iommu.then_some("intel_iommu=on");
        // On a busy host an emulated timer may be too late for the kernel's check at boot, which is fatal with an IOMMU.
        let args = ["console=ttyS0", "quiet", "no_timer_check"].into_iter().chain(iommu);
        let args = args.chain(self.kernel_args.iter().map(String::as_str));
        command.arg("-append").arg(args.collect::<Vec<_>>().join(" "));
        command.arg("-serial").arg(format!("file:{}", paths.console.display()));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", paths.qmp.display()));
        command.args(["-device", "virtio-serial-pci", "-chardev"]);
        command.arg(format!("socket,id=agent,path={},server=on,wait=off", paths.agent.display()));
        command.arg("-device").arg(format!("virtserialport,chardev=agent,name={PORT}"));
        if let Some(place) = place {
            command.args(place.qemu_args());
        }
        for (n, (host, _)) in self.shares.iter().enumerate() {
            let host = host.display();
            command.arg("-fsdev").arg(format!("local,id=share{n},path={host},security_model=none"));
            command.arg("-device").arg(format!("virtio-9p-pci,fsdev=share{n},mount_tag=share{n}"));
        }
        if self.host_files {
            // The files come from several file systems, in which inode numbers may be the same.
            command.args(["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"]);
            command.args(["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]);
        }
        if self.incoming {
            command.arg("-incoming").arg(format!("unix:{}", paths.incoming.display()));
        }
        command.args(&self.qemu_args);
        command
    }
}

/// The files of one VM in the folder of the test bed.
struct Paths {
    initrd: PathBuf,
    console: PathBuf,
    log: PathBuf,
    qmp: PathBuf,
    agent: PathBuf,
    incoming: PathBuf,
}

impl Paths {
    fn new(dir: &Path) -> Paths {
        Paths {
            initrd: dir.join("initrd"),
            console: dir.join("console"),
            log: dir.join("qemu.log"),
            qmp: dir.join("qmp.sock"),
            agent: dir.join("agent.sock"),
            incoming: dir.join("incoming.sock"),
        }
    }
}

/// A QEMU with the connections to it.
pub(crate) struct Machine {
    name: String,
    place: Option<Place>,
    accel: Accel,
    process: Process,
    agent: Arc<AgentConnection>,
    qmp: Mutex<Option<Arc<Qmp>>>,
    /// The id of the boot that the test has waited for last.
    boot: Mutex<Option<String>>,
    boot_timeout: Duration,
    paths: Paths,
    /// Its files and its network must exist as long as it does.
    _bed: Arc<Inner>,
}

impl Machine {
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Kills QEMU and waits until it is gone.
    pub fn kill(&self) {
        self.process.signal(Signal::KILL);
        let _ = self.process.wait("qemu", PROMPT);
    }

    fn open_qmp(&self) -> Result<()> {
        let deadline = Instant::now() + PROMPT;
        let stream = loop {
            match UnixStream::connect(&self.paths.qmp) {
                Ok(stream) => break stream,
                Err(_) if !self.is_running() => bail!("QEMU ended at once"),
                Err(e) if Instant::now() > deadline => {
                    return Err(e).context("QEMU opened no control socket");
                }
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        };
        let agent = self.agent.clone();
        let qmp = Qmp::open(stream, move |event| match event["event"].as_str() {
            Some("RESET") => agent.reset("the guest rebooted"),
            Some("VSERPORT_CHANGE") if event["data"]["open"] == false => {
                agent.reset("the guest's agent is gone")
            }
            _ => {}
        })?;
        *self.qmp.lock().unwrap_or_else(PoisonError::into_inner) = Some(qmp);
        Ok(())
    }

    /// Returns whether the kernel has panicked in the first boot.
    fn died_booting(&self) -> bool {
        let first = self.boot.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        first
            && String::from_utf8_lossy(&fs::read(&self.paths.console).unwrap_or_default())
                .contains("Kernel panic")
    }

    fn qmp(&self) -> Result<Arc<Qmp>> {
        let qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        qmp.clone().context("QEMU's control socket is not open")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("{:#}", self.explain(anyhow!("the test panicked")));
        }
    }
}

/// A running VM. Dropping it kills it.
///
/// When a test panics, the end of the guest's console and of QEMU's output are shown. They are also part of the error of a
/// command that could not be run.
pub struct Vm {
    machine: Arc<Machine>,
}

impl Vm {
    /// Waits until the guest can run commands, for as long as the builder allowed.
    pub fn wait_ready(&self) -> Result<()> {
        self.wait_boot(None)
    }

    /// Runs a shell command in the guest, for at most a minute.
    ///
    /// A command that fails is not an error here; see [`Output::ok`].
    pub fn run(&self, command: &str) -> Result<Output> {
        self.run_within(COMMAND, command)
    }

    /// Runs a shell command in the guest. If it has not ended within `timeout`, it is killed, and that is an error.
    pub fn run_within(&self, timeout: Duration, command: &str) -> Result<Output> {
        let job = self.spawn_within(timeout.min(PROMPT), command)?;
        job.wait(timeout).inspect_err(|_| {
            let _ = job.kill(9);
        })
    }

    /// Starts a shell command in the guest and waits until it has a process.
    ///
    /// Write `exec PROGRAM` if the job's process is to be the program itself.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        self.spawn_within(PROMPT, command)
    }

    fn spawn_within(&self, timeout: Duration, command: &str) -> Result<Job> {
        let start = || {
            let (id, record) = self.machine.agent.spawn(command)?;
            let pid = record.wait_started(command, timeout)?;
            Ok(Job { machine: self.machine.clone(), command: command.to_owned(), id, pid, record })
        };
        start().map_err(|e| self.explain(e))
    }

    /// Copies a host file into the guest, with its permissions.
    pub fn push(&self, host: impl AsRef<Path>, guest: &str) -> Result<()> {
        let host = host.as_ref();
        let open =
            || Ok::<_, io::Error>((File::open(host)?, fs::metadata(host)?.permissions().mode() & 0o7777));
        let (file, mode) = open().with_context(|| format!("cannot read {}", host.display()))?;
        self.transfer(self.machine.agent.push(file, guest, mode), "push", guest)
    }

    /// Writes a file in the guest.
    pub fn write(&self, guest: &str, mode: u32, bytes: impl AsRef<[u8]>) -> Result<()> {
        self.transfer(self.machine.agent.push(bytes.as_ref(), guest, mode), "write", guest)
    }

    /// Copies a file of the guest to the host.
    pub fn pull(&self, guest: &str, host: impl AsRef<Path>) -> Result<()> {
        let host = host.as_ref();
        let file = File::create(host).with_context(|| format!("cannot write {}", host.display()))?;
        self.transfer(self.machine.agent.pull(guest, file), "pull", guest)
    }

    /// Reads a file of the guest.
    pub fn read(&self, guest: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.transfer(self.machine.agent.pull(guest, &mut bytes), "read", guest)?;
        Ok(bytes)
    }

    fn transfer(&self, result: Result<()>, what: &str, guest: &str) -> Result<()> {
        result.with_context(|| format!("cannot {what} {guest}")).map_err(|e| self.explain(e))
    }

    /// Runs a QMP command, given as JSON, and returns what QEMU returns.
    pub fn qmp(&self, command: &str) -> Result<Value> {
        let command = serde_json::from_str(command).with_context(|| format!("not JSON: {command}"))?;
        self.machine.qmp()?.execute(&command).map_err(|e| self.explain(e))
    }

    /// Waits for a QMP event, such as `SHUTDOWN`, and removes it. An event that arrived before this call counts too.
    pub fn wait_event(&self, name: &str, timeout: Duration) -> Result<Value> {
        self.machine.qmp()?.wait_event(name, timeout).map_err(|e| self.explain(e))
    }

    /// Stops the guest's processors. Its memory and devices stay as they are.
    pub fn pause(&self) -> Result<()> {
        self.machine.qmp()?.execute(&json!({"execute": "stop"})).map(drop)
    }

    /// Resumes a paused guest.
    pub fn resume(&self) -> Result<()> {
        self.machine.qmp()?.execute(&json!({"execute": "cont"})).map(drop)
    }

    /// Begins to migrate the guest to a VM that was started as [`incoming`](VmBuilder::incoming). Follow its progress with
    /// `query-migrate`.
    ///
    /// When the guest has arrived, commands are run there ([`Vm::wait_ready`]). Jobs that were started here go on there, but
    /// nobody receives their output: they must not write to their standard streams meanwhile, and their handles report only the
    /// end of this QEMU.
    pub fn migrate(&self, to: &Vm) -> Result<()> {
        to.machine.agent.number_from(&self.machine.agent);
        let uri = format!("unix:{}", to.machine.paths.incoming.display());
        let command = json!({"execute": "migrate", "arguments": {"uri": uri}});
        self.machine.qmp()?.execute(&command).map(drop).map_err(|e| self.explain(e))
    }

    /// Reboots the guest in the same QEMU, and waits until it can run commands again.
    pub fn reboot_and_wait(&self) -> Result<()> {
        let old = self.boot_id()?;
        self.machine.agent.spawn("reboot -f").map_err(|e| self.explain(e))?;
        self.wait_boot(Some(&old))
    }

    /// Waits until the guest can run commands after a reboot that the test has caused in another way.
    ///
    /// `old` is the [`boot_id`](Vm::boot_id) from before the reboot.
    pub fn wait_reboot(&self, old: &str) -> Result<()> {
        self.wait_boot(Some(old))
    }

    /// Returns the kernel's id of the boot that was last waited for.
    pub fn boot_id(&self) -> Result<String> {
        let boot = self.machine.boot.lock().unwrap_or_else(PoisonError::into_inner);
        boot.clone().context("the guest is not ready (wait_ready)")
    }

    fn wait_boot(&self, old: Option<&str>) -> Result<()> {
        let timeout = self.machine.boot_timeout;
        let deadline = Instant::now() + timeout;
        let boot = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.machine.agent.wait_ready(old, left.min(Duration::from_secs(1))) {
                Ok(boot) => break boot,
                Err(e) if left.is_zero() || !self.is_running() => {
                    return Err(self.explain(e.context(format!("the guest did not boot within {timeout:?}"))));
                }
                // The guest cannot go on after that, so there is no need to wait any longer.
                Err(_) if self.machine.died_booting() => {
                    return Err(self.explain(anyhow!("the guest's kernel panicked")));
                }
                Err(_) => {}
            }
        };
        *self.machine.boot.lock().unwrap_or_else(PoisonError::into_inner) = Some(boot);
        Ok(())
    }

    /// Powers the guest off and waits until QEMU has ended by itself.
    pub fn shutdown(&self) -> Result<()> {
        let agent = &self.machine.agent;
        agent.spawn("sync; poweroff -f").map_err(|e| self.explain(e))?;
        let exit = self.machine.process.wait("qemu", PROMPT).map_err(|e| self.explain(e))?;
        ensure!(exit == crate::Exit::Code(0), "QEMU ended with {exit}");
        Ok(())
    }

    /// Kills QEMU with SIGKILL and waits until it is gone.
    pub fn kill_qemu(&self) -> Result<()> {
        self.machine.process.signal(Signal::KILL);
        self.machine.process.wait("qemu", PROMPT).map(drop)
    }

    /// Returns the VM's name in the test bed, which is also its host name.
    pub fn name(&self) -> &str {
        &self.machine.name
    }

    /// Returns its address on the bridge of the test bed.
    pub fn address(&self) -> Result<Ipv4Addr> {
        let place = self.machine.place.with_context(|| format!("VM {} has no network", self.name()))?;
        Ok(place.address())
    }

    /// Returns the acceleration with which it runs.
    pub fn accel(&self) -> Accel {
        self.machine.accel
    }

    /// Returns the process id of QEMU.
    pub fn qemu_pid(&self) -> u32 {
        self.machine.process.pid()
    }

    /// Returns whether QEMU has not ended.
    pub fn is_running(&self) -> bool {
        self.machine.is_running()
    }

    /// Returns what the guest has written to its console, and QEMU to its standard error.
    pub fn console(&self) -> (String, String) {
        let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        (read(&self.machine.paths.console), read(&self.machine.paths.log))
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        self.machine.explain(error)
    }
}

impl Machine {
    /// Adds the ends of the console and of QEMU's output to an error.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let mut text = format!("VM {} ({}): {error:#}", self.name, self.accel);
        for (what, path) in [("console", &self.paths.console), ("QEMU", &self.paths.log)] {
            let said = fs::read(path).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            if !said.trim().is_empty() {
                text += &format!("\n--- {what} of {} (its end) ---\n{}", self.name, tail(&said, 40));
            }
        }
        anyhow!(text)
    }
}

/// A command that runs in a guest. Dropping this handle does not end it.
pub struct Job {
    machine: Arc<Machine>,
    command: String,
    id: u32,
    pid: u32,
    record: Arc<Record>,
}

impl Job {
    /// Returns the process id in the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns whether it has not ended.
    pub fn is_running(&self) -> bool {
        self.record.is_running()
    }

    /// Returns what it has written so far to standard output and standard error.
    pub fn said(&self) -> (String, String) {
        self.record.said()
    }

    /// Waits for its end. It is an error if the guest reboots or dies meanwhile.
    pub fn wait(&self, timeout: Duration) -> Result<Output> {
        self.record.wait_ended(&self.command, timeout).map_err(|e| self.machine.explain(e))
    }

    /// Waits until a line of its output contains `pattern` and returns that line.
    pub fn wait_for_line(&self, pattern: &str, timeout: Duration) -> Result<String> {
        let found = self.record.wait_for_line(&self.command, pattern, timeout);
        found.map_err(|e| self.machine.explain(e))
    }

    /// Sends a signal to its whole process group. Does nothing if it has ended.
    pub fn kill(&self, signal: i32) -> Result<()> {
        self.signal(signal, true)
    }

    /// Sends a signal to the process alone, not to its children.
    pub fn kill_process(&self, signal: i32) -> Result<()> {
        self.signal(signal, false)
    }

    fn signal(&self, signal: i32, group: bool) -> Result<()> {
        signal_of(signal)?;
        if !self.record.is_running() {
            return Ok(());
        }
        self.machine.agent.signal(self.id, signal, group).map_err(|e| self.machine.explain(e))
    }
}
