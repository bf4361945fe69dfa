//! MPI programs over a segment: `make bench NAME=mpi`.

use anyhow::Result;
use clap::Parser;
use ginnel_bench::mpi::Mpi;
use ginnel_bench::report::Report;

/// Measures MPICH and Open MPI over a segment beside their own shared memory.
#[derive(Parser)]
struct Cli {
    /// Only rows whose names contain this.
    #[arg(long)]
    row: Option<String>,
    /// Pairs of runs for each row, one of them of the peer.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut report = Report::default();
    Mpi { report: &mut report, pairs: cli.pairs, row: cli.row.as_deref() }.host()?;
    report.finish("mpi", cli.row.is_some())
}
