//! `ginnel ping`.

use crate::output;
use crate::wait::Mode;
use anyhow::{Context, Result, bail};
use ginnel::{AttachOptions, Endpoint, Error, Listener, MessageChannel};
use ginnel_config::seconds;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often a wait checks whether the program should end.
const LOOK: Duration = Duration::from_millis(50);
/// The longest message, in bytes. An answer of this length fits into a ring of any size.
const MAX_SIZE: usize = 60 << 10;

/// Sends messages to a program that answers them, and measures how long the answers take.
///
/// The other side runs `ginnel ping --serve ADDRESS`. Exit status 0 if every message was answered.
#[derive(clap::Args)]
pub struct Args {
    /// SEGMENT/NAME, such as web/ping.
    address: String,

    /// Answer pings instead of sending them.
    #[arg(long, conflicts_with_all = ["count", "interval", "size", "timeout", "quiet", "json"])]
    serve: bool,

    /// Number of messages. Default: until interrupted.
    #[arg(short, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Time between messages, in seconds.
    #[arg(short, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,

    /// Size of a message, in bytes.
    #[arg(short, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=MAX_SIZE as i64))]
    size: u32,

    /// How long to wait for an answer, in seconds.
    #[arg(short = 'W', value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    timeout: Duration,

    /// How to wait for the other side.
    #[arg(long, value_enum, default_value_t = Mode::Adaptive)]
    mode: Mode,

    /// Print only the summary.
    #[arg(short)]
    quiet: bool,

    /// Print only the summary, as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    let (segment, name) = crate::address::split(&args.address)?;
    let options = AttachOptions {
        name: Some("ginnel-ping".into()),
        mode: args.mode.into(),
        ..AttachOptions::default()
    };
    let endpoint = Endpoint::attach_with(segment, &options)?;
    if args.serve {
        let listener = endpoint.listen::<MessageChannel>(name)?;
        output::ready(format!("answering pings at {}", args.address));
        return serve(&listener);
    }
    let channel = endpoint.connect::<MessageChannel>(name).with_context(|| {
        format!("cannot ping {} (the other side runs `ginnel ping --serve {0}`)", args.address)
    })?;
    ping(&args, channel)
}

/// Answers all clients, each in its own thread.
fn serve(listener: &Listener<MessageChannel>) -> Result<()> {
    loop {
        let mut channel = listener.accept()?;
        let answer = move || {
            let mut buffer = vec![0; channel.max_message()];
            while let Ok(len) = channel.recv_into(&mut buffer) {
                if channel.send(&buffer[..len]).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new()
            .name("answer".into())
            .spawn(answer)
            .context("cannot start a thread for an answer")?;
    }
}

fn ping(args: &Args, mut channel: MessageChannel) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The first signal asks for the summary; the second ends the program at once.
        signal_hook::flag::register_conditional_default(signal, stop.clone()).context("catching signals")?;
        signal_hook::flag::register(signal, stop.clone()).context("catching signals")?;
    }
    let peer = channel.info().peer.clone();
    let say = |line: String| if args.json { Ok(()) } else { output::line(line) };
    say(format!("PING {} ({}, {}): {} bytes", args.address, peer.member_name, peer.name, args.size))?;
    channel.set_timeout(Some(LOOK));
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut ended = None;
    let mut message = vec![0; args.size as usize];
    while args.count.is_none_or(|count| tally.sent < count) && !stop.load(Ordering::Relaxed) {
        tally.sent += 1;
        let sequence = tally.sent;
        message[..8].copy_from_slice(&sequence.to_le_bytes());
        let sent = Instant::now();
        match exchange(&mut channel, &message, sequence, sent + args.timeout, &stop) {
            Ok(true) => {
                let time = sent.elapsed();
                tally.add(time);
                if !args.quiet {
                    let from = &peer.member_name;
                    say(format!("{} bytes from {from}: seq={sequence} time={}", args.size, millis(time)))?;
                }
            }
            Ok(false) if stop.load(Ordering::Relaxed) => break,
            Ok(false) if args.quiet => {}
            Ok(false) => say(format!("no answer within {:?}: seq={sequence}", args.timeout))?,
            Err(error) => {
                ended = Some(error);
                break;
            }
        }
        let last = args.count == Some(tally.sent);
        while !last && sent.elapsed() < args.interval && !stop.load(Ordering::Relaxed) {
            thread::sleep(LOOK.min(args.interval.saturating_sub(sent.elapsed())));
        }
    }
    let summary = tally.summary(&args.address, begun.elapsed());
    if args.json {
        output::json(&summary)?
    } else {
        output::line(summary.to_string())?
    }
    match ended {
        Some(error) => Err(error).with_context(|| args.address.clone()),
        None if summary.received < summary.sent => {
            bail!("{} messages were not answered", summary.sent - summary.received)
        }
        None => Ok(()),
    }
}

/// Sends a message and waits for its answer. Returns false if none came by the deadline, or if the program should end.
fn exchange(
    channel: &mut MessageChannel,
    message: &[u8],
    sequence: u64,
    deadline: Instant,
    stop: &AtomicBool,
) -> Result<bool, Error> {
    let late = || Instant::now() >= deadline || stop.load(Ordering::Relaxed);
    loop {
        match channel.send(message) {
            Err(Error::TimedOut) if late() => return Ok(false),
            Err(Error::TimedOut) => {}
            other => break other?,
        }
    }
    let mut answer = vec![0; message.len()];
    loop {
        match channel.recv_into(&mut answer) {
            // This is a late answer to an earlier message.
            Ok(len) if answer[..len].first_chunk() != Some(&sequence.to_le_bytes()) => {}
            Ok(_) => return Ok(true),
            Err(Error::TimedOut) if late() => return Ok(false),
            Err(Error::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
}

#[derive(Default)]
struct Tally {
    sent: u64,
    received: u64,
    min: Option<Duration>,
    max: Duration,
    sum: f64,
    squares: f64,
}

impl Tally {
    fn add(&mut self, time: Duration) {
        self.received += 1;
        self.min = Some(self.min.map_or(time, |min| min.min(time)));
        self.max = self.max.max(time);
        let nanos = time.as_nanos() as f64;
        self.sum += nanos;
        self.squares += nanos * nanos;
    }

    fn summary<'a>(&self, address: &'a str, time: Duration) -> Summary<'a> {
        let n = self.received.max(1) as f64;
        let avg = self.sum / n;
        let rtt_ns = self.min.map(|min| RoundTrip {
            min: min.as_nanos() as f64,
            avg,
            max: self.max.as_nanos() as f64,
            mdev: (self.squares / n - avg * avg).max(0.0).sqrt(),
        });
        Summary { address, sent: self.sent, received: self.received, seconds: time.as_secs_f64(), rtt_ns }
    }
}

/// The results of all pings.
#[derive(Serialize)]
struct Summary<'a> {
    address: &'a str,
    sent: u64,
    received: u64,
    seconds: f64,
    /// `None` if no answer came.
    rtt_ns: Option<RoundTrip>,
}

#[derive(Serialize)]
struct RoundTrip {
    min: f64,
    avg: f64,
    max: f64,
    mdev: f64,
}

impl std::fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lost = 100.0 * (self.sent - self.received) as f64 / self.sent.max(1) as f64;
        writeln!(f, "--- {} ping statistics ---", self.address)?;
        let time = self.seconds * 1e3;
        write!(f, "{} sent, {} answered, {lost:.0}% lost, time {time:.0} ms", self.sent, self.received)?;
        if let Some(RoundTrip { min, avg, max, mdev }) = self.rtt_ns {
            let [min, avg, max, mdev] = [min, avg, max, mdev].map(|nanos| nanos / 1e6);
            write!(f, "\nrtt min/avg/max/mdev = {min:.4}/{avg:.4}/{max:.4}/{mdev:.4} ms")?;
        }
        Ok(())
    }
}

fn millis(time: Duration) -> String {
    format!("{:.4} ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics() {
        let mut tally = Tally { sent: 4, ..Tally::default() };
        for ms in [1, 2, 3] {
            tally.add(Duration::from_millis(ms));
        }
        let text = tally.summary("web/ping", Duration::from_secs(4)).to_string();
        assert_eq!(
            text,
            "--- web/ping ping statistics ---\n4 sent, 3 answered, 25% lost, time 4000 ms\n\
             rtt min/avg/max/mdev = 1.0000/2.0000/3.0000/0.8165 ms"
        );
    }
}
