//! Caches in Prometheus' text exposition format, version 0.0.4.

use super::stat::Stat;
use std::fmt::Write;

/// Appends a line to a `String`, which never fails.
macro_rules! put {
    ($text:expr, $($arg:tt)*) => { let _ = writeln!($text, $($arg)*); };
}

type Family = (&'static str, &'static str, &'static str, fn(&Stat) -> Option<f64>);

/// The metrics of which each cache has one value. The server's counters begin at 0 with each server.
const FAMILIES: &[Family] = &[
    ("ginnel_cache_up", "gauge", "Whether the server answers.", |s| Some(flag(s.no_server.is_none()))),
    ("ginnel_cache_servers_total", "counter", "Servers so far.", |s| Some(s.servers as f64)),
    ("ginnel_cache_clock_seconds", "counter", "Seconds with a server since the cache was created.", |s| {
        Some(s.clock_seconds)
    }),
    ("ginnel_cache_items", "gauge", "Items, including expired ones.", |s| Some(s.items as f64)),
    ("ginnel_cache_slots", "gauge", "Places for items in the index.", |s| Some(s.slots as f64)),
    ("ginnel_cache_limit_bytes", "gauge", "Memory that the server may use for items.", |s| {
        Some(s.limit_bytes as f64)
    }),
    ("ginnel_cache_block_bytes", "gauge", "Memory of the block.", |s| Some(s.block_bytes as f64)),
    ("ginnel_cache_pressed", "gauge", "Whether the server evicts items, or will soon.", |s| {
        Some(flag(s.pressed))
    }),
    ("ginnel_cache_get_hits_total", "counter", "Gets executed by the server that were hits.", |s| {
        counter(s, "get_hits")
    }),
    ("ginnel_cache_get_misses_total", "counter", "Gets executed by the server that were misses.", |s| {
        counter(s, "get_misses")
    }),
    ("ginnel_cache_sets_total", "counter", "Requests to store an item.", |s| counter(s, "cmd_set")),
    ("ginnel_cache_flushes_total", "counter", "Requests to remove all items.", |s| counter(s, "cmd_flush")),
    ("ginnel_cache_evictions_total", "counter", "Items that were evicted for others.", |s| {
        counter(s, "evictions")
    }),
    ("ginnel_cache_connections", "gauge", "Connections to the server.", |s| counter(s, "curr_connections")),
    ("ginnel_cache_uptime_seconds", "gauge", "Seconds since the server's start.", |s| counter(s, "uptime")),
];

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn counter(stat: &Stat, name: &str) -> Option<f64> {
    stat.counter(name).map(|number| number as f64)
}

/// Returns several caches as one exposition.
pub fn text(stats: &[Stat]) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in FAMILIES {
        let values: Vec<_> =
            stats.iter().filter_map(|stat| Some((quoted(&stat.cache), value(stat)?))).collect();
        if !values.is_empty() {
            put!(text, "# HELP {name} {help}");
            put!(text, "# TYPE {name} {kind}");
        }
        for (cache, value) in values {
            put!(text, "{name}{{cache={cache}}} {value}");
        }
    }
    if !stats.is_empty() {
        let name = "ginnel_cache_memory_bytes";
        put!(text, "# HELP {name} Memory of log segments, by their use.");
        put!(text, "# TYPE {name} gauge");
        for stat in stats {
            for (queue, segments) in
                [("small", stat.small.segments), ("main", stat.main.segments), ("free", stat.free.segments)]
            {
                let bytes = segments.saturating_mul(stat.segment_bytes);
                put!(text, "{name}{{cache={},queue=\"{queue}\"}} {bytes}", quoted(&stat.cache));
            }
        }
    }
    text
}

/// Returns the quoted value of a label.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_their_samples_together() {
        let mut one = Stat { cache: "web/a".into(), items: 3, segment_bytes: 4096, ..Stat::default() };
        one.main.segments = 2;
        one.server.insert("evictions".into(), "7".into());
        let two = Stat { cache: "web/b".into(), no_server: Some("gone".into()), ..Stat::default() };
        let text = text(&[one, two]);
        for part in [
            "# HELP ginnel_cache_up Whether the server answers.\n# TYPE ginnel_cache_up gauge\n\
             ginnel_cache_up{cache=\"web/a\"} 1\nginnel_cache_up{cache=\"web/b\"} 0\n",
            "# TYPE ginnel_cache_items gauge\nginnel_cache_items{cache=\"web/a\"} 3\n",
            "# TYPE ginnel_cache_evictions_total counter\nginnel_cache_evictions_total{cache=\"web/a\"} 7\n# ",
            "ginnel_cache_memory_bytes{cache=\"web/a\",queue=\"main\"} 8192\n",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        assert!(!text.contains("get_hits"), "{text}");
        assert!(super::text(&[]).is_empty());
    }
}
