//! MPI programs over a segment: `make bench NAME=mpi`.

use anyhow::Result;
use clap::Parser;
use ginnel_bench::mpi::Mpi;
use ginnel_bench::report::Report;

/// Measures MPICH and Open MPI over a segment: on the host beside their own shared memory, between VMs beside TCP.
#[derive(Parser)]
struct Cli {
    /// Run only `host` or `vms`.
    #[arg(long)]
    only: Option<String>,
    /// Measure only rows whose names, or whose alternatives' names, contain this.
    #[arg(long)]
    row: Option<String>,
    /// The number of pairs of runs for each row, one of each pair with the peer. Default: 5 on the host, 3 between VMs.
    #[arg(long)]
    pairs: Option<usize>,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut report = Report::default();
    let mut bench = Mpi { report: &mut report, pairs: cli.pairs, row: cli.row.as_deref() };
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    if wants("host") {
        bench.host()?;
    }
    if wants("vms") {
        bench.vms()?;
    }
    report.finish("mpi", cli.only.is_some() || cli.row.is_some())
}
