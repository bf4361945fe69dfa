//! `ginnel verbs`.

use crate::inspect::Inspect;
use crate::output::{self, Table};
use anyhow::{Context, Result, bail};
use ginnel::Daemon;
use ginnel_verbs::inspect::{QueuePair, Tables};
use serde_json::json;
use std::collections::BTreeMap;

/// Shows segments as RDMA devices: the programs that use them, their registered memory, queue pairs and shared receive queues.
///
/// They are those of programs that run with Ginnel's libibverbs (`ginnel run --verbs`), in segments with `verbs = true` that this user may
/// attach to. Numbers of queue pairs are those of `ibv_qp.qp_num`.
#[derive(clap::Args)]
pub struct Args {
    /// The device of this segment only.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
}

/// The programs of a device.
type Devices = BTreeMap<String, Vec<Tables>>;

pub fn run(args: Args) -> Result<()> {
    let text = Daemon::connect()?.inspect().context("asking the daemon for its status")?;
    let inspect = crate::inspect::parse(&text)?;
    let mut devices = Devices::new();
    let is_wanted = |name: &str| args.segment.as_deref().is_none_or(|segment| segment == name);
    for segment in inspect.segments.iter().filter(|segment| segment.verbs && is_wanted(&segment.name)) {
        let endpoints = inspect.endpoints.iter().filter(|endpoint| endpoint.segment == segment.name);
        let tables = ginnel_verbs::inspect::tables(&segment.name, endpoints.map(|endpoint| endpoint.number));
        let tables = tables.with_context(|| format!("looking at segment {}", segment.name))?;
        devices.insert(segment.name.clone(), tables);
    }
    if let (true, Some(segment)) = (devices.is_empty(), &args.segment) {
        bail!(
            "there is no segment {segment} with `verbs = true` here; `ginnel verbs` shows those that there are"
        );
    }
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
    output::line(queue_pairs.to_string())
}

fn programs(inspect: &Inspect, devices: &Devices) -> Table {
    let mut table =
        Table::new(&["DEVICE", "ENDPOINT", "PROGRAM", "QUEUE PAIRS", "REGIONS", "REGISTERED", "ARENAS"]);
    for (segment, endpoints) in devices {
        if endpoints.is_empty() {
            table.row([format!("ginnel_{segment}"), "-".into(), "-".into()]);
        }
        for tables in endpoints {
            let is_it = |number, epoch| (number, epoch) == (tables.endpoint, tables.epoch);
            let known = inspect.endpoints.iter().find(|known| is_it(known.number, known.epoch));
            let program = known.map_or("?".into(), |known| {
                let process = known.pid.map(|pid| format!(" {pid}")).unwrap_or_default();
                format!("{}{process}@{}", known.name, known.member)
            });
            table.row([
                format!("ginnel_{segment}"),
                tables.endpoint.to_string(),
                program,
                tables.queue_pairs.iter().filter(|pair| pair.kind != "srq").count().to_string(),
                tables.regions.to_string(),
                output::bytes(tables.region_bytes),
                tables.arenas.to_string(),
            ]);
        }
    }
    table
}

fn queue_pairs(devices: &Devices) -> Table {
    let mut table =
        Table::new(&["DEVICE", "NUMBER", "TYPE", "STATE", "PEER", "RECEIVES WAITING", "USED", "FROM"]);
    for (segment, endpoints) in devices {
        for QueuePair { number, kind, state, peer, shared, posted, used, entries } in
            endpoints.iter().flat_map(|tables| &tables.queue_pairs)
        {
            let number_of =
                |number: &Option<u32>| number.map_or("-".into(), |number| format!("{number:#08x}"));
            let own = |text: String| if shared.is_none() { text } else { "-".into() };
            table.row([
                format!("ginnel_{segment}"),
                format!("{number:#08x}"),
                (*kind).to_owned(),
                (*state).to_owned(),
                number_of(peer),
                own(format!("{} of {entries}", posted.wrapping_sub(*used))),
                own(used.to_string()),
                number_of(shared),
            ]);
        }
    }
    table
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
        };
        let two = QueuePair { number: 0x1002, peer: None, kind: "ud", shared: Some(0x1003), ..one.clone() };
        let (regions, region_bytes) = (2, 8192);
        let tables =
            Tables { endpoint: 1, epoch: 5, regions, region_bytes, arenas: 1, queue_pairs: vec![one, two] };
        let devices = Devices::from([("web".to_owned(), vec![tables]), ("db".to_owned(), Vec::new())]);
        let text = r#"{"endpoints": [{"number": 1, "epoch": 5, "member": "vm-a", "name": "ib_send_bw", "pid": 77}]}"#;
        let inspect = crate::inspect::parse(text).unwrap();
        let programs = programs(&inspect, &devices).to_string();
        let rows: Vec<Vec<_>> =
            programs.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["ginnel_db", "-", "-"]);
        assert_eq!(rows[1], ["ginnel_web", "1", "ib_send_bw", "77@vm-a", "2", "2", "8", "KiB", "1"]);
        let pairs = queue_pairs(&devices).to_string();
        let rows: Vec<Vec<_>> = pairs.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["ginnel_web", "0x001001", "rc", "RTS", "0x002001", "10", "of", "16", "60", "-"]);
        assert_eq!(rows[1], ["ginnel_web", "0x001002", "ud", "RTS", "-", "-", "-", "0x001003"]);
    }
}
