//! Unmodified MPI libraries, as the distribution has them: their ranks are processes of one machine, and send over a segment.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::stage::have;
use crate::verbs::{DEVICE, Killed, Verbs, expect_good, text, used};
use crate::world::wait_for;

/// Room for the buffers of eight ranks.
const SIZE: &str = "3G";

/// An MPI, and what is set in addition for ranks of one machine, which would use its shared memory.
struct Mpi {
    name: &'static str,
    settings: &'static [(&'static str, &'static str)],
    /// Options of the program.
    options: &'static str,
}

/// Of Open MPI's components for one-sided communication, only that for shared memory makes shared windows, and it would take all
/// others too.
const MPIS: [Mpi; 2] = [
    Mpi { name: "mpich", settings: &[("UCX_TLS", "self,rc_v")], options: "" },
    Mpi {
        name: "openmpi",
        settings: &[
            ("UCX_TLS", "self,rc_v"),
            ("OMPI_MCA_osc", "ucx"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ],
        options: "--no-shared-windows",
    },
];

/// What a shell has to do for a program to have the environment.
fn environment(verbs: &Verbs) -> String {
    let output = verbs.ginnel("mpi-env web").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A C program, compiled for an MPI.
fn compiled(verbs: &Verbs, mpi: &Mpi, name: &str) -> String {
    compiled_by(verbs, &format!("mpicc.{}", mpi.name), name)
}

fn compiled_by(verbs: &Verbs, compiler: &str, name: &str) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/command/mpi/{name}.c"));
    let program = verbs.world.files().join(format!("{name}.{compiler}"));
    let mut compiler = Command::new(compiler);
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
        .arg("-lm");
    assert!(compiler.status().unwrap().success(), "{compiler:?}");
    program.to_str().unwrap().to_owned()
}

/// Starts a program with so many ranks.
fn start(verbs: &Verbs, mpi: &Mpi, ranks: usize, program: &str) -> Child {
    start_by(verbs, &format!("mpirun.{}", mpi.name), mpi, ranks, program)
}

fn start_by(verbs: &Verbs, starter: &str, mpi: &Mpi, ranks: usize, program: &str) -> Child {
    let script = format!("{}\n{}\nexec env {starter} -n {ranks} {program}", environment(verbs), exports(mpi));
    let mut command = Command::new("sh");
    command.args(["-c", &script]).env("GINNEL_SOCKET", verbs.world.socket()).env_remove("LD_LIBRARY_PATH");
    command
        .current_dir(verbs.world.files())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Runs a program with so many ranks.
fn run(verbs: &Verbs, mpi: &Mpi, ranks: usize, program: &str) -> String {
    expect_good(&["mpirun", mpi.name, program], start(verbs, mpi, ranks, program))
}

/// Whether both MPIs are there.
fn have_both() -> bool {
    have(&["mpicc.mpich", "mpirun.mpich", "mpicc.openmpi", "mpirun.openmpi"])
}

fn is_soak() -> bool {
    std::env::var_os("GINNEL_SOAK").is_some()
}

fn exports(mpi: &Mpi) -> String {
    mpi.settings.iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect()
}

#[test]
fn data_are_right_and_go_over_the_segment() {
    if !have_both() {
        return;
    }
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "checks");
        let proof = verbs.world.files().join("proof");
        let ginnel = env!("CARGO_BIN_EXE_ginnel");
        for &ranks in if is_soak() { &[2, 4, 8][..] } else { &[4] } {
            let command = format!("{ginnel} verbs web --json >{}", proof.display());
            let said = run(&verbs, &mpi, ranks, &format!("{program} {} '{command}'", mpi.options));
            assert!(said.contains(&format!("all data are right: {ranks} ranks")), "{}: {said}", mpi.name);
            let devices: Value = serde_json::from_slice(&std::fs::read(&proof).unwrap()).unwrap();
            assert_eq!(devices[0]["device"], DEVICE);
            let bytes: Vec<_> = devices[0]["endpoints"].as_array().unwrap().iter().map(sent).collect();
            // A message of 2 MB, and others, to the neighbour alone.
            let have_sent = bytes.iter().filter(|bytes| **bytes > 4_000_000).count();
            assert_eq!(have_sent, ranks, "{} with {ranks} ranks: {devices}", mpi.name);
        }
    }
}

/// The bytes that the connected queue pairs of a program have sent, written and read.
fn sent(endpoint: &Value) -> u64 {
    let pairs = endpoint["queue_pairs"].as_array().unwrap().iter();
    pairs.filter(|pair| pair["kind"] == "rc").map(|pair| pair["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn solvers_find_what_is_known() {
    if !have_both() {
        return;
    }
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "solvers");
        for &ranks in if is_soak() { &[2, 4, 8][..] } else { &[2, 4] } {
            let said = run(&verbs, &mpi, ranks, &program);
            assert!(said.contains(&format!("both are solved: {ranks} ranks")), "{}: {said}", mpi.name);
        }
    }
}

/// What HPCC is told: a system of 400 equations, for four ranks in a square. Its other problems follow from that size.
const HPCC_INPUT: &str = "\
HPLinpack benchmark input file
Ginnel
HPL.out      output file name
8            device out (a file)
1            # of problem sizes
400          Ns
1            # of NBs
80           NBs
0            PMAP
1            # of process grids
2            Ps
2            Qs
16.0         threshold
1            # of panel fact
2            PFACTs
1            # of recursive stopping criteria
4            NBMINs
1            # of panels in recursion
2            NDIVs
1            # of recursive panel fact
1            RFACTs
1            # of broadcast
1            BCASTs
1            # of lookahead depth
1            DEPTHs
2            SWAP
64           swapping threshold
0            L1
0            U
1            Equilibration
8            memory alignment in double
##### (ignored)
0            # of additional problem sizes for PTRANS
1200         values of N
0            # of additional blocking sizes for PTRANS
40           values of NB
";

#[test]
fn all_residuals_of_hpcc_pass() {
    if !have(&["hpcc", "mpirun.openmpi"]) {
        return;
    }
    let verbs = Verbs::sized(SIZE);
    std::fs::write(verbs.world.files().join("hpccinf.txt"), HPCC_INPUT).unwrap();
    run(&verbs, &MPIS[1], 4, "hpcc");
    let said = std::fs::read_to_string(verbs.world.files().join("hpccoutf.txt")).unwrap();
    assert!(said.lines().any(|line| line == "Success=1") && !said.contains("FAILED"), "{said}");
    let failed = said.lines().filter(|line| line.contains("completed and failed residual checks"));
    let failed: Vec<_> = failed.map(str::trim_start).collect();
    assert!(failed.len() == 2 && failed.iter().all(|line| line.starts_with("0 tests")), "{said}");
}

#[test]
fn symmetric_memory_is_reached_by_all() {
    if !have_both() || !have(&["oshcc", "oshrun"]) {
        return;
    }
    let openmpi = &MPIS[1];
    let verbs = Verbs::sized(SIZE);
    let program = compiled_by(&verbs, "oshcc", "symmetric");
    for &pes in if is_soak() { &[2, 4, 8][..] } else { &[2] } {
        let job = start_by(&verbs, "SHMEM_SYMMETRIC_HEAP_SIZE=16M oshrun", openmpi, pes, &program);
        let said = expect_good(&["oshrun", &program], job);
        assert!(said.contains(&format!("all of the memory is right: {pes} PEs")), "{said}");
    }
}

/// A job that adds numbers up until it is stopped.
struct Endless {
    job: Killed,
    out: BufReader<ChildStdout>,
    /// The processes of its ranks.
    pids: Vec<String>,
}

impl Endless {
    /// Starts it.
    fn spawn(verbs: &Verbs, mpi: &Mpi, ranks: usize, program: &str, how: &str) -> Self {
        let stop = verbs.world.files().join("stop");
        let mut job = start(verbs, mpi, ranks, &format!("{program} {} {how}", stop.display()));
        let out = BufReader::new(job.stdout.take().unwrap());
        Self { job: Killed(Some(job)), out, pids: Vec::new() }
    }

    /// Waits until each rank is at work; false if the job has ended.
    fn begin(&mut self, ranks: usize) -> bool {
        while self.pids.len() < ranks {
            let mut line = String::new();
            if self.out.read_line(&mut line).unwrap() == 0 {
                return false;
            }
            self.pids.extend(line.trim().strip_prefix("at work: ").map(str::to_owned));
        }
        true
    }

    /// Starts it, and waits until each rank is at work.
    fn start(verbs: &Verbs, mpi: &Mpi, ranks: usize) -> Self {
        let program = compiled(verbs, mpi, "endless");
        let mut job = Self::spawn(verbs, mpi, ranks, &program, "");
        assert!(job.begin(ranks), "{} has ended: {:?}", mpi.name, job.end());
        job
    }

    /// Waits until it has ended; whether it has succeeded, and what it said.
    fn end(mut self) -> (bool, String) {
        let mut said = String::new();
        self.out.read_to_string(&mut said).unwrap();
        let output = self.job.0.take().unwrap().wait_with_output().unwrap();
        (output.status.success(), said + &String::from_utf8_lossy(&output.stderr))
    }
}

#[test]
fn jobs_outlast_a_daemon_and_end_with_a_rank() {
    const RANKS: usize = 3;
    if !have_both() {
        return;
    }
    for mpi in MPIS {
        let mut verbs = Verbs::sized(SIZE);
        let before = used(&verbs);
        let job = Endless::start(&verbs, &mpi, RANKS);
        for _ in 0..3 {
            verbs.world.replace_daemon();
        }
        std::fs::write(verbs.world.files().join("stop"), "").unwrap();
        let (is_good, said) = job.end();
        assert!(is_good && said.contains("all sums are right: 3 ranks"), "{}: {said}", mpi.name);
        wait_for("the return of all memory", || used(&verbs) == before);

        std::fs::remove_file(verbs.world.files().join("stop")).unwrap();
        let job = Endless::start(&verbs, &mpi, RANKS);
        let pids = job.pids.clone();
        let killed = Instant::now();
        let status = Command::new("kill").args(["-KILL", &pids[1]]).status().unwrap();
        assert!(status.success());
        let (is_good, said) = job.end();
        let took = killed.elapsed();
        assert!(!is_good && !said.contains("all sums are right"), "{}: {said}", mpi.name);
        println!("{}: a job has ended {took:?} after one of its ranks", mpi.name);
        assert!(took < Duration::from_secs(20), "{}: {took:?}: {said}", mpi.name);
        let is_there = |pid: &String| Path::new(&format!("/proc/{pid}")).exists();
        wait_for("the end of all ranks", || !pids.iter().any(is_there));
        wait_for("the return of all memory", || used(&verbs) == before);
    }
}

#[test]
fn jobs_one_after_another_leave_nothing() {
    if !have_both() {
        return;
    }
    let files = |verbs: &Verbs| -> Vec<_> {
        let entries = std::fs::read_dir(verbs.world.path().join("shm")).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    for mpi in MPIS {
        let verbs = Verbs::sized(SIZE);
        let program = compiled(&verbs, &mpi, "solvers");
        let before = (used(&verbs), files(&verbs));
        for job in 0..if is_soak() { 500 } else { 3 } {
            run(&verbs, &mpi, 2, &program);
            wait_for(&format!("the return of all memory after job {job} of {}", mpi.name), || {
                (used(&verbs), files(&verbs)) == before
            });
        }
    }
}

#[test]
fn jobs_at_once_run_until_the_segment_is_full_which_is_said() {
    const JOBS: usize = 24;
    if !have_both() {
        return;
    }
    let mpi = &MPIS[0];
    // Each rank of this MPI takes some 75 MB if it can get them, and much of that can be elsewhere. None ends before all have begun.
    let verbs = Verbs::sized("256M");
    let program = compiled(&verbs, mpi, "endless");
    let before = used(&verbs);
    let mut jobs: Vec<_> = (0..JOBS).map(|_| Endless::spawn(&verbs, mpi, 2, &program, "rests")).collect();
    let begun: Vec<_> = jobs.iter_mut().map(|job| job.begin(2)).collect();
    std::fs::write(verbs.world.files().join("stop"), "").unwrap();
    let ends: Vec<_> = jobs.into_iter().map(Endless::end).collect();
    let (good, bad): (Vec<_>, Vec<_>) = ends.into_iter().partition(|(is_good, _)| *is_good);
    println!("{} of {JOBS} jobs found room", good.len());
    assert!(good.iter().all(|(_, said)| said.contains("all sums are right")), "{good:?}");
    assert!(!good.is_empty() && !bad.is_empty(), "{begun:?}");
    for (_, said) in bad {
        assert!(said.contains("libibverbs: Warning: "), "{said}");
    }
    wait_for("the return of all memory", || used(&verbs) == before);
}

#[test]
fn the_environment_is_that_of_a_segment_that_is_a_device() {
    let verbs = Verbs::new();
    let said = environment(&verbs);
    for line in ["export UCX_NET_DEVICES='ginnel_web:1'", "export OMPI_MCA_pml='ucx'"] {
        assert!(said.lines().any(|said| said == line), "{said}");
    }
    // Open MPI passes on what is no setting of its own.
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
