//! `ginnel perf ADDRESS`: makes one connection for each measurement.

use super::Args;
use super::measure::{Outcome, ask, clock_ns};
use super::parameters::{Kind, Parameters, Test};
use super::server::{options, stream_name};
use super::transport::Transport;
use crate::wait::Mode;
use crate::{AlreadyReported, address, output};
use anyhow::{Context, Result};
use ginnel::{Channel, ChannelOptions, Endpoint, MessageChannel, StreamChannel};
use serde::Serialize;
use std::net::TcpStream;

const LATENCY_SIZES: [usize; 4] = [8, 64, 1 << 10, 16 << 10];
const BANDWIDTH_SIZES: [usize; 4] = [64, 4 << 10, 64 << 10, 1 << 20];
const MIN_CAPACITY: usize = 1 << 20;

/// Measures channels.
pub fn run(args: &Args, at: &str) -> Result<()> {
    let (segment, name) = address::split(at)?;
    let endpoint = Endpoint::attach_with(segment, &options())?;
    let mut report = Report::new(args, at, "ginnel");
    let modes = or(&args.mode, &[Mode::Poll, Mode::Interrupt, Mode::Adaptive]);
    for test in or(&args.test, &[Test::Latency, Test::Bandwidth]) {
        let kinds: &[_] = match test {
            Test::Latency => &[Kind::Message, Kind::Stream],
            Test::Bandwidth => &[Kind::Message, Kind::MessageZeroCopy, Kind::Stream, Kind::StreamZeroCopy],
        };
        for kind in or(&args.kind, kinds) {
            if test == Test::Latency && kind.is_in_place() {
                continue;
            }
            for &mode in &modes {
                for size in sizes(args, test) {
                    let parameters = parameters(args, test, kind.is_in_place(), Some(mode), size);
                    let outcome = if kind.is_stream() {
                        measure::<StreamChannel>(args, &endpoint, &stream_name(name), &parameters)
                    } else {
                        measure::<MessageChannel>(args, &endpoint, name, &parameters)
                    };
                    report.add(kind, &parameters, outcome)?;
                }
            }
        }
    }
    report.end()
}

/// Measures TCP.
pub fn run_tcp(args: &Args, at: &str) -> Result<()> {
    let mut report = Report::new(args, at, "tcp");
    for test in or(&args.test, &[Test::Latency, Test::Bandwidth]) {
        for size in sizes(args, test) {
            let parameters = parameters(args, test, false, None, size);
            let outcome = TcpStream::connect(at)
                .with_context(|| format!("cannot connect to {at}"))
                .and_then(|mut socket| ask(&mut socket, &parameters));
            report.add(Kind::Stream, &parameters, outcome.map(|outcome| (outcome, None)))?;
        }
    }
    report.end()
}

/// Returns the given values, or else the defaults.
fn or<T: Copy>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

fn sizes(args: &Args, test: Test) -> Vec<usize> {
    or(
        &args.size,
        match test {
            Test::Latency => &LATENCY_SIZES,
            Test::Bandwidth => &BANDWIDTH_SIZES,
        },
    )
}

fn parameters(args: &Args, test: Test, in_place: bool, mode: Option<Mode>, size: usize) -> Parameters {
    Parameters { test, in_place, reverse: args.reverse, mode, size, duration: args.duration }
}

fn measure<C: Channel + Transport>(
    args: &Args,
    endpoint: &Endpoint,
    name: &str,
    parameters: &Parameters,
) -> Result<(Outcome, Option<usize>)> {
    let capacity = args.capacity.unwrap_or(match parameters.test {
        // A message can have at most a quarter of the ring.
        Test::Latency if parameters.size < 32 << 10 => 0,
        Test::Latency => 8 * parameters.size,
        Test::Bandwidth => (8 * parameters.size).max(MIN_CAPACITY),
    });
    let options = ChannelOptions { capacity, ..ChannelOptions::default() };
    let mut channel = endpoint.connect_with::<C>(name, &options)?;
    let outcome = ask(&mut channel, parameters)?;
    Ok((outcome, channel.capacity()))
}

/// All measurements of a run.
#[derive(Serialize)]
struct Report<'a> {
    version: &'static str,
    address: &'a str,
    transport: &'static str,
    clock_ns: f64,
    results: Vec<Measured>,
    #[serde(skip)]
    json: bool,
    #[serde(skip)]
    failed: bool,
    #[serde(skip)]
    shown: Option<Test>,
}

/// One measurement.
#[derive(Serialize)]
struct Measured {
    test: Test,
    kind: Kind,
    /// `None` for a socket.
    mode: Option<Mode>,
    size: usize,
    reverse: bool,
    /// `None` for a socket.
    capacity: Option<usize>,
    #[serde(flatten)]
    outcome: Option<Outcome>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl<'a> Report<'a> {
    fn new(args: &Args, address: &'a str, transport: &'static str) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            address,
            transport,
            clock_ns: clock_ns(),
            results: Vec::new(),
            json: args.json,
            failed: false,
            shown: None,
        }
    }

    /// Adds a measurement, and prints it at once unless the output is JSON.
    fn add(
        &mut self,
        kind: Kind,
        parameters: &Parameters,
        outcome: Result<(Outcome, Option<usize>)>,
    ) -> Result<()> {
        let (outcome, capacity, error) = match outcome {
            Ok((outcome, capacity)) => (Some(outcome), capacity, None),
            Err(error) => (None, None, Some(format!("{error:#}"))),
        };
        self.failed |= error.is_some();
        let reverse = parameters.reverse && parameters.test == Test::Bandwidth;
        let measured = Measured {
            test: parameters.test,
            kind,
            mode: parameters.mode,
            size: parameters.size,
            reverse,
            capacity,
            outcome,
            error,
        };
        if let Some(error) = &measured.error {
            output::note(format!("ginnel: {} {}: {error}", self.address, measured.what()));
        }
        if !self.json {
            if self.shown != Some(parameters.test) {
                output::line(heading(parameters.test))?;
                self.shown = Some(parameters.test);
            }
            output::line(measured.to_string())?;
        }
        self.results.push(measured);
        Ok(())
    }

    fn end(self) -> Result<()> {
        if self.json {
            output::json(&self)?;
        }
        if self.failed { Err(AlreadyReported.into()) } else { Ok(()) }
    }
}

fn heading(test: Test) -> String {
    let what = format!("{:<18} {:<10} {:>9}", test.name(), "MODE", "SIZE");
    match test {
        Test::Latency => {
            format!(
                "{what} {:>12} {:>12} {:>12} {:>12} {:>12}",
                "ONE-WAY us", "RTT p50 us", "p99", "p99.9", "max"
            )
        }
        Test::Bandwidth => format!("{what} {:>12} {:>12} {:>14}", "GB/s", "MiB/s", "sends/s"),
    }
}

impl Test {
    fn name(self) -> &'static str {
        match self {
            Self::Latency => "LATENCY",
            Self::Bandwidth => "BANDWIDTH",
        }
    }
}

impl Measured {
    fn what(&self) -> String {
        let name = |value: Option<String>| value.unwrap_or_else(|| "kernel".into());
        let kind = clap_name(&self.kind);
        let direction = if self.reverse { " <-" } else { "" };
        let kind = name(kind) + direction;
        let mode = name(self.mode.as_ref().and_then(clap_name));
        format!("{kind:<18} {mode:<10} {:>9}", self.size)
    }
}

/// Returns the name of a value on the command line.
fn clap_name(value: &impl clap::ValueEnum) -> Option<String> {
    Some(value.to_possible_value()?.get_name().to_owned())
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.what())?;
        match &self.outcome {
            Some(Outcome::Latency(latency)) => {
                let rtt = &latency.rtt_ns;
                for nanos in [latency.one_way_ns, rtt.p50, rtt.p99, rtt.p999, rtt.max] {
                    write!(f, " {:>12.3}", nanos / 1e3)?;
                }
                Ok(())
            }
            Some(Outcome::Bandwidth(b)) => {
                let (gb, mib) = (b.bytes_per_s / 1e9, b.bytes_per_s / f64::from(1 << 20));
                write!(f, " {gb:>12.3} {mib:>12.1} {:>14.0}", b.operations_per_s)
            }
            None => write!(f, " failed"),
        }
    }
}
