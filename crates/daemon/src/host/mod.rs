//! The host role: the authority over members, segments, endpoints and channels of this machine.
//!
//! | part | what it is |
//! |---|---|
//! | [`config`] | the configuration file |
//! | [`broker`], `requests` | the state machine of the attach protocol |
//! | `blocks`, `sync`, `estate` | blocks, synchronisation objects, and what they have in common |
//! | [`books`], [`record`], [`arena`], `starts` | its state, and the changes that lead there |
//! | [`journal`] | these changes on disk |
//! | [`segments`], `front`, [`members`] | files, mappings, what stands in front of them, and descriptors |
//! | [`server`], `clients`, `vms`, [`ivshmem`] | the event loop, sockets of programs and of VMs |
//! | `heartbeat`, `fence`, [`qmp`] | guests that hang, and what is done about them |
//! | `declare`, `admin`, `inspect`, `inspect_memory` | members and segments come and go, and are shown |
//! | `startup` | from a configuration and a journal to a running daemon |

mod admin;
pub mod arena;
mod blocks;
pub mod books;
pub mod broker;
mod clients;
pub mod config;
mod declare;
mod estate;
mod fence;
mod front;
mod heartbeat;
mod inspect;
mod inspect_memory;
pub mod ivshmem;
pub mod journal;
pub mod members;
pub mod qmp;
pub mod record;
pub mod reply;
mod requests;
pub mod segments;
pub mod server;
mod starts;
mod startup;
mod sync;
mod vms;

use config::Config;
use ginnel_config::LogFormat;
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
    /// At the end, end the keeper too. Running VMs and programs must then be started anew.
    #[arg(long)]
    pub stop_keeper: bool,
}

/// Runs until it is told to end.
pub fn run(args: Args) -> anyhow::Result<()> {
    let config = Config::read(&args.config)?;
    if args.check {
        return startup::check(&config);
    }
    crate::logging::start(&config.log, config.log_format == LogFormat::Json);
    startup::run(config, args.stop_keeper)
}
