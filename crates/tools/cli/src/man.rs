//! `ginnel man`.

use anyhow::{Context, Result};
use clap::Command;
use std::path::PathBuf;

/// Writes the manual pages of this command into a folder.
///
/// There is one page for the command and one for each of its subcommands: ginnel.1, ginnel-cp.1 and so on.
#[derive(clap::Args)]
pub struct Args {
    /// The folder; it is created if it does not exist.
    dir: PathBuf,
}

pub fn run(args: Args, command: Command) -> Result<()> {
    let shown = args.dir.display();
    std::fs::create_dir_all(&args.dir).with_context(|| format!("cannot create the folder {shown}"))?;
    clap_mangen::generate_to(command, &args.dir)
        .with_context(|| format!("cannot write manual pages to {shown}"))
}
