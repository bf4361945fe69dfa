//! Unmodified programs over TCP and over shared memory: `make bench NAME=sockets`.

use anyhow::Result;
use clap::Parser;
use ginnel_bench::report::Report;
use ginnel_bench::sockets::Sockets;

/// Measures unmodified programs over TCP and over shared memory.
#[derive(Parser)]
struct Cli {
    /// Run only this part.
    #[arg(long, value_parser = ["host", "vms"])]
    only: Option<String>,
    /// Measure only rows whose names, or whose alternatives' names, contain this.
    #[arg(long)]
    row: Option<String>,
    /// The number of pairs of runs for each row, one over TCP and one over shared memory.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut report = Report::default();
    let mut bench = Sockets { report: &mut report, pairs: cli.pairs, row: cli.row.as_deref() };
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    if wants("host") {
        bench.host()?;
    }
    if wants("vms") {
        bench.vms()?;
    }
    report.finish("sockets", cli.only.is_some() || cli.row.is_some())
}
