//! One virtual machine: described, booted, used, ended.

use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::image::{DAX, Overlay};
use crate::link::Link;
use crate::net::Place;
use crate::process::{Process, signal_of};
use crate::protocol::PORT;
use crate::qmp::Qmp;
use crate::record::{Output, Record, tail};
use crate::test_bed::Inner;

/// How long [`Vm::run`] gives a command.
const COMMAND: Duration = Duration::from_secs(60);
/// How long a guest may take to boot, unless the builder says otherwise.
const BOOT: Duration = Duration::from_secs(120);
/// How long a job may take to get a process, QEMU to open its sockets or to die, a guest to power off.
const PROMPT: Duration = Duration::from_secs(30);

/// A VM that is being described. [`boot`](VmBuilder::boot) makes it real.
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

    /// The guest's memory, in MiB; 256 if not said. The guest's files live in it too.
    pub fn memory_mib(mut self, mib: u32) -> VmBuilder {
        self.memory_mib = mib;
        self
    }

    /// Room for memory devices such as virtio-pmem, in MiB: QEMU's `maxmem` is the memory and this.
    pub fn device_memory_mib(mut self, mib: u64) -> VmBuilder {
        self.device_memory_mib = Some(mib);
        self
    }

    /// Virtual processors; 1 if not said.
    pub fn cpus(mut self, cpus: u32) -> VmBuilder {
        self.cpus = cpus;
        self
    }

    /// An IOMMU with interrupt remapping, so that VFIO works in the guest.
    pub fn iommu(mut self) -> VmBuilder {
        self.iommu = true;
        self
    }

    /// A virtio-net card on the bed's bridge, with an address. Needs root.
    pub fn network(mut self) -> VmBuilder {
        self.network = true;
        self
    }

    /// This QEMU instead of the bed's.
    pub fn qemu(mut self, program: impl Into<PathBuf>) -> VmBuilder {
        self.qemu = Some(program.into());
        self
    }

    /// This acceleration instead of the bed's.
    pub fn accel(mut self, accel: Accel) -> VmBuilder {
        self.accel = Some(accel);
        self
    }

    /// A host program, with its libraries, as `/usr/local/bin/NAME`.
    pub fn program(mut self, path: impl Into<PathBuf>) -> VmBuilder {
        self.overlay.programs.push(path.into());
        self
    }

    /// A host library, with those that it needs, as `/usr/local/lib/NAME`, where all programs of the guest look first.
    pub fn library(mut self, path: impl Into<PathBuf>) -> VmBuilder {
        self.overlay.libraries.push(path.into());
        self
    }

    /// A host file at any place; a program brings its libraries.
    pub fn file(mut self, host: impl Into<PathBuf>, guest: &str) -> VmBuilder {
        self.overlay.files.push((host.into(), guest.to_owned()));
        self
    }

    /// A file with this content and these permissions.
    pub fn content(mut self, guest: &str, mode: u32, bytes: impl Into<Vec<u8>>) -> VmBuilder {
        self.overlay.contents.push((guest.to_owned(), mode, bytes.into()));
        self
    }

    /// A kernel module, loaded at boot with all that it needs.
    pub fn module(mut self, name: &str) -> VmBuilder {
        self.overlay.modules.push(name.to_owned());
        self.load.push(name.to_owned());
        self
    }

    /// The drivers that turn a virtio-pmem device into `/dev/dax*`, loaded at boot.
    pub fn dax(self) -> VmBuilder {
        DAX.into_iter().fold(self, VmBuilder::module)
    }

    /// A host folder, mounted at boot through 9p.
    pub fn share(mut self, host: impl Into<PathBuf>, guest: &str) -> VmBuilder {
        self.shares.push((host.into(), guest.to_owned()));
        self
    }

    /// All files of the host below `/host`, which cannot be written, so that a program of the host runs by `chroot /host`
    /// without a copy of it and of what it needs. `/dev`, `/proc`, `/run`, `/sys`, `/tmp` and `/usr/local` are the guest's own there.
    pub fn host_files(mut self) -> VmBuilder {
        self.host_files = true;
        self
    }

    /// One more argument for the kernel.
    pub fn kernel_arg(mut self, arg: &str) -> VmBuilder {
        self.kernel_args.push(arg.to_owned());
        self
    }

    /// More of QEMU's command line, split at white space, such as `ginnel qemu-args` prints.
    pub fn qemu_args(mut self, line: &str) -> VmBuilder {
        self.qemu_args.extend(line.split_whitespace().map(str::to_owned));
        self
    }

    /// One more argument for QEMU, taken as it is.
    pub fn qemu_arg(mut self, arg: &str) -> VmBuilder {
        self.qemu_args.push(arg.to_owned());
        self
    }

    /// How long the guest may take to boot; two minutes if not said.
    pub fn boot_timeout(mut self, timeout: Duration) -> VmBuilder {
        self.boot_timeout = timeout;
        self
    }

    /// Boots no guest: waits for one that comes by [`Vm::migrate`]. To be described as the VM that it comes from.
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

    /// Starts the VM and does not wait: several can boot at once. Follow with [`Vm::wait_ready`].
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
        let link = Link::open(&paths.agent);
        let on_exit = link.clone();
        let child = self.bed.launcher.spawn(command).inspect_err(|_| link.close("QEMU was not started"))?;
        let process = Process::adopt(child, move |exit| on_exit.close(&format!("QEMU ended with {exit}")))?;
        let machine = Arc::new(Machine {
            name: self.name.clone(),
            place,
            accel,
            process,
            link,
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
        // At least two possible processors, even if one runs: with a single one TCG drops memory barriers and makes
        // atomic instructions non-atomic, which breaks memory that the guest shares with others.
        command.arg("-smp").arg(format!("{},maxcpus={}", self.cpus, self.cpus.max(2)));
        let max_memory = self.device_memory_mib.map(|mib| u64::from(self.memory_mib) + mib);
        let max_memory = max_memory.map(|mib| format!(",slots=8,maxmem={mib}M")).unwrap_or_default();
        command.arg("-m").arg(format!("{}M{max_memory}", self.memory_mib));
        command.arg("-kernel").arg(&self.bed.vmlinux).arg("-initrd").arg(&paths.initrd);
        let iommu = self.iommu.then_some("intel_iommu=on");
        // On a busy host an emulated timer may be late for the kernel's check at boot, which is fatal with an IOMMU.
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
            // Files of several file systems, whose numbers may be the same.
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

/// Files of one VM in the bed's folder.
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

/// A QEMU and the ways to it.
pub(crate) struct Machine {
    name: String,
    place: Option<Place>,
    accel: Accel,
    process: Process,
    link: Arc<Link>,
    qmp: Mutex<Option<Arc<Qmp>>>,
    /// The boot that the test has seen last.
    boot: Mutex<Option<String>>,
    boot_timeout: Duration,
    paths: Paths,
    /// Its files and its network must not go before it does.
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
        let link = self.link.clone();
        let qmp = Qmp::open(stream, move |event| match event["event"].as_str() {
            Some("RESET") => link.reset("the guest rebooted"),
            Some("VSERPORT_CHANGE") if event["data"]["open"] == false => {
                link.reset("the guest's agent is gone")
            }
            _ => {}
        })?;
        *self.qmp.lock().unwrap_or_else(PoisonError::into_inner) = Some(qmp);
        Ok(())
    }

    /// Whether the kernel has panicked in the first boot.
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
/// The end of the guest's console and of what QEMU said are shown when a test panics, and with the error of a command
/// that did not run.
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
    /// A command that fails is no error here; see [`Output::ok`].
    pub fn run(&self, command: &str) -> Result<Output> {
        self.run_within(COMMAND, command)
    }

    /// Runs a shell command in the guest, for at most this long; then it is killed and that is an error.
    pub fn run_within(&self, timeout: Duration, command: &str) -> Result<Output> {
        let job = self.spawn_within(timeout.min(PROMPT), command)?;
        job.wait(timeout).inspect_err(|_| {
            let _ = job.kill(9);
        })
    }

    /// Starts a shell command in the guest and waits until it has a process.
    ///
    /// Write `exec PROGRAM` when the job's process shall be the program itself.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        self.spawn_within(PROMPT, command)
    }

    fn spawn_within(&self, timeout: Duration, command: &str) -> Result<Job> {
        let start = || {
            let (id, record) = self.machine.link.spawn(command)?;
            let pid = record.wait_started(command, timeout)?;
            Ok(Job { machine: self.machine.clone(), command: command.to_owned(), id, pid, record })
        };
        start().map_err(|e| self.explain(e))
    }

    /// Copies a host file into the guest, permissions too.
    pub fn push(&self, host: impl AsRef<Path>, guest: &str) -> Result<()> {
        let host = host.as_ref();
        let open =
            || Ok::<_, io::Error>((File::open(host)?, fs::metadata(host)?.permissions().mode() & 0o7777));
        let (file, mode) = open().with_context(|| format!("cannot read {}", host.display()))?;
        self.transfer(self.machine.link.push(file, guest, mode), "push", guest)
    }

    /// Writes a file in the guest.
    pub fn write(&self, guest: &str, mode: u32, bytes: impl AsRef<[u8]>) -> Result<()> {
        self.transfer(self.machine.link.push(bytes.as_ref(), guest, mode), "write", guest)
    }

    /// Copies a file of the guest to the host.
    pub fn pull(&self, guest: &str, host: impl AsRef<Path>) -> Result<()> {
        let host = host.as_ref();
        let file = File::create(host).with_context(|| format!("cannot write {}", host.display()))?;
        self.transfer(self.machine.link.pull(guest, file), "pull", guest)
    }

    /// Reads a file of the guest.
    pub fn read(&self, guest: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.transfer(self.machine.link.pull(guest, &mut bytes), "read", guest)?;
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

    /// Waits for a QMP event, such as `SHUTDOWN`, and takes it; one that came before counts.
    pub fn wait_event(&self, name: &str, timeout: Duration) -> Result<Value> {
        self.machine.qmp()?.wait_event(name, timeout).map_err(|e| self.explain(e))
    }

    /// Stops the guest's processors. Its memory and devices stay.
    pub fn pause(&self) -> Result<()> {
        self.machine.qmp()?.execute(&json!({"execute": "stop"})).map(drop)
    }

    /// Lets a paused guest go on.
    pub fn resume(&self) -> Result<()> {
        self.machine.qmp()?.execute(&json!({"execute": "cont"})).map(drop)
    }

    /// Begins to migrate the guest to a VM that was started as [`incoming`](VmBuilder::incoming); follow it with
    /// `query-migrate`.
    ///
    /// When it has arrived, commands are run there ([`Vm::wait_ready`]). Jobs that were started here go on there, unheard: they
    /// must write nothing to their standard streams meanwhile, and their handles tell of the end of this QEMU only.
    pub fn migrate(&self, to: &Vm) -> Result<()> {
        to.machine.link.number_from(&self.machine.link);
        let uri = format!("unix:{}", to.machine.paths.incoming.display());
        let command = json!({"execute": "migrate", "arguments": {"uri": uri}});
        self.machine.qmp()?.execute(&command).map(drop).map_err(|e| self.explain(e))
    }

    /// Makes the guest reboot, in the same QEMU, and waits until it can run commands again.
    pub fn reboot_and_wait(&self) -> Result<()> {
        let old = self.boot_id()?;
        self.machine.link.spawn("reboot -f").map_err(|e| self.explain(e))?;
        self.wait_boot(Some(&old))
    }

    /// Waits until the guest can run commands after a reboot that the test has caused in another way.
    ///
    /// `old` is the [`boot_id`](Vm::boot_id) before.
    pub fn wait_reboot(&self, old: &str) -> Result<()> {
        self.wait_boot(Some(old))
    }

    /// The kernel's id of the boot that was last waited for.
    pub fn boot_id(&self) -> Result<String> {
        let boot = self.machine.boot.lock().unwrap_or_else(PoisonError::into_inner);
        boot.clone().context("the guest is not ready (wait_ready)")
    }

    fn wait_boot(&self, old: Option<&str>) -> Result<()> {
        let timeout = self.machine.boot_timeout;
        let deadline = Instant::now() + timeout;
        let boot = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.machine.link.wait_ready(old, left.min(Duration::from_secs(1))) {
                Ok(boot) => break boot,
                Err(e) if left.is_zero() || !self.is_running() => {
                    return Err(self.explain(e.context(format!("the guest did not boot within {timeout:?}"))));
                }
                // It stays where it is: no need to wait for the end of the time.
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
        let link = &self.machine.link;
        link.spawn("sync; poweroff -f").map_err(|e| self.explain(e))?;
        let exit = self.machine.process.wait("qemu", PROMPT).map_err(|e| self.explain(e))?;
        ensure!(exit == crate::Exit::Code(0), "QEMU ended with {exit}");
        Ok(())
    }

    /// Kills QEMU with SIGKILL and waits until it is gone.
    pub fn kill_qemu(&self) -> Result<()> {
        self.machine.process.signal(Signal::KILL);
        self.machine.process.wait("qemu", PROMPT).map(drop)
    }

    /// The name that the bed knows it by; also its host name.
    pub fn name(&self) -> &str {
        &self.machine.name
    }

    /// Its address on the bed's bridge.
    pub fn address(&self) -> Result<Ipv4Addr> {
        let place = self.machine.place.with_context(|| format!("VM {} has no network", self.name()))?;
        Ok(place.address())
    }

    /// The acceleration that it runs with.
    pub fn accel(&self) -> Accel {
        self.machine.accel
    }

    /// QEMU's process id.
    pub fn qemu_pid(&self) -> u32 {
        self.machine.process.pid()
    }

    /// Whether QEMU has not ended.
    pub fn is_running(&self) -> bool {
        self.machine.is_running()
    }

    /// What the guest has written to its console, and QEMU to its standard error.
    pub fn console(&self) -> (String, String) {
        let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        (read(&self.machine.paths.console), read(&self.machine.paths.log))
    }

    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        self.machine.explain(error)
    }
}

impl Machine {
    /// Adds to an error what the console and QEMU say about it.
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

/// A command that runs in a guest. It goes on when this handle is dropped.
pub struct Job {
    machine: Arc<Machine>,
    command: String,
    id: u32,
    pid: u32,
    record: Arc<Record>,
}

impl Job {
    /// The process id in the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has not ended.
    pub fn is_running(&self) -> bool {
        self.record.is_running()
    }

    /// What it has written so far: standard output, standard error.
    pub fn said(&self) -> (String, String) {
        self.record.said()
    }

    /// Waits for its end. A guest that reboots or dies meanwhile is an error.
    pub fn wait(&self, timeout: Duration) -> Result<Output> {
        self.record.wait_ended(&self.command, timeout).map_err(|e| self.machine.explain(e))
    }

    /// Waits until a line of its output contains `pattern` and returns that line.
    pub fn wait_for_line(&self, pattern: &str, timeout: Duration) -> Result<String> {
        let found = self.record.wait_for_line(&self.command, pattern, timeout);
        found.map_err(|e| self.machine.explain(e))
    }

    /// Sends a signal to its whole process group. One that has ended takes none, and that is no error.
    pub fn kill(&self, signal: i32) -> Result<()> {
        self.signal(signal, true)
    }

    /// Sends a signal to the process alone; its children are left alone.
    pub fn kill_process(&self, signal: i32) -> Result<()> {
        self.signal(signal, false)
    }

    fn signal(&self, signal: i32, group: bool) -> Result<()> {
        signal_of(signal)?;
        if !self.record.is_running() {
            return Ok(());
        }
        self.machine.link.signal(self.id, signal, group).map_err(|e| self.machine.explain(e))
    }
}
