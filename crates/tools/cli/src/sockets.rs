//! `ginnel sockets`.

use crate::inspect::{Channel, Inspect, Side};
use crate::output::{self, Table};
use anyhow::{Context, Result};
use ginnel::Daemon;
use serde_json::Value;

/// The daemon's word for channels that carry a TCP connection.
const KIND: &str = "socket";

/// Shows the TCP connections that use shared memory: segment, the programs at both ends, rings, state.
///
/// These are connections of programs that run with the preload library (`ginnel run`). On the host, this shows all of
/// them. In a VM, it shows those of the segments in which the VM has a share. The report of `ginnel run --report` says
/// how much was transferred, and why other connections stay on TCP.
#[derive(clap::Args)]
pub struct Args {
    /// Show only those of this segment.
    #[arg(value_name = "SEGMENT")]
    segment: Option<String>,
    /// Print the daemon's answer about their channels as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    let text = Daemon::connect()?.inspect().context("asking the daemon for its status")?;
    let segment = args.segment.as_deref();
    if args.json {
        return output::json(&selected(&text, segment)?);
    }
    let table = table(&crate::inspect::parse(&text)?, segment);
    if table.is_empty() {
        output::note("ginnel: no TCP connection uses shared memory");
        return Ok(());
    }
    output::line(table.to_string())
}

/// Returns the channels that carry TCP connections, in one segment or in all.
pub fn channels<'a>(inspect: &'a Inspect, segment: Option<&'a str>) -> impl Iterator<Item = &'a Channel> {
    let channels = inspect.channels.iter().filter(|channel| channel.kind == KIND);
    channels.filter(move |channel| segment.is_none_or(|segment| channel.segment == segment))
}

fn table(inspect: &Inspect, segment: Option<&str>) -> Table {
    let mut table = Table::new(&["SEGMENT", "CHANNEL", "CONNECTOR", "ACCEPTOR", "RINGS", "STATE"]);
    for channel in channels(inspect, segment) {
        table.row([
            channel.segment.clone(),
            channel.id.to_string(),
            end(inspect, &channel.initiator),
            end(inspect, &channel.acceptor),
            format!("{}, {}", output::bytes(channel.capacity), output::bytes(channel.acceptor_capacity)),
            channel.state.clone(),
        ]);
    }
    table
}

/// Returns the program at one end, as far as this user may see it.
fn end(inspect: &Inspect, side: &Side) -> String {
    let known = inspect.endpoints.iter().find(|e| (e.number, e.epoch) == (side.endpoint, side.epoch));
    let name = known.map_or("?", |endpoint| &endpoint.name);
    let process = known.and_then(|endpoint| endpoint.pid).map(|pid| format!(" {pid}")).unwrap_or_default();
    let closed = if side.closed { ", closed" } else { "" };
    format!("{name}{process}@{}{closed}", side.member)
}

fn selected(text: &str, segment: Option<&str>) -> Result<Value> {
    let mut value: Value = serde_json::from_str(text).context("the daemon's status is not JSON")?;
    let Value::Array(mut all) = value["channels"].take() else { return Ok(Value::Array(Vec::new())) };
    all.retain(|one| one["kind"] == KIND && segment.is_none_or(|segment| one["segment"] == segment));
    Ok(Value::Array(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"endpoints": [
            {"number": 1, "epoch": 4, "member": "vm-a", "name": "redis-cli", "pid": 77},
            {"number": 2, "epoch": 5, "member": "host", "name": "redis-server"}],
        "channels": [
            {"id": 8, "segment": "web", "kind": "stream", "state": "open"},
            {"id": 9, "segment": "web", "kind": "socket", "capacity": 4096, "acceptor_capacity": 262144, "state": "open",
             "initiator": {"endpoint": 1, "epoch": 4, "member": "vm-a"},
             "acceptor": {"endpoint": 2, "epoch": 5, "member": "host", "closed": true}},
            {"id": 10, "segment": "db", "kind": "socket", "capacity": 4096, "acceptor_capacity": 4096, "state": "waiting",
             "initiator": {"endpoint": 1, "epoch": 3, "member": "vm-a"}, "acceptor": {"member": "host"}}]}"#;

    #[test]
    fn sockets_are_shown_with_the_programs_at_both_ends() {
        let inspect = crate::inspect::parse(ANSWER).unwrap();
        let all = table(&inspect, None).to_string();
        assert_eq!(
            all.lines().skip(1).collect::<Vec<_>>(),
            [
                "web      9        redis-cli 77@vm-a  redis-server@host, closed  4 KiB, 256 KiB  open",
                "db       10       ?@vm-a             ?@host                     4 KiB, 4 KiB    waiting",
            ]
        );
        assert_eq!(table(&inspect, Some("db")).to_string().lines().count(), 2);
        assert!(table(&inspect, Some("none")).is_empty());
        assert_eq!(selected(ANSWER, None).unwrap().as_array().unwrap().len(), 2);
        assert_eq!(selected(ANSWER, Some("web")).unwrap()[0]["id"], 9);
        assert_eq!(selected("{}", None).unwrap(), serde_json::json!([]));
    }
}
