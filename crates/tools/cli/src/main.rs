//! `ginnel`: the command for operators.

mod address;
mod apparmor;
mod blocks;
mod cache;
mod completions;
mod cp;
mod farm;
mod inspect;
mod libraries;
mod libvirt_xml;
mod list;
mod locks;
mod machine;
mod man;
mod mpi_env;
mod output;
mod perf;
mod ping;
mod qemu_args;
mod qemu_version;
mod run;
mod segment;
mod sockets;
mod status;
mod verbs;
mod vm;
mod vm_devices;
mod volume;
mod volume_devices;
mod wait;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Manages segments and channels between this host and its virtual machines.
///
/// Talks to the daemon at $GINNEL_SOCKET, or at /run/ginnel/ginnel.sock. The commands work on the host and in a VM;
/// only the host can change the configuration. Exit status: 0 for success, 1 if something failed, 2 for an invalid
/// command line.
#[derive(Parser)]
#[command(name = "ginnel", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Segment(segment::Args),
    Vm(vm::Args),
    Status(status::Args),
    Blocks(blocks::Args),
    Cache(cache::Args),
    Locks(locks::Args),
    Sockets(sockets::Args),
    Verbs(verbs::Args),
    Ping(ping::Args),
    Perf(perf::Args),
    Cp(cp::Args),
    Run(run::Args),
    MpiEnv(mpi_env::Args),
    Farm(farm::Args),
    Volume(volume::Args),
    QemuArgs(qemu_args::Args),
    LibvirtXml(libvirt_xml::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// The command line is invalid, in a way that the parser cannot detect.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// An error that was already reported. Only the exit status says so once more.
#[derive(Debug)]
struct AlreadyReported;

impl std::fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed")
    }
}

impl std::error::Error for AlreadyReported {}

fn main() -> ExitCode {
    // The process ends here with status 2 for usage errors, and with 0 for help and version.
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Segment(args) => segment::run(args),
        Command::Vm(args) => vm::run(args),
        Command::Status(args) => status::run(args),
        Command::Blocks(args) => blocks::run(args),
        Command::Cache(args) => cache::run(args),
        Command::Locks(args) => locks::run(args),
        Command::Sockets(args) => sockets::run(args),
        Command::Verbs(args) => verbs::run(args),
        Command::Ping(args) => ping::run(args),
        Command::Perf(args) => perf::run(args),
        Command::Cp(args) => cp::run(args),
        Command::Run(args) => run::run(args),
        Command::MpiEnv(args) => mpi_env::run(args),
        Command::Farm(args) => farm::run(args),
        Command::Volume(args) => volume::run(args),
        Command::QemuArgs(args) => qemu_args::run(args),
        Command::LibvirtXml(args) => libvirt_xml::run(args),
        Command::Completions(args) => completions::run(args, Cli::command()),
        Command::Man(args) => man::run(args, Cli::command()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if !error.is::<AlreadyReported>() {
                output::note(format!("ginnel: {}", one_line(&error)));
            }
            ExitCode::from(match error.downcast_ref::<run::NotRun>() {
                Some(not_run) => not_run.status,
                None if error.is::<Usage>() => 2,
                None => 1,
            })
        }
    }
}

/// Returns an error and its causes on one line.
fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn errors_have_one_line() {
        let error = anyhow::anyhow!("first\n  second").context("outer");
        assert_eq!(one_line(&error), "outer: first second");
    }
}
