//! The output of the command.

use ginnel_volume_bench::workload::{Outcome, Tally};
use ginnel_volume_bench::{Disk, Front};
use serde::Serialize;
use std::fmt::Write;

/// The result of a measurement, for JSON.
#[derive(Serialize)]
pub struct Report<'a> {
    disk: &'a Disk,
    in_flight_account: bool,
    seconds: f64,
    /// Reads and writes per second.
    iops: f64,
    client_cpu: f64,
    kicks: u64,
    reconnects: u32,
    verified: u64,
    failed: u64,
    first_failure: Option<&'a str>,
    reads: Option<Kind>,
    writes: Option<Kind>,
    flushes: Option<Kind>,
}

/// Requests of one kind. Latencies are in nanoseconds.
#[derive(Serialize)]
struct Kind {
    requests: u64,
    iops: f64,
    mib_per_second: f64,
    mean: f64,
    min: u64,
    p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

impl Kind {
    fn of(tally: &Tally, seconds: f64) -> Option<Self> {
        let latency = &tally.latency;
        (tally.requests > 0).then(|| Self {
            requests: tally.requests,
            iops: tally.requests as f64 / seconds,
            mib_per_second: tally.bytes as f64 / seconds / f64::from(1 << 20),
            mean: latency.mean(),
            min: latency.min(),
            p50: latency.value_at_quantile(0.5),
            p90: latency.value_at_quantile(0.9),
            p99: latency.value_at_quantile(0.99),
            p999: latency.value_at_quantile(0.999),
            max: latency.max(),
        })
    }
}

impl<'a> Report<'a> {
    /// Summarises an outcome.
    pub fn new(client: &'a impl Front, outcome: &'a Outcome) -> Self {
        let seconds = outcome.time.as_secs_f64();
        Self {
            disk: client.disk(),
            in_flight_account: client.has_inflight_record(),
            seconds,
            iops: outcome.iops(),
            client_cpu: outcome.cpu,
            kicks: outcome.kicks,
            reconnects: outcome.reconnects,
            verified: outcome.verified,
            failed: outcome.failed,
            first_failure: outcome.first_failure.as_deref(),
            reads: Kind::of(&outcome.reads, seconds),
            writes: Kind::of(&outcome.writes, seconds),
            flushes: Kind::of(&outcome.flushes, seconds),
        }
    }

    /// Returns the result as a table. Latencies are in microseconds.
    pub fn table(&self) -> String {
        let titles =
            ["", "requests", "a second", "MiB/s", "mean", "min", "50 %", "90 %", "99 %", "99.9 %", "max us"];
        let mut rows = vec![titles.map(str::to_owned)];
        for (name, kind) in [("read", &self.reads), ("write", &self.writes), ("flush", &self.flushes)] {
            let Some(kind) = kind else { continue };
            rows.push([
                name.into(),
                kind.requests.to_string(),
                format!("{:.0}", kind.iops),
                format!("{:.1}", kind.mib_per_second),
                micro(kind.mean),
                micro(kind.min as f64),
                micro(kind.p50 as f64),
                micro(kind.p90 as f64),
                micro(kind.p99 as f64),
                micro(kind.p999 as f64),
                micro(kind.max as f64),
            ]);
        }
        let widths: [usize; 11] =
            std::array::from_fn(|c| rows.iter().map(|row| row[c].len()).max().unwrap_or(0));
        let mut text = String::new();
        for row in &rows {
            let cells: Vec<_> =
                row.iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
            let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        }
        let _ = write!(
            text,
            "{:.2} s, client {:.0} % of a CPU, server woken {} times",
            self.seconds,
            100.0 * self.client_cpu,
            self.kicks
        );
        if self.reconnects > 0 {
            let _ = write!(text, ", {} reconnects", self.reconnects);
        }
        if self.verified > 0 {
            let _ = write!(text, ", {} blocks verified", self.verified);
        }
        if let Some(first) = self.first_failure {
            let _ = write!(text, "\n{} requests failed, the first: {first}", self.failed);
        }
        text
    }
}

fn micro(ns: f64) -> String {
    let digits = if ns < 100_000.0 { 2 } else { 0 };
    format!("{:.digits$}", ns / 1000.0)
}
