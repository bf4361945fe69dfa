//! `ginnel farm work`.

use super::{address, job, name};
use crate::output;
use crate::wait::Mode;
use anyhow::{Context, Result};
use ginnel::{AttachOptions, ChannelOptions, Endpoint, Error, MessageChannel};
use ginnel_config::seconds;
use ginnel_farm::{Worker, run_program};
use serde::Serialize;
use std::process::Command;
use std::time::{Duration, Instant};

/// Works for the manager at ADDRESS (`ginnel farm run`) until it has no more work.
///
/// Without PROGRAM, the worker knows the jobs count-chars and count-words. With PROGRAM, it runs that program for each
/// piece of any job: the piece is the program's standard input, and its output is the result. The exit status is 0 if
/// the manager ended normally.
#[derive(clap::Args)]
pub struct Args {
    /// SEGMENT or SEGMENT/NAME, such as job.w1. The default NAME is farm.
    #[arg(value_parser = address)]
    address: String,

    /// How long to wait for a manager, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    patience: Duration,

    /// Work for one manager after another, and wait for each without limit.
    #[arg(long, conflicts_with = "patience")]
    forever: bool,

    /// How to wait for pieces.
    #[arg(long, value_enum, default_value_t = Mode::Adaptive)]
    mode: Mode,

    /// Print a summary as JSON.
    #[arg(long)]
    json: bool,

    /// A program and its arguments.
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

#[derive(Serialize)]
struct Summary<'a> {
    address: &'a str,
    pieces: u64,
    bytes: u64,
    seconds: f64,
}

pub fn run(args: Args) -> Result<()> {
    let (segment, farm) = crate::address::split(&args.address)?;
    let options = AttachOptions { name: name("worker"), mode: args.mode.into(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with(segment, &options)?;
    loop {
        let patience = if args.forever { Duration::MAX } else { args.patience };
        let options = ChannelOptions { patience, ..ChannelOptions::default() };
        let channel = endpoint.connect_with::<MessageChannel>(farm, &options).with_context(|| {
            format!("cannot work at {} (the manager runs `ginnel farm run JOB {0}`)", args.address)
        })?;
        if !args.json {
            output::ready(format!("working at {}", args.address));
        }
        let served = serve(&args, channel);
        match served {
            Err(error) if args.forever => output::note(format!("ginnel: {error:#}")),
            other => other?,
        }
        if !args.forever {
            return Ok(());
        }
    }
}

fn serve(args: &Args, channel: MessageChannel) -> Result<()> {
    let begun = Instant::now();
    let mut worker = Worker::over(channel);
    let served = match args.program.split_first() {
        None => worker.serve(job::work),
        Some((program, rest)) => {
            let longest = worker.longest_result();
            worker.serve(|task, result| {
                let mut command = Command::new(program);
                command.args(rest).env("GINNEL_JOB", task.job);
                command.env("GINNEL_PIECE_OFFSET", task.offset.to_string());
                run_program(&mut command, task.data, result, longest)
            })
        }
    };
    let (pieces, bytes) = worker.done();
    let seconds = begun.elapsed().as_secs_f64();
    if args.json {
        output::json(&Summary { address: &args.address, pieces, bytes, seconds })?;
    } else {
        output::line(format!("{pieces} pieces, {} in {seconds:.2} s", output::bytes(bytes)))?;
    }
    served.map_err(|error| match error {
        Error::PeerDead => anyhow::anyhow!("{}: the manager has died", args.address),
        Error::Aborted => {
            anyhow::anyhow!("{}: the manager has rejected this worker, and reports the reason", args.address)
        }
        Error::Closed => anyhow::anyhow!("{}: the manager has dismissed this worker", args.address),
        other => anyhow::Error::from(other).context(args.address.clone()),
    })
}
