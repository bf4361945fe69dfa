//! `ginnel farm run`.

use super::input::Input;
use super::job::{Consolidation, Job};
use super::progress::Progress;
use super::{address, name, usage};
use crate::output::{self, Table};
use crate::wait::Mode;
use anyhow::{Context, Result};
use ginnel::{AttachOptions, Endpoint};
use ginnel_config::{Bytes, seconds};
use ginnel_farm::{Manager, Options, Report, WorkerProcesses};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Has the workers that come to ADDRESS (`ginnel farm work`) do a job.
///
/// The exit status is 0 if the whole input was processed, even if some workers failed meanwhile.
#[derive(clap::Args)]
pub struct Args {
    /// What to do with the input.
    #[arg(value_enum)]
    job: Job,

    /// SEGMENT or SEGMENT/NAME, one for each slice, such as job.w1 job.w2. The default NAME is farm.
    #[arg(required = true, value_name = "ADDRESS", value_parser = address)]
    addresses: Vec<String>,

    /// The input file.
    #[arg(long, value_name = "FILE", required_unless_present = "generate", conflicts_with = "generate")]
    file: Option<PathBuf>,

    /// Generate this many bytes of text instead, such as 1G.
    #[arg(long, value_name = "SIZE")]
    generate: Option<Bytes>,

    /// Seed of the generated text: each number gives another text.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "file")]
    seed: u64,

    /// Size of the longest piece. Each worker's channel takes about eight times as much shared memory. Default: the
    /// size that fits into rings of 1M.
    #[arg(long, value_name = "SIZE")]
    piece: Option<Bytes>,

    /// Let each piece end where a line does, unless a line is longer than a piece.
    #[arg(long, conflicts_with = "generate")]
    lines: bool,

    /// Number of pieces that a worker holds at a time: the one on which it works, and those that are transferred
    /// meanwhile.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    window: u8,

    /// How to wait for the workers.
    #[arg(long, value_enum, default_value_t = Mode::Adaptive)]
    mode: Mode,

    /// Begin when this many workers have come. Default: with the first.
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,

    /// Start this many workers on this machine, distributed over the ADDRESSes.
    #[arg(long, value_name = "N", default_value_t = 0)]
    spawn: usize,

    /// How long to wait for workers at the beginning, and to continue without any, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    patience: Duration,

    /// Dismiss a worker that takes longer than this for a piece, and give its work to others. Default: no time limit.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    piece_timeout: Option<Duration>,

    /// Print no progress and no table.
    #[arg(short, long)]
    quiet: bool,

    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    if args.json && args.job == Job::Filter {
        return Err(usage("filter prints the output of its workers, so it cannot print JSON"));
    }
    let input = Input::open(args.file.as_deref(), args.generate.map(|bytes| bytes.0), args.seed)?;
    let piece = args.piece.map_or(Ok(Options::PIECE), |Bytes(piece)| {
        usize::try_from(piece)
            .ok()
            .filter(|piece| (1..=1 << 30).contains(piece))
            .ok_or_else(|| usage("--piece: the size must be from 1 byte to 1G"))
    })?;
    let mut manager = Manager::new(Options {
        mode: args.mode.into(),
        window: args.window.into(),
        piece,
        piece_timeout: args.piece_timeout,
        patience: Some(args.patience),
        ..Options::default()
    })?;
    listen(&args, &mut manager)?;
    let mut processes = start_processes(&args)?;
    if !args.quiet && !args.json && args.job != Job::Filter {
        output::ready(format!("managing at {}", args.addresses.join(", ")));
    }
    if !manager.wait_for_workers(args.workers, args.patience)? {
        anyhow::bail!(
            "{} of {} workers came within {:?}; start them with `ginnel farm work {}`",
            manager.workers(),
            args.workers,
            args.patience,
            args.addresses[0]
        );
    }
    let progress = Progress::new(input.len(), args.quiet || args.json);
    progress.say(format!("{} with {} workers", args.job.name(), manager.workers()));
    let mut sum = Consolidation::new(args.job, &input, std::io::stdout().lock());
    let pieces = input.pieces(piece, args.lines);
    let report = manager.run(args.job.name(), pieces, &input, |piece, result| {
        sum.add(piece, result)?;
        progress.done(piece.len as u64);
        Ok(())
    })?;
    drop(progress);
    let count = sum.finish()?;
    // The workers end when their manager does.
    drop(manager);
    processes.finish(Duration::from_secs(5));
    show(&args, count, &report)
}

/// Listens at all addresses. Attaches once to each segment.
fn listen(args: &Args, manager: &mut Manager) -> Result<()> {
    let mut endpoints = BTreeMap::new();
    for address in &args.addresses {
        let (segment, farm) = crate::address::split(address)?;
        let endpoint = match endpoints.get(segment) {
            Some(endpoint) => endpoint,
            None => {
                let mode = args.mode.into();
                let options = AttachOptions { name: name("manager"), mode, ..AttachOptions::default() };
                let endpoint = Endpoint::attach_with(segment, &options)?;
                endpoints.entry(segment).or_insert(endpoint)
            }
        };
        manager.listen(endpoint, farm).with_context(|| format!("cannot listen at {address}"))?;
    }
    Ok(())
}

/// Starts the workers that `--spawn` asks for.
fn start_processes(args: &Args) -> Result<WorkerProcesses> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut processes = WorkerProcesses::default();
    for address in args.addresses.iter().cycle().take(args.spawn) {
        let mut command = Command::new(&program);
        processes.start(command.args(["farm", "work", address.as_str()])).context("cannot start a worker")?;
    }
    Ok(processes)
}

#[derive(Serialize)]
struct Summary<'a> {
    job: &'a str,
    /// `None` if the job counts nothing.
    count: Option<u64>,
    bytes: u64,
    pieces: u64,
    seconds: f64,
    bytes_per_s: f64,
    reassigned: u64,
    deaths: usize,
    workers: Vec<WorkerSummary<'a>>,
}

#[derive(Serialize)]
struct WorkerSummary<'a> {
    name: &'a str,
    pieces: u64,
    bytes: u64,
    bytes_per_s: f64,
    /// Seconds from the start of the job; 0 if the worker was there before.
    joined: f64,
    failed: u64,
    /// Number of pieces that were taken from it and given to others.
    lost: u64,
    /// How it left, if it did so before the end.
    departure: Option<String>,
}

fn show(args: &Args, count: Option<u64>, report: &Report) -> Result<()> {
    let seconds = report.time.as_secs_f64();
    let bytes_per_s = report.bytes as f64 / seconds.max(1e-9);
    let workers = report.workers.iter().map(|worker| WorkerSummary {
        name: &worker.name,
        pieces: worker.pieces,
        bytes: worker.bytes,
        bytes_per_s: worker.throughput(),
        joined: worker.joined.as_secs_f64(),
        failed: worker.failed,
        lost: worker.lost,
        departure: worker.departure.as_ref().map(ToString::to_string),
    });
    let workers: Vec<_> = workers.collect();
    if args.json {
        return output::json(&Summary {
            job: args.job.name(),
            count,
            bytes: report.bytes,
            pieces: report.pieces,
            seconds,
            bytes_per_s,
            reassigned: report.reassigned,
            deaths: report.deaths(),
            workers,
        });
    }
    if let Some(count) = count {
        output::line(count.to_string())?;
    }
    if args.quiet {
        return Ok(());
    }
    let mut table = Table::new(&["WORKER", "PIECES", "BYTES", "SPEED", "JOINED", "LOST", "DEPARTURE"]);
    for worker in workers {
        table.row([
            worker.name.to_owned(),
            worker.pieces.to_string(),
            output::bytes(worker.bytes),
            format!("{}/s", output::bytes(worker.bytes_per_s as u64)),
            format!("{:.2} s", worker.joined),
            worker.lost.to_string(),
            worker.departure.unwrap_or_default(),
        ]);
    }
    output::note(table.to_string());
    let (bytes, speed) = (output::bytes(report.bytes), output::bytes(bytes_per_s as u64));
    let mut line = format!("{} pieces, {bytes} in {seconds:.2} s, {speed}/s", report.pieces);
    if report.reassigned > 0 {
        line += &format!("; {} pieces were given to a second worker", report.reassigned);
    }
    output::note(line);
    Ok(())
}
