//! YCSB with our bindings (`benches/ycsb`): the cache through the C library, and memcached through spymemcached.

use super::Cache;
use super::requests::{PORTS, Servers};
use crate::report::{Better, folder};
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use vmtest::installation::{Plan, program};
use vmtest::{HOST_ADDRESS, Job, TestBed, Vm};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The number of pairs of runs for each row.
const PAIRS: usize = 3;
/// The number of seconds of a run.
const SECONDS: u32 = 4;
/// The number of records, of a kilobyte each.
const RECORDS: u32 = 50_000;
/// The number of operations in the run that checks values.
const CHECKED: u32 = 20_000;

/// How long a run in VMs may take, including the start of a Java machine there.
const PATIENCE_OF_VMS: Duration = Duration::from_secs(300);
/// The number of pairs of runs in VMs, and the seconds of each run.
const PAIRS_OF_VMS: usize = 2;
const SECONDS_OF_VMS: u32 = 10;
/// The number of records with clients in VMs.
const RECORDS_OF_VMS: u32 = 10_000;
/// The folder with the bindings in VMs.
const FOLDER: &str = "/tmp/ycsb";

/// The client of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// The C library.
    Own,
    /// spymemcached with the cache, under `ginnel run`.
    Unmodified,
    /// spymemcached with memcached.
    Memcached,
}

/// The folder of the compiled bindings.
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

    /// Runs a phase of a workload, and returns YCSB's figures by name, such as `READ AverageLatency(us)`.
    fn run(&self, servers: &Servers<'_>, own: bool, phase: &str, more: &str) -> Result<HashMap<String, f64>> {
        let (script, folder) = (Self::script("run"), self.0.display());
        let binding = if own { "ginnel" } else { "memcached" };
        let command = format!(
            "exec {} {folder} {binding} {phase} -threads 2 -p recordcount={RECORDS} -p ginnel.cache=items/main -p memcached.hosts={} {more}",
            script.display(),
            servers.memcached_at(),
        );
        figures(&servers.on_host(&command, PATIENCE)?).with_context(|| format!("{binding} {phase} {more}"))
    }

    /// Runs a phase of a workload in each of these VMs at the same time. Rates are added; times are those of the slowest VM.
    fn run_in(&self, vms: &[&Vm], client: Client, phase: &str, more: &str) -> Result<HashMap<String, f64>> {
        let (binding, port, prefix) = match client {
            Client::Own => ("ginnel", PORTS[1], ""),
            Client::Unmodified => ("memcached", PORTS[1], "ginnel run --"),
            Client::Memcached => ("memcached", PORTS[0], ""),
        };
        let script = format!(
            "export HOME=/tmp GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so\n\
             exec {prefix} {FOLDER}/run {FOLDER} {binding} {phase} -threads 2 -p recordcount={RECORDS_OF_VMS} \
             -p ginnel.cache=items/main -p memcached.hosts={HOST_ADDRESS}:{port} {more}\n"
        );
        let name = format!("run.{client:?}");
        std::fs::write(self.0.join(&name), script)?;
        let jobs: Vec<Job> = vms
            .iter()
            .map(|vm| vm.spawn(&format!("exec chroot /host sh {FOLDER}/{name}")))
            .collect::<Result<_>>()?;
        let mut all = HashMap::new();
        for job in jobs {
            let said = job.wait(PATIENCE_OF_VMS)?.ok()?.stdout;
            let figures = figures(&said).with_context(|| format!("{client:?} {phase} {more}: {said}"))?;
            for (name, figure) in figures {
                let sum: &mut f64 = all.entry(name.clone()).or_default();
                *sum = if name.contains("Throughput") { *sum + figure } else { sum.max(figure) };
            }
        }
        Ok(all)
    }
}

/// Parses the output of YCSB. Fails if an operation has failed.
fn figures(said: &str) -> Result<HashMap<String, f64>> {
    let figures: HashMap<String, f64> = said.lines().filter_map(figure).collect();
    let failed = figures.keys().find(|name| name.contains("Return=") && !name.ends_with("Return=OK"));
    ensure!(failed.is_none(), "operations of YCSB have failed: {failed:?}");
    Ok(figures)
}

/// Parses a line of YCSB's output, such as `[READ], AverageLatency(us), 12.3`.
fn figure(line: &str) -> Option<(String, f64)> {
    let mut words = line.strip_prefix('[')?.split(", ");
    let (what, figure) = (words.next()?.strip_suffix(']')?, words.next()?);
    Some((format!("{what} {figure}"), words.next()?.parse().ok()?))
}

impl Cache<'_> {
    /// Adds the rows of workloads A to D and F of YCSB.
    pub fn ycsb(&mut self) -> Result<()> {
        let bed = TestBed::new("bench-cache-ycsb")?;
        let plan = Plan::new(&bed).segment("items", 320, &["host"]).segment("web", 32, &["host"]);
        let ginnel = plan.config("[limits]\nbytes_per_endpoint = \"1G\"").start()?;
        let (ycsb, servers) = (Ycsb::build()?, Servers::new(&bed, ginnel, "127.0.0.1".into(), 2)?);
        for own in [true, false] {
            let checked = format!("-p dataintegrity=true -p operationcount={CHECKED}");
            ycsb.run(&servers, own, "load a", &checked)?;
            ycsb.run(&servers, own, "run f", &checked)?;
        }
        // The last workload adds records.
        for (workload, target) in
            [("C", Some(3.0)), ("B", Some(3.0)), ("A", Some(1.5)), ("F", None), ("D", None)]
        {
            let case = format!("YCSB {workload}, host, 2 threads");
            if !self.wants(&case) {
                continue;
            }
            let mut runs = [Vec::new(), Vec::new()];
            for pair in 0..self.pairs.unwrap_or(PAIRS) {
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
                    // YCSB reports percentiles in whole microseconds.
                    let figure = |run: &HashMap<String, f64>| run.get(name).copied().unwrap_or(f64::NAN);
                    runs.iter().map(|run| (figure(run) * scale).max(scale / 2.0)).collect()
                };
                let case = format!("{case}{what}");
                self.report.pairs(case, unit, better, &column(&own), peer, &column(&peers), target, "");
            }
        }
        Ok(())
    }

    /// Adds the rows of workloads C, B and A, with clients in one VM and in two, and servers on the host.
    pub fn ycsb_vms(&mut self) -> Result<()> {
        let rows: Vec<_> = [("C", 3.0), ("B", 3.0), ("A", 1.5)]
            .into_iter()
            .flat_map(|(workload, target)| [1, 2].map(|count| (workload, target, count)))
            .map(|(workload, target, count)| {
                let case = format!("YCSB {workload}, {count} VM{}", if count > 1 { "s" } else { "" });
                (workload, target, count, case)
            })
            .filter(|(.., case)| self.wants(case))
            .collect();
        if rows.is_empty() {
            return Ok(());
        }
        let bed = TestBed::new("bench-cache-ycsb-vms")?;
        let plan = Plan::new(&bed).vm("a").vm("b");
        let ginnel = plan
            .segment_with_readers("items", 320, &["host"], &["a", "b"])
            .segment("web", 32, &["host", "a", "b"])
            .config("[limits]\nbytes_per_endpoint = \"1G\"")
            .start()?;
        let ycsb = Ycsb::build()?;
        std::fs::copy(Ycsb::script("run"), ycsb.0.join("run"))?;
        let workloads = ycsb.0.join("workloads");
        std::fs::create_dir_all(&workloads)?;
        for workload in std::fs::read_dir(Ycsb::script("workloads"))? {
            let workload = workload?;
            std::fs::copy(workload.path(), workloads.join(workload.file_name()))?;
        }
        let start = |name| -> Result<Vm> {
            let vm = ginnel.vm(name)?.memory_mib(1536).host_files().share(&ycsb.0, FOLDER);
            vm.library(program("libginnel_preload.so")?).start()
        };
        let (a, b) = (start("a")?, start("b")?);
        let mut daemons = Vec::new();
        for vm in [&a, &b] {
            vm.wait_ready()?;
            daemons.push(ginnel.start_guest(vm)?);
        }
        let servers = Servers::new(&bed, ginnel, HOST_ADDRESS.to_string(), 2)?;
        for client in [Client::Own, Client::Memcached] {
            ycsb.run_in(&[&a], client, "load a", "-p operationcount=1")?;
        }
        let note = format!("guests run under {}, with one processor each; 2 threads in each", bed.accel()?);
        for (workload, target, count, case) in rows {
            let vms = &[&a, &b][..count];
            let mut runs: HashMap<&str, Vec<HashMap<String, f64>>> = HashMap::new();
            for pair in 0..self.pairs.unwrap_or(PAIRS_OF_VMS) {
                let mut clients = [Client::Own, Client::Memcached, Client::Unmodified];
                if pair % 2 == 1 {
                    clients.reverse();
                }
                for client in clients {
                    let phase = format!("run {}", workload.to_lowercase());
                    let time = format!("-p operationcount=100000000 -p maxexecutiontime={SECONDS_OF_VMS}");
                    let run = ycsb.run_in(vms, client, &phase, &time)?;
                    let name = match client {
                        Client::Own => "own",
                        Client::Unmodified => "unmodified",
                        Client::Memcached => "memcached",
                    };
                    runs.entry(name).or_default().push(run);
                }
            }
            let peer = "memcached -t 2, virtio-net, spymemcached";
            for (client, what) in [("own", ", C library"), ("unmodified", ", spymemcached, ginnel run")] {
                for (figure, unit, better, name, scale, target) in [
                    ("", "k/s", Better::Higher, "OVERALL Throughput(ops/sec)", 1e-3, Some(target)),
                    (", read", "us", Better::Lower, "READ AverageLatency(us)", 1.0, None),
                ] {
                    let column = |runs: &[HashMap<String, f64>]| -> Vec<f64> {
                        runs.iter().map(|run| run.get(name).map_or(f64::NAN, |n| n * scale)).collect()
                    };
                    let (own, peers) = (column(&runs[client]), column(&runs["memcached"]));
                    let case = format!("{case}{what}{figure}");
                    self.report.pairs(case, unit, better, &own, peer, &peers, target, &note);
                }
            }
        }
        drop((servers, daemons));
        Ok(())
    }
}
