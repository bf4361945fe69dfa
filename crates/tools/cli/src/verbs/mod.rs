//! `ginnel verbs`.

mod top;

use crate::inspect::Inspect;
use crate::output::{self, Table};
use anyhow::{Context, Result, bail};
use ginnel::Daemon;
use ginnel_layout::verbs::QpNumber;
use ginnel_verbs::inspect::{QueuePair, Tables, Waiting};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

/// Shows segments as RDMA devices: the programs that use them, their registered memory, queue pairs and shared receive
/// queues, what these have executed, and which requests wait for what.
///
/// These are programs that run with Ginnel's libibverbs (`ginnel run --verbs`), in segments with `verbs = true` to
/// which this user may attach. Numbers of queue pairs are those of `ibv_qp.qp_num`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Show only the device of this segment.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Command {
    Top(top::Args),
}

/// For each device, by its segment, the tables of its programs.
type Devices = BTreeMap<String, Vec<Tables>>;

/// Reads the tables of all segments' devices, or of this segment's. Connects to the daemon each time, because it may
/// have been restarted.
fn look(segment: Option<&str>) -> Result<(Inspect, Devices)> {
    let inspect = crate::inspect::ask(&mut Daemon::connect()?)?;
    let mut devices = Devices::new();
    let is_wanted = |name: &str| segment.is_none_or(|segment| segment == name);
    for segment in inspect.segments.iter().filter(|segment| segment.verbs && is_wanted(&segment.name)) {
        let endpoints = inspect.endpoints.iter().filter(|endpoint| endpoint.segment == segment.name);
        let tables = ginnel_verbs::inspect::tables(&segment.name, endpoints.map(|endpoint| endpoint.number));
        let tables = tables.with_context(|| format!("looking at segment {}", segment.name))?;
        devices.insert(segment.name.clone(), tables);
    }
    if let (true, Some(segment)) = (devices.is_empty(), segment) {
        bail!("there is no segment {segment} with `verbs = true` here; `ginnel verbs` lists such segments");
    }
    Ok((inspect, devices))
}

pub fn run(args: Args) -> Result<()> {
    if let Some(Command::Top(args)) = args.command {
        return top::run(args);
    }
    let (inspect, devices) = look(args.segment.as_deref())?;
    if args.json {
        let devices: Vec<_> = devices
            .iter()
            .map(|(segment, endpoints)| {
                json!({"segment": segment, "device": format!("ginnel_{segment}"), "endpoints": endpoints})
            })
            .collect();
        return output::json(&devices);
    }
    if devices.is_empty() {
        output::note("ginnel: no segment has `verbs = true`");
        return Ok(());
    }
    output::line(programs(&inspect, &devices).to_string())?;
    let queue_pairs = queue_pairs(&devices);
    if queue_pairs.is_empty() {
        return Ok(());
    }
    output::line("")?;
    output::line(queue_pairs.to_string())?;
    let waits = waits(&inspect, &devices);
    if waits.is_empty() {
        return Ok(());
    }
    output::line("")?;
    waits.iter().try_for_each(output::line)
}

/// Returns the program of an endpoint, if the daemon knows it.
fn program(inspect: &Inspect, segment: &str, number: u32, epoch: Option<u32>) -> Option<String> {
    let is_it = |known: &&ginnel_status::Endpoint| {
        known.segment == segment && known.number == number && epoch.is_none_or(|epoch| epoch == known.epoch)
    };
    inspect.endpoints.iter().find(is_it).map(|known| {
        let process = known.pid.map(|pid| format!(" {pid}")).unwrap_or_default();
        format!("{}{process}@{}", known.name, known.member)
    })
}

fn programs(inspect: &Inspect, devices: &Devices) -> Table {
    let mut table = Table::new(&[
        "DEVICE",
        "ENDPOINT",
        "PROGRAM",
        "QUEUE PAIRS",
        "REGIONS",
        "REGISTERED",
        "SHADOW REGIONS",
        "THEIR BYTES",
        "ARENAS",
    ]);
    for (segment, endpoints) in devices {
        if endpoints.is_empty() {
            table.row([format!("ginnel_{segment}"), "-".into(), "-".into()]);
        }
        for tables in endpoints {
            let program = program(inspect, segment, tables.endpoint, Some(tables.epoch));
            table.row([
                format!("ginnel_{segment}"),
                tables.endpoint.to_string(),
                program.unwrap_or_else(|| "?".into()),
                tables.queue_pairs.iter().filter(|pair| pair.kind != "srq").count().to_string(),
                tables.regions.to_string(),
                output::bytes(tables.region_bytes),
                tables.shadow_regions.to_string(),
                output::bytes(tables.shadow_bytes),
                tables.arenas.to_string(),
            ]);
        }
    }
    table
}

fn queue_pairs(devices: &Devices) -> Table {
    let mut table = Table::new(&[
        "DEVICE", "NUMBER", "TYPE", "STATE", "PEER", "EXECUTED", "BYTES", "WAITING", "RECEIVES", "USED",
        "FROM",
    ]);
    for (segment, endpoints) in devices {
        for QueuePair {
            number,
            kind,
            state,
            peer,
            shared,
            posted,
            used,
            entries,
            executed,
            bytes,
            waits,
            ..
        } in endpoints.iter().flat_map(|tables| &tables.queue_pairs)
        {
            let number_of =
                |number: &Option<u32>| number.map_or("-".into(), |number| format!("{number:#08x}"));
            let sends = |text: String| if *kind == "srq" { "-".into() } else { text };
            let own = |text: String| if shared.is_none() { text } else { "-".into() };
            table.row([
                format!("ginnel_{segment}"),
                format!("{number:#08x}"),
                (*kind).to_owned(),
                (*state).to_owned(),
                number_of(peer),
                sends(executed.to_string()),
                sends(output::bytes(*bytes)),
                sends(waits.as_ref().map_or(0, |waits| waits.requests).to_string()),
                own(format!("{} of {entries}", posted.wrapping_sub(*used))),
                own(used.to_string()),
                number_of(shared),
            ]);
        }
    }
    table
}

/// Returns a line for each queue pair whose requests wait.
fn waits(inspect: &Inspect, devices: &Devices) -> Vec<String> {
    let mut lines = Vec::new();
    for (segment, endpoints) in devices {
        let of = |number: u32| {
            let program = program(inspect, segment, QpNumber(number).endpoint(), None);
            program.map_or(format!("{number:#08x}"), |program| format!("{number:#08x} (program {program})"))
        };
        for pair in endpoints.iter().flat_map(|tables| &tables.queue_pairs) {
            let Some(Waiting { requests, reason, nanoseconds }) = &pair.waits else { continue };
            let peer = pair.peer.map_or("its peer".into(), of);
            let what = match *reason {
                "peer" => format!("until {peer} is ready to receive"),
                "receive" => format!("for a receive of {peer}"),
                "errand" => format!("for the process of {peer}, which has a shadow region"),
                "copy" => format!("for the process of {peer}, which has begun to copy a part"),
                "completions" => "for room in its completion queue".into(),
                "stopped" => "until its program lets it send again".into(),
                "ended" => format!("for {peer}, which has ended"),
                _ => "for something unknown".into(),
            };
            let requests = if *requests == 1 { "1 request".into() } else { format!("{requests} requests") };
            let time = time(Duration::from_nanos(*nanoseconds));
            lines.push(format!("ginnel_{segment} {} waits {time} {what}: {requests}", of(pair.number)));
        }
    }
    lines
}

/// Returns a time as a short text.
fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 if time < Duration::from_millis(1) => format!("{} us", time.as_micros()),
        0 => format!("{} ms", time.as_millis()),
        1..120 => format!("{seconds}.{} s", time.subsec_millis() / 100),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_are_shown_with_their_peers() {
        let one = QueuePair {
            number: 0x1001,
            kind: "rc",
            state: "RTS",
            peer: Some(0x2001),
            shared: None,
            posted: 70,
            used: 60,
            entries: 16,
            executed: 5,
            bytes: 3 << 20,
            waited: 0,
            helped: 0,
            waits: None,
        };
        let two = QueuePair { number: 0x1002, peer: None, kind: "ud", shared: Some(0x1003), ..one.clone() };
        let tables = Tables { queue_pairs: vec![one, two], ..TABLES };
        let devices = Devices::from([("web".to_owned(), vec![tables]), ("db".to_owned(), Vec::new())]);
        let text = r#"{"endpoints": [{"number": 1, "epoch": 5, "segment": "web", "member": "vm-a", "name": "ib_send_bw", "pid": 77}]}"#;
        let inspect = crate::inspect::parse(text).unwrap();
        let programs = programs(&inspect, &devices).to_string();
        let rows: Vec<Vec<_>> =
            programs.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["ginnel_db", "-", "-"]);
        let words = "ginnel_web 1 ib_send_bw 77@vm-a 2 2 8 KiB 1 4 KiB 1";
        assert_eq!(rows[1].join(" "), words);
        let pairs = queue_pairs(&devices).to_string();
        let rows: Vec<Vec<_>> = pairs.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0].join(" "), "ginnel_web 0x001001 rc RTS 0x002001 5 3 MiB 0 10 of 16 60 -");
        assert_eq!(rows[1].join(" "), "ginnel_web 0x001002 ud RTS - 5 3 MiB 0 - - 0x001003");
    }

    const TABLES: Tables = Tables {
        endpoint: 1,
        epoch: 5,
        regions: 2,
        region_bytes: 8192,
        shadow_regions: 1,
        shadow_bytes: 4096,
        arenas: 1,
        queue_pairs: Vec::new(),
    };

    #[test]
    fn the_peer_that_a_queue_pair_waits_for_is_shown() {
        let waits = |reason, requests, nanoseconds| Some(Waiting { requests, reason, nanoseconds });
        let pair = QueuePair {
            number: 0x1001,
            kind: "rc",
            state: "RTS",
            peer: Some(0x2001),
            shared: None,
            posted: 0,
            used: 0,
            entries: 1,
            executed: 0,
            bytes: 0,
            waited: 0,
            helped: 0,
            waits: waits("receive", 1, 3_250_000_000),
        };
        let full = QueuePair { waits: waits("completions", 7, 20_000_000), ..pair.clone() };
        let idle = QueuePair { waits: None, ..pair.clone() };
        let stranger = QueuePair { peer: Some(0x9001), waits: waits("?", 2, 0), ..pair.clone() };
        let queue_pairs = vec![pair, full, idle, stranger];
        let devices = Devices::from([("web".to_owned(), vec![Tables { queue_pairs, ..TABLES }])]);
        let text = r#"{"endpoints": [
            {"number": 2, "epoch": 9, "segment": "db", "member": "vm-c", "name": "other", "pid": 1},
            {"number": 2, "epoch": 3, "segment": "web", "member": "vm-a", "name": "server", "pid": 77}]}"#;
        let inspect = crate::inspect::parse(text).unwrap();
        assert_eq!(
            super::waits(&inspect, &devices),
            [
                "ginnel_web 0x001001 waits 3.2 s for a receive of 0x002001 (program server 77@vm-a): 1 request",
                "ginnel_web 0x001001 waits 20 ms for room in its completion queue: 7 requests",
                "ginnel_web 0x001001 waits 0 us for something unknown: 2 requests",
            ]
        );
    }

    #[test]
    fn times_are_short() {
        let shown = [5, 1_500, 61_990, 150_000, 7_200_000].map(|ms| time(Duration::from_millis(ms)));
        assert_eq!(shown, ["5 ms", "1.5 s", "61.9 s", "2 min", "2 h"]);
    }
}
