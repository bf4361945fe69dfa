//! A program of the distribution that uses one-sided communication: NWChem, with Global Arrays.

use crate::{PATIENCE, ensure_sent, timed};
use anyhow::{Context, Result, ensure};
use std::fs;
use vmtest::mpi::{Cluster, FILES};

/// The input: water, by the Hartree-Fock method. Rank 0 runs its last line while all ranks are connected.
const WATER: &str = r#"start water
memory 200 mb
geometry units angstrom
  O  0.0   0.0    0.0
  H  0.0   0.757  0.586
  H  0.0  -0.757  0.586
end
basis
  * library sto-3g
end
task scf energy
"#;

/// Checks that ranks in two VMs find the same energy as ranks on the host over shared memory.
pub fn finds_the_same_energy(cluster: &Cluster<'_>) -> Result<()> {
    const RANKS: usize = 2;
    let files = cluster.files();
    fs::write(files.join("water.nw"), WATER)?;
    let proof = format!("task shell \"ginnel verbs rdma --json >{FILES}/proof\"\n");
    fs::write(files.join("proof.nw"), format!("{WATER}{proof}"))?;
    let own = files.join("own");
    fs::create_dir(&own)?;
    let line = format!(
        "cd {} && mpirun.openmpi --allow-run-as-root --oversubscribe -n {RANKS} nwchem ../water.nw",
        own.display()
    );
    let expected = energy(&cluster.bed.host(&line)?.ok()?.stdout)?;
    let job = format!("mpirun.openmpi --host a,b -n {RANKS} nwchem proof.nw");
    let lines = format!("eval \"$(ginnel mpi-env rdma)\"\nexec {job}");
    let found = energy(&timed(&job, || cluster.run(&lines, PATIENCE))?)?;
    println!("nwchem: {found}, and {expected} on the host");
    // The iterations end when nothing changes by more than this.
    ensure!((found - expected).abs() < 1e-6, "{found} instead of {expected}");
    ensure_sent(&fs::read_to_string(files.join("proof"))?, RANKS, 10_000).context(job)
}

/// Returns the energy that NWChem has found, in hartree.
fn energy(said: &str) -> Result<f64> {
    let number = said.split_once("Total SCF energy =").and_then(|(_, rest)| rest.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).with_context(|| format!("no energy: {said}"))
}
