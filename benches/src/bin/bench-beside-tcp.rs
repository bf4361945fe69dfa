//! Programs that must not be slower than over TCP: `make bench NAME=beside-tcp`.

use anyhow::Result;
use clap::Parser;
use ginnel_bench::beside_tcp::beside_tcp;
use ginnel_bench::report::Report;

/// Measures programs with short connections, and such as work more than they send, over TCP and with the sockets preload library.
#[derive(Parser)]
struct Cli {
    /// Measure only rows whose names contain this.
    #[arg(long)]
    row: Option<String>,
    /// The number of pairs of runs for each row, one without the library and one with it.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut report = Report::default();
    beside_tcp(&mut report, cli.pairs, cli.row.as_deref())?;
    report.finish("beside-tcp", cli.row.is_some())
}
