//! The keeper: a process that does nothing but hold file descriptors by name, so that they outlive a daemon.

use std::path::PathBuf;

/// Arguments of `ginneld keeper`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its socket.
    #[arg(long)]
    pub socket: PathBuf,
}

/// Runs until it is told to end.
pub fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("the keeper is not in this build yet")
}
