//! The program `ginneld`: the host role, the guest role, and the keeper and the helpers that both roles use.

use clap::{Parser, Subcommand};
use ginnel_config::Problem;
use ginnel_daemon::strangers::helper;
use ginnel_daemon::{guest, host, keeper, namer, spawned};
use std::process::ExitCode;

/// The control daemon of Ginnel.
#[derive(Parser)]
#[command(name = "ginneld", version)]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Serve the programs and the VMs of this host.
    Host(host::Args),
    /// Serve the programs of this VM.
    Guest(guest::Args),
    /// Hold file descriptors for a daemon while it is away.
    #[command(hide = true)]
    Keeper(keeper::Args),
    /// Examine and close the descriptors that the programs of one user have sent to a daemon.
    #[command(hide = true)]
    Helper(helper::Args),
    /// Make and remove names in a folder through which others may pass. The requests come over standard input.
    #[command(hide = true)]
    Namer,
    /// Change the file of a segment, which is standard input.
    #[command(hide = true)]
    File(host::file_work::Args),
    /// Make the file of a segment.
    #[command(hide = true)]
    NewFile(host::file_making::NewFile),
    /// Look for the processes that have the files of segments.
    #[command(hide = true)]
    Holders(host::holders::Args),
    /// Make the folder for the files of segments.
    #[command(hide = true)]
    Folder(host::own_folder::Args),
}

/// The exit status for an invalid configuration, the same as for an invalid command line: starting again would not help.
const INVALID_CONFIGURATION: u8 = 2;

fn main() -> ExitCode {
    // Whoever has started this program may have ignored the ends of children, which outlives an `exec`.
    spawned::wait_for_children();
    let result = match Cli::parse().role {
        Role::Host(args) => host::run(args),
        Role::Guest(args) => guest::run(args),
        Role::Keeper(args) => keeper::run(args),
        Role::Helper(args) => helper::run(args),
        Role::Namer => namer::run(),
        Role::File(args) => host::file_work::run(args),
        Role::NewFile(args) => host::file_making::run(args),
        Role::Holders(args) => host::holders::run(args),
        Role::Folder(args) => host::own_folder::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ginneld: {error:#}");
            if error.is::<Problem>() { ExitCode::from(INVALID_CONFIGURATION) } else { ExitCode::FAILURE }
        }
    }
}
