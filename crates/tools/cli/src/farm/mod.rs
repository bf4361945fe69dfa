//! `ginnel farm`.

mod input;
mod job;
mod progress;
mod run;
mod work;

use crate::Usage;
use anyhow::Result;
use ginnel_layout::Name;

/// Has many workers do a job, each with shared memory of its own.
///
/// The manager (`run`) and its workers (`work`) meet at an address: a segment that a manager shares with one worker (a
/// slice), or one that many share. The manager writes pieces of the input into the workers' memory, and the workers
/// work on them there. The pieces of a worker that dies are given to others; workers that come late get work too.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Run(run::Args),
    Work(work::Args),
}

pub fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Run(args) => run::run(args),
        Command::Work(args) => work::run(args),
    }
}

/// Parses SEGMENT or SEGMENT/NAME, and adds the default name.
fn address(text: &str) -> Result<String, String> {
    let full = if text.contains('/') { text.to_owned() } else { format!("{text}/{}", ginnel_farm::NAME) };
    crate::address::split(&full).map(|_| full.clone()).map_err(|error| error.to_string())
}

/// Returns a name for this program's endpoint that distinguishes it from others of its kind.
fn name(what: &str) -> Option<String> {
    let name = format!("farm-{what}.{}", std::process::id());
    Name::new(&name).ok().map(|_| name)
}

/// Returns a usage error.
fn usage(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}
