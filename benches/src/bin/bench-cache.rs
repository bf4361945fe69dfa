//! A cache beside memcached: `make bench NAME=cache`.

use anyhow::Result;
use clap::Parser;
use ginnel_bench::cache::Cache;
use ginnel_bench::report::Report;

/// Measures a cache beside memcached.
#[derive(Parser)]
struct Cli {
    /// Run only `hit-rate`, `host`, `vm`, `ycsb` or `ycsb-vms`.
    #[arg(long)]
    only: Option<String>,
    /// Measure only rows whose names contain this. `the same on the host` selects the rows with this alternative.
    #[arg(long)]
    row: Option<String>,
    /// The number of pairs of runs for each row, one of each pair with the peer. Default: 5 on the host, 3 or 2 with VMs.
    #[arg(long)]
    pairs: Option<usize>,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut report = Report::default();
    let mut bench = Cache { report: &mut report, pairs: cli.pairs, row: cli.row.as_deref() };
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    if wants("hit-rate") {
        bench.hit_rate()?;
    }
    if wants("host") {
        bench.host()?;
    }
    if wants("vm") {
        bench.vm()?;
    }
    if wants("ycsb") {
        bench.ycsb()?;
    }
    if wants("ycsb-vms") {
        bench.ycsb_vms()?;
    }
    report.finish("cache", cli.only.is_some() || cli.row.is_some())
}
