//! Measures MPI libraries over a segment: on the host beside their own shared memory, and between two VMs beside TCP.

mod vms;

use crate::report::{Better, Report};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use vmtest::TestBed;
use vmtest::installation::{Installation, Plan, verbs_libraries};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The name of the segment.
const SEGMENT: &str = "rdma";
/// The program that is run, which is compiled for each MPI.
const EXCHANGE: &str = include_str!("mpi/exchange.c");
/// The program for OpenSHMEM, which is compiled in the same way.
const PUT: &str = include_str!("mpi/put.c");

/// The measurements, and the report to which they add rows.
pub struct Mpi<'r> {
    /// The report to which rows are added.
    pub report: &'r mut Report,
    /// Pairs of runs for each row. `None` means the default of each kind of row.
    pub pairs: Option<usize>,
    /// Only rows whose names, or whose alternatives' names, contain this.
    pub row: Option<&'r str>,
}

/// The transports of ranks on one machine after `ginnel mpi-env`: only the segment.
const OVER_SEGMENT: &str = "UCX_TLS=self,rc_v";

/// UCX's shared memory, which Open MPI uses only if it may use any transport.
const OVER_POSIX: &str =
    "UCX_TLS=self,posix OMPI_MCA_opal_common_ucx_tls=any OMPI_MCA_opal_common_ucx_devices=any";

/// An MPI's own shared memory.
struct Shared {
    /// Its name in a row.
    name: &'static str,
    /// The environment variables that select it.
    settings: &'static str,
}

/// An MPI, and its transports without a segment.
struct Library {
    name: &'static str,
    command: &'static str,
    /// Exchanges of all ranks, and the target ratio for them.
    alltoall: &'static str,
    target: Option<f64>,
    /// With its default configuration.
    own: Shared,
    /// With one copy into shared memory, and one copy out of it.
    two_copies: Shared,
    /// With one copy by the kernel (Cross Memory Attach).
    one_copy: Shared,
}

const LIBRARIES: [Library; 2] = [
    Library {
        name: "mpich",
        command: "mpirun.mpich",
        // These take long over the MPI's own shared memory.
        alltoall: "alltoall 1024 20",
        target: Some(1.0 / 0.7),
        own: Shared { name: "own shared memory", settings: "" },
        two_copies: Shared { name: "two copies", settings: "UCX_TLS=self,posix" },
        one_copy: Shared { name: "CMA", settings: "UCX_TLS=self,posix,cma" },
    },
    Library {
        name: "openmpi",
        command: "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none",
        // So many that the first exchanges, which make connections, do not decide the result.
        alltoall: "alltoall 1024 2000",
        target: None,
        own: Shared { name: "own shared memory", settings: "OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader" },
        two_copies: Shared {
            name: "two copies",
            settings: "OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none",
        },
        one_copy: Shared {
            name: "CMA",
            settings: "OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=cma",
        },
    },
];

/// The name and the targets of a row.
struct Row<'a> {
    case: &'a str,
    unit: &'static str,
    better: Better,
    peer: &'static str,
    target: Option<f64>,
    note: &'a str,
}

impl Mpi<'_> {
    fn wants(&self, case: &str, peer: &str) -> bool {
        self.row.is_none_or(|row| case.contains(row) || peer.contains(row))
    }

    /// Alternates runs of two measurements, and adds a row for each figure that they return. The order within a pair changes,
    /// in case it matters.
    fn compare<const N: usize>(
        &mut self,
        rows: [Row<'_>; N],
        pairs: usize,
        run: impl Fn(bool) -> Result<[f64; N]>,
    ) -> Result<()> {
        if !rows.iter().any(|row| self.wants(row.case, row.peer)) {
            return Ok(());
        }
        let (mut figures, mut peers) = (Vec::new(), Vec::new());
        for pair in 0..self.pairs.unwrap_or(pairs) {
            for own in [pair % 2 == 1, pair % 2 != 1] {
                let of_run = run(own).with_context(|| rows[0].case.to_owned())?;
                if own { &mut figures } else { &mut peers }.push(of_run);
            }
        }
        for (i, row) in rows.into_iter().enumerate() {
            if !self.wants(row.case, row.peer) {
                continue;
            }
            let column = |runs: &[[f64; N]]| -> Vec<f64> { runs.iter().map(|run| run[i]).collect() };
            let Row { case, unit, better, peer, target, note } = row;
            self.report.pairs(case, unit, better, &column(&figures), peer, &column(&peers), target, note);
        }
        Ok(())
    }

    /// Measures between processes of the host.
    pub fn host(&mut self) -> Result<()> {
        const PAIRS: usize = 5;
        let bed = TestBed::new("bench-mpi")?;
        let host = Host::new(&bed)?;
        for library in &LIBRARIES {
            for (what, ranks, arguments, peer, target) in [
                ("8 B, one way", 2, "pingpong 8 20000", &library.own, Some(1.0 / 1.6)),
                ("64 KiB, one way", 2, "pingpong 65536 1000", &library.two_copies, Some(1.0 / 0.8)),
                ("64 KiB, one way", 2, "pingpong 65536 1000", &library.one_copy, Some(1.0 / 1.05)),
                ("1 MiB, one way", 2, "pingpong 1048576 100", &library.two_copies, Some(1.0 / 0.8)),
                ("1 MiB, one way", 2, "pingpong 1048576 100", &library.one_copy, Some(1.0 / 1.05)),
                ("alltoall, 1 KiB, 8 ranks on 2 CPUs", 8, library.alltoall, &library.own, library.target),
            ] {
                let case = format!("{}, {what}", library.name);
                let note = "median of 11 runs";
                let row =
                    Row { case: &case, unit: "us", better: Better::Lower, peer: peer.name, target, note };
                let program =
                    format!("{} -n {ranks} {}", library.command, host.program("exchange", library.name));
                self.compare([row], PAIRS, |own| {
                    host.run((!own).then_some(peer.settings), &format!("{program} {arguments}"))
                })?;
            }
        }
        let row = Row {
            case: "OpenSHMEM, put of 8 B, one way",
            unit: "us",
            better: Better::Lower,
            peer: "UCX over posix",
            target: Some(1.0 / 1.6),
            note: "shmem_putmem and shmem_quiet, median of 11 runs",
        };
        let program = host.program("put", "openmpi");
        let line = format!(
            "OMPI_MCA_pml=ucx OMPI_MCA_osc=ucx OMPI_MCA_spml=ucx SHMEM_SYMMETRIC_HEAP_SIZE=16M \
             oshrun --allow-run-as-root --oversubscribe --bind-to none -n 2 {program} 100000"
        );
        self.compare([row], PAIRS, |own| host.run((!own).then_some(OVER_POSIX), &line))
    }
}

/// A daemon with a segment that is an RDMA device.
struct Host<'b> {
    bed: &'b TestBed,
    ginnel: Installation<'b>,
}

impl<'b> Host<'b> {
    fn new(bed: &'b TestBed) -> Result<Self> {
        let ginnel = Plan::new(bed).segment(SEGMENT, 2048, &["host"]).with_verbs().start()?;
        verbs_libraries(&bed.dir().join("verbs"))?;
        let host = Self { bed, ginnel };
        for library in &LIBRARIES {
            let compiler = format!("mpicc.{}", library.name);
            compile(&compiler, EXCHANGE, Path::new(&host.program("exchange", library.name)))?;
        }
        compile("oshcc", PUT, Path::new(&host.program("put", "openmpi")))?;
        Ok(host)
    }

    /// Returns the path of a program for an MPI.
    fn program(&self, name: &str, library: &str) -> String {
        self.bed.dir().join(format!("{name}.{library}")).display().to_string()
    }

    /// Returns the time that rank 0 prints, in microseconds: with these settings for the MPI's own shared memory or, with
    /// `None`, over the segment.
    fn run(&self, shared: Option<&str>, command: &str) -> Result<[f64; 1]> {
        let (environment, settings) = match shared {
            Some(settings) => (String::new(), settings),
            None => (over_segment(&self.bed.dir().join("verbs"), SEGMENT), OVER_SEGMENT),
        };
        on_host(self.bed, &self.ginnel, &format!("{environment} exec env {settings} {command}"))
    }
}

/// Returns the shell commands that let processes of the host use a segment, with the libraries in a folder.
fn over_segment(libraries: &Path, segment: &str) -> String {
    format!("export GINNEL_VERBS={}; eval \"$(ginnel mpi-env {segment})\";", libraries.display())
}

/// Runs a command on the host, and returns the time that rank 0 prints, in microseconds.
fn on_host(bed: &TestBed, ginnel: &Installation<'_>, line: &str) -> Result<[f64; 1]> {
    let output = bed.host_spawn(&ginnel.on_host(line)?)?.wait(PATIENCE)?.ok()?;
    let number = output.stdout.lines().last().and_then(|line| line.trim().parse().ok());
    Ok([number.with_context(|| format!("no time: {output:?}"))?])
}

/// Compiles a program with the compiler of an MPI.
fn compile(compiler: &str, source: &str, to: &Path) -> Result<()> {
    let file = to.with_extension("c");
    std::fs::write(&file, source)?;
    let compiled = Command::new(compiler)
        .args(["-O2", "-Wno-stringop-overflow", "-o"])
        .arg(to)
        .arg(&file)
        .arg("-lm")
        .status();
    let is_compiled = compiled.is_ok_and(|status| status.success());
    ensure!(is_compiled, "{compiler} is missing or fails: `scripts/setup bench` installs it");
    Ok(())
}
