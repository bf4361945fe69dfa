//! MPI programs over a segment: `make bench NAME=mpi`.

use anyhow::Result;
use clap::Parser;
use ginnel_bench::mpi::Mpi;
use ginnel_bench::report::Report;

/// Measures MPICH and Open MPI over a segment: on the host beside their own shared memory, and between VMs beside TCP.
#[derive(Parser)]
struct Cli {
    /// Only this part.
    #[arg(long, value_parser = ["host", "vms"])]
    only: Option<String>,
    /// Only rows whose names contain this.
    #[arg(long)]
    row: Option<String>,
    /// Pairs of runs for each row on the host, one of them of the peer.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// The same between VMs, where a run takes long.
    #[arg(long, default_value_t = 3)]
    vm_pairs: usize,
}

fn main() -> Result<()> {
    let Cli { only, row, pairs, vm_pairs } = Cli::parse();
    let mut report = Report::default();
    let mut bench = Mpi { report: &mut report, pairs, vm_pairs, row: row.as_deref() };
    let wants = |part: &str| only.as_deref().is_none_or(|only| only == part);
    if wants("host") {
        bench.host()?;
    }
    if wants("vms") {
        bench.vms()?;
    }
    report.finish("mpi", only.is_some() || row.is_some())
}
