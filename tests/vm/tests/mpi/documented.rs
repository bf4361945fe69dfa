//! The statements of docs/mpi.md about two VMs.

use crate::{MPIS, PATIENCE, ensure_sent, is_soak, source, start_endless, stop_endless, timed};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use vmtest::mpi::{Cluster, FILES};

/// The number of ranks in the commands of the page.
const RANKS: usize = 4;

/// The text of the page.
const PAGE: &str = include_str!("../../../../docs/mpi.md");

/// Returns the commands of its chapter: the first prepares the shell, and each of the others starts a job.
fn commands() -> Result<(&'static str, Vec<&'static str>)> {
    let chapter = PAGE.split_once("\n## On two VMs\n").context("a chapter")?.1;
    let chapter = chapter.split("\n## ").next().unwrap_or(chapter);
    let block =
        chapter.split_once("```sh\n").context("commands")?.1.split("```").next().context("their end")?;
    let mut lines = block.lines();
    Ok((lines.next().context("a first line")?, lines.collect()))
}

/// Runs the commands of the page exactly as they are written.
pub fn the_commands_of_the_page_work(cluster: &Cluster<'_>) -> Result<()> {
    let (prepare, jobs) = commands()?;
    ensure!(jobs.len() == MPIS.len(), "{jobs:?}");
    for (mpi, job) in MPIS.iter().zip(jobs) {
        ensure!(job.starts_with(&format!("mpirun.{mpi} ")) && job.ends_with(" -n 4 ./program"), "{job}");
        let lines = format!("{prepare}\n{job}");
        // All of the checks take minutes with Open MPI, because its ranks share the one processor of a VM.
        let is_checked = is_soak() || *mpi == "mpich";
        let run = || if is_checked { check(cluster, mpi, &lines) } else { add_up(cluster, mpi, &lines) };
        // Ranks in the same VM use its own shared memory.
        ensure_sent(&timed(job, run)?, RANKS, 200_000).context(job)?;
    }
    Ok(())
}

/// Runs a job whose `./program` checks all data. Returns what `ginnel verbs` showed at its end.
fn check(cluster: &Cluster<'_>, mpi: &str, lines: &str) -> Result<String> {
    let checks = cluster.compile(&format!("mpicc.{mpi}"), &source("checks"))?;
    make_program(cluster, &format!("{checks} 'ginnel verbs rdma --json >{FILES}/proof'"))?;
    let said = cluster.run(lines, PATIENCE)?;
    ensure!(said.contains(&format!("all data are right: {RANKS} ranks")), "{said}");
    Ok(fs::read_to_string(cluster.files().join("proof"))?)
}

/// Runs a job whose `./program` adds numbers up. Returns what `ginnel verbs` showed on the host meanwhile.
fn add_up(cluster: &Cluster<'_>, mpi: &str, lines: &str) -> Result<String> {
    let endless = cluster.compile(&format!("mpicc.{mpi}"), &source("endless"))?;
    make_program(cluster, &format!("{endless} {FILES}/stop"))?;
    let job = start_endless(cluster, lines, RANKS)?;
    let proof = cluster.bed.host(&cluster.ginnel.on_host("ginnel verbs rdma --json")?)?.ok()?.stdout;
    stop_endless(cluster)?;
    let said = job.wait(PATIENCE)?.ok()?.stdout;
    ensure!(said.contains(&format!("all sums are right: {RANKS} ranks")), "{said}");
    Ok(proof)
}

/// Makes `./program`, a script that runs a command.
fn make_program(cluster: &Cluster<'_>, command: &str) -> Result<()> {
    let program = cluster.files().join("program");
    fs::write(&program, format!("#!/bin/sh\nexec {command}\n"))?;
    Ok(fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?)
}
