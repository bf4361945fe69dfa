//! Volumes beside QEMU's storage daemon, fio, and QEMU's own disks: `make bench NAME=volume`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ginnel_bench::measure::bare;
use ginnel_bench::measure::pingpong::Echo;
use ginnel_bench::report::{Better, Report, median};
use ginnel_bench::volume::{Backing, Plan, Server, Wait, for_seconds, make_file, p50};
use ginnel_bench::{guest_disks, guest_nvme, nvme_volume, own_driver};
use ginnel_layout::segment;
use ginnel_shmem::Mapping;
use ginnel_volume_bench::Options;
use ginnel_volume_bench::workload::{Workload, run};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Measures volumes beside their alternatives.
#[derive(Parser)]
struct Cli {
    /// Run only this part.
    #[arg(long, value_parser = ["ram", "cached", "null", "file", "idle", "queues", "nvme", "guest", "guest-nvme", "vfio"])]
    only: Option<String>,
    /// The number of pairs of runs for each row.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// The number of seconds of each run.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

const DAEMON: &str = "qemu-storage-daemon";
const FIO: &str = "fio, io_uring";
const FIO_32: &str = "fio, io_uring, 32 at a time";
const RAM: u64 = 256 << 20;
const FILE: u64 = 1 << 30;

fn main() -> Result<()> {
    let cli = Cli::parse();
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    let dir = tempfile::tempdir()?;
    let shm = tempfile::Builder::new().prefix("ginnel-bench").tempdir_in("/dev/shm")?;
    let tmpfs = shm.path().join("image");
    make_file(&tmpfs, RAM)?;
    let mut bench = Bench { dir, tmpfs, report: Report::default(), pairs: cli.pairs, seconds: cli.seconds };
    println!("one machine with {} CPUs; client on CPU 0, server on CPU 1", cpus());
    if wants("ram") {
        bench.ram()?;
    }
    if wants("cached") {
        bench.cached()?;
    }
    if wants("null") {
        bench.null()?;
    }
    if wants("file") {
        bench.file()?;
    }
    if wants("idle") {
        bench.idle()?;
    }
    if wants("queues") {
        bench.queues()?;
    }
    if wants("nvme") {
        nvme_volume::rows(&mut bench.report, bench.dir.path(), bench.pairs, bench.seconds)?;
    }
    if wants("guest") {
        guest_disks::rows(&mut bench.report, bench.pairs)?;
    }
    if wants("guest-nvme") {
        guest_nvme::rows(&mut bench.report, bench.pairs)?;
    }
    if wants("vfio") {
        own_driver::rows(&mut bench.report, bench.pairs)?;
    }
    bench.report.finish("volume", cli.only.is_some())
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

struct Bench {
    dir: TempDir,
    /// An image on tmpfs.
    tmpfs: PathBuf,
    report: Report,
    pairs: usize,
    seconds: f64,
}

/// The kind of server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Ours,
    Daemon,
}

/// The figures of one run.
struct Run {
    iops: f64,
    /// The median latency in nanoseconds.
    p50: f64,
    /// The CPU seconds of the server for a million requests.
    cpu: f64,
}

impl Bench {
    fn serve(&self, who: Who, plan: &Plan<'_>) -> Result<Server> {
        match who {
            Who::Ours => Server::ours(self.dir.path(), plan),
            Who::Daemon => Server::storage_daemon(self.dir.path(), plan),
        }
    }

    /// Returns a workload of random reads of 4 KiB from the first CPU; the server is on the second.
    fn workload(&self, depth: u16) -> Workload {
        for_seconds(self.seconds, Workload { depth, cpu: Some(0), ..Workload::default() })
    }

    fn run(&self, who: Who, plan: &Plan<'_>, workload: &Workload) -> Result<Run> {
        let mut server = self.serve(who, plan)?;
        let (outcome, cpu) = server.measure(plan.queues, workload)?;
        let iops = outcome.iops();
        Ok(Run { iops, p50: p50(&outcome), cpu: cpu * 1e6 / iops })
    }

    /// Alternates runs of both servers.
    fn turns(&self, plan: &Plan<'_>, workload: &Workload) -> Result<(Vec<Run>, Vec<Run>)> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            theirs.push(self.run(Who::Daemon, plan, workload)?);
            ours.push(self.run(Who::Ours, plan, workload)?);
        }
        Ok((ours, theirs))
    }

    fn rate(&mut self, case: &str, ours: &[Run], theirs: &[Run], target: Option<f64>, note: &str) {
        self.report.pairs(case, "kIOPS", Better::Higher, &kiops(ours), DAEMON, &kiops(theirs), target, note);
    }

    fn latency(&mut self, case: &str, ours: &[Run], theirs: &[Run], target: Option<f64>, note: &str) {
        let us = |runs: &[Run]| columns(runs, |run| run.p50 / 1000.0);
        self.report.pairs(case, "us", Better::Lower, &us(ours), DAEMON, &us(theirs), target, note);
    }

    fn cpu(&mut self, case: &str, ours: &[Run], theirs: &[Run]) {
        let cpu = |runs: &[Run]| columns(runs, |run| run.cpu);
        self.report.pairs(case, "s", Better::Lower, &cpu(ours), DAEMON, &cpu(theirs), Some(2.0), "");
    }

    fn ram(&mut self) -> Result<()> {
        let tmpfs = self.tmpfs.clone();
        for wait in [Wait::Poll, Wait::Adaptive] {
            let how = wait.word();
            let plan = Plan { backing: Backing::Ram(&tmpfs, RAM), queues: 1, cpus: vec![1], wait };
            let (ours, theirs) = self.turns(&plan, &self.workload(32))?;
            let (target, note) = (Some(3.0), "one server thread each; the daemon's image is a file on tmpfs");
            self.rate(&format!("RAM, {how}: 4 KiB random reads, QD 32"), &ours, &theirs, target, note);
            self.cpu(&format!("RAM, {how}: server CPU per million, QD 32"), &ours, &theirs);
            let (ours, theirs) = self.turns(&plan, &self.workload(1))?;
            self.latency(&format!("RAM, {how}: QD 1, p50"), &ours, &theirs, target, note);
        }
        Ok(())
    }

    /// Both servers have the same image, which was read before, through the page cache.
    fn cached(&mut self) -> Result<()> {
        let folder = tempfile::tempdir_in(ginnel_bench::report::folder()?)?;
        let image = folder.path().join("image");
        make_file(&image, RAM)?;
        let plan = Plan { backing: Backing::File(&image), queues: 1, cpus: vec![1], wait: Wait::Adaptive };
        let (mut ours, mut theirs, mut fios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            fios.push(fio(&image, false, self.seconds)?);
            ours.push(self.run(Who::Ours, &plan, &self.workload(32))?);
            theirs.push(self.run(Who::Daemon, &plan, &self.workload(32))?);
        }
        self.rate("file in the page cache: reads, QD 32", &ours, &theirs, None, "");
        let case = "file in the page cache: CPU per million";
        self.cpu(case, &ours, &theirs);
        self.cpu_of_fio(case, &ours, &fios);
        let (ours, theirs) = self.turns(&plan, &self.workload(1))?;
        self.latency("file in the page cache: QD 1, p50", &ours, &theirs, None, "");
        Ok(())
    }

    /// Measures what the volume adds to the client's own loop and to the round trip of a cache line.
    fn null(&mut self) -> Result<()> {
        let plan = Plan { backing: Backing::Null(RAM), queues: 1, cpus: vec![1], wait: Wait::Poll };
        let workload = self.workload(1);
        let (mut alone, mut volume, mut daemon, mut floor) = (vec![], vec![], vec![], vec![]);
        for _ in 0..self.pairs {
            floor.push(cache_line()?);
            daemon.push(self.run(Who::Daemon, &plan, &workload)?.p50);
            let mut server = self.serve(Who::Ours, &plan)?;
            alone.push(self.alone(&mut server, &workload)?);
            let (outcome, _) = server.measure(1, &workload)?;
            volume.push(p50(&outcome));
        }
        let added: Vec<f64> = volume.iter().zip(&alone).map(|(all, own)| all - own).collect();
        let limit = vec![700.0; added.len()];
        let mut row = |case: &str, ours: &[f64], peer: &str, peers: &[f64], target, note: &str| {
            self.report.pairs(case, "ns", Better::Lower, ours, peer, peers, target, note);
        };
        let note = "whole round trip of a request; the peer is the client with nobody behind it";
        row("null, poll: QD 1, round trip, p50", &volume, "client's own loop", &alone, None, note);
        row(
            "null, poll: QD 1, added by the volume, p50",
            &added,
            "the limit",
            &limit,
            Some(1.0),
            "round trip less own loop",
        );
        row(
            "null, poll: QD 1, added by the volume, p50",
            &added,
            "a cache line there and back",
            &floor,
            None,
            "",
        );
        row("null, poll: QD 1, round trip, p50", &volume, "qemu-storage-daemon, null-co", &daemon, None, "");
        self.null_deep()
    }

    /// Measures the cost of a request that does nothing, with and without event index.
    fn null_deep(&mut self) -> Result<()> {
        let workload = self.workload(32);
        for queues in [1, 2] {
            let plan = Plan { backing: Backing::Null(RAM), queues, cpus: vec![1], wait: Wait::Poll };
            let (mut with, mut without) = (Vec::new(), Vec::new());
            for _ in 0..self.pairs {
                for (event_idx, rates) in [(true, &mut with), (false, &mut without)] {
                    let mut server = self.serve(Who::Ours, &plan)?;
                    let options = Options { queues, event_idx, ..Options::new(server.socket()) };
                    rates.push(server.measure_as(options, &workload)?.0.iops() / 1000.0);
                }
            }
            let case = format!("null, poll: reads, {queues} queues, 1 thread, QD 32 each");
            let peer = "the same without event index";
            self.report.pairs(&case, "kIOPS", Better::Higher, &with, peer, &without, None, "");
        }
        Ok(())
    }

    /// Returns the time of one turn of the client's loop, in nanoseconds.
    fn alone(&self, server: &mut Server, workload: &Workload) -> Result<f64> {
        let options = Options {
            depth: workload.depth,
            buffer: workload.block,
            echo: true,
            ..Options::new(server.socket())
        };
        let outcome = run(&mut server.connect(options)?, workload)?;
        Ok(p50(&outcome))
    }

    fn file(&mut self) -> Result<()> {
        // The files are in the target folder, which is on the machine's disk and not on a tmpfs.
        let folder = tempfile::tempdir_in(ginnel_bench::report::folder()?)?;
        let image = folder.path().join("image");
        make_file(&image, FILE)?;
        for (how, wait, pinned) in [
            ("adaptive", Wait::Adaptive, false),
            ("adaptive, pinned", Wait::Adaptive, true),
            ("interrupt", Wait::Interrupt, false),
            ("poll", Wait::Poll, false),
        ] {
            let backing = if pinned { Backing::Pinned(&image) } else { Backing::Direct(&image) };
            let plan = Plan { backing, queues: 1, cpus: vec![1], wait };
            // The client sleeps, as fio does.
            let workload = |bench: &Self, depth| Workload { sleep: true, ..bench.workload(depth) };
            let (mut ours, mut theirs, mut fios) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..self.pairs {
                fios.push(fio(&image, true, self.seconds)?);
                ours.push(self.run(Who::Ours, &plan, &workload(self, 32))?);
                theirs.push(self.run(Who::Daemon, &plan, &workload(self, 32))?);
            }
            let case = format!("file O_DIRECT, {how}: reads, QD 32");
            self.against_fio(&case, &ours, &fios, Some(0.95));
            self.rate(&case, &ours, &theirs, None, "");
            let case = format!("file O_DIRECT, {how}: CPU per million, QD 32");
            self.cpu(&case, &ours, &theirs);
            self.cpu_of_fio(&case, &ours, &fios);
            if !pinned {
                let (ours, theirs) = self.turns(&plan, &workload(self, 1))?;
                self.rate(&format!("file O_DIRECT, {how}: QD 1"), &ours, &theirs, Some(1.2), "");
                self.latency(&format!("file O_DIRECT, {how}: QD 1, p50"), &ours, &theirs, None, "");
            }
        }
        // If CPUs emulate the disk, a server that polls all the time may take them away from it.
        let plan = Plan { backing: Backing::Direct(&image), queues: 1, cpus: vec![1], wait: Wait::Poll };
        let (mut ours, mut fios, mut beside) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            fios.push(fio(&image, true, self.seconds)?);
            ours.push(self.run(Who::Ours, &plan, &self.workload(32))?);
            beside.push(beside_a_busy_cpu(0, || fio(&image, true, self.seconds))?);
        }
        let case = "file O_DIRECT, poll, and the client looks too: reads, QD 32";
        self.against_fio(case, &ours, &fios, Some(0.95));
        let (ours, beside) = (kiops(&ours), columns(&beside, |fio| fio.0.iops / 1000.0));
        let peer = "fio beside a CPU that is busy";
        self.report.pairs(case, "kIOPS", Better::Higher, &ours, peer, &beside, None, "");
        Ok(())
    }

    fn against_fio(&mut self, case: &str, ours: &[Run], fios: &[Fio], target: Option<f64>) {
        let (ours, fios) = (kiops(ours), columns(fios, |fio| fio.0.iops / 1000.0));
        self.report.pairs(case, "kIOPS", Better::Higher, &ours, FIO, &fios, target, "");
    }

    /// Measures how much CPU time the kernel takes for the same requests, with little else.
    fn cpu_of_fio(&mut self, case: &str, ours: &[Run], fios: &[Fio]) {
        let ours: Vec<f64> = ours.iter().map(|run| run.cpu).collect();
        for (peer, runs) in [(FIO, columns(fios, |fio| fio.0.cpu)), (FIO_32, columns(fios, |fio| fio.1.cpu))]
        {
            let note = "fio asks the kernel itself: little of it is its own";
            self.report.pairs(case, "s", Better::Lower, &ours, peer, &runs, None, note);
        }
    }

    /// Measures a connected server that has nothing to do.
    fn idle(&mut self) -> Result<()> {
        let tmpfs = self.tmpfs.clone();
        let plan =
            Plan { backing: Backing::Ram(&tmpfs, RAM), queues: 2, cpus: vec![0, 1], wait: Wait::Adaptive };
        let seconds = 5;
        let idle = |who| -> Result<f64> {
            let mut server = self.serve(who, &plan)?;
            let mut client = server.connect(Options { queues: 2, ..Options::new(server.socket()) })?;
            // The server has had work, and has none any more.
            client.read(0, &mut [0; 4096])?;
            std::thread::sleep(Duration::from_millis(500));
            let before = server.cpu()?;
            std::thread::sleep(Duration::from_secs(seconds));
            let used = server.cpu()?.saturating_sub(before).as_secs_f64() / seconds as f64;
            client.close()?;
            // A value of 0 has no ratio.
            Ok((100.0 * used).max(0.001))
        };
        let (theirs, ours) = (idle(Who::Daemon)?, idle(Who::Ours)?);
        self.report.pairs(
            format!("adaptive: idle, client connected, {seconds} s"),
            "% CPU",
            Better::Lower,
            &[ours],
            DAEMON,
            &[theirs],
            None,
            "0.001 stands for less than that",
        );
        Ok(())
    }

    /// Measures the step from one queue and thread to two. With fewer than four CPUs, a client and its server share one CPU and
    /// take turns: then both sleep when they have nothing to do, and one such pair on one CPU is compared with two pairs on two
    /// CPUs.
    fn queues(&mut self) -> Result<()> {
        let tmpfs = self.tmpfs.clone();
        let plenty = cpus() >= 4;
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            for (queues, rates) in [(1u16, &mut one), (2, &mut two)] {
                let first = if plenty { 2 } else { 0 };
                let plan = Plan {
                    backing: Backing::Ram(&tmpfs, RAM),
                    queues,
                    cpus: (first..first + usize::from(queues)).collect(),
                    wait: if plenty { Wait::Poll } else { Wait::Adaptive },
                };
                let workload = Workload { threads: queues.into(), sleep: !plenty, ..self.workload(32) };
                rates.push(self.run(Who::Ours, &plan, &workload)?.iops / 1000.0);
            }
        }
        let note = if plenty { "" } else { "client and server of a queue share a CPU" };
        self.report.pairs(
            "RAM: 2 queues, 2 threads, QD 32 each",
            "kIOPS",
            Better::Higher,
            &two,
            "1 queue, 1 thread",
            &one,
            Some(1.7),
            note,
        );
        Ok(())
    }
}

/// Returns how long a cache line takes from CPU 0 to CPU 1 and back, in nanoseconds: the floor of every round trip.
fn cache_line() -> Result<f64> {
    // Take the median of many short measurements, because other users of the CPUs disturb a few of them.
    const GAMES: usize = 500;
    const ROUNDS: u32 = 500;
    let memory = Mapping::anonymous((segment::ARENA - segment::RESERVED) as usize + 4096)?;
    bare::reset(&memory, 8);
    let answering = memory.clone();
    let pong = std::thread::spawn(move || {
        ginnel_bench::measure::pin(1);
        bare::bare_pong(&answering, 8);
    });
    let timing = memory.clone();
    // In a thread of its own, because it stays on its CPU.
    let ping = std::thread::spawn(move || -> Result<f64> {
        ginnel_bench::measure::pin(0);
        let mut ping = bare::BarePing::new(timing, 8);
        ping.exchange(&mut [])?;
        let mut game = || -> Result<f64> {
            let begin = Instant::now();
            for _ in 0..ROUNDS {
                ping.exchange(&mut [])?;
            }
            Ok(begin.elapsed().as_nanos() as f64 / f64::from(ROUNDS))
        };
        Ok(median((0..GAMES).map(|_| game()).collect::<Result<_>>()?))
    });
    let took = ping.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    bare::stop(&memory, 8);
    pong.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    took
}

fn columns<T>(runs: &[T], of: impl Fn(&T) -> f64) -> Vec<f64> {
    runs.iter().map(of).collect()
}

fn kiops(runs: &[Run]) -> Vec<f64> {
    columns(runs, |run| run.iops / 1000.0)
}

/// fio on the file itself with a depth of 32: once with its default batching, and once with batches of 32.
struct Fio(Run, Run);

fn fio(image: &Path, direct: bool, seconds: f64) -> Result<Fio> {
    let at_once = ["--iodepth_batch=32", "--iodepth_batch_complete_min=32"];
    Ok(Fio(fio_run(image, direct, seconds, &[])?, fio_run(image, direct, seconds, &at_once)?))
}

fn fio_run(image: &Path, direct: bool, seconds: f64, how: &[&str]) -> Result<Run> {
    let output = Command::new("fio")
        .args(["--name=bench", "--ioengine=io_uring", "--rw=randread", "--bs=4k", "--iodepth=32"])
        .args(["--registerfiles", "--fixedbufs", "--time_based", "--output-format=json"])
        .args(how)
        .arg(format!("--direct={}", u8::from(direct)))
        // The page cache is kept, as it is with the servers.
        .arg("--invalidate=0")
        .arg(format!("--filename={}", image.display()))
        .arg(format!("--runtime={}ms", (seconds * 1000.0) as u64))
        .arg(format!("--ramp_time={}ms", (seconds * 200.0) as u64))
        .output()
        .context("fio starts; scripts/setup bench installs it")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    let (iops, p50) = guest_disks::fio_said(&output.stdout)?;
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).context("fio prints JSON")?;
    let percent = |key: &str| said["jobs"][0][key].as_f64().with_context(|| format!("fio tells its {key}"));
    Ok(Run { iops, p50, cpu: (percent("usr_cpu")? + percent("sys_cpu")?) / 100.0 * 1e6 / iops })
}

/// Runs something while a CPU is kept busy.
fn beside_a_busy_cpu<T>(cpu: usize, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ginnel_bench::measure::pin(cpu);
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let result = run();
        over.store(true, Ordering::Relaxed);
        result
    })
}
