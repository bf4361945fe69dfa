//! Disk servers to measure: ours, and QEMU's storage daemon, each a process of its own on CPUs of its own.

use anyhow::{Context, Result, bail, ensure};
use ginnel_volume_bench::workload::{Limit, Outcome, Workload, run};
use ginnel_volume_bench::{Client, Options, verify};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmtest::installation::program;

/// What lies behind a disk.
#[derive(Clone, Copy)]
pub enum Backing<'a> {
    /// Memory of the server; for the storage daemon, which has none, this file on tmpfs.
    Ram(&'a Path, u64),
    /// Nothing at all.
    Null(u64),
    /// A file, through the page cache.
    File(&'a Path),
    /// A file, past the page cache.
    Direct(&'a Path),
    /// As that; our server pins the guest's memory.
    Pinned(&'a Path),
}

/// How our server waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// It looks all the time.
    Poll,
    /// It looks while there is work, and sleeps then.
    Adaptive,
    /// It sleeps at once.
    Interrupt,
}

impl Wait {
    /// As the configuration has it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Interrupt => "interrupt",
        }
    }
}

/// How to serve.
#[derive(Clone)]
pub struct Plan<'a> {
    /// What.
    pub backing: Backing<'a>,
    /// With so many queues.
    pub queues: u16,
    /// Our server: on these CPUs, a thread each; none: one thread, wherever the kernel puts it. The storage daemon serves from one
    /// thread, on all of them.
    pub cpus: Vec<usize>,
    /// Our server only.
    pub wait: Wait,
}

/// A running server. Ends when dropped.
pub struct Server {
    process: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts `ginnel-volume` in `dir`. Neither server locks its image: the kernel may still hold the lock of one that was
    /// killed a moment ago.
    pub fn ours(dir: &Path, plan: &Plan<'_>) -> Result<Self> {
        let socket = dir.join("ours.sock");
        let mut config = format!(
            "log = \"error\"\nsocket = {socket:?}\ncontrol = {:?}\nqueues = {}\nthreads = {}\ncpus = {:?}\nwait = {:?}\n",
            dir.join("ours.ctl"),
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
        if let Backing::Pinned(_) = plan.backing {
            config += "pin-memory = true\n";
        }
        write!(config, "\n[[disk]]\n{disk}\n")?;
        let file = dir.join("ours.toml");
        std::fs::write(&file, config)?;
        let mut command = Command::new(program("ginnel-volume")?);
        command.arg("bench").arg("--config").arg(file);
        let mut server = Self::start(command, socket)?;
        if let Backing::Ram(_, bytes) = plan.backing {
            server.fill(bytes)?;
        }
        Ok(server)
    }

    /// Writes all of the disk. Memory that was never written is one page of zeros, which stays in the first-level cache however
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

    /// Starts QEMU's storage daemon in `dir`, in the way in which it was fastest here: with io_uring.
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

    /// Connects to it, as soon as it takes connections.
    pub fn connect(&mut self, options: Options) -> Result<Client> {
        let result = Client::connect_within(options, Duration::from_secs(20));
        if let Some(status) = self.process.try_wait()? {
            bail!("the server has ended with {status}");
        }
        Ok(result?)
    }

    /// Its vhost-user socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// CPU time that all its threads have used.
    pub fn cpu(&self) -> Result<Duration> {
        let mut sum = Duration::ZERO;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            // A thread that has just ended is none.
            let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
            let ns = text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            sum += Duration::from_nanos(ns);
        }
        Ok(sum)
    }

    /// Runs a workload against it, from a client of `queues` queues. Also: CPU seconds of the server for each second.
    pub fn measure(&mut self, queues: u16, workload: &Workload) -> Result<(Outcome, f64)> {
        self.measure_as(Options { queues, ..Options::new(&self.socket) }, workload)
    }

    /// The same with a client of one's own choice.
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

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The same for so long, after a fifth of it that does not count.
pub fn for_seconds(seconds: f64, workload: Workload) -> Workload {
    let time = Duration::from_secs_f64(seconds);
    Workload { limit: Limit::Time(time), ramp: time / 5, ..workload }
}

/// The median latency of all requests, in nanoseconds.
pub fn p50(outcome: &Outcome) -> f64 {
    outcome.latency().value_at_quantile(0.5) as f64
}

/// A file that is all there, and does not compress.
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
