//! Disk servers that are measured: ours, and QEMU's storage daemon. Each is a separate process on its own CPUs.

use anyhow::{Context, Result, bail, ensure};
use ginnel_volume_bench::workload::{Limit, Outcome, Workload, run};
use ginnel_volume_bench::{Client, Options, verify};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmtest::installation::program;

/// The storage behind a disk.
#[derive(Clone, Copy)]
pub enum Backing<'a> {
    /// Memory of the server. The storage daemon cannot do that, so it gets this file on tmpfs.
    Ram(&'a Path, u64),
    /// No storage: reads and writes do nothing.
    Null(u64),
    /// A file, through the page cache.
    File(&'a Path),
    /// A file, without the page cache.
    Direct(&'a Path),
    /// Like `Direct`, but our server pins the guest's memory.
    Pinned(&'a Path),
}

/// How our server waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// It polls all the time.
    Poll,
    /// It polls while there is work, and sleeps otherwise.
    Adaptive,
    /// The same, but it polls for 10 ms after the last work.
    Patient,
    /// It sleeps at once.
    Interrupt,
}

impl Wait {
    /// Returns the word for the configuration.
    pub fn word(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive | Self::Patient => "adaptive",
            Self::Interrupt => "interrupt",
        }
    }
}

/// How a server serves its disk.
#[derive(Clone)]
pub struct Plan<'a> {
    /// The storage.
    pub backing: Backing<'a>,
    /// The number of queues.
    pub queues: u16,
    /// The CPUs. Our server has a thread on each of them; with none, it has one thread, wherever the kernel puts it. The
    /// storage daemon serves from one thread, on any of them.
    pub cpus: Vec<usize>,
    /// How our server waits. Has no meaning for the storage daemon.
    pub wait: Wait,
}

/// A running server, which ends when this value is dropped.
pub struct Server {
    process: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts `ginnel-volume` in `dir`. Neither server locks its image, because the kernel may still hold the lock of a server
    /// that was killed a moment ago.
    pub fn ours(dir: &Path, plan: &Plan<'_>) -> Result<Self> {
        let (file, socket) = configure(dir, "ours", plan, "")?;
        let mut command = Command::new(program("ginnel-volume")?);
        command.arg("bench").arg("--config").arg(file);
        let mut server = Self::start(command, socket)?;
        if let Backing::Ram(_, bytes) = plan.backing {
            server.fill(bytes)?;
        }
        Ok(server)
    }

    /// Writes the whole disk. Memory that was never written is one page of zeros, which stays in the first-level cache however
    /// much of it is read.
    fn fill(&mut self, bytes: u64) -> Result<()> {
        let mut client = self.connect(Options::new(&self.socket))?;
        let mut block = vec![0u8; 64 << 10];
        for at in (0..bytes).step_by(block.len()) {
            verify::stamp(&mut block, at, 0);
            client.write(at, &block)?;
        }
        client.close()?;
        Ok(())
    }

    /// Starts QEMU's storage daemon in `dir` with io_uring, with which it was fastest here.
    pub fn storage_daemon(dir: &Path, plan: &Plan<'_>) -> Result<Self> {
        let socket = dir.join("peer.sock");
        let file = |path: &Path, direct| {
            format!("driver=file,filename={},aio=io_uring,locking=off,cache.direct={direct}", path.display())
        };
        let disk = match plan.backing {
            Backing::Ram(path, _) | Backing::File(path) => file(path, "off"),
            Backing::Direct(path) | Backing::Pinned(path) => file(path, "on"),
            Backing::Null(bytes) => format!("driver=null-co,read-zeroes=off,size={bytes}"),
        };
        let cpus: Vec<_> = plan.cpus.iter().map(ToString::to_string).collect();
        let mut command = Command::new("taskset");
        command.args(["-c", &cpus.join(","), "qemu-storage-daemon", "--blockdev"]);
        command.arg(format!("{disk},node-name=disk")).arg("--export").arg(format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={},addr.type=unix,addr.path={}",
            plan.queues,
            socket.display()
        ));
        Self::start(command, socket)
    }

    fn start(mut command: Command, socket: PathBuf) -> Result<Self> {
        let _ = std::fs::remove_file(&socket);
        let process =
            command.stdin(Stdio::null()).spawn().with_context(|| format!("starting {command:?}"))?;
        Ok(Self { process, socket })
    }

    /// Connects to the server as soon as it accepts connections.
    pub fn connect(&mut self, options: Options) -> Result<Client> {
        let result = Client::connect_within(options, Duration::from_secs(20));
        if let Some(status) = self.process.try_wait()? {
            bail!("the server has ended with {status}");
        }
        Ok(result?)
    }

    /// Returns the path of its vhost-user socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns its process.
    pub(crate) fn process(&self) -> &Child {
        &self.process
    }

    /// Returns the CPU time that all its threads have used.
    pub fn cpu(&self) -> Result<Duration> {
        cpu_time(&self.process)
    }

    /// Runs a workload from a client with `queues` queues. Returns its outcome, and the CPU seconds of the server per second.
    pub fn measure(&mut self, queues: u16, workload: &Workload) -> Result<(Outcome, f64)> {
        self.measure_as(Options { queues, ..Options::new(&self.socket) }, workload)
    }

    /// Does the same with a client that has these options.
    pub fn measure_as(&mut self, options: Options, workload: &Workload) -> Result<(Outcome, f64)> {
        let options = Options { depth: workload.depth, buffer: workload.block, ..options };
        let mut client = self.connect(options)?;
        let (cpu, begin) = (self.cpu()?, Instant::now());
        let outcome = run(&mut client, workload)?;
        let used = (self.cpu()?.saturating_sub(cpu)).as_secs_f64() / begin.elapsed().as_secs_f64();
        ensure!(outcome.failed == 0, "requests failed, the first: {:?}", outcome.first_failure);
        client.close()?;
        Ok((outcome, used))
    }
}

/// Writes the configuration of a volume of ours, which also has the lines `more`. Returns the paths of the file and of the
/// volume's socket.
pub(crate) fn configure(dir: &Path, name: &str, plan: &Plan<'_>, more: &str) -> Result<(PathBuf, PathBuf)> {
    let socket = dir.join(format!("{name}.sock"));
    let mut config = format!(
        "log = \"error\"\nsocket = {socket:?}\ncontrol = {:?}\nqueues = {}\nthreads = {}\ncpus = {:?}\nwait = {:?}\n{more}",
        dir.join(format!("{name}.ctl")),
        plan.queues,
        plan.cpus.len().max(1),
        plan.cpus,
        plan.wait.word(),
    );
    let disk = match plan.backing {
        Backing::Ram(_, bytes) => format!("backend = \"ram\"\nsize = \"{bytes}\""),
        Backing::Null(bytes) => format!("backend = \"null\"\nsize = \"{bytes}\""),
        Backing::File(path) => format!("path = {path:?}\nlock = false\ndirect = \"off\""),
        Backing::Direct(path) | Backing::Pinned(path) => {
            format!("path = {path:?}\nlock = false\ndirect = \"on\"")
        }
    };
    if plan.wait == Wait::Patient {
        config += "poll-for = \"10ms\"\n";
    }
    if let Backing::Pinned(_) = plan.backing {
        config += "pin-memory = true\n";
    }
    write!(config, "\n[[disk]]\n{disk}\n")?;
    let file = dir.join(format!("{name}.toml"));
    std::fs::write(&file, config)?;
    Ok((file, socket))
}

/// Returns the CPU time that all threads of a process have used.
pub(crate) fn cpu_time(process: &Child) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for task in std::fs::read_dir(format!("/proc/{}/task", process.id()))? {
        // A thread that has just ended is not counted.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let ns = text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
        sum += Duration::from_nanos(ns);
    }
    Ok(sum)
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Limits a workload to this time, after a warm-up of a fifth of it that does not count.
pub fn for_seconds(seconds: f64, workload: Workload) -> Workload {
    let time = Duration::from_secs_f64(seconds);
    Workload { limit: Limit::Time(time), ramp: time / 5, ..workload }
}

/// Returns the median latency of all requests, in nanoseconds.
pub fn p50(outcome: &Outcome) -> f64 {
    outcome.latency().value_at_quantile(0.5) as f64
}

/// Makes a file without holes whose bytes do not compress.
pub fn make_file(path: &Path, bytes: u64) -> Result<()> {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    let mut block = vec![0u8; 1 << 20];
    for at in 0..bytes >> 20 {
        verify::stamp(&mut block, at << 20, 0);
        std::io::Write::write_all(&mut file, &block)?;
    }
    file.into_inner()?.sync_all()?;
    Ok(())
}
