//! NVMe volumes beside virtio-blk volumes of the same kind, each with a client of its own kind and without a VM.

use crate::report::{Better, Report};
use crate::volume::{Backing, Plan, Server, Wait, configure, cpu_time, for_seconds, make_file};
use anyhow::{Context, Result, ensure};
use ginnel_volume_bench::workload::{Outcome, Workload, run};
use ginnel_volume_bench::{Doorbells, Front, NvmeClient, NvmeOptions, NvmeQueue, Request};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmtest::installation::program;

const BYTES: u64 = 256 << 20;
const BLK: &str = "the same volume as virtio-blk";
pub(crate) const LIMIT: &str = "the limit";
/// How often the engine is killed for a row.
const KILLS: usize = 10;
/// Stands for zero, which has no ratio.
pub(crate) const NOTHING: f64 = 0.001;
const PATIENCE: Duration = Duration::from_secs(20);

/// Adds the rows.
pub fn rows(report: &mut Report, dir: &Path, pairs: usize, seconds: f64) -> Result<()> {
    let bench = Bench { dir, pairs, seconds };
    bench.rates(report)?;
    bench.idle(report)?;
    bench.kills(report)
}

struct Bench<'a> {
    dir: &'a Path,
    pairs: usize,
    seconds: f64,
}

/// The figures of one run.
struct Run {
    kiops: f64,
    /// Thousands of requests for each second of the server's CPU time.
    per_cpu: f64,
    /// Trapped doorbells for each 1000 commands, at least [`NOTHING`].
    traps: f64,
}

impl Run {
    fn new(outcome: &Outcome, cpu: f64) -> Self {
        let kiops = outcome.iops() / 1000.0;
        // The warm-up counts for the traps, and not for the requests, so that the figure is a little too large.
        let traps = outcome.kicks as f64 * 1000.0 / outcome.reads.requests.max(1) as f64;
        Self { kiops, per_cpu: kiops / cpu, traps: traps.max(NOTHING) }
    }
}

impl Bench<'_> {
    /// Measures volumes that do nothing, with mapped doorbells (poll) and with shadow doorbells (adaptive).
    fn rates(&self, report: &mut Report) -> Result<()> {
        for (wait, expected, target, most) in [
            (Wait::Poll, Doorbells::Mapped, Some(1.0), NOTHING),
            (Wait::Adaptive, Doorbells::Shadow, None, 5.0),
        ] {
            let plan = Plan { backing: Backing::Null(BYTES), queues: 1, cpus: vec![1], wait };
            let case = format!("NVMe, null, {}", wait.word());
            for depth in [32, 1] {
                let workload =
                    for_seconds(self.seconds, Workload { depth, cpu: Some(0), ..Workload::default() });
                let (mut nvme, mut blk) = (Vec::new(), Vec::new());
                for _ in 0..self.pairs {
                    let mut server = Server::ours(self.dir, &plan)?;
                    let (outcome, cpu) = server.measure(1, &workload)?;
                    blk.push(Run::new(&outcome, cpu));
                    drop(server);
                    nvme.push(NvmeServer::start(self.dir, "nvme", &plan)?.measure(expected, &workload)?);
                }
                let column = |runs: &[Run], of: fn(&Run) -> f64| runs.iter().map(of).collect::<Vec<_>>();
                let mut row = |what: &str, unit, of, target| {
                    let (nvme, blk) = (column(&nvme, of), column(&blk, of));
                    let case = format!("{case}: {what}, QD {depth}");
                    report.pairs(case, unit, Better::Higher, &nvme, BLK, &blk, target, "");
                };
                row("reads, 1 queue", "kIOPS", |run| run.kiops, target.filter(|_| depth == 32));
                let per_cpu: fn(&Run) -> f64 = |run| run.per_cpu;
                row("thousand requests per CPU second", "k", per_cpu, None);
                let traps = column(&nvme, |run| run.traps);
                report.pairs(
                    format!("{case}: trapped doorbells per 1000 commands, QD {depth}"),
                    "traps",
                    Better::Lower,
                    &traps,
                    LIMIT,
                    &vec![most; traps.len()],
                    Some(1.0).filter(|_| depth == 32),
                    "0.001 stands for none",
                );
            }
        }
        Ok(())
    }

    /// Measures a volume that has had work, and has none any more.
    fn idle(&self, report: &mut Report) -> Result<()> {
        let plan = Plan { backing: Backing::Null(BYTES), queues: 2, cpus: vec![0, 1], wait: Wait::Adaptive };
        let server = NvmeServer::start(self.dir, "nvme", &plan)?;
        let mut client = server.connect(NvmeOptions { queues: 2, ..server.options() })?;
        ensure!(client.doorbells() == Doorbells::Shadow, "doorbells are {:?}", client.doorbells());
        client.read(0, &mut [0; 4096])?;
        std::thread::sleep(Duration::from_millis(500));
        let (before, seconds) = (server.cpu()?, 5);
        std::thread::sleep(Duration::from_secs(seconds));
        let used = 100.0 * server.cpu()?.saturating_sub(before).as_secs_f64() / seconds as f64;
        client.close()?;
        report.pairs(
            format!("NVMe, adaptive: idle, driver connected, {seconds} s"),
            "% CPU",
            Better::Lower,
            &[used.max(NOTHING)],
            LIMIT,
            // What is less than that is shown as 0 by every tool.
            &[0.05],
            Some(1.0),
            "holder and engine; 0.001 stands for less than that",
        );
        Ok(())
    }

    /// Measures how long a driver with 32 reads in flight waits when the engine is killed and started again at once.
    fn kills(&self, report: &mut Report) -> Result<()> {
        let folder = tempfile::tempdir_in(crate::report::folder()?)?;
        let image = folder.path().join("image");
        make_file(&image, BYTES)?;
        for (disk, backing, wait) in [
            ("null, poll", Backing::Null(BYTES), Wait::Poll),
            ("null, adaptive", Backing::Null(BYTES), Wait::Adaptive),
            ("file O_DIRECT, adaptive", Backing::Direct(&image), Wait::Adaptive),
        ] {
            let plan = Plan { backing, queues: 1, cpus: vec![1], wait };
            let mut server = NvmeServer::start(self.dir, "nvme", &plan)?;
            let mut client = server.connect(server.options())?;
            let mut gaps = Vec::new();
            for _ in 0..KILLS {
                let gap = server.kill_under_load(client.queue(0))?;
                gaps.push(gap.as_secs_f64() * 1000.0);
            }
            client.close()?;
            report.pairs(
                format!("NVMe, {disk}: engine killed until the next completion, QD 32"),
                "ms",
                Better::Lower,
                &gaps,
                LIMIT,
                &[100.0; KILLS],
                Some(1.0),
                "started again at once",
            );
        }
        Ok(())
    }
}

/// A process that is killed when this value is dropped.
struct Process(Child);

impl Process {
    fn start(name: &str, config: &Path, flags: &[&str]) -> Result<Self> {
        let mut command = Command::new(program("ginnel-volume")?);
        command.arg(name).arg("--config").arg(config).args(flags).stdin(Stdio::null());
        Ok(Self(command.spawn().with_context(|| format!("starting {command:?}"))?))
    }

    fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A running NVMe volume. Both processes end when this value is dropped.
pub(crate) struct NvmeServer {
    name: &'static str,
    config: PathBuf,
    socket: PathBuf,
    // The engine ends before its holder.
    engine: Process,
    holder: Process,
}

impl NvmeServer {
    /// Starts both processes in `dir`. The name is also the serial number.
    pub(crate) fn start(dir: &Path, name: &'static str, plan: &Plan<'_>) -> Result<Self> {
        let (config, socket) = configure(dir, name, plan, "device = \"nvme\"\n")?;
        let attach = PathBuf::from(format!("{}.engine", socket.display()));
        let _ = std::fs::remove_file(&attach);
        let mut holder = Process::start(name, &config, &["--holder"])?;
        let begin = Instant::now();
        while !attach.exists() {
            if let Some(status) = holder.0.try_wait()? {
                anyhow::bail!("the holder has ended with {status}");
            }
            ensure!(begin.elapsed() < PATIENCE, "the holder does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        let engine = Process::start(name, &config, &[])?;
        Ok(Self { name, config, socket, engine, holder })
    }

    /// Returns the path of its vfio-user socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) fn engine(&self) -> &Child {
        &self.engine.0
    }

    fn options(&self) -> NvmeOptions {
        NvmeOptions { patience: PATIENCE, ..NvmeOptions::new(&self.socket) }
    }

    fn connect(&self, options: NvmeOptions) -> Result<NvmeClient> {
        Ok(NvmeClient::connect_within(options, PATIENCE)?)
    }

    fn cpu(&self) -> Result<Duration> {
        Ok(cpu_time(&self.engine.0)? + cpu_time(&self.holder.0)?)
    }

    fn measure(&self, expected: Doorbells, workload: &Workload) -> Result<Run> {
        let Workload { depth, block, .. } = *workload;
        let mut client = self.connect(NvmeOptions { depth, buffer: block, ..self.options() })?;
        let found = client.doorbells();
        ensure!(found == expected, "the doorbells are {found:?} and not {expected:?}");
        let (cpu, begin) = (self.cpu()?, Instant::now());
        let outcome = run(&mut client, workload)?;
        let used = self.cpu()?.saturating_sub(cpu).as_secs_f64() / begin.elapsed().as_secs_f64();
        ensure!(outcome.failed == 0, "requests failed, the first: {:?}", outcome.first_failure);
        client.close()?;
        Ok(Run::new(&outcome, used))
    }

    /// Kills the engine while the queue is full, and starts the next one. Returns the time from the kill until a command that
    /// the dead engine has not completed completes.
    fn kill_under_load(&mut self, queue: &mut NvmeQueue) -> Result<Duration> {
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            fill(queue)?;
            reap(queue)?;
        }
        fill(queue)?;
        let begin = Instant::now();
        self.engine.kill()?;
        while reap(queue)? {}
        fill(queue)?;
        self.engine = Process::start(self.name, &self.config, &[])?;
        while !reap(queue)? {
            ensure!(begin.elapsed() < PATIENCE, "no completion after a kill");
        }
        Ok(begin.elapsed())
    }
}

/// Submits reads until all slots are in flight.
fn fill(queue: &mut NvmeQueue) -> Result<()> {
    while let Some(slot) = queue.claim() {
        queue.submit(slot, Request::read(4096 * slot.index() as u64, 4096))?;
    }
    Ok(queue.publish()?)
}

/// Takes all completions. Returns whether there were any.
fn reap(queue: &mut NvmeQueue) -> Result<bool> {
    let mut any = false;
    while let Some(done) = queue.poll()? {
        ensure!(done.status == ginnel_volume_bench::Status::Ok, "{}: {}", done.request, done.status);
        queue.release(done.slot);
        any = true;
    }
    Ok(any)
}
