//! `ginnel-volume-bench`: measures and checks a disk server without a VM.

mod report;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use ginnel_config::{Bytes, seconds};
use ginnel_volume_bench::workload::{Limit, Pattern, Workload, run};
use ginnel_volume_bench::{
    Client, Device, Disk, Doorbells, Error, Front, NvmeClient, NvmeOptions, Options, Ring,
};
use report::Report;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Measures and checks a vhost-user-blk, vhost-user-scsi or NVMe server (ginnel-volume, qemu-storage-daemon, ...) without a VM.
///
/// Connects as QEMU does, submits requests as a guest's driver does, and polls for the answers. With --rw write,
/// randwrite, rw or randrw, the data on the disk is lost. Exit status: 0 for success, 1 if something failed or a block
/// was wrong, 2 for an invalid command line.
#[derive(Parser)]
#[command(name = "ginnel-volume-bench", version, max_term_width = 100)]
struct Cli {
    /// The server's vhost-user socket, or its vfio-user socket with --nvme.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The server is an NVMe controller over vfio-user.
    #[arg(long, conflicts_with_all = ["scsi", "packed", "indirect", "no_event_idx", "segment", "echo"])]
    nvme: bool,
    /// With --nvme: ring all doorbells by writes to registers, even if the device has better ones.
    #[arg(long, requires = "nvme")]
    trapped: bool,
    /// The server is vhost-user-scsi: use this logical unit, as TARGET:LUN.
    #[arg(long, value_name = "TARGET:LUN", value_parser = unit)]
    scsi: Option<(u8, u16)>,
    /// Only print the properties of the disk.
    #[arg(long)]
    info: bool,
    /// Only discard these parts of the disk, one after another. The data in them is lost.
    #[arg(long, value_name = "OFFSET:SIZE", value_parser = part, value_delimiter = ',')]
    discard: Vec<(u64, u32)>,
    /// Pattern of the requests: sequential or random, reading, writing or both.
    #[arg(long, value_enum, default_value = "randread")]
    rw: Rw,
    /// With rw and randrw: percentage of requests that read.
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(1..100))]
    reads: u8,
    /// Size of a request in bytes. k, M and G are 2^10, 2^20 and 2^30, here and below.
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    bs: Bytes,
    /// Requests in flight in each queue, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 32)]
    qd: u16,
    /// Number of queues to use.
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// Number of threads over which the queues are distributed. Default: one for each queue.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Bind the first thread to this CPU, the second to the next one, and so on.
    #[arg(long, value_name = "CPU")]
    cpu: Option<usize>,
    /// Duration of the measurement, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds)]
    seconds: Duration,
    /// Stop after this many requests of each queue instead.
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    requests: Option<u64>,
    /// Time to run before the measurement begins, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds)]
    ramp: Duration,
    /// Use only the first SIZE bytes of the disk.
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// Flush after this many writes of a queue.
    #[arg(long, value_name = "N")]
    flush_every: Option<u64>,
    /// Write blocks with offset, sequence number and checksum, check all blocks that are read, and read all that were
    /// written once more at the end.
    #[arg(long)]
    verify: bool,
    /// If the server ends, wait this long for the next one, hand it the in-flight region, and continue.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    reconnect: Option<Duration>,
    /// Sleep until an answer comes, instead of polling.
    #[arg(long)]
    sleep: bool,
    /// Use packed rings instead of split ones.
    #[arg(long)]
    packed: bool,
    /// Use indirect descriptors, if the server supports them.
    #[arg(long)]
    indirect: bool,
    /// Use no event index: suppress notifications by flag.
    #[arg(long)]
    no_event_idx: bool,
    /// Number of descriptors in a ring, a power of two, or of entries in an NVMe queue.
    #[arg(long, value_name = "N")]
    ring_size: Option<u16>,
    /// Largest number of bytes of a request in one descriptor.
    #[arg(long, value_name = "SIZE")]
    segment: Option<Bytes>,
    /// Answer all requests in the client instead of the server, to measure the client alone.
    #[arg(long)]
    echo: bool,
    /// Seed of the random requests.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print the result as JSON; latencies are in nanoseconds.
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

/// Parses a logical unit.
fn unit(text: &str) -> Result<(u8, u16), String> {
    let numbers =
        text.split_once(':').and_then(|(target, lun)| Some((target.parse().ok()?, lun.parse().ok()?)));
    numbers.filter(|(_, lun)| *lun < 1 << 14).ok_or_else(|| "a target and a logical unit, like 0:1".into())
}

/// Parses a part of the disk.
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

/// Runs the command. Returns false if requests failed.
fn go(cli: &Cli) -> Result<bool> {
    let narrow =
        |name, value: u64| u32::try_from(value).map_err(|_| anyhow::anyhow!("--{name} is too large"));
    let block = narrow("bs", cli.bs.0)?;
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
    if cli.nvme {
        let mut client = NvmeClient::connect(NvmeOptions {
            queues: cli.queues,
            depth: cli.qd,
            buffer: block.max(4096),
            entries: cli.ring_size,
            interrupts: cli.sleep,
            trapped: cli.trapped,
            ..NvmeOptions::new(&cli.socket)
        })?;
        let doorbells = client.doorbells();
        let succeeded = act(cli, &mut client, &workload, Some(doorbells))?;
        leave(cli, client.close())?;
        return Ok(succeeded);
    }
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
    let mut client = Client::connect(options)?;
    let succeeded = act(cli, &mut client, &workload, None)?;
    if !cli.echo {
        leave(cli, client.close())?;
    }
    Ok(succeeded)
}

/// Judges how a client has ended that has done its work: a server that may die at any time may do so then.
fn leave<T>(cli: &Cli, closed: Result<T, Error>) -> Result<()> {
    match closed {
        Err(Error::Gone) if cli.reconnect.is_some() => Ok(()),
        closed => Ok(closed.map(drop)?),
    }
}

/// Does with a connected client what the command line asks for. Returns false if requests failed.
fn act<F: Front>(
    cli: &Cli,
    client: &mut F,
    workload: &Workload,
    doorbells: Option<Doorbells>,
) -> Result<bool> {
    if cli.info {
        if cli.json {
            print(&serde_json::to_string_pretty(client.disk())?);
        } else {
            let serial = client.serial().ok();
            print(&describe(client.disk(), serial.as_deref(), doorbells));
        }
        return Ok(true);
    }
    if !cli.discard.is_empty() {
        cli.discard.iter().try_for_each(|(offset, size)| client.discard(*offset, *size))?;
        return Ok(true);
    }
    let outcome = run(client, workload)?;
    let report = Report::new(client, &outcome);
    print(&if cli.json { serde_json::to_string_pretty(&report)? } else { report.table() });
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

fn describe(disk: &Disk, serial: Option<&str>, doorbells: Option<Doorbells>) -> String {
    let yes = |yes| if yes { "yes" } else { "no" };
    let mut text = format!(
        "serial         {}\nbytes          {}\nblock          {}\nqueues         {}\nread-only      {}\nwrite cache    {}\ndiscard        {}\nwrite zeroes   {}\nsegments       {}",
        serial.unwrap_or("-"),
        disk.bytes,
        disk.block,
        disk.queues,
        yes(disk.read_only),
        yes(disk.write_cache),
        yes(disk.discard),
        yes(disk.write_zeroes),
        disk.segments
    );
    if let Some(doorbells) = doorbells {
        let how = match doorbells {
            Doorbells::Mapped => "mapped",
            Doorbells::Shadow => "shadow",
            Doorbells::Trapped => "trapped",
        };
        text += &format!("\ndoorbells      {how}");
    }
    text
}

/// Prints on stdout. Ignores errors, because stdout may have no reader.
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
