//! MPI programs whose ranks are in two VMs, over a segment and over TCP on virtio-net, in the same VMs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use vmtest::Bed;
use vmtest::installation::Plan;
use vmtest::mpi::{Cluster, FILES};

use super::{EXCHANGE, Mpi};
use crate::report::Better;

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(900);

/// How a program is started, one rank in each VM, without Ginnel and with it.
struct Launcher {
    name: &'static str,
    compiler: &'static str,
    /// The environment in which its messages go by TCP.
    tcp: &'static str,
    start: &'static str,
}

const MPICH: Launcher = Launcher {
    name: "mpich",
    compiler: "mpicc.mpich",
    tcp: "export UCX_TLS=self,tcp UCX_NET_DEVICES=eth0",
    start: "mpirun.mpich -hosts a,b -n 2",
};
const OPENMPI: Launcher = Launcher {
    name: "openmpi",
    compiler: "mpicc.openmpi",
    tcp: "export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp",
    start: "mpirun.openmpi --host a,b -n 2",
};
/// The environment in which they go over the segment.
const OVER_SEGMENT: &str = "eval \"$(ginnel mpi-env rdma)\"";

/// A program, and the figures that it prints.
struct Program {
    launcher: &'static Launcher,
    /// The command; `{}` stands for the folder of its files.
    command: String,
    /// A file that it writes, unless it prints its figures.
    output: Option<&'static str>,
    /// Of each: the row's name, what its line begins with, the unit, what is better, and the target.
    figures: Vec<(String, &'static str, &'static str, Better, f64)>,
    note: &'static str,
}

impl Mpi<'_> {
    /// Between two VMs.
    pub fn vms(&mut self) -> Result<()> {
        let mut programs = programs();
        programs.retain(|program| program.figures.iter().any(|(case, ..)| self.is_wanted(case)));
        if programs.is_empty() {
            return Ok(());
        }
        let bed = Bed::new("bench-mpi-vms")?;
        let ginnel =
            Plan::new(&bed).vm("a").vm("b").segment("rdma", 512, &["host", "a", "b"]).with_verbs().start()?;
        let cluster = Cluster::new(&bed, ginnel, &["a", "b"], |_, vm| vm)?;
        prepare(&cluster)?;
        for program in programs {
            self.compare_in_vms(&cluster, &program)?;
        }
        Ok(())
    }

    fn compare_in_vms(&mut self, cluster: &Cluster<'_>, program: &Program) -> Result<()> {
        let mut figures = vec![[Vec::new(), Vec::new()]; program.figures.len()];
        for pair in 0..self.vm_pairs {
            // Whoever comes first changes, in case that matters.
            for of_peer in [pair % 2 == 0, pair % 2 != 0] {
                let environment = if of_peer { program.launcher.tcp } else { OVER_SEGMENT };
                let said = run(cluster, program, environment)?;
                for (all, (case, begin, ..)) in figures.iter_mut().zip(&program.figures) {
                    all[usize::from(of_peer)]
                        .push(number(&said, begin).with_context(|| format!("{case}: {said}"))?);
                }
            }
        }
        for ([own, peers], (case, _, unit, better, target)) in figures.iter().zip(&program.figures) {
            self.report.pairs(
                case,
                unit,
                *better,
                own,
                "TCP over virtio-net",
                peers,
                Some(*target),
                program.note,
            );
        }
        Ok(())
    }
}

/// What is run in VMs.
fn programs() -> Vec<Program> {
    let mut programs = Vec::new();
    for launcher in [&MPICH, &OPENMPI] {
        for (what, arguments, target) in
            [("8 B, one way", "pingpong 8 100", 60.0), ("1 MiB, one way", "pingpong 1048576 3", 8.0)]
        {
            let case = format!("VM to VM, {}, {what}", launcher.name);
            programs.push(Program {
                launcher,
                command: format!("{{}}/exchange.{} {arguments}", launcher.name),
                output: None,
                figures: vec![(case, "", "us", Better::Lower, target)],
                note: "median of 11 runs",
            });
        }
    }
    let figure = |case: &str, begin, unit, better| (format!("VM to VM, {case}"), begin, unit, better, 1.0);
    programs.push(Program {
        launcher: &MPICH,
        command: "{}/solvers.mpich".into(),
        output: None,
        figures: vec![
            figure("conjugate gradients (MPICH)", "conjugate gradients: ", "s", Better::Lower),
            figure("Fourier transform (MPICH)", "Fourier transform: ", "s", Better::Lower),
        ],
        note: "the program's own time",
    });
    programs.push(Program {
        launcher: &OPENMPI,
        command: "lmp -log none -in {}/melt.in".into(),
        output: None,
        figures: vec![figure("LAMMPS melt (Open MPI)", "Loop time of ", "s", Better::Lower)],
        note: "its loop time",
    });
    let of_hpcc =
        |case: &str, begin, unit| figure(&format!("HPCC, {case} (Open MPI)"), begin, unit, Better::Higher);
    programs.push(Program {
        launcher: &OPENMPI,
        command: "hpcc".into(),
        output: Some("hpccoutf.txt"),
        figures: vec![
            of_hpcc("HPL", "HPL_Tflops=", "Tflop/s"),
            of_hpcc("PTRANS", "PTRANS_GBs=", "GB/s"),
            of_hpcc("RandomAccess", "MPIRandomAccess_GUPs=", "Gup/s"),
            of_hpcc("FFT", "MPIFFT_Gflops=", "Gflop/s"),
        ],
        note: "its own figures",
    });
    programs
}

/// Puts programs and their input where both VMs find them.
fn prepare(cluster: &Cluster<'_>) -> Result<()> {
    let files = cluster.files();
    fs::write(files.join("exchange.c"), EXCHANGE)?;
    for launcher in [&MPICH, &OPENMPI] {
        cluster.compile(launcher.compiler, &files.join("exchange.c"))?;
    }
    cluster.compile(MPICH.compiler, &of_tests("solvers.c"))?;
    fs::copy(of_tests("melt.in"), files.join("melt.in"))?;
    fs::write(files.join("hpccinf.txt"), HPCC_INPUT)?;
    Ok(())
}

/// A file of the tests on one machine.
fn of_tests(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/cli/tests/command/mpi").join(name)
}

/// What a program says in an environment, or writes.
fn run(cluster: &Cluster<'_>, program: &Program, environment: &str) -> Result<String> {
    let output = program.output.map(|name| cluster.files().join(name));
    if let Some(output) = &output {
        // It would be appended to.
        let _ = fs::remove_file(output);
    }
    let command = program.command.replace("{}", FILES);
    let said = cluster.run(&format!("{environment}\nexec {} {command}", program.launcher.start), PATIENCE)?;
    Ok(match output {
        Some(output) => fs::read_to_string(output)?,
        None => said,
    })
}

/// The number with which a line goes on that begins so.
fn number(said: &str, begin: &str) -> Option<f64> {
    let lines = said.lines().filter_map(|line| line.trim_start().strip_prefix(begin));
    lines.filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).next_back()
}

/// What HPCC is told: a system of 256 equations, for two ranks.
const HPCC_INPUT: &str = "\
HPLinpack benchmark input file
Ginnel
HPL.out      output file name
8            device out (a file)
1            # of problem sizes
256          Ns
1            # of NBs
64           NBs
0            PMAP
1            # of process grids
1            Ps
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
