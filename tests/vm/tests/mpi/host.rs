//! Jobs whose ranks are on the host and in VMs.

use crate::{MPIS, PATIENCE, ensure_sent, is_soak, source, timed};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use vmtest::mpi::{Cluster, FILES, HOST};

/// Runs one rank on each of two VMs and the host, started from a VM and from the host.
pub fn ranks_are_on_the_host_and_in_vms(cluster: &Cluster<'_>) -> Result<()> {
    const RANKS: usize = 3;
    let _host = cluster.add_host()?;
    for mpi in MPIS.into_iter().filter(|mpi| is_soak() || *mpi == "mpich") {
        let program = cluster.compile(&format!("mpicc.{mpi}"), &source("checks"))?;
        let hosts = match mpi {
            "mpich" => "-hosts a,b,host",
            _ => "--host a,b,host",
        };
        let job = format!("mpirun.{mpi} {hosts} -n {RANKS}");
        let lines = format!(
            "eval \"$(ginnel mpi-env rdma)\"\n\
             exec {job} {program} 'ginnel verbs rdma --json >{FILES}/proof; ginnel status --json >{FILES}/status'"
        );
        let said = timed(&job, || cluster.run(&lines, PATIENCE))?;
        ensure!(said.contains(&format!("all data are right: {RANKS} ranks")), "{job}: {said}");
        let proof = fs::read_to_string(cluster.files().join("proof"))?;
        ensure_sent(&proof, RANKS, 1_000_000).context(job)?;
        let status: Value = serde_json::from_slice(&fs::read(cluster.files().join("status"))?)?;
        let endpoints = status["endpoints"].as_array().context("endpoints")?.iter();
        let mut machines: Vec<_> = endpoints.filter_map(|endpoint| endpoint["member"].as_str()).collect();
        machines.sort_unstable();
        ensure!(machines == ["a", "b", HOST], "{machines:?}");
    }
    Ok(())
}
