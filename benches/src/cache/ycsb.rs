//! YCSB, with bindings of ours (`benches/ycsb`): the cache through the C library, and memcached through spymemcached.

use super::Cache;
use super::requests::Servers;
use crate::report::{Better, folder};
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use vmtest::Bed;
use vmtest::installation::Plan;

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pairs of runs for each row.
const PAIRS: usize = 3;
/// Seconds of a run.
const SECONDS: u32 = 4;
/// Records, of a kilobyte each.
const RECORDS: u32 = 50_000;
/// Operations of the run whose values are checked.
const CHECKED: u32 = 20_000;

/// The bindings, compiled.
struct Ycsb(PathBuf);

impl Ycsb {
    fn script(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("ycsb").join(name)
    }

    fn build() -> Result<Self> {
        let target = folder()?.parent().context("a folder without a parent")?.canonicalize()?;
        let folder = target.join("ycsb");
        let build =
            Command::new(Self::script("build")).arg(&folder).env("CARGO_TARGET_DIR", &target).status();
        ensure!(build?.success(), "YCSB cannot be built; `scripts/setup bench` installs what it needs");
        Ok(Self(folder))
    }

    /// Runs a phase of a workload, and returns what YCSB says of it: `READ AverageLatency(us)` and the like.
    fn run(&self, servers: &Servers<'_>, own: bool, phase: &str, more: &str) -> Result<HashMap<String, f64>> {
        let (script, folder) = (Self::script("run"), self.0.display());
        let binding = if own { "ginnel" } else { "memcached" };
        let command = format!(
            "exec {} {folder} {binding} {phase} -threads 2 -p recordcount={RECORDS} -p ginnel.cache=items/main -p memcached.hosts={} {more}",
            script.display(),
            servers.memcached_at(),
        );
        let said = servers.on_host(&command, PATIENCE)?;
        let figures: HashMap<String, f64> = said.lines().filter_map(figure).collect();
        let failed = figures.keys().find(|name| name.contains("Return=") && !name.ends_with("Return=OK"));
        ensure!(failed.is_none(), "YCSB, {binding} {phase} {more}: {failed:?}");
        Ok(figures)
    }
}

/// A line of what YCSB says: `[READ], AverageLatency(us), 12.3`.
fn figure(line: &str) -> Option<(String, f64)> {
    let mut words = line.strip_prefix('[')?.split(", ");
    let (what, figure) = (words.next()?.strip_suffix(']')?, words.next()?);
    Some((format!("{what} {figure}"), words.next()?.parse().ok()?))
}

impl Cache<'_> {
    /// Workloads A to D and F of YCSB.
    pub fn ycsb(&mut self) -> Result<()> {
        let bed = Bed::new("bench-cache-ycsb")?;
        let plan = Plan::new(&bed).segment("items", 320, &["host"]).segment("web", 32, &["host"]);
        let ginnel = plan.config("[limits]\nbytes_per_endpoint = \"1G\"").start()?;
        let (ycsb, servers) = (Ycsb::build()?, Servers::new(&bed, ginnel, "127.0.0.1".into(), 2)?);
        for own in [true, false] {
            let checked = format!("-p dataintegrity=true -p operationcount={CHECKED}");
            ycsb.run(&servers, own, "load a", &checked)?;
            ycsb.run(&servers, own, "run f", &checked)?;
        }
        // The last one adds records.
        for (workload, target) in
            [("C", Some(3.0)), ("B", Some(3.0)), ("A", Some(1.5)), ("F", None), ("D", None)]
        {
            let case = format!("YCSB {workload}, host, 2 threads");
            if !self.wants(&case) {
                continue;
            }
            let mut runs = [Vec::new(), Vec::new()];
            for pair in 0..PAIRS {
                for own in [pair % 2 == 1, pair % 2 != 1] {
                    let phase = format!("run {}", workload.to_lowercase());
                    let time = format!("-p operationcount=100000000 -p maxexecutiontime={SECONDS}");
                    runs[usize::from(!own)].push(ycsb.run(&servers, own, &phase, &time)?);
                }
            }
            let peer = "memcached -t 2, TCP, spymemcached";
            let [own, peers] = runs;
            for (what, unit, better, name, scale, target) in [
                ("", "k/s", Better::Higher, "OVERALL Throughput(ops/sec)", 1e-3, target),
                (", read", "us", Better::Lower, "READ AverageLatency(us)", 1.0, None),
                (", read, p99", "us", Better::Lower, "READ 99thPercentileLatency(us)", 1.0, None),
            ] {
                let column = |runs: &[HashMap<String, f64>]| -> Vec<f64> {
                    // YCSB counts whole microseconds for the percentiles.
                    let figure = |run: &HashMap<String, f64>| run.get(name).copied().unwrap_or(f64::NAN);
                    runs.iter().map(|run| (figure(run) * scale).max(scale / 2.0)).collect()
                };
                let case = format!("{case}{what}");
                self.report.pairs(case, unit, better, &column(&own), peer, &column(&peers), target, "");
            }
        }
        Ok(())
    }
}
