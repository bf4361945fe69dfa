//! `ginnel volume serve`: executes `ginnel-volume` in this process. The holder of an nvme volume is another process.

use anyhow::{Result, anyhow};
use ginnel_volume_control::VolumePaths;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = "ginnel-volume";

/// Serves a volume until SIGTERM. This is the program ginnel-volume; `ginnel-volume --help` shows its options.
///
/// An nvme volume (--nvme) also needs a holder, which keeps QEMU's connection while this process is restarted. If none serves, this
/// command starts one. It ends by itself when neither QEMU nor an engine is there.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Name of the volume, and options.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

pub fn run(paths: &VolumePaths, args: &Args) -> Result<()> {
    let program = beside_us().unwrap_or_else(|| PROGRAM.into());
    let error = Command::new(&program)
        .arg("--start-holder")
        .args(&args.arguments)
        .env("GINNEL_VOLUME_SOCKETS", &paths.sockets)
        .env("GINNEL_VOLUME_CONFIGS", &paths.configurations)
        .exec();
    Err(anyhow!("cannot run {}: {error}; install it beside ginnel, or into the PATH", program.display()))
}

/// Returns the program beside this command, if there is one.
fn beside_us() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(PROGRAM);
    path.exists().then_some(path)
}
