//! The host role: the authority over members, segments, endpoints and channels of this machine.
//!
//! | part | what it is |
//! |---|---|
//! | [`config`] | the configuration file |
//! | [`broker`], `requests` | the state machine of the attach protocol |
//! | [`books`], [`record`], [`arena`] | its state, and the changes that lead there |
//! | [`journal`] | these changes on disk |
//! | [`segments`], [`members`] | files, mappings and descriptors |
//! | [`server`], `clients` | the event loop, sockets |
//! | `startup` | from a configuration and a journal to a running daemon |

pub mod arena;
pub mod books;
pub mod broker;
pub mod clients;
pub mod config;
pub mod journal;
pub mod members;
pub mod record;
pub mod reply;
mod requests;
pub mod segments;
pub mod server;
mod startup;

use config::{Config, LogFormat};
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
pub fn run(args: Args) -> anyhow::Result<()> {
    let config = Config::read(&args.config)?;
    if args.check {
        return startup::check(&config);
    }
    crate::logging::start(&config.log, config.log_format == LogFormat::Json);
    startup::run(config)
}
