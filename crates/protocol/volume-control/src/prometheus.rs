//! Statistics in Prometheus' text exposition format, version 0.0.4.

use crate::{DiskStat, Latency, OperationStat, QueueStat, Stat, ThreadStat};
use std::fmt::Write;

/// Binary logarithms of the buckets' bounds, from 256 ns to 17 s. Each bound is also a bound of the buckets in which
/// volumes count.
const BOUNDS: std::ops::RangeInclusive<u32> = 8..=34;

/// Returns the counters of several volumes as one exposition.
pub fn prometheus(stats: &[Stat]) -> String {
    let mut text = String::new();
    about(&mut text, stats);
    queues(&mut text, stats);
    threads(&mut text, stats);
    operations(&mut text, stats);
    text
}

/// Appends a line to a `String`, which never fails.
macro_rules! put {
    ($text:expr, $($arg:tt)*) => { let _ = writeln!($text, $($arg)*); };
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    put!(text, "# HELP {name} {help}");
    put!(text, "# TYPE {name} {kind}");
}

fn about(text: &mut String, stats: &[Stat]) {
    family(text, "ginnel_volume_info", "gauge", "Properties of a volume; always 1.");
    for s in stats {
        put!(
            text,
            "ginnel_volume_info{{volume={},version={},device={},vm={},sandbox={}}} 1",
            quoted(&s.volume),
            quoted(&s.version),
            quoted(s.device.word()),
            quoted(s.vm.as_deref().unwrap_or("")),
            quoted(&s.sandbox)
        );
    }
    type Gauge = (&'static str, &'static str, &'static str, fn(&Stat) -> f64);
    let gauges: [Gauge; 6] = [
        ("ginnel_volume_uptime_seconds", "gauge", "Seconds since the volume's start.", |s| s.uptime),
        ("ginnel_volume_connected", "gauge", "Whether a front end is connected.", |s| {
            f64::from(u8::from(s.front_end.is_some()))
        }),
        ("ginnel_volume_sessions_total", "counter", "Front ends that have connected.", |s| s.sessions as f64),
        ("ginnel_volume_limit_iops", "gauge", "Allowed requests per second; 0 means no limit.", |s| {
            s.limits.iops as f64
        }),
        (
            "ginnel_volume_limit_bytes_per_second",
            "gauge",
            "Allowed bytes per second; 0 means no limit.",
            |s| s.limits.bandwidth.0 as f64,
        ),
        ("ginnel_volume_limit_burst_seconds", "gauge", "Time in which unused allowance accumulates.", |s| {
            s.limits.burst.0.as_secs_f64()
        }),
    ];
    for (name, kind, help, value) in gauges {
        family(text, name, kind, help);
        for s in stats {
            put!(text, "{name}{{volume={}}} {}", quoted(&s.volume), value(s));
        }
    }
    disks(text, stats);
}

fn disks(text: &mut String, stats: &[Stat]) {
    type Gauge = (&'static str, &'static str, fn(&DiskStat) -> u64);
    let gauges: [Gauge; 2] = [
        ("ginnel_volume_disk_size_bytes", "Size of a disk.", |d| d.size),
        ("ginnel_volume_disk_lost_writes", "Whether acknowledged writes are lost and flushes fail.", |d| {
            d.lost_writes.into()
        }),
    ];
    for (name, help, value) in gauges {
        family(text, name, "gauge", help);
        for s in stats {
            for d in &s.disks {
                put!(text, "{name}{{volume={},disk=\"{}\"}} {}", quoted(&s.volume), d.disk, value(d));
            }
        }
    }
}

fn queues(text: &mut String, stats: &[Stat]) {
    type Counter = (&'static str, &'static str, fn(&QueueStat) -> u64);
    let counters: [Counter; 7] = [
        ("ginnel_volume_queue_taken_total", "Requests taken from a queue.", |q| q.taken),
        ("ginnel_volume_queue_done_total", "Requests given back.", |q| q.done),
        ("ginnel_volume_queue_kicks_total", "Kicks from the driver.", |q| q.kicks),
        ("ginnel_volume_queue_calls_total", "Calls to the driver.", |q| q.calls),
        (
            "ginnel_volume_queue_calls_saved_total",
            "Calls that were not sent because the driver did not want them.",
            |q| q.calls_saved,
        ),
        ("ginnel_volume_queue_throttled_total", "Requests that waited for a limit.", |q| q.throttled),
        ("ginnel_volume_queue_malformed_total", "Requests that the device could not interpret.", |q| {
            q.malformed
        }),
    ];
    let held = "Requests that wait for an operator because their disk was full or had failed.";
    let kinds = counters.map(|(name, help, value)| (name, "counter", help, value));
    let gauge = [("ginnel_volume_queue_held", "gauge", held, (|q| q.held) as fn(&QueueStat) -> u64)];
    for (name, kind, help, value) in kinds.into_iter().chain(gauge) {
        family(text, name, kind, help);
        for s in stats {
            for q in &s.queues {
                put!(text, "{name}{{volume={},queue=\"{}\"}} {}", quoted(&s.volume), q.queue, value(q));
            }
        }
    }
}

fn threads(text: &mut String, stats: &[Stat]) {
    type Counter = (&'static str, &'static str, fn(&ThreadStat) -> u64);
    let counters: [Counter; 3] = [
        ("ginnel_volume_thread_turns_total", "Loop turns of a thread.", |t| t.turns),
        ("ginnel_volume_thread_busy_turns_total", "Loop turns of a thread that found work.", |t| {
            t.busy_turns
        }),
        ("ginnel_volume_thread_sleeps_total", "How often a thread has slept.", |t| t.sleeps),
    ];
    for (name, help, value) in counters {
        family(text, name, "counter", help);
        for s in stats {
            for t in &s.threads {
                put!(text, "{name}{{volume={},thread=\"{}\"}} {}", quoted(&s.volume), t.thread, value(t));
            }
        }
    }
}

fn operations(text: &mut String, stats: &[Stat]) {
    type Counter = (&'static str, &'static str, fn(&OperationStat) -> u64);
    let counters: [Counter; 3] = [
        ("ginnel_volume_requests_total", "Requests, successful or failed.", |o| o.requests),
        ("ginnel_volume_bytes_total", "Bytes of data in requests.", |o| o.bytes),
        ("ginnel_volume_errors_total", "Requests that failed.", |o| o.errors),
    ];
    let labels = |s: &Stat, o: &OperationStat| {
        format!("volume={},operation={}", quoted(&s.volume), quoted(&o.operation))
    };
    for (name, help, value) in counters {
        family(text, name, "counter", help);
        for s in stats {
            for o in &s.operations {
                put!(text, "{name}{{{}}} {}", labels(s, o), value(o));
            }
        }
    }
    let name = "ginnel_volume_latency_seconds";
    family(text, name, "histogram", "Time from taking a request to giving it back.");
    for s in stats {
        for o in &s.operations {
            histogram(text, name, &labels(s, o), &o.latency);
        }
    }
}

fn histogram(text: &mut String, name: &str, labels: &str, latency: &Latency) {
    for bound in BOUNDS {
        let nanoseconds = 1u64 << bound;
        let within: u64 =
            latency.buckets.iter().take_while(|(upper, _)| *upper <= nanoseconds).map(|(_, n)| n).sum();
        put!(text, "{name}_bucket{{{labels},le=\"{}\"}} {within}", nanoseconds as f64 / 1e9);
    }
    put!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", latency.count);
    put!(text, "{name}_sum{{{labels}}} {}", latency.sum as f64 / 1e9);
    put!(text, "{name}_count{{{labels}}} {}", latency.count);
}

/// Returns the quoted value of a label.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exposition() {
        let read = OperationStat {
            operation: "read".into(),
            requests: 3,
            bytes: 12288,
            errors: 1,
            latency: Latency::of(vec![(255, 1), (1023, 1), (1 << 40, 1)], 2_000, 1 << 39),
        };
        let queue = QueueStat { queue: 1, kicks: 7, held: 3, ..Default::default() };
        let disk = DiskStat { disk: 2, lost_writes: true, ..Default::default() };
        let stat = Stat {
            volume: "a\"b".into(),
            disks: vec![disk],
            queues: vec![queue],
            operations: vec![read],
            ..Default::default()
        };
        let text = prometheus(&[stat]);
        for line in [
            r#"ginnel_volume_disk_lost_writes{volume="a\"b",disk="2"} 1"#,
            r#"ginnel_volume_queue_kicks_total{volume="a\"b",queue="1"} 7"#,
            r#"ginnel_volume_queue_held{volume="a\"b",queue="1"} 3"#,
            r#"ginnel_volume_requests_total{volume="a\"b",operation="read"} 3"#,
            r#"ginnel_volume_latency_seconds_bucket{volume="a\"b",operation="read",le="0.000000256"} 1"#,
            r#"ginnel_volume_latency_seconds_bucket{volume="a\"b",operation="read",le="0.000001024"} 2"#,
            r#"ginnel_volume_latency_seconds_bucket{volume="a\"b",operation="read",le="+Inf"} 3"#,
            r#"ginnel_volume_latency_seconds_sum{volume="a\"b",operation="read"} 0.000002"#,
            r#"ginnel_volume_latency_seconds_count{volume="a\"b",operation="read"} 3"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        // Each family is declared once, and its samples are together.
        let announced: Vec<_> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let mut unique = announced.clone();
        unique.dedup();
        assert_eq!(announced, unique);
    }
}
