//! What many channels cost a thread that serves all of them: `make bench NAME=ready`.

use anyhow::{Context, Result};
use clap::Parser;
use ginnel_bench::readiness;
use ginnel_bench::report::Report;
use std::path::PathBuf;

/// Measures one busy channel among 10,000 idle ones, what it takes to open them, and what the idle ones cost.
#[derive(Parser)]
struct Cli {
    /// For the bench itself: be one of the servers.
    #[arg(long, hide = true, value_parser = ["channels", "sockets"])]
    serve: Option<String>,
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
    #[arg(long, hide = true, default_value_t = 1)]
    count: usize,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(kind) = cli.serve {
        let socket = cli.socket.context("--socket")?;
        return match kind.as_str() {
            "channels" => readiness::serve(&socket, cli.count),
            _ => readiness::serve_sockets(&socket, cli.count),
        };
    }
    let mut report = Report::default();
    readiness::readiness(&mut report)?;
    report.finish("ready", false)
}
