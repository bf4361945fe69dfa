//! `ginnel verbs top`.

use super::{Devices, look, program};
use crate::inspect::Inspect;
use crate::output::{self, Table};
use anyhow::Result;
use ginnel_config::Period;
use ginnel_layout::verbs::QpNumber;
use ginnel_verbs::inspect::QueuePair;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Shows repeatedly what each program sends to each other program over RDMA.
///
/// There is a line for each pair of programs, with the most bytes first: requests and bytes per second, the share of
/// the time in which requests waited, and what they wait for now. Requests are sends, writes, reads and atomic
/// operations; they count for the program that posts them. If several queue pairs connect two programs, the time is
/// that of the queue pair that has waited longest. Datagrams have no receiver here, because a queue pair sends them to
/// many.
#[derive(clap::Args)]
pub struct Args {
    /// Show only the device of this segment.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// The time between two measurements, at least 10ms.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    interval: Period,
    /// End after this many intervals. Default: until interrupted.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print each interval as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Two programs: the segment, the endpoint that posts requests, and the endpoint to which it posts them, if there is
/// only one.
type Pair = (String, u32, Option<u32>);

/// The traffic between two programs in an interval.
#[derive(Clone, Debug, Default, PartialEq)]
struct Traffic {
    requests: u64,
    bytes: u64,
    /// How long requests waited, in nanoseconds, on the queue pair whose requests waited longest.
    waited: u64,
    /// What the requests of that queue pair wait for now, if they do.
    waits_for: Option<&'static str>,
}

pub fn run(args: Args) -> Result<()> {
    let interval = args.interval.0.max(Duration::from_millis(10));
    let segment = args.segment.as_deref();
    let mut before = (Instant::now(), look(segment)?.1);
    let is_terminal = std::io::stdout().is_terminal();
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        std::thread::sleep(interval);
        let (inspect, devices) = look(segment)?;
        let now = Instant::now();
        let elapsed = now - before.0;
        let pairs = traffic(&before.1, &devices, elapsed);
        before = (now, devices);
        if args.json {
            output::line(json(&inspect, &pairs, elapsed)?)?;
            continue;
        }
        // On a terminal, each table replaces the previous one.
        let begin = if is_terminal { "\x1b[H\x1b[2J" } else { "" };
        let end = if is_terminal { "" } else { "\n" };
        output::line(format!("{begin}{}{end}", table(&inspect, &pairs, elapsed)))?;
    }
    Ok(())
}

/// Returns the traffic since `before`. If a queue pair was created meanwhile, the counters of its number begin at 0.
fn traffic(before: &Devices, now: &Devices, elapsed: Duration) -> BTreeMap<Pair, Traffic> {
    let queue_pairs = |devices: &Devices| -> Vec<(String, u32, QueuePair)> {
        let all = devices.iter().flat_map(|(segment, all)| all.iter().map(move |tables| (segment, tables)));
        let pairs = all.flat_map(|(segment, tables)| {
            tables.queue_pairs.iter().map(|pair| (segment.clone(), tables.epoch, pair.clone()))
        });
        pairs.filter(|(.., pair)| pair.kind != "srq").collect()
    };
    let key = |(segment, epoch, pair): &(String, u32, QueuePair)| (segment.clone(), *epoch, pair.number);
    let before: BTreeMap<_, _> = queue_pairs(before).into_iter().map(|all| (key(&all), all.2)).collect();
    let mut pairs = BTreeMap::<Pair, Traffic>::new();
    for all in queue_pairs(now) {
        let old = before.get(&key(&all)).filter(|old| old.executed <= all.2.executed);
        let (segment, _, now) = all;
        let since = |of: fn(&QueuePair) -> u64| of(&now).wrapping_sub(old.map_or(0, of));
        // The time comes from another machine's clock and from memory that a program can write, so it is limited to the
        // interval.
        let most = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let waited = now.waited.saturating_sub(old.map_or(0, |old| old.waited)).min(most);
        let peer = now.peer.map(|peer| QpNumber(peer).endpoint());
        let sum = pairs.entry((segment, QpNumber(now.number).endpoint(), peer)).or_default();
        sum.requests = sum.requests.saturating_add(since(|pair| pair.executed));
        sum.bytes = sum.bytes.saturating_add(since(|pair| pair.bytes));
        if waited >= sum.waited {
            sum.waited = waited;
            sum.waits_for = now.waits.as_ref().map(|waits| waits.reason).or(sum.waits_for);
        }
    }
    pairs.retain(|_, traffic| *traffic != Traffic::default());
    pairs
}

/// Returns the pairs, with the most bytes first.
fn sorted(pairs: &BTreeMap<Pair, Traffic>) -> Vec<(&Pair, &Traffic)> {
    let mut pairs: Vec<_> = pairs.iter().collect();
    pairs.sort_by_key(|(_, traffic)| std::cmp::Reverse((traffic.bytes, traffic.requests, traffic.waited)));
    pairs
}

fn name(inspect: &Inspect, segment: &str, endpoint: u32) -> String {
    program(inspect, segment, endpoint, None).unwrap_or_else(|| format!("endpoint {endpoint}"))
}

fn table(inspect: &Inspect, pairs: &BTreeMap<Pair, Traffic>, elapsed: Duration) -> Table {
    let mut table = Table::new(&["DEVICE", "FROM", "TO", "REQUESTS/S", "BYTES/S", "WAITED", "WAITS FOR"]);
    let seconds = elapsed.as_secs_f64().max(1e-9);
    for ((segment, from, to), traffic) in sorted(pairs) {
        table.row([
            format!("ginnel_{segment}"),
            name(inspect, segment, *from),
            to.map_or_else(|| "-".into(), |to| name(inspect, segment, to)),
            format!("{:.0}", traffic.requests as f64 / seconds),
            output::bytes((traffic.bytes as f64 / seconds) as u64),
            format!("{:.0} %", traffic.waited as f64 / seconds / 1e7),
            traffic.waits_for.unwrap_or("-").to_owned(),
        ]);
    }
    table
}

fn json(inspect: &Inspect, pairs: &BTreeMap<Pair, Traffic>, elapsed: Duration) -> Result<String> {
    let pairs: Vec<_> = sorted(pairs)
        .into_iter()
        .map(|((segment, from, to), traffic)| {
            serde_json::json!({
                "segment": segment, "device": format!("ginnel_{segment}"),
                "from": from, "from_program": program(inspect, segment, *from, None),
                "to": to, "to_program": to.and_then(|to| program(inspect, segment, to, None)),
                "requests": traffic.requests, "bytes": traffic.bytes,
                "waited_ns": traffic.waited, "waits_for": traffic.waits_for,
            })
        })
        .collect();
    Ok(serde_json::to_string(&serde_json::json!({"seconds": elapsed.as_secs_f64(), "pairs": pairs}))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_verbs::inspect::{Tables, Waiting};

    fn pair(number: u32, peer: Option<u32>, executed: u64, bytes: u64, waited: u64) -> QueuePair {
        QueuePair {
            number,
            kind: if peer.is_some() { "rc" } else { "ud" },
            state: "RTS",
            peer,
            shared: None,
            posted: 0,
            used: 0,
            entries: 1,
            executed,
            bytes,
            waited,
            helped: 0,
            waits: None,
        }
    }

    fn devices(queue_pairs: Vec<QueuePair>) -> Devices {
        let tables = Tables {
            endpoint: 1,
            epoch: 5,
            regions: 0,
            region_bytes: 0,
            shadow_regions: 0,
            shadow_bytes: 0,
            arenas: 0,
            queue_pairs,
        };
        Devices::from([("web".to_owned(), vec![tables])])
    }

    #[test]
    fn queue_pairs_of_the_same_programs_are_added_up() {
        let before = devices(vec![
            pair(0x1001, Some(0x2001), 10, 1000, 500),
            pair(0x1002, Some(0x2007), 5, 50, 0),
            pair(0x1003, Some(0x3001), 7, 70, 0),
            pair(0x1004, None, 0, 0, 0),
        ]);
        let waits = Some(Waiting { requests: 1, reason: "receive", nanoseconds: 9 });
        let now = devices(vec![
            pair(0x1001, Some(0x2001), 30, 3000, 600),
            // Another queue pair with the same number.
            QueuePair { waits, ..pair(0x1002, Some(0x2007), 4, 40, 1 << 40) },
            pair(0x1003, Some(0x3001), 7, 70, 0),
            pair(0x1004, None, 1, 8, 0),
        ]);
        let elapsed = Duration::from_secs(2);
        let pairs = traffic(&before, &now, elapsed);
        let both = Traffic { requests: 24, bytes: 2040, waited: 2_000_000_000, waits_for: Some("receive") };
        let datagrams = Traffic { requests: 1, bytes: 8, waited: 0, waits_for: None };
        let of = |to| ("web".to_owned(), 1, to);
        assert_eq!(pairs, BTreeMap::from([(of(Some(2)), both), (of(None), datagrams)]));

        let text = r#"{"endpoints": [
            {"number": 1, "epoch": 5, "segment": "web", "member": "vm-a", "name": "send", "pid": 7}]}"#;
        let inspect = crate::inspect::parse(text).unwrap();
        let shown = table(&inspect, &pairs, elapsed).to_string();
        let rows: Vec<_> =
            shown.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            rows,
            [
                "ginnel_web send 7@vm-a endpoint 2 12 1020 B 100 % receive",
                "ginnel_web send 7@vm-a - 0 4 B 0 % -"
            ]
        );
        let json: serde_json::Value =
            serde_json::from_str(&json(&inspect, &pairs, elapsed).unwrap()).unwrap();
        assert_eq!((&json["pairs"][0]["to"], &json["pairs"][0]["to_program"]), (&2.into(), &().into()));
        assert_eq!((&json["pairs"][1]["to"], &json["pairs"][1]["requests"]), (&().into(), &1.into()));
    }
}
