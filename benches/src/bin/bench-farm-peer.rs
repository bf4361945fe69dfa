//! The manager or a worker of one farm, over shared memory or TCP, on the host or in a guest. Prints one JSON line.

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use ginnel::{AttachOptions, ChannelOptions, Endpoint, MessageChannel, WaitMode};
use ginnel_bench::farm;
use ginnel_bench::measure::cpu_seconds;
use ginnel_farm::{Generated, Manager, Options, Refusal, Worker, count, equal};
use std::time::Duration;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Count the characters of generated text.
    Manage(How),
    /// Work for a manager until it ends.
    Work(How),
}

#[derive(Args)]
struct How {
    /// SEGMENT/NAME, one for each slice; or, with --tcp, HOST:PORT.
    #[arg(required = true)]
    addresses: Vec<String>,
    #[arg(long)]
    tcp: bool,
    #[arg(long, default_value_t = 1)]
    workers: usize,
    #[arg(long, default_value_t = 1 << 30)]
    bytes: u64,
    #[arg(long, default_value_t = Options::PIECE)]
    piece: usize,
    #[arg(long, default_value_t = 2)]
    window: usize,
    /// poll, interrupt, or the microseconds to poll before sleeping.
    #[arg(long, default_value = "interrupt")]
    mode: String,
}

impl How {
    fn mode(&self) -> Result<WaitMode> {
        Ok(match self.mode.as_str() {
            "poll" => WaitMode::Poll,
            "interrupt" => WaitMode::Interrupt,
            budget => WaitMode::Adaptive { budget: Duration::from_micros(budget.parse()?) },
        })
    }

    fn endpoint(&self, address: &str) -> Result<(Endpoint, String)> {
        let (segment, name) = ginnel::split(address)?;
        let options = AttachOptions { mode: self.mode()?, ..AttachOptions::default() };
        Ok((Endpoint::attach_with(segment, &options)?, name.into()))
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    match Cli::parse().what {
        What::Manage(how) => manage(&how),
        What::Work(how) => work(&how),
    }
}

fn manage(how: &How) -> Result<()> {
    let (before, sum, report);
    if how.tcp {
        before = cpu_seconds();
        let mode = how.mode()?;
        (sum, report) = farm::manage(&how.addresses[0], how.workers, how.bytes, how.piece, how.window, mode)?;
    } else {
        let mut manager = Manager::new(Options {
            mode: how.mode()?,
            window: how.window,
            piece: how.piece,
            ..Options::default()
        })?;
        for address in &how.addresses {
            let (endpoint, name) = how.endpoint(address)?;
            manager.listen(&endpoint, &name)?;
        }
        if !manager.wait_for_workers(how.workers, PATIENCE)? {
            bail!("{} of {} workers came", manager.workers(), how.workers);
        }
        before = cpu_seconds();
        let mut count = 0;
        report = manager.run("count", equal(how.bytes, how.piece), Generated { seed: 1 }, |_, result| {
            let result = result.try_into().map_err(|_| Refusal::Nonsense("no number".into()))?;
            count += u64::from_le_bytes(result);
            Ok(())
        })?;
        sum = count;
    }
    let cpu = cpu_seconds() - before;
    anyhow::ensure!(sum == how.bytes, "{sum} characters of {}", how.bytes);
    anyhow::ensure!(report.workers.len() == how.workers, "{} workers", report.workers.len());
    println!("{{\"seconds\": {}, \"cpu\": {cpu}}}", report.time.as_secs_f64());
    Ok(())
}

fn work(how: &How) -> Result<()> {
    let cpu;
    if how.tcp {
        cpu = cpu_seconds();
        farm::work(&how.addresses[0], how.piece, how.mode()?)?;
    } else {
        let (endpoint, name) = how.endpoint(&how.addresses[0])?;
        let options = ChannelOptions { patience: PATIENCE, ..ChannelOptions::default() };
        let channel: MessageChannel = endpoint.connect_with(&name, &options).context("no manager")?;
        cpu = cpu_seconds();
        Worker::over(channel).serve(|task, result| {
            result.extend_from_slice(&count::characters(task.data).to_le_bytes());
            Ok(())
        })?;
    }
    println!("{{\"seconds\": 0, \"cpu\": {}}}", cpu_seconds() - cpu);
    Ok(())
}
