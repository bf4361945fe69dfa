//! `ginnel perf`.

mod client;
mod emulation;
mod mapping;
mod measure;
mod parameters;
mod server;
mod transport;

use crate::Usage;
use crate::wait::Mode;
use anyhow::Result;
use ginnel_config::{Bytes, seconds};
use parameters::{Kind, MAX_DURATION, MAX_SIZE, Test};
use std::time::Duration;

/// Measures latency and bandwidth of channels, or of a TCP connection in the same way.
///
/// The other side runs `ginnel perf --serve ADDRESS`. This side chooses the measurements, so one server suffices for
/// all. With --tcp HOST:PORT on both sides, the same measurements run over a TCP socket. With --mapping, this side
/// alone measures loads and stores on its mapping of a segment and on private memory, which shows whether the processor
/// caches the mapping. The exit status is 0 if all measurements succeeded.
#[derive(clap::Args)]
pub struct Args {
    /// SEGMENT/NAME, such as web/perf. Streams also use NAME.stream.
    #[arg(required_unless_present_any = ["tcp", "mapping"], conflicts_with = "tcp")]
    address: Option<String>,

    /// Be the server for measurements.
    #[arg(long, conflicts_with_all = ["test", "kind", "mode", "size", "duration", "reverse", "capacity", "json"])]
    serve: bool,

    /// Measure TCP instead, to (or with --serve, at) this address and port.
    #[arg(long, value_name = "HOST:PORT")]
    tcp: Option<String>,

    /// Measure this member's mapping of a segment instead.
    #[arg(long, value_name = "SEGMENT", conflicts_with_all = ["address", "serve", "tcp", "test", "kind", "mode", "size", "reverse", "capacity"])]
    mapping: Option<String>,

    /// What to measure. Default: both.
    #[arg(long, value_enum, value_delimiter = ',')]
    test: Vec<Test>,

    /// Which kind of channel to use, and how. Default: message and stream for latency, all four for bandwidth.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "tcp")]
    kind: Vec<Kind>,

    /// How both sides wait. Default: all three.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "tcp")]
    mode: Vec<Mode>,

    /// Bytes in a message or write, with K or M for 1024 or 1024 x 1024. Default: 8, 64, 1K and 16K for latency; 64,
    /// 4K, 64K and 1M for bandwidth.
    #[arg(long, value_delimiter = ',', value_parser = size)]
    size: Vec<usize>,

    /// Duration of each measurement, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "0.3", value_parser = duration)]
    duration: Duration,

    /// Let the server send in bandwidth tests.
    #[arg(long)]
    reverse: bool,

    /// Size of each ring in bytes. Default: the daemon's default for latency; for bandwidth, enough for eight messages
    /// or writes, and at least 1M.
    #[arg(long, value_parser = size, conflicts_with = "tcp")]
    capacity: Option<usize>,

    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    if let Some(segment) = &args.mapping {
        return mapping::run(&args, segment);
    }
    match (args.serve, &args.tcp, &args.address) {
        (true, Some(tcp), _) => server::serve_tcp(tcp),
        (true, None, Some(address)) => server::serve(address),
        (false, Some(tcp), _) => client::run_tcp(&args, tcp),
        (false, None, Some(address)) => client::run(&args, address),
        (_, None, None) => Err(Usage("name an address, --tcp HOST:PORT or --mapping SEGMENT".into()).into()),
    }
}

fn size(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .map(|Bytes(n)| n)
        .filter(|n| (1..=MAX_SIZE).contains(n))
        .map(|n| n as usize)
        .ok_or_else(|| format!("{text:?} is not a size from 1 to {}M", MAX_SIZE >> 20))
}

fn duration(text: &str) -> Result<Duration, String> {
    seconds(text)
        .ok()
        .filter(|time| *time <= MAX_DURATION)
        .ok_or_else(|| format!("{text:?} is not a number of seconds up to {}", MAX_DURATION.as_secs()))
}
