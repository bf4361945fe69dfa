//! MPI between two VMs, over a segment and, for comparison, over TCP and their network cards.

use super::{EXCHANGE, LIBRARIES, Mpi, OVER_SEGMENT, Row, SEGMENT, compile, on_host, over_segment};
use crate::report::{BESIDE_HOST, Better, ON_HOST};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::Duration;
use vmtest::installation::Plan;
use vmtest::mpi::{Cluster, FILES};
use vmtest::{Accel, TestBed};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// The default number of pairs of runs.
const PAIRS: usize = 3;
/// The segment of processes of the host.
const LOCAL: &str = "local";
/// The alternative of most rows.
const TCP: &str = "TCP, virtio-net";
/// Two solvers that print how long they took.
const SOLVERS: &str = include_str!("../../../tests/programs/mpi/solvers.c");
/// A header that they share with other programs of the tests.
const CHECK: &str = include_str!("../../../tests/programs/mpi/check.h");
/// The inputs of LAMMPS and HPCC.
const MELT: &str = include_str!("../../../tests/programs/mpi/melt.in");
const HPCC: &str = include_str!("hpccinf.txt");

/// How an MPI starts two ranks, one in each VM, and how it is made to use TCP.
struct Library {
    name: &'static str,
    mpirun: &'static str,
    tcp: &'static str,
}

const MPICH: Library = Library {
    name: "mpich",
    mpirun: "mpirun.mpich -hosts a,b -n 2",
    tcp: "export UCX_TLS=tcp,self UCX_NET_DEVICES=eth0",
};
const OPENMPI: Library = Library {
    name: "openmpi",
    mpirun: "mpirun.openmpi --host a,b -n 2",
    tcp: "export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=eth0",
};

/// Global results of HPCC: their name in a row, their name in HPCC's summary, how many make a unit, and the unit.
const RESULTS: [(&str, &str, f64, &str); 4] = [
    ("VMs: HPCC, linear equations", "HPL_Tflops", 1e6, "MFlop/s"),
    ("VMs: HPCC, transposition", "PTRANS_GBs", 1e3, "MB/s"),
    ("VMs: HPCC, random access", "MPIRandomAccess_GUPs", 1e6, "k/s"),
    ("VMs: HPCC, Fourier transform", "MPIFFT_Gflops", 1e3, "MFlop/s"),
];

impl Mpi<'_> {
    /// Measures between two VMs with one rank in each.
    pub fn vms(&mut self) -> Result<()> {
        const CASES: [&str; 7] = [
            "VMs: mpich, 8 B, one way",
            "VMs: mpich, 1 MiB, one way",
            "VMs: openmpi, 8 B, one way",
            "VMs: openmpi, 1 MiB, one way",
            "VMs: conjugate gradients",
            "VMs: Fourier transform",
            "VMs: LAMMPS, melt",
        ];
        let mut cases = CASES.iter().chain(RESULTS.iter().map(|(case, ..)| case));
        if !cases.any(|case| self.wants(case, TCP)) && !self.wants("", ON_HOST) {
            return Ok(());
        }
        let bed = TestBed::new("bench-mpi-vms")?;
        let plan = Plan::new(&bed).vm("a").vm("b");
        let plan = plan.segment(SEGMENT, 512, &["a", "b"]).with_verbs();
        let ginnel = plan.segment(LOCAL, 512, &["host"]).with_verbs().start()?;
        let cluster = Cluster::new(&bed, ginnel, &["a", "b"], |_, vm| vm)?;
        let files = cluster.files();
        for (name, content) in [("check.h", CHECK), ("in.melt", MELT), ("hpccinf.txt", HPCC)] {
            std::fs::write(files.join(name), content)?;
        }
        let program = |library: &Library, name: &str, source: &str| {
            let name = format!("{name}.{}", library.name);
            compile(&format!("mpicc.{}", library.name), source, &files.join(&name))?;
            Ok::<_, anyhow::Error>(format!("{FILES}/{name}"))
        };
        let note = format!("guests run under {}, with one processor each", bed.accel()?);
        let row = |case, unit, better, target| Row { case, unit, better, peer: TCP, target, note: &note };

        for (library, [small, large]) in [(&MPICH, [CASES[0], CASES[1]]), (&OPENMPI, [CASES[2], CASES[3]])] {
            let exchange = program(library, "exchange", EXCHANGE)?;
            for (case, size, counts, target) in [(small, 8, [2000, 50], 60.0), (large, 1 << 20, [20, 5], 8.0)]
            {
                self.compare([row(case, "us", Better::Lower, Some(target))], PAIRS, |own| {
                    let count = counts[usize::from(!own)];
                    let said = run(&cluster, library, own, &format!("{exchange} pingpong {size} {count}"))?;
                    Ok([time(&said)?])
                })?;
            }
        }

        if bed.accel()? == Accel::Kvm {
            self.beside_host(&cluster)?;
        }

        let solvers = program(&MPICH, "solvers", SOLVERS)?;
        let rows = [CASES[4], CASES[5]].map(|case| row(case, "s", Better::Lower, Some(1.0)));
        self.compare(rows, PAIRS, |own| {
            let said = run(&cluster, &MPICH, own, &format!("{solvers} 5"))?;
            ensure!(said.contains("both are solved: 2 ranks"), "{said}");
            Ok([after(&said, "conjugate gradients took ")?, after(&said, "the Fourier transform took ")?])
        })?;
        self.compare([row(CASES[6], "s", Better::Lower, Some(1.0))], PAIRS, |own| {
            let said = run(&cluster, &OPENMPI, own, "lmp -in in.melt -log none")?;
            Ok([after(&said, "Loop time of ")?])
        })?;
        let rows = RESULTS.map(|(case, _, _, unit)| row(case, unit, Better::Higher, Some(1.0)));
        self.compare(rows, PAIRS, |own| {
            run(&cluster, &OPENMPI, own, "hpcc")?;
            let said = summary(files)?;
            let mut figures = [0.0; RESULTS.len()];
            for (figure, (_, name, units, _)) in figures.iter_mut().zip(RESULTS) {
                *figure = after(&said, &format!("\n{name}="))? * units;
            }
            Ok(figures)
        })
    }
}

impl Mpi<'_> {
    /// Measures messages between two VMs beside those between two processes of the host.
    fn beside_host(&mut self, cluster: &Cluster<'_>) -> Result<()> {
        for (between_vms, here) in [&MPICH, &OPENMPI].into_iter().zip(&LIBRARIES) {
            let exchange = format!("exchange.{}", here.name);
            for (what, arguments) in [
                ("8 B", "pingpong 8 20000"),
                ("64 KiB", "pingpong 65536 1000"),
                ("1 MiB", "pingpong 1048576 100"),
            ] {
                let case = format!("VMs: {}, {what}, one way", here.name);
                let (unit, better, note) = ("us", Better::Lower, "median of 11 runs");
                let row = Row { case: &case, unit, better, peer: ON_HOST, target: BESIDE_HOST, note };
                self.compare([row], PAIRS, |own| {
                    if own {
                        let program = format!("{FILES}/{exchange} {arguments}");
                        return Ok([time(&run(cluster, between_vms, true, &program)?)?]);
                    }
                    let files = cluster.files();
                    let environment = over_segment(&files.join("verbs"), LOCAL);
                    let program = files.join(&exchange);
                    let (mpirun, program) = (here.command, program.display());
                    let line =
                        format!("{environment} exec env {OVER_SEGMENT} {mpirun} -n 2 {program} {arguments}");
                    on_host(cluster.bed, &cluster.ginnel, &line)
                })?;
            }
        }
        Ok(())
    }
}

/// Returns the time that rank 0 prints.
fn time(said: &str) -> Result<f64> {
    let number = said.lines().find_map(|line| line.trim().parse().ok());
    number.with_context(|| format!("no time: {said}"))
}

/// Returns what a program with a rank in each VM prints, over the segment or over TCP.
fn run(cluster: &Cluster<'_>, library: &Library, own: bool, program: &str) -> Result<String> {
    let over_segment = format!("eval \"$(ginnel mpi-env {SEGMENT})\"");
    let environment = if own { &over_segment } else { library.tcp };
    cluster.run(&format!("{environment}\nexec {} {program}", library.mpirun), PATIENCE)
}

/// Returns what HPCC has written; HPCC appends to an existing file.
fn summary(files: &Path) -> Result<String> {
    let file = files.join("hpccoutf.txt");
    let said = std::fs::read_to_string(&file)?;
    std::fs::remove_file(&file)?;
    ensure!(said.contains("\nSuccess=1\n"), "{said}");
    Ok(said)
}

/// Returns the number after some words.
fn after(said: &str, words: &str) -> Result<f64> {
    let number = said.split_once(words).and_then(|(_, rest)| rest.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("no number behind {words:?}: {said}"))
}
