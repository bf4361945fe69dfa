//! Unmodified MPI libraries of the distribution. Their ranks are processes of one machine, and send over a segment.

mod deaths;
mod endless;
mod jobs;
mod mpi4py;
mod packaged;
mod sources;

kit::test_that_skips_are_seen!();

use programs::verbs::{DEVICE, Verbs, expect_good, text};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The size of a segment with room for the buffers of eight ranks.
const SIZE: &str = "3G";

type Settings = &'static [(&'static str, &'static str)];

/// An MPI implementation, or a similar library.
struct Mpi {
    name: &'static str,
    compiler: &'static str,
    starter: &'static str,
    /// C code that comes before a program, with the function that the program calls when it ends.
    witness: &'static str,
    /// Environment variables in addition to those that `ginnel mpi-env` prints.
    settings: &'static [Settings],
    /// Options of the program.
    options: &'static str,
}

/// Without these settings, the ranks of one machine would use its shared memory.
const NOTHING_BUT_SEGMENTS: Settings = &[("UCX_TLS", "self,rc_v")];
/// The settings with which Open MPI runs in these tests.
const ON_ANY_MACHINE: Settings = &[
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

const MPICH: Mpi = Mpi {
    name: "mpich",
    compiler: "mpicc.mpich",
    starter: "mpirun.mpich",
    witness: "witness",
    settings: &[NOTHING_BUT_SEGMENTS],
    options: "",
};

/// Among Open MPI's components for one-sided communication, only the one for shared memory creates shared windows, and it would handle
/// all other windows too.
const OPENMPI: Mpi = Mpi {
    name: "openmpi",
    compiler: "mpicc.openmpi",
    starter: "mpirun.openmpi",
    witness: "witness",
    settings: &[NOTHING_BUT_SEGMENTS, ON_ANY_MACHINE, &[("OMPI_MCA_osc", "ucx")]],
    options: "--no-shared-windows",
};

const OPENSHMEM: Mpi = Mpi {
    name: "openshmem",
    compiler: "oshcc",
    starter: "oshrun",
    witness: "symmetric_witness",
    settings: &[NOTHING_BUT_SEGMENTS, ON_ANY_MACHINE, &[("SHMEM_SYMMETRIC_HEAP_SIZE", "16M")]],
    options: "",
};

const MPIS: [Mpi; 2] = [MPICH, OPENMPI];

/// Returns shell commands that set the environment of a program.
fn environment(verbs: &Verbs) -> String {
    let output = verbs.ginnel("mpi-env web").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn exports<'s>(settings: impl IntoIterator<Item = &'s (&'s str, &'s str)>) -> String {
    settings.into_iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect()
}

/// Returns the path of a file next to these tests.
fn beside(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("mpi").join(file)
}

/// Compiles a C program for an MPI. Returns its path.
fn compiled(verbs: &Verbs, mpi: &Mpi, name: &str) -> String {
    compiled_with(verbs, mpi, name, &[])
}

/// The same as [`compiled`], with further options for the compiler, such as libraries.
fn compiled_with(verbs: &Verbs, mpi: &Mpi, name: &str, options: &[&str]) -> String {
    let source = beside(&format!("{name}.c"));
    let program = verbs.world.files().join(format!("{name}.{}", mpi.name));
    let mut compiler = Command::new(mpi.compiler);
    compiler
        .args([
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-stringop-overflow",
            "-Wno-deprecated-declarations",
            "-pthread",
            "-o",
        ])
        .arg(&program)
        .arg(source)
        .args(options)
        .arg("-lm");
    assert!(compiler.status().unwrap().success(), "{compiler:?}");
    program.to_str().unwrap().to_owned()
}

/// Starts a program with this many ranks, in the folder of the test's files.
fn start(verbs: &Verbs, mpi: &Mpi, ranks: usize, program: &str) -> Child {
    let settings = exports(mpi.settings.iter().copied().flatten());
    start_with(verbs, &(environment(verbs) + &settings), mpi.starter, ranks, program)
}

fn start_with(verbs: &Verbs, settings: &str, starter: &str, ranks: usize, program: &str) -> Child {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("{settings}\nexec {starter} -n {ranks} {program}"))
        .env("GINNEL_SOCKET", verbs.world.socket())
        .env_remove("LD_LIBRARY_PATH")
        .current_dir(verbs.world.files())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// The result of a job.
struct Done {
    said: String,
    /// The number of bytes that each rank has sent over the segment.
    sent: Vec<u64>,
}

/// Runs a program with this many ranks. Each of them must have sent data over the segment by the time it ends.
fn run(verbs: &Verbs, mpi: &Mpi, ranks: usize, program: &str) -> Done {
    let witness = compiled_with(verbs, mpi, mpi.witness, &["-shared", "-fPIC"]);
    let seen = verbs.world.files().join("seen");
    let _ = std::fs::remove_file(&seen);
    let looks = format!("{} verbs web --json >{}", kit::build::program("ginnel").display(), seen.display());
    let witnessed = format!("env LD_PRELOAD=\"$LD_PRELOAD:{witness}\" WITNESS='{looks}' {program}");
    let job = start(verbs, mpi, ranks, &witnessed);
    let said = expect_good(&["mpirun", mpi.name, program], job);
    let devices: Value = serde_json::from_slice(&std::fs::read(&seen).unwrap()).unwrap();
    assert_eq!(devices[0]["device"], DEVICE);
    let sent: Vec<_> = devices[0]["endpoints"].as_array().unwrap().iter().map(sent).collect();
    assert!(sent.len() == ranks && !sent.contains(&0), "{} with {ranks} ranks: {devices}", mpi.name);
    Done { said, sent }
}

/// Returns the number of bytes that the connected queue pairs of a program have sent, written and read.
fn sent(endpoint: &Value) -> u64 {
    let pairs = endpoint["queue_pairs"].as_array().unwrap().iter();
    pairs.filter(|pair| pair["kind"] == "rc").map(|pair| pair["bytes"].as_u64().unwrap()).sum()
}

/// Runs a program of Open MPI with this many ranks, which use the shared memory of their machine, and no part of Ginnel.
fn run_without(verbs: &Verbs, ranks: usize, program: &str) -> String {
    let own = exports([("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "self,vader")].iter().chain(ON_ANY_MACHINE));
    let job = start_with(verbs, &own, OPENMPI.starter, ranks, program);
    expect_good(&["mpirun without Ginnel", program], job)
}

/// The programs of both MPI implementations.
const BOTH: [&str; 4] = ["mpicc.mpich", "mpirun.mpich", "mpicc.openmpi", "mpirun.openmpi"];

fn is_soak() -> bool {
    std::env::var_os("GINNEL_SOAK").is_some()
}

#[test]
fn the_environment_names_the_segment_that_is_a_device() {
    let verbs = Verbs::new();
    let said = environment(&verbs);
    for line in ["export UCX_NET_DEVICES='ginnel_web:1'", "export OMPI_MCA_pml='ucx'"] {
        assert!(said.lines().any(|said| said == line), "{said}");
    }
    // Open MPI passes on variables that are not its own settings.
    let passed_on = said.lines().find(|line| line.starts_with("export OMPI_MCA_mca_base_env_list=")).unwrap();
    for name in ["LD_LIBRARY_PATH", "LD_PRELOAD", "GINNEL_SOCKET", "UCX_TLS", "FI_PROVIDER"] {
        assert!(passed_on.contains(name) && said.contains(&format!("export {name}='")), "{name}: {said}");
    }
    assert!(!passed_on.contains("OMPI_MCA_pml"), "{said}");
    let all = text(&verbs.ginnel("mpi-env web --all-devices").output().unwrap());
    assert!(all.contains("export UCX_NET_DEVICES='all'") && !all.contains("FI_VERBS_DEVICE_NAME"), "{all}");
    let refused = verbs.ginnel("mpi-env shared").output().unwrap();
    assert!(
        refused.status.code() == Some(1) && text(&refused).contains("no segment shared"),
        "{}",
        text(&refused)
    );
}
