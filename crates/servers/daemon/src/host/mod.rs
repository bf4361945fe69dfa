//! The host role: it performs what `ginnel_broker` decides about the members, segments, endpoints and channels of this machine.
//!
//! | part | what it is |
//! |---|---|
//! | [`config`], `accepted` | the configuration file, and the last configuration without a mistake |
//! | [`journal`] | the changes of the books, on disk, and how far they go |
//! | [`segments`], `front`, [`members`] | files and mappings, the memory in front of the arenas, and descriptors |
//! | [`file_jobs`], [`file_making`], [`file_work`] | files of segments that processes make or change |
//! | `pending_segments`, `added_segments` | segments that wait for their files, and what happens when these are made |
//! | [`watched_files`] | files of segments that others have changed, and that get back what they had |
//! | [`in_use`] | whether anybody else has a file |
//! | `former`, [`holders`] | processes that have a segment's file and are no members |
//! | `kept` | segments that somebody may have who should not, until they get a new file |
//! | `memory_limit` | the memory that the daemon's cgroups leave to it |
//! | `doorbells`, `ringing` | the eventfds of doorbells, their announcement to QEMUs, and the threads that ring them |
//! | [`server`], `token`, `turns` | the event loop |
//! | `connections`, `clients` | the connections of programs, and what happens on them |
//! | `vm`, `vms`, [`ivshmem`] | a VM as the daemon has it, and what happens between it, its QEMU and its daemon |
//! | `pauses` | listening sockets that rest, because nothing can be accepted now |
//! | `pulse`, `heartbeat`, `fence`, [`qmp`] | guests that hang, and what the daemon does about them |
//! | `finder` | processes that connect to the control sockets of QEMUs |
//! | `resets` | the resets of a guest, however often they come |
//! | `declare`, `admin`, `inspect`, `viewer`, `views` | declaring, removing and showing members and segments |
//! | `own_folder` | the folder in which the files of segments lie |
//! | `rereading`, `reload` | reading the configuration again while the daemon serves, and what that changes |
//! | `startup` | the way from a configuration and a journal to a running daemon |

mod accepted;
mod added_segments;
mod admin;
mod clients;
pub mod config;
mod connections;
mod declare;
mod doorbells;
mod fence;
pub mod file_jobs;
pub mod file_making;
pub mod file_work;
mod finder;
mod fixed_size;
mod former;
mod front;
mod heartbeat;
pub mod holders;
mod holds;
pub mod in_use;
mod inspect;
pub mod ivshmem;
pub mod journal;
mod kept;
pub mod members;
mod memory_limit;
pub mod own_folder;
mod pauses;
mod pending_segments;
mod pulse;
pub mod qmp;
mod random;
mod reload;
mod rereading;
mod resets;
mod ringing;
pub mod segments;
pub mod server;
mod startup;
mod token;
mod turns;
mod viewer;
mod views;
mod vm;
mod vms;
pub mod watched_files;

use crate::closer::Closer;
use crate::hangup::Hangup;
use crate::{keeper, pidwatch};
use accepted::Chosen;
use anyhow::Context;
use config::Config;
use ginnel_config::{LogFormat, Problem};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a configuration with a mistake is read again while VMs run.
const REREAD_INTERVAL: Duration = Duration::from_secs(1);

/// Arguments of `ginneld host`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/ginnel/ginneld.toml")]
    pub config: PathBuf,
    /// Only check whether the configuration is good.
    #[arg(long)]
    pub check: bool,
    /// When the daemon ends, also end the keeper. Running VMs and programs must then be restarted.
    #[arg(long)]
    pub stop_keeper: bool,
}

/// Runs until the daemon is told to end.
pub fn run(args: Args) -> anyhow::Result<()> {
    if args.check {
        return startup::check(&Config::read(&args.config)?);
    }
    keeper::keep_to_itself();
    // The heir looks at as many descriptors as there may be.
    keeper::raise_open_files();
    let closer = Closer::start_for_life().context("the closer of connections cannot be started")?;
    pidwatch::look_from_elsewhere().context("the process that looks at others cannot be started")?;
    let hangup = Hangup::register().context("SIGHUP cannot be handled")?;
    let chosen = read_config(&args.config)?;
    crate::logging::start(&chosen.config.log, chosen.config.log_format == LogFormat::Json);
    // From here on a failure is not reported as a mistake in the configuration: the service manager must restart this daemon
    // and keep its descriptors until then.
    startup::run(chosen, args.stop_keeper, closer, &hangup).map_err(|error| anyhow::anyhow!("{error:#}"))
}

/// Reads the configuration. A daemon that holds the descriptors of running VMs does not give up because of a mistake in the file:
/// systemd would drop the descriptors, and the VMs would have to be restarted. It uses the last configuration that was accepted
/// instead; without a copy of that, it waits until the mistake is fixed.
fn read_config(path: &Path) -> Result<Chosen, Problem> {
    let mut said = None;
    loop {
        let problem = match accepted::choose(path) {
            Err(problem) if keeper::is_entrusted() => problem.to_string(),
            done => return done,
        };
        if said.as_ref() != Some(&problem) {
            eprintln!(
                "ginneld: {problem}; waiting until this is fixed, because running VMs need what systemd holds for this daemon"
            );
            let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Status(&problem)]);
            said = Some(problem);
        }
        std::thread::sleep(REREAD_INTERVAL);
    }
}
