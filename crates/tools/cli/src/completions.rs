//! `ginnel completions`.

use anyhow::Result;
use clap::Command;
use clap_complete::Shell;
use std::io::Write;

/// Prints the completion script of this command for a shell.
///
/// For bash: `ginnel completions bash > /usr/share/bash-completion/completions/ginnel`.
#[derive(clap::Args)]
pub struct Args {
    shell: Shell,
}

pub fn run(args: Args, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "ginnel", &mut script);
    Ok(std::io::stdout().lock().write_all(&script)?)
}
