//! MPI jobs over VMs, started as users start them: `mpirun` on one machine starts ranks on several over ssh, and the ranks send
//! over the segment that the machines share.

mod deaths;
mod devices;
mod documented;
mod host;
mod nwchem;

use anyhow::{Context, Result, ensure};
use kit::skip::missing;
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmtest::installation::Plan;
use vmtest::mpi::Cluster;
use vmtest::{Job, TestBed, wait_until};

kit::test_that_skips_are_seen!();

/// How long a job may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// The MPIs, by the endings of their programs' names.
const MPIS: [&str; 2] = ["mpich", "openmpi"];

/// All jobs use one pair of VMs, because starting the VMs takes longer than running a job.
#[test]
fn two_vms_and_the_host_run_jobs_that_end_when_a_rank_does() -> Result<()> {
    let missing = missing(&programs());
    kit::require!(missing.is_none(), "{missing:?} is not installed: `scripts/setup test` installs it");
    let bed = TestBed::new("mpi")?;
    let plan = Plan::new(&bed).vm("a").vm("b");
    let ginnel = plan.segment("rdma", 512, &["host", "a", "b"]).with_verbs().start()?;
    let mut cluster = Cluster::new(&bed, ginnel, &["a", "b"], |_, vm| vm)?;
    documented::the_commands_of_the_page_work(&cluster)?;
    host::ranks_are_on_the_host_and_in_vms(&cluster)?;
    nwchem::finds_the_same_energy(&cluster)?;
    deaths::of_daemons_ranks_and_a_vm(&mut cluster)
}

fn programs() -> Vec<&'static str> {
    let mpis = ["mpicc.mpich", "mpirun.mpich", "mpicc.openmpi", "mpirun.openmpi", "nwchem"];
    [&vmtest::mpi::PROGRAMS[..], &mpis].concat()
}

fn is_soak() -> bool {
    std::env::var_os("GINNEL_SOAK").is_some()
}

/// Returns the path of one of the programs of `tests/programs`.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../programs/mpi/{name}.c"))
}

/// Runs `work` and prints how long it took.
fn timed<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    let done = work().with_context(|| what.to_owned())?;
    println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    Ok(done)
}

/// Starts a job with shell commands in which this many ranks of endless.c add numbers up until [`stop_endless`], and waits
/// until all of them are at work.
fn start_endless(cluster: &Cluster<'_>, lines: &str, ranks: usize) -> Result<Job> {
    if let Err(e) = fs::remove_file(cluster.files().join("stop")) {
        ensure!(e.kind() == ErrorKind::NotFound, "the file that stops a job: {e}");
    }
    let job = cluster.start(lines)?;
    let are_at_work = || job.said().0.matches("at work: ").count() == ranks;
    wait_until("ranks at work", PATIENCE, || Ok(are_at_work() || !job.is_running()))?;
    ensure!(are_at_work(), "{lines}: {:?}", job.said());
    Ok(job)
}

/// Tells the job to end, which it does with "all sums are right".
fn stop_endless(cluster: &Cluster<'_>) -> Result<()> {
    fs::write(cluster.files().join("stop"), "").context("the file that stops a job")
}

/// Returns the endpoints of the first device in the JSON of `ginnel verbs`.
fn endpoints(proof: &str) -> Result<Vec<Value>> {
    let devices: Value = serde_json::from_str(proof).with_context(|| proof.to_owned())?;
    Ok(devices[0]["endpoints"].as_array().context("endpoints")?.clone())
}

/// Returns how many bytes the connected queue pairs of a program have sent, written and read.
fn sent(endpoint: &Value) -> u64 {
    let pairs = endpoint["queue_pairs"].as_array().into_iter().flatten();
    pairs.filter(|pair| pair["kind"] == "rc").filter_map(|pair| pair["bytes"].as_u64()).sum()
}

/// Fails unless this many ranks have each sent at least `least` bytes over the segment.
fn ensure_sent(proof: &str, ranks: usize, least: u64) -> Result<()> {
    let have_sent = endpoints(proof)?.iter().filter(|endpoint| sent(endpoint) > least).count();
    ensure!(have_sent == ranks, "{have_sent} of {ranks} ranks have sent: {proof}");
    Ok(())
}
