//! The presentation of a volume's statistics.

use super::{ask_stat, limits_text};
use crate::output::{self, Table};
use crate::status::period;
use anyhow::Result;
use ginnel_volume_control::{Client, FrontEnd, OperationStat, Stat};
use std::time::Duration;

/// Returns everything about a volume.
pub fn page(stat: &Stat) -> String {
    let mut parts = vec![head(stat)];
    for table in [disks(stat), operations(stat), queues(stat), threads(stat)] {
        if !table.is_empty() {
            parts.push(table.to_string());
        }
    }
    parts.join("\n\n")
}

fn head(stat: &Stat) -> String {
    let vm = stat.vm.as_ref().map(|vm| format!(" for VM {vm}")).unwrap_or_default();
    let front_end = match &stat.front_end {
        Some(FrontEnd { pid: 0, since }) => format!("QEMU has been connected for {}", period(*since as u64)),
        Some(FrontEnd { pid, since }) => {
            format!("process {pid} has been connected for {}", period(*since as u64))
        }
        None => "no front end is connected".into(),
    };
    let holder = stat.holder.map(|pid| format!("; holder: process {pid}")).unwrap_or_default();
    format!(
        "volume {} ({}){vm}, version {}, process {}, up {}\n{front_end}; connections so far: {}{holder}\nsocket {}; waits: {}; sandbox: {}; {}",
        stat.volume,
        stat.device,
        stat.version,
        stat.pid,
        period(stat.uptime as u64),
        stat.sessions,
        stat.socket,
        stat.wait,
        stat.sandbox,
        limits_text(&stat.limits)
    )
}

fn disks(stat: &Stat) -> Table {
    let mut table =
        Table::new(&["DISK", "BACKEND", "SIZE", "SECTOR", "SERIAL", "MAY", "WRITES", "I/O", "IMAGE"]);
    for disk in &stat.disks {
        table.row([
            disk.disk.to_string(),
            disk.backend.to_string(),
            output::bytes(disk.size),
            disk.sector.to_string(),
            disk.serial.clone(),
            if disk.read_only { "read" } else { "write" }.into(),
            match disk.write_back {
                _ if disk.read_only => "-",
                _ if disk.lost_writes => "LOST",
                true => "back",
                false => "through",
            }
            .into(),
            match disk.path {
                Some(_) if disk.direct => "direct",
                Some(_) => "page cache",
                None => "-",
            }
            .into(),
            disk.path.clone().unwrap_or_else(|| "-".into()),
        ]);
    }
    table
}

/// Returns a table with the kinds of requests that have occurred.
fn operations(stat: &Stat) -> Table {
    let mut table =
        Table::new(&["REQUEST", "COUNT", "BYTES", "ERRORS", "MEAN", "P50", "P90", "P99", "P99.9", "LONGEST"]);
    for operation in stat.operations.iter().filter(|o| o.requests > 0) {
        let l = &operation.latency;
        table.row([
            operation.operation.clone(),
            operation.requests.to_string(),
            output::bytes(operation.bytes),
            operation.errors.to_string(),
            time(l.mean),
            time(l.p50),
            time(l.p90),
            time(l.p99),
            time(l.p999),
            time(l.max),
        ]);
    }
    table
}

fn queues(stat: &Stat) -> Table {
    let mut table = Table::new(&[
        "QUEUE",
        "THREAD",
        "TAKEN",
        "DONE",
        "KICKS",
        "CALLS",
        "CALLS SAVED",
        "THROTTLED",
        "HELD",
        "MALFORMED",
    ]);
    for q in &stat.queues {
        table.row([
            q.queue.to_string(),
            q.thread.to_string(),
            q.taken.to_string(),
            q.done.to_string(),
            q.kicks.to_string(),
            q.calls.to_string(),
            q.calls_saved.to_string(),
            q.throttled.to_string(),
            q.held.to_string(),
            q.malformed.to_string(),
        ]);
    }
    table
}

fn threads(stat: &Stat) -> Table {
    let mut table = Table::new(&["THREAD", "CPU", "TURNS", "WITH WORK", "SLEEPS", "LONGEST TURN"]);
    for t in &stat.threads {
        table.row([
            t.thread.to_string(),
            t.cpu.map_or_else(|| "any".into(), |cpu| cpu.to_string()),
            t.turns.to_string(),
            t.busy_turns.to_string(),
            t.sleeps.to_string(),
            time(t.longest_turn_ns),
        ]);
    }
    table
}

/// Prints the activity of each interval, until the reader of the output or the volume ends.
pub fn watch(client: &mut Client, interval: Duration) -> Result<()> {
    let mut before = ask_stat(client)?;
    output::line(row(
        ["REQUEST", "PER SECOND", "BYTES/S", "ERRORS", "P50", "P99", "LONGEST"].map(String::from)
    ))?;
    loop {
        std::thread::sleep(interval);
        let now = ask_stat(client)?;
        let seconds = (now.uptime - before.uptime).max(1e-9);
        let since = now.since(&before);
        let mut some = false;
        for operation in since.operations.iter().filter(|o| o.requests > 0) {
            some = true;
            output::line(rates(operation, seconds))?;
        }
        if !some {
            output::line("idle")?;
        }
        before = now;
    }
}

fn rates(operation: &OperationStat, seconds: f64) -> String {
    let l = &operation.latency;
    row([
        operation.operation.clone(),
        format!("{:.0}", operation.requests as f64 / seconds),
        output::bytes((operation.bytes as f64 / seconds) as u64),
        operation.errors.to_string(),
        time(l.p50),
        time(l.p99),
        time(l.max),
    ])
}

/// Returns a row with columns of fixed width, because later lines are not known yet.
fn row(cells: [String; 7]) -> String {
    let [name, rest @ ..] = cells;
    let rest: Vec<_> = rest.iter().map(|cell| format!("{cell:>11}")).collect();
    format!("{name:<12}{}", rest.join(" "))
}

/// Returns a latency with three digits.
pub fn time(nanoseconds: u64) -> String {
    let (mut value, mut unit) = (nanoseconds as f64, "ns");
    for next in ["µs", "ms", "s"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    let digits = if value >= 100.0 || unit == "ns" {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_volume_control::{DiskStat, Latency, QueueStat};

    #[test]
    fn times_have_three_digits() {
        for (ns, text) in
            [(0, "0 ns"), (999, "999 ns"), (1234, "1.23 µs"), (56_789, "56.8 µs"), (120_000_000, "120 ms")]
        {
            assert_eq!(time(ns), text);
        }
    }

    #[test]
    fn a_page() {
        let read = OperationStat {
            operation: "read".into(),
            requests: 2,
            bytes: 8192,
            errors: 0,
            latency: Latency::of(vec![(1023, 1), (2047, 1)], 3000, 2000),
        };
        let stat = Stat {
            volume: "web".into(),
            vm: Some("a".into()),
            front_end: Some(FrontEnd { pid: 7, since: 61.0 }),
            sessions: 2,
            sandbox: "landlock+seccomp".into(),
            disks: vec![DiskStat {
                size: 1 << 30,
                sector: 512,
                path: Some("/i".into()),
                ..Default::default()
            }],
            queues: vec![QueueStat::default()],
            operations: vec![read, OperationStat { operation: "flush".into(), ..Default::default() }],
            ..Default::default()
        };
        let page = page(&stat);
        for part in [
            "volume web (blk) for VM a",
            "process 7 has been connected for 1 min",
            "no limits",
            "1 GiB",
            "read",
            "1.50 µs",
        ] {
            assert!(page.contains(part), "{part} is missing in\n{page}");
        }
        assert!(!page.contains("flush"), "{page}");
    }
}
