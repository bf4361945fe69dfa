//! The host role: the authority over members, segments, endpoints and channels of this machine.

use std::path::PathBuf;

/// Arguments of `ginneld host`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = "/etc/ginnel/ginneld.toml")]
    pub config: PathBuf,
    /// Only look whether the configuration is good.
    #[arg(long)]
    pub check: bool,
}

/// Runs until it is told to end.
pub fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("the host role is not in this build yet")
}
