//! `ginnel vm`.

use crate::output;
use anyhow::{Context, Result};
use clap::Subcommand;
use ginnel::Daemon;
use ginnel_config::Bytes;
use serde_json::{Value, json};

/// Declares and removes VMs at run time.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Add(Add),
    Remove(Remove),
}

/// Declares a VM. It stays declared across restarts of the daemon. Only the host's administrators may do this.
#[derive(clap::Args)]
struct Add {
    /// Name of the VM.
    name: String,

    /// Also create a segment home-NAME of this size, which the VM shares only with the host.
    #[arg(long, value_name = "SIZE")]
    home: Option<Bytes>,

    /// The kind of device by which the VM gets that segment: `dax` or `bar`. Default: dax.
    #[arg(long, value_name = "KIND", requires = "home")]
    home_memory: Option<String>,
}

/// Removes a VM that was declared at run time and is not running, and its home segment.
#[derive(clap::Args)]
struct Remove {
    /// Name of the VM.
    name: String,
}

pub fn run(args: Args) -> Result<()> {
    let mut daemon = Daemon::connect()?;
    match args.command {
        Command::Add(args) => {
            let mut request = json!({ "op": "vm-add", "name": args.name });
            if let Some(home) = args.home {
                request["home"] = json!(home);
            }
            if let Some(memory) = args.home_memory {
                request["home_memory"] = json!(memory);
            }
            let answer = daemon.admin(&request.to_string()).context("VM not declared")?;
            let vm: Value = serde_json::from_str(&answer).unwrap_or_default();
            output::line(format!(
                "VM {}: member {}; `ginnel qemu-args {0}` prints its devices",
                args.name, vm["vm"]["number"]
            ))
        }
        Command::Remove(args) => {
            let request = json!({ "op": "vm-remove", "name": args.name });
            daemon.admin(&request.to_string()).map(drop).context("VM not removed")
        }
    }
}
