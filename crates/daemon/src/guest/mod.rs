//! The guest role.

use std::path::PathBuf;

/// Arguments of `ginneld guest`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where the attach socket and the keeper's socket are.
    #[arg(long, value_name = "DIR", default_value = "/run/ginnel")]
    pub runtime_dir: PathBuf,
}

/// Runs until it is told to end.
pub fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("the guest role is not in this build yet")
}
