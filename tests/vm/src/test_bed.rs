//! A test bed: the VMs of one test, their network, and everything that must disappear together with them.

use crate::accel::{Accel, PROBE};
use crate::image::which;
use crate::kernel::Kernel;
use crate::net::{Network, Place};
use crate::process::{HostJob, Launcher};
use crate::reaper::Reaper;
use crate::record::Output;
use crate::vm::{Machine, VmBuilder};
use crate::vmlinux::unpacked;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// How long a test bed waits for its turn. One test that boots VMs already uses all of a small machine.
const TURN: Duration = Duration::from_secs(30 * 60);

/// The timeout of commands of [`TestBed::host`].
const HOST_COMMAND: Duration = Duration::from_secs(120);

/// VMs and what they share.
///
/// There is only one test bed at a time on a machine; [`TestBed::new`] waits for its turn. Dropping the test bed (also by a
/// panic) kills its VMs and host commands. When the last handle of a VM is dropped too, its network and its files disappear.
/// The same happens when the whole program is killed, except that the files stay until the next test bed removes them.
pub struct TestBed {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    // Dropped in this order: processes and their network, then their files, then the turn.
    pub launcher: Launcher,
    reaper: Reaper,
    network: OnceLock<Network>,
    pub kernel: Kernel,
    /// The kernel in the form that QEMU loads.
    pub vmlinux: PathBuf,
    pub qemu: PathBuf,
    accel: OnceLock<Accel>,
    state: Mutex<State>,
    dir: tempfile::TempDir,
    _turn: Turn,
}

#[derive(Default)]
struct State {
    places: BTreeMap<String, Place>,
    machines: Vec<(String, Weak<Machine>)>,
    jobs: Vec<Arc<HostJob>>,
}

impl TestBed {
    /// Makes a test bed without VMs. The name is for messages.
    ///
    /// Blocks until no other test bed is on the machine (at most half an hour). Finds or downloads a kernel; an error says
    /// which package is missing.
    pub fn new(name: &str) -> Result<TestBed> {
        let turn = Turn::take()?;
        let qemu = match std::env::var_os("GINNEL_QEMU") {
            Some(path) => PathBuf::from(path),
            None => which("qemu-system-x86_64", "qemu-system-x86")?,
        };
        ensure!(qemu.is_file(), "there is no QEMU {}", qemu.display());
        let dir = tempfile::Builder::new()
            .prefix(&format!("{BED_PREFIX}{name}-"))
            .tempdir()
            .context("cannot make a temporary folder")?;
        let kernel = Kernel::find()?;
        let inner = Inner {
            launcher: Launcher::new()?,
            reaper: Reaper::new()?,
            network: OnceLock::new(),
            vmlinux: unpacked(&kernel.image)?,
            kernel,
            qemu,
            accel: OnceLock::new(),
            state: Mutex::default(),
            dir,
            _turn: turn,
        };
        Ok(TestBed { inner: Arc::new(inner) })
    }

    /// Describes a VM. A name can be used again when the former VM of that name has ended; its address stays the same.
    pub fn vm(&self, name: &str) -> VmBuilder {
        VmBuilder::new(self.inner.clone(), name)
    }

    /// Returns the acceleration of the guests. The first call may boot a VM to find out; the result is kept.
    pub fn accel(&self) -> Result<Accel> {
        self.inner.accel()
    }

    /// Returns the kernel that the guests boot.
    pub fn kernel(&self) -> &Kernel {
        &self.inner.kernel
    }

    /// Returns the path of the QEMU that runs the guests.
    pub fn qemu(&self) -> &Path {
        &self.inner.qemu
    }

    /// Returns the folder of the test bed, for sockets and files of the test. It is removed together with the test bed.
    pub fn dir(&self) -> &Path {
        self.inner.dir.path()
    }

    /// Runs a shell command on the host, in the network of the test bed, for at most two minutes.
    ///
    /// This call makes the network if no VM has asked for it before. Needs root.
    pub fn host_in_net(&self, command: &str) -> Result<Output> {
        self.inner.network()?;
        self.host(command)
    }

    /// Runs a shell command on the host for at most two minutes: in the network of the test bed if it exists, otherwise in the
    /// host's.
    pub fn host(&self, command: &str) -> Result<Output> {
        let job = self.host_spawn(command)?;
        job.wait(HOST_COMMAND).inspect_err(|_| {
            let _ = job.kill(9);
        })
    }

    /// Starts a shell command on the host. Write `exec PROGRAM` if the job's process is to be the program itself.
    pub fn host_spawn(&self, command: &str) -> Result<Arc<HostJob>> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", command]).current_dir(self.dir());
        self.host_spawn_command(command, shell)
    }

    /// Starts a program on the host. The harness reads its standard output and standard error.
    pub fn host_spawn_command(&self, name: &str, mut command: Command) -> Result<Arc<HostJob>> {
        // Whoever runs the tests may set this for the test runner. A command that builds something would build everything anew with it.
        command.env_remove("RUSTC_BOOTSTRAP");
        let job = Arc::new(HostJob::start(&self.inner.launcher, name, command)?);
        self.inner.reaper.note(job.pid())?;
        let mut state = self.inner.state();
        state.jobs.retain(|job| job.is_running());
        state.jobs.push(job.clone());
        Ok(job)
    }

    /// Runs a closure on a thread in the network of the test bed, so sockets that it opens can reach the guests.
    ///
    /// This call makes the network if no VM has asked for it before. Needs root.
    pub fn in_net<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let network = self.inner.network()?;
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                move_into_link_name_space(
                    std::os::fd::AsFd::as_fd(&network.namespace),
                    Some(LinkNameSpaceType::Network),
                )
                .context("cannot enter the network of the test bed")?;
                Ok(work())
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        // Handles of VMs and jobs may live on, but the VMs and jobs themselves must end.
        let mut state = self.inner.state();
        let machines: Vec<_> =
            state.machines.drain(..).filter_map(|(_, machine)| machine.upgrade()).collect();
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        for job in jobs {
            let _ = job.kill(9);
        }
        for machine in machines {
            machine.kill();
        }
    }
}

impl Inner {
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn accel(self: &Arc<Inner>) -> Result<Accel> {
        if let Some(accel) = self.accel.get() {
            return Ok(*accel);
        }
        let accel = Accel::choose(&self.kernel, &self.qemu, || {
            VmBuilder::new(self.clone(), "kvm-probe").accel(Accel::Kvm).boot_timeout(PROBE).boot().map(drop)
        })?;
        Ok(*self.accel.get_or_init(|| accel))
    }

    pub fn network(&self) -> Result<&Network> {
        // One call at a time: a second namespace would separate the VMs.
        let _state = self.state();
        if let Some(network) = self.network.get() {
            return Ok(network);
        }
        let network = Network::new(&self.launcher)?;
        Ok(self.network.get_or_init(|| network))
    }

    /// Returns the place of the VM of this name in the network. It is the same for each boot of the VM.
    pub fn place(&self, name: &str) -> Result<Place> {
        let mut state = self.state();
        if let Some(place) = state.places.get(name) {
            return Ok(*place);
        }
        let index = u8::try_from(state.places.len()).ok().filter(|index| *index < 240);
        let place = Place { index: index.context("a test bed has room for 240 VMs")? };
        state.places.insert(name.to_owned(), place);
        Ok(place)
    }

    /// Returns the content of `/etc/hosts` with all names that a guest may look up.
    pub fn hosts(&self) -> String {
        let mut text = format!("127.0.0.1 localhost\n{} host\n", crate::net::HOST);
        for (name, place) in &self.state().places {
            text += &format!("{} {name}\n", place.address());
        }
        text
    }

    pub fn enter(&self, name: &str, machine: &Arc<Machine>) {
        let mut state = self.state();
        state.machines.retain(|(_, machine)| machine.strong_count() > 0);
        state.machines.push((name.to_owned(), Arc::downgrade(machine)));
    }

    /// Fails if a VM of this name runs.
    pub fn check_free(&self, name: &str) -> Result<()> {
        let state = self.state();
        let running = |(other, machine): &(String, Weak<Machine>)| {
            other == name && machine.upgrade().is_some_and(|machine| machine.is_running())
        };
        ensure!(!state.machines.iter().any(running), "a VM named {name} is running in this test bed already");
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const BED_PREFIX: &str = "ginnel-bed-";

/// The thread that has the turn. If it asked for the turn again, it would wait for itself for ever.
static HOLDER: Mutex<Option<ThreadId>> = Mutex::new(None);

/// The right to boot VMs on this machine, kept by a file lock.
struct Turn {
    _lock: File,
}

impl Turn {
    fn take() -> Result<Turn> {
        let mine = || *HOLDER.lock().unwrap_or_else(PoisonError::into_inner) == Some(thread::current().id());
        ensure!(!mine(), "this thread has a test bed already; boot several VMs in one test bed");
        let temp = std::env::temp_dir();
        let path = temp.join(format!("ginnel-vm-{}.lock", rustix::process::geteuid().as_raw()));
        let lock = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let mut lock = lock.with_context(|| format!("cannot open {}", path.display()))?;
        let holder = || fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
        let begun = Instant::now();
        let mut told = false;
        while let Err(e) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            ensure!(e == rustix::io::Errno::WOULDBLOCK, "cannot lock {}: {e}", path.display());
            if begun.elapsed() > TURN {
                bail!("process {} has been booting VMs for {TURN:?} ({})", holder(), path.display());
            }
            if !told && begun.elapsed() > Duration::from_secs(5) {
                eprintln!("waiting for the VMs of process {}", holder());
                told = true;
            }
            thread::sleep(Duration::from_millis(50));
        }
        *HOLDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current().id());
        lock.set_len(0)?;
        writeln!(lock, "{}", std::process::id())?;
        let turn = Turn { _lock: lock };
        sweep(&temp).context("cannot remove what a killed test left")?;
        Ok(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *HOLDER.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Removes the folders of test beds that were killed. The owner of the turn knows that no other test bed exists.
fn sweep(temp: &Path) -> io::Result<()> {
    let me = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(temp)?.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(BED_PREFIX);
        if ours && entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == me) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
