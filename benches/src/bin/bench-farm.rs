//! The farm beside the same manager and workers over TCP: `make bench NAME=farm`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ginnel_bench::report::{Better, Report, median};
use ginnel_layout::farm::Header;
use ginnel_layout::ring;
use serde::Deserialize;
use std::time::Duration;
use vmtest::installation::{Installation, MemoryKind, Plan, program};
use vmtest::{HOST_ADDRESS, Job, TestBed, Vm};

/// Measures the farm.
#[derive(Parser)]
struct Cli {
    /// Run only this part.
    #[arg(long, value_parser = ["host", "modes", "vm"])]
    only: Option<String>,
    /// The number of pairs of runs for each row.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// The number of mebibytes of text that host processes count; VMs count a sixteenth of it.
    #[arg(long, default_value_t = 4096)]
    mib: u64,
    /// The number of bytes of a piece, in shared memory and over TCP.
    #[arg(long, default_value_t = ginnel_farm::Options::PIECE)]
    piece: usize,
    /// The number of mebibytes of shared memory for everything (rings included), for any number of host processes. A power of
    /// two.
    #[arg(long, default_value_t = 128)]
    memory: u64,
    /// The most pieces that a worker may hold, even if its share of the memory has room for more.
    #[arg(long, default_value_t = 15)]
    window: usize,
    /// How both sides of the farm wait: interrupt, poll, or the microseconds to poll before sleeping.
    #[arg(long, default_value = "100")]
    mode: String,
    /// How both sides wait over TCP.
    #[arg(long, default_value = "100")]
    tcp_mode: String,
    /// The number of bytes of a piece over TCP.
    #[arg(long, default_value_t = ginnel_farm::Options::PIECE)]
    tcp_piece: usize,
    /// The number of pieces that a worker may hold over TCP.
    #[arg(long, default_value_t = 3)]
    tcp_window: usize,
    /// The numbers of workers that are host processes.
    #[arg(long, value_delimiter = ',', default_value = "1,3,7,15,31")]
    workers: Vec<usize>,
}

const WORKERS: [&str; 3] = ["w1", "w2", "w3"];
const PATIENCE: Duration = Duration::from_secs(240);
/// The size of a VM's slice in bytes.
const SLICE: u64 = 16 << 20;

fn main() -> Result<()> {
    let cli = Cli::parse();
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    let bed = TestBed::new("bench")?;
    let mut plan = Plan::new(&bed).segment("bench", cli.memory, &["host"]);
    for worker in WORKERS {
        plan = plan.vm(worker);
    }
    let slices = format!(
        "[segment.job]\nsize = \"{}M\"\nmemory = \"{}\"\nmembers = [\"host\"]\nslices = {WORKERS:?}",
        SLICE >> 20,
        MemoryKind::Dax
    );
    let ginnel = plan.config(&slices).start()?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("one machine with {cpus} CPUs; guests run under {:?}", bed.accel()?);
    let mut bench = Bench { bed: &bed, ginnel: &ginnel, cli: &cli, report: Report::default() };
    if wants("host") {
        bench.host()?;
    }
    if wants("modes") {
        bench.modes()?;
    }
    if wants("vm") {
        bench.vms()?;
    }
    bench.report.finish("farm", cli.only.is_some())
}

/// The result that manager and workers print.
#[derive(Clone, Copy, Deserialize)]
struct Said {
    seconds: f64,
    cpu: f64,
}

/// The time of one run, and the CPU time of manager and workers together.
#[derive(Clone, Copy)]
struct Run {
    seconds: f64,
    cpu: f64,
}

struct Bench<'b> {
    bed: &'b TestBed,
    ginnel: &'b Installation<'b>,
    cli: &'b Cli,
    report: Report,
}

impl Bench<'_> {
    fn spawn(&self, args: &str) -> Result<std::sync::Arc<vmtest::HostJob>> {
        self.bed.host_spawn(&self.ginnel.on_host(&format!("exec bench-farm-peer {args}"))?)
    }

    /// Runs the farm once with host processes as workers.
    fn on_host(&self, count: usize, manage: &str, work: &str) -> Result<Run> {
        let manager = self.spawn(&format!("manage --workers {count} {manage}"))?;
        let workers: Vec<_> =
            (0..count).map(|_| self.spawn(&format!("work {work}"))).collect::<Result<_>>()?;
        let said = said(&manager.wait(PATIENCE)?.ok()?.stdout)?;
        let mut cpu = said.cpu;
        for worker in workers {
            cpu += self::said(&worker.wait(PATIENCE)?.ok()?.stdout)?.cpu;
        }
        Ok(Run { seconds: said.seconds, cpu })
    }

    /// Runs the farm once with VMs as workers. The CPU time is the sum of the manager's and, in the guests' time, the workers'.
    fn in_vms(&self, vms: &[&Vm], manage: &str, work: impl Fn(usize) -> String) -> Result<Run> {
        let manager = self.spawn(&format!("manage --workers {} {manage}", vms.len()))?;
        let workers: Vec<Job> = vms
            .iter()
            .enumerate()
            .map(|(n, vm)| vm.spawn(&format!("exec bench-farm-peer work {}", work(n))))
            .collect::<Result<_>>()?;
        let said = said(&manager.wait(PATIENCE)?.ok()?.stdout)?;
        let mut cpu = said.cpu;
        for worker in workers {
            cpu += self::said(&worker.wait(PATIENCE)?.ok()?.stdout)?.cpu;
        }
        Ok(Run { seconds: said.seconds, cpu })
    }

    /// Adds a row of pairs, in which the peer comes first.
    fn row(
        &mut self,
        case: String,
        peer: &str,
        target: Option<f64>,
        note: &str,
        mut ours: impl FnMut(&Self) -> Result<Run>,
        mut theirs: impl FnMut(&Self) -> Result<Run>,
    ) -> Result<()> {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..self.cli.pairs {
            b.push(theirs(self).with_context(|| format!("{case}: {peer}"))?);
            a.push(ours(self).with_context(|| case.clone())?);
        }
        let times = |runs: &[Run]| runs.iter().map(|run| run.seconds).collect::<Vec<_>>();
        let cpus = |runs: &[Run]| median(runs.iter().map(|run| run.cpu / run.seconds).collect());
        let note = format!("CPUs used: {:.2} and {:.2}; {note}", cpus(&a), cpus(&b));
        self.report.pairs(case, "s", Better::Lower, &times(&a), peer, &times(&b), target, &note);
        Ok(())
    }

    /// Returns the arguments of a job over TCP.
    fn tcp_job(&self, mib: u64) -> String {
        let Cli { tcp_piece, tcp_window, tcp_mode, .. } = self.cli;
        format!("--bytes {} --piece {tcp_piece} --window {tcp_window} --mode {tcp_mode}", mib << 20)
    }

    /// Returns the arguments of a job for this many workers, each of which has rings of an equal share of `memory` bytes, with
    /// as many pieces as fit, and a description of the job.
    fn job(&self, mib: u64, memory: u64, count: usize) -> (String, String) {
        let share = memory as usize / count;
        let mut ring = ring::MIN_CAPACITY;
        // Two rings in whole pages, and a little for the segment's own tables.
        while 2 * (ring::footprint(2 * ring) + 4096) <= share - share / 32 {
            ring *= 2;
        }
        let piece = self.cli.piece.min(ring::max_message(ring) - size_of::<Header>());
        let span = ring::record_span(piece + size_of::<Header>());
        let window = (ring / span - 1).clamp(1, self.cli.window);
        let taken = (2 * span * (window + 1)).next_power_of_two().min(2 * ring);
        let note = format!("{window} pieces of {} KiB in rings of {} KiB", piece.div_ceil(1024), taken >> 11);
        (format!("--bytes {} --piece {piece} --window {window}", mib << 20), note)
    }

    fn host(&mut self) -> Result<()> {
        for count in self.cli.workers.clone() {
            let (job, how) = self.job(self.cli.mib, self.cli.memory << 20, count);
            let tcp = format!("--tcp 127.0.0.1:17271 {}", self.tcp_job(self.cli.mib));
            let target = match count {
                1..=3 => Some(1.0 / 0.6),
                15.. => Some(1.0 / 0.4),
                _ => None,
            };
            let mode = format!("--mode {}", self.cli.mode);
            self.row(
                format!("{count} host processes count {} MiB", self.cli.mib),
                "TCP loopback",
                target,
                &format!("{how} of {} MiB in all", self.cli.memory),
                |b| b.on_host(count, &format!("bench/farm {job} {mode}"), &format!("bench/farm {mode}")),
                |b| b.on_host(count, &tcp, &tcp),
            )?;
        }
        Ok(())
    }

    /// Compares sleeping with polling.
    fn modes(&mut self) -> Result<()> {
        for count in [1, 3] {
            let (job, _) = self.job(self.cli.mib, self.cli.memory << 20, count);
            let run = |b: &Self, mode: &str| {
                b.on_host(
                    count,
                    &format!("bench/farm {job} --mode {mode}"),
                    &format!("bench/farm --mode {mode}"),
                )
            };
            self.row(
                format!("{count} host processes, interrupt"),
                "polling",
                None,
                WITHIN,
                |b| run(b, "interrupt"),
                |b| run(b, "poll"),
            )?;
        }
        Ok(())
    }

    fn vms(&mut self) -> Result<()> {
        let mut starting = Vec::new();
        for name in WORKERS {
            starting.push(self.ginnel.vm(name)?.program(program("bench-farm-peer")?).start()?);
        }
        let mut vms = Vec::new();
        for vm in starting {
            vm.wait_ready()?;
            let daemon = self.ginnel.start_guest(&vm)?;
            vms.push((vm, daemon));
        }
        let vms: Vec<&Vm> = vms.iter().map(|(vm, _)| vm).collect();
        ensure!(vms.len() == WORKERS.len(), "as many VMs as names");
        let mib = self.cli.mib / 16;
        let (job, how) = self.job(mib, SLICE, 1);
        let tcp = self.tcp_job(mib);
        let slices =
            |count: usize| WORKERS[..count].iter().map(|w| format!("job.{w}/farm ")).collect::<String>();
        for count in [1, 3] {
            let mode = format!("--mode {}", self.cli.mode);
            self.row(
                format!("{count} VMs count {mib} MiB"),
                "TCP over virtio-net",
                Some(1.0 / 0.6),
                &format!("{how}, a slice for each VM"),
                |b| {
                    let manage = format!("{}{job} {mode}", slices(count));
                    b.in_vms(&vms[..count], &manage, |n| format!("job.{}/farm {mode}", WORKERS[n]))
                },
                |b| {
                    let manage = format!("--tcp 0.0.0.0:17271 {tcp}");
                    b.in_vms(&vms[..count], &manage, |_| format!("--tcp {HOST_ADDRESS}:17271 {tcp}"))
                },
            )?;
        }
        let run = |b: &Self, mode: &str| {
            let manage = format!("{}{job} --mode {mode}", slices(1));
            b.in_vms(&vms[..1], &manage, |_| format!("job.w1/farm --mode {mode}"))
        };
        self.row(
            "1 VM, interrupt".into(),
            "polling",
            None,
            WITHIN,
            |b| run(b, "interrupt"),
            |b| run(b, "poll"),
        )
    }
}

/// For sleeping beside polling. A target would be one-sided, and this is not.
const WITHIN: &str = "asked: within 10 % of each other, that is a ratio from 0.91 to 1.1";

fn said(text: &str) -> Result<Said> {
    serde_json::from_str(text.trim()).with_context(|| format!("not a result: {text:?}"))
}
