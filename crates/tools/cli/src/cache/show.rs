//! The presentation of a cache's status.

use super::stat::{Queue, Stat};
use crate::output::{Table, bytes};
use crate::status::period;

/// Returns everything about a cache.
pub fn page(stat: &Stat) -> String {
    let mut lines = vec![
        format!("cache {}: {}", stat.cache, server(stat)),
        format!(
            "{} items in {} of {}{}",
            stat.items,
            bytes(stat.small.bytes + stat.main.bytes),
            bytes(stat.limit_bytes),
            if stat.pressed { ", so that some have to go" } else { "" }
        ),
    ];
    if let Some(rate) = stat.hit_rate() {
        let [hits, misses] = ["get_hits", "get_misses"].map(|name| stat.counter(name).unwrap_or(0));
        lines.push(format!(
            "of {} gets that came to the server, {:.1} % were hits; gets in memory are counted by those who do them",
            hits.saturating_add(misses),
            rate * 100.0
        ));
    }
    let counted: Vec<_> = [
        ("cmd_set", "stored"),
        ("evictions", "had to go"),
        ("expired_unfetched", "ended unused"),
        ("curr_connections", "connections"),
    ]
    .iter()
    .filter_map(|(name, what)| Some(format!("{} {what}", stat.counter(name)?)))
    .collect();
    if !counted.is_empty() {
        lines.push(counted.join(", "));
    }
    let contact = if stat.contact.is_empty() { "nowhere".into() } else { stat.contact.join(", ") };
    lines.push(format!("changes go to: {contact}"));
    lines.push(String::new());
    lines.push(queues(stat).to_string());
    lines.join("\n")
}

fn server(stat: &Stat) -> String {
    let number = format!("server {}", stat.servers);
    let clock = period(stat.clock_seconds as u64);
    if stat.no_server.is_some() {
        let clock =
            if stat.clock_stands { format!("its clock stands at {clock}") } else { "its clock goes".into() };
        return format!("{number} does not answer; {clock}");
    }
    let up = stat.counter("uptime").map_or_else(String::new, |seconds| format!(" since {}", period(seconds)));
    let pid = stat.counter("pid").map_or_else(String::new, |pid| format!(" is process {pid}"));
    format!("{number}{pid}{up}; served for {clock}")
}

fn queues(stat: &Stat) -> Table {
    let mut table = Table::new(&["QUEUE", "SEGMENTS", "MEMORY", "USED"]);
    for (name, queue) in [("small", &stat.small), ("main", &stat.main), ("free", &stat.free)] {
        let Queue { segments, bytes: used } = queue;
        let memory = segments.saturating_mul(stat.segment_bytes);
        table.row([name.into(), segments.to_string(), bytes(memory), bytes(*used)]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page() {
        let mut stat = Stat {
            cache: "web/c".into(),
            items: 12,
            limit_bytes: 64 << 20,
            segment_bytes: 1 << 20,
            small: Queue { segments: 2, bytes: 1 << 20 },
            servers: 3,
            clock_seconds: 61.0,
            contact: vec!["channel web".into(), "tcp 127.0.0.1:11211".into()],
            ..Stat::default()
        };
        for (name, value) in [("get_hits", "3"), ("get_misses", "1"), ("pid", "7"), ("uptime", "5")] {
            stat.server.insert(name.into(), value.into());
        }
        let text = page(&stat);
        for part in [
            "cache web/c: server 3 is process 7 since 5 s; served for 1 min",
            "12 items in 1 MiB of 64 MiB\n",
            "of 4 gets that came to the server, 75.0 % were hits",
            "changes go to: channel web, tcp 127.0.0.1:11211",
            "small  2         2 MiB   1 MiB",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        stat.no_server = Some("nobody".into());
        stat.clock_stands = true;
        assert!(
            page(&stat).starts_with("cache web/c: server 3 does not answer; its clock stands at 1 min\n")
        );
    }
}
