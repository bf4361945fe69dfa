//! Daemons, ranks and a VM die while a job is at work in two VMs.

use crate::{MPIS, PATIENCE, is_soak, source, start_endless, stop_endless, timed};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};
use vmtest::mpi::{Cluster, FILES, LAUNCHER};
use vmtest::{Exit, Job, Vm, wait_until};

/// The number of ranks: 0 and 2 are in VM a, where `mpirun` runs, and 1 is in VM b.
const RANKS: usize = 3;
/// How long a job may take to end after a rank has died, on a machine that emulates and has other things to do.
const END: Duration = Duration::from_secs(30);
/// How long a rank may continue to write to a VM that is dead.
const TOLD: Duration = Duration::from_secs(2);
/// The code with which a rank aborts, in endless.c.
const CODE: i32 = 7;

/// Kills daemons, ranks and VM b in turn.
pub fn of_daemons_ranks_and_a_vm(cluster: &mut Cluster<'_>) -> Result<()> {
    for mpi in MPIS.into_iter().filter(|mpi| is_soak() || *mpi == "mpich") {
        let program = cluster.compile(&format!("mpicc.{mpi}"), &source("endless"))?;
        let before = used(cluster)?;
        timed(&format!("{mpi}: daemons die"), || daemons(cluster, mpi, &program))?;
        nothing_is_left(cluster, &program, &before)?;
        timed(&format!("{mpi}: a rank aborts"), || abort(cluster, mpi, &program))?;
        nothing_is_left(cluster, &program, &before)?;
        timed(&format!("{mpi}: a rank dies"), || rank(cluster, mpi, &program))?;
        nothing_is_left(cluster, &program, &before)?;
        timed(&format!("{mpi}: a VM dies, to which a rank writes"), || vm(cluster, mpi, &program, "puts"))?;
        nothing_is_left(cluster, &program, &before)?;
        if is_soak() {
            timed("the VM comes back", || cluster.restart(1))?;
            timed(&format!("{mpi}: a VM dies, in a collective"), || vm(cluster, mpi, &program, ""))?;
            nothing_is_left(cluster, &program, &before)?;
            timed("the VM comes back", || cluster.restart(1))?;
        }
    }
    Ok(())
}

/// Checks that the job continues with other daemons, and ends when it is told to.
fn daemons(cluster: &mut Cluster<'_>, mpi: &str, program: &str) -> Result<()> {
    let job = start(cluster, mpi, program, "")?;
    cluster.ginnel.kill_daemon()?;
    cluster.ginnel.start_daemon()?;
    for vm in 0..cluster.vms.len() {
        cluster.replace_daemon(vm)?;
    }
    stop_endless(cluster)?;
    let output = job.wait(PATIENCE)?.ok()?;
    ensure!(output.stdout.contains(&format!("all sums are right: {RANKS} ranks")), "{output:?}");
    Ok(())
}

/// Lets a rank in VM b end the job. `mpirun` must return the rank's code.
fn abort(cluster: &Cluster<'_>, mpi: &str, program: &str) -> Result<()> {
    let job = start(cluster, mpi, program, "aborts")?;
    let begun = Instant::now();
    stop_endless(cluster)?;
    let output = job.wait(END)?;
    println!("{mpi}: the job has ended {:?} after a rank could abort", begun.elapsed());
    ensure!(output.exit == Exit::Code(CODE), "{output:?}");
    Ok(())
}

/// Kills the rank in VM b.
fn rank(cluster: &Cluster<'_>, mpi: &str, program: &str) -> Result<()> {
    let job = start(cluster, mpi, program, "")?;
    let begun = Instant::now();
    cluster.vm("b")?.run(&format!("kill -9 $(pidof {})", name(program)))?.ok()?;
    let ranks = gone(cluster.vm("a")?, program)?;
    let output = job.wait(END)?;
    println!(
        "{mpi}: a rank was killed: the others were gone after {:?}, the job after {:?}",
        ranks - begun,
        begun.elapsed()
    );
    ensure!(output.exit != Exit::Code(0) && !output.stdout.contains("all sums are right"), "{output:?}");
    Ok(())
}

/// Kills VM b. A rank that writes to it gets the MPI's error; `mpirun` ends a rank that waits for others once ssh has given up.
fn vm(cluster: &Cluster<'_>, mpi: &str, program: &str, how: &str) -> Result<()> {
    let job = start(cluster, mpi, program, how)?;
    let begun = Instant::now();
    cluster.vm("b")?.kill_qemu()?;
    if how == "puts" {
        job.wait_for_line("transport retry counter exceeded", END)?;
        let told = begun.elapsed();
        println!("{mpi}: a VM was killed: a rank that writes to it was told after {told:?}");
        ensure!(told < TOLD, "{told:?}");
    }
    let ranks = gone(cluster.vm("a")?, program)?;
    let output = job.wait(END)?;
    println!(
        "{mpi}: a VM was killed: the other ranks were gone after {:?}, the job after {:?}",
        ranks - begun,
        begun.elapsed()
    );
    ensure!(output.exit != Exit::Code(0) && !output.stdout.contains("all sums are right"), "{output:?}");
    Ok(())
}

/// Starts a job and waits until all its ranks are at work. It adds numbers up until [`stop_endless`].
fn start(cluster: &Cluster<'_>, mpi: &str, program: &str, how: &str) -> Result<Job> {
    let hosts = match mpi {
        "mpich" => format!("-launcher-exec {LAUNCHER} -hosts a,b"),
        _ => format!("--mca plm_rsh_agent {LAUNCHER} --host a:2,b:1 --map-by node"),
    };
    let lines = format!(
        "eval \"$(ginnel mpi-env rdma)\"\nexec mpirun.{mpi} {hosts} -n {RANKS} {program} {FILES}/stop {how}"
    );
    start_endless(cluster, &lines, RANKS)
}

fn name(program: &str) -> &str {
    program.rsplit('/').next().unwrap_or(program)
}

/// Waits until no rank is in a VM, and returns the time.
fn gone(vm: &Vm, program: &str) -> Result<Instant> {
    let line = format!("while pidof {} >/dev/null; do usleep 10000; done", name(program));
    vm.run_within(END, &line)?.ok()?;
    Ok(Instant::now())
}

/// Returns what the host's daemon shows: the bytes of the segment in use, and the numbers of endpoints and blocks.
fn used(cluster: &Cluster<'_>) -> Result<[u64; 3]> {
    let status = cluster.bed.host(&cluster.ginnel.on_host("ginnel status --json")?)?.ok()?.stdout;
    let status: Value = serde_json::from_str(&status)?;
    let count = |what: &str| status[what].as_array().map(|all| all.len() as u64).context(what.to_owned());
    let used = status["segments"][0]["used"].as_u64().context("used")?;
    Ok([used, count("endpoints")?, count("blocks")?])
}

/// Waits until no rank is left, and everything that ranks had in the segment has been returned.
fn nothing_is_left(cluster: &Cluster<'_>, program: &str, before: &[u64; 3]) -> Result<()> {
    for vm in cluster.vms.iter().filter(|vm| vm.is_running()) {
        gone(vm, program)?;
    }
    let mut now = *before;
    let is_back = || {
        now = used(cluster)?;
        Ok(now == *before)
    };
    wait_until("the return of all memory", END, is_back)
        .with_context(|| format!("{now:?} is in use, and was {before:?}"))
}
