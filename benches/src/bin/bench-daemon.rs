//! How long the daemon lets others wait: `make bench NAME=daemon`.

use anyhow::{Context, Result};
use clap::Parser;
use ginnel_bench::report::Report;
use ginnel_bench::{joining, relayed, restarting, stalls};
use std::path::PathBuf;

/// Measures the waits of a program while others use the daemon heavily, how long a VM takes to join, requests from a VM, and the restart
/// of a daemon that was killed.
#[derive(Parser)]
struct Cli {
    /// Run only this part.
    #[arg(long, value_parser = ["stalls", "joining", "relayed", "restarting"])]
    only: Option<String>,
    /// For the bench itself: be one of the programs that use the daemon heavily.
    #[arg(long, hide = true, value_parser = ["blocks", "locks", "listeners"])]
    hold: Option<String>,
    /// For the bench itself: be the program in a VM that makes requests.
    #[arg(long, hide = true)]
    ask: Option<relayed::Request>,
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
    #[arg(long, hide = true, default_value_t = 0)]
    number: usize,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(what) = cli.hold {
        let socket = cli.socket.context("--socket")?;
        return match what.as_str() {
            "listeners" => restarting::hold(&socket, cli.number),
            _ => stalls::hold(&what, &socket, cli.number),
        };
    }
    if let Some(what) = cli.ask {
        return relayed::ask(what);
    }
    let wants = |part: &str| cli.only.as_deref().is_none_or(|only| only == part);
    let mut report = Report::default();
    if wants("stalls") {
        stalls::stalls(&mut report)?;
    }
    if wants("joining") {
        joining::joining(&mut report)?;
    }
    if wants("relayed") {
        relayed::relayed(&mut report)?;
    }
    if wants("restarting") {
        restarting::restarting(&mut report)?;
    }
    report.finish("daemon", cli.only.is_some())
}
