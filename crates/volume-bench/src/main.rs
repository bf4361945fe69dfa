//! `ginnel-volume-bench`: measures and checks a disk server without a VM.

mod report;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use ginnel_config::{Bytes, seconds};
use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{Client, Device, Disk, Options, Ring};
use report::Report;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Measures and checks a vhost-user-blk or -scsi server (ginnel-volume, qemu-storage-daemon, ...) without a VM.
///
/// Connects as QEMU does, submits requests like a guest's driver, and looks for the answers all the time. With --rw write,
/// randwrite, rw or randrw, what is on the disk is lost. Exit status: 0 if all went well, 1 if something failed or a
/// block was wrong, 2 if the command line makes no sense.
#[derive(Parser)]
#[command(name = "ginnel-volume-bench", version, max_term_width = 100)]
struct Cli {
    /// The server's vhost-user socket.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The server is vhost-user-scsi: this logical unit, as TARGET:LUN.
    #[arg(long, value_name = "TARGET:LUN", value_parser = unit)]
    scsi: Option<(u8, u16)>,
    /// Only print what the disk says of itself.
    #[arg(long)]
    info: bool,
    /// Only give these parts of the disk back, one after the other. What is in them is lost.
    #[arg(long, value_name = "OFFSET:SIZE", value_parser = part, value_delimiter = ',')]
    discard: Vec<(u64, u32)>,
    /// Requests: sequential or random, reading, writing or both.
    #[arg(long, value_enum, default_value = "randread")]
    rw: Rw,
    /// With rw and randrw: of a hundred requests, how many read.
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(1..100))]
    reads: u8,
    /// Bytes of a request. k, M and G are 2^10, 2^20 and 2^30, here and below.
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    bs: Bytes,
    /// Requests on their way in each queue, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 32)]
    qd: u16,
    /// Queues to use.
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// Threads that the queues are dealt out to; one for each queue if not given.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Keep the first thread on this CPU, the second on the next, and so on.
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// How long, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds)]
    seconds: Duration,
    /// Stop after so many requests of each queue instead.
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    requests: Option<u64>,
    /// Run so long before it counts, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds)]
    ramp: Duration,
    /// Use only the first SIZE bytes of the disk.
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// Flush after so many writes of a queue.
    #[arg(long, value_name = "N")]
    flush_every: Option<u64>,
    /// Write blocks with offset, sequence number and checksum, check all that is read, and read all that was written once more
    /// at the end.
    #[arg(long)]
    verify: bool,
    /// When the server goes away, wait so long for the next one, hand it the account of what is in flight, and go on.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    reconnect: Option<Duration>,
    /// Sleep until an answer comes, instead of looking for it all the time.
    #[arg(long)]
    sleep: bool,
    /// Packed rings instead of split ones.
    #[arg(long)]
    packed: bool,
    /// Indirect descriptors, if the server takes them.
    #[arg(long)]
    indirect: bool,
    /// No event index: suppress notifications by flag.
    #[arg(long)]
    no_event_idx: bool,
    /// Descriptors in a ring, a power of two.
    #[arg(long, value_name = "N")]
    ring_size: Option<u16>,
    /// Bytes of a request that one descriptor covers at most.
    #[arg(long, value_name = "SIZE")]
    segment: Option<Bytes>,
    /// Answer all requests ourselves instead of the server: what is measured is the client alone.
    #[arg(long)]
    echo: bool,
    /// Other numbers make other random requests.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON; latencies are in nanoseconds.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Rw {
    Read,
    Write,
    #[value(name = "rw")]
    Both,
    Randread,
    Randwrite,
    Randrw,
}

/// A logical unit.
fn unit(text: &str) -> Result<(u8, u16), String> {
    let numbers =
        text.split_once(':').and_then(|(target, lun)| Some((target.parse().ok()?, lun.parse().ok()?)));
    numbers.filter(|(_, lun)| *lun < 1 << 14).ok_or_else(|| "a target and a logical unit, like 0:1".into())
}

/// A part of the disk.
fn part(text: &str) -> Result<(u64, u32), String> {
    let bytes = |text: &str| text.parse::<Bytes>().map(|bytes| bytes.0).ok();
    let numbers = text.split_once(':').and_then(|(offset, size)| Some((bytes(offset)?, bytes(size)?)));
    let part = numbers.and_then(|(offset, size)| Some((offset, u32::try_from(size).ok()?)));
    part.ok_or_else(|| "an offset and less than 4 GiB, like 1M:64k".into())
}

fn main() -> ExitCode {
    match go(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "ginnel-volume-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// False if requests failed.
fn go(cli: &Cli) -> Result<bool> {
    let narrow =
        |name, value: u64| u32::try_from(value).map_err(|_| anyhow::anyhow!("--{name} is too large"));
    let block = narrow("bs", cli.bs.0)?;
    let device = match cli.scsi {
        None => Device::Blk,
        Some((target, lun)) => Device::Scsi { target, lun, wide: false },
    };
    let options = Options {
        device,
        queues: cli.queues,
        depth: cli.qd,
        buffer: block.max(512),
        segment: cli.segment.map_or(Ok(u32::MAX), |Bytes(segment)| narrow("segment", segment))?,
        ring: if cli.packed { Ring::Packed } else { Ring::Split },
        ring_size: cli.ring_size,
        indirect: cli.indirect,
        event_idx: !cli.no_event_idx,
        echo: cli.echo,
        ..Options::new(&cli.socket)
    };
    let workload = Workload {
        pattern: pattern(cli),
        block,
        depth: cli.qd,
        limit: match cli.requests {
            Some(requests) => Limit::Requests(requests),
            None => Limit::Time(cli.seconds),
        },
        ramp: cli.ramp,
        bytes: cli.size.map(|size| size.0),
        threads: cli.threads.unwrap_or(cli.queues.into()),
        cpu: cli.cpu,
        sleep: cli.sleep,
        flush_every: cli.flush_every,
        verify: cli.verify,
        reconnect: cli.reconnect,
        seed: cli.seed,
        ..Workload::default()
    };
    if cli.verify && cli.rw == Rw::Randread {
        bail!("--verify checks what it has written; choose --rw randrw, randwrite, rw or write");
    }
    let mut client = Client::connect(options)?;
    if cli.info {
        if cli.json {
            print(&serde_json::to_string_pretty(client.disk())?);
        } else {
            let id = client.id().ok();
            print(&describe(client.disk(), id.as_deref()));
        }
        client.close()?;
        return Ok(true);
    }
    if !cli.discard.is_empty() {
        cli.discard.iter().try_for_each(|(offset, size)| client.discard(*offset, *size))?;
        client.close()?;
        return Ok(true);
    }
    let outcome = run(&mut client, &workload)?;
    let report = Report::new(&client, &outcome);
    print(&if cli.json { serde_json::to_string_pretty(&report)? } else { report.table() });
    if !cli.echo {
        client.close()?;
    }
    Ok(outcome.failed == 0)
}

fn pattern(cli: &Cli) -> Pattern {
    let (random, reads) = match cli.rw {
        Rw::Read => (false, 100),
        Rw::Write => (false, 0),
        Rw::Both => (false, cli.reads),
        Rw::Randread => (true, 100),
        Rw::Randwrite => (true, 0),
        Rw::Randrw => (true, cli.reads),
    };
    Pattern { random, reads }
}

fn describe(disk: &Disk, id: Option<&str>) -> String {
    let yes = |yes| if yes { "yes" } else { "no" };
    format!(
        "serial         {}\nbytes          {}\nblock          {}\nqueues         {}\nread-only      {}\nwrite cache    {}\ndiscard        {}\nwrite zeroes   {}\nsegments       {}",
        id.unwrap_or("-"),
        disk.bytes,
        disk.block,
        disk.queues,
        yes(disk.read_only),
        yes(disk.write_cache),
        yes(disk.discard),
        yes(disk.write_zeroes),
        disk.segments
    )
}

/// Prints on stdout, which may find nobody reading.
fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
