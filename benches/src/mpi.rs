//! MPI libraries over a segment, beside their own shared memory, on the host.

use crate::report::{Better, Report};
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;
use vmtest::Bed;
use vmtest::installation::{Installation, Plan, verbs_libraries};

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The segment.
const SEGMENT: &str = "rdma";
/// What is run; compiled for each MPI.
const EXCHANGE: &str = include_str!("mpi/exchange.c");

/// What is measured, and how.
pub struct Mpi<'r> {
    /// Where the rows go.
    pub report: &'r mut Report,
    /// Pairs of runs of each row.
    pub pairs: usize,
    /// Only rows whose names contain this.
    pub row: Option<&'r str>,
}

/// What ranks of one machine take for their messages after `ginnel mpi-env`: the segment alone.
const OVER_SEGMENT: &str = "UCX_TLS=self,rc_v";

/// Shared memory of an MPI's own.
struct Shared {
    /// How it is called in a row.
    name: &'static str,
    /// The environment that selects it.
    settings: &'static str,
}

/// An MPI, and the ways that it has without a segment.
struct Library {
    name: &'static str,
    command: &'static str,
    /// As it is configured.
    own: Shared,
    /// With one copy into shared memory, and one out of it.
    two_copies: Shared,
    /// With one copy by the kernel (Cross Memory Attach).
    one_copy: Shared,
}

const LIBRARIES: [Library; 2] = [
    Library {
        name: "mpich",
        command: "mpirun.mpich",
        own: Shared { name: "own shared memory", settings: "" },
        two_copies: Shared { name: "two copies", settings: "UCX_TLS=self,posix" },
        one_copy: Shared { name: "CMA", settings: "UCX_TLS=self,posix,cma" },
    },
    Library {
        name: "openmpi",
        command: "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none",
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

impl Mpi<'_> {
    /// Between processes of the host.
    pub fn host(&mut self) -> Result<()> {
        let bed = Bed::new("bench-mpi")?;
        let host = Host::new(&bed)?;
        for library in &LIBRARIES {
            host.compile(library)?;
            for (what, ranks, arguments, peer, target) in [
                ("8 B, one way", 2, "pingpong 8 20000", &library.own, Some(1.0 / 1.6)),
                ("64 KiB, one way", 2, "pingpong 65536 1000", &library.two_copies, Some(1.0 / 0.8)),
                ("64 KiB, one way", 2, "pingpong 65536 1000", &library.one_copy, Some(1.0 / 1.05)),
                ("1 MiB, one way", 2, "pingpong 1048576 100", &library.two_copies, Some(1.0 / 0.8)),
                ("1 MiB, one way", 2, "pingpong 1048576 100", &library.one_copy, Some(1.0 / 1.05)),
                ("alltoall, 1 KiB, 8 ranks on 2 CPUs", 8, "alltoall 1024 20", &library.own, Some(1.0 / 0.7)),
            ] {
                let case = format!("{}, {what}", library.name);
                if self.row.is_some_and(|row| !case.contains(row)) {
                    continue;
                }
                let run = |peer: Option<&Shared>| {
                    host.run(library, peer, ranks, arguments).with_context(|| case.clone())
                };
                let (mut figures, mut peers) = (Vec::new(), Vec::new());
                for pair in 0..self.pairs {
                    // Whoever comes first changes, in case that matters.
                    for own in [pair % 2 == 1, pair % 2 != 1] {
                        match own {
                            true => figures.push(run(None)?),
                            false => peers.push(run(Some(peer))?),
                        }
                    }
                }
                self.report.pairs(
                    &case,
                    "us",
                    Better::Lower,
                    &figures,
                    peer.name,
                    &peers,
                    target,
                    "median of 11 runs",
                );
            }
        }
        Ok(())
    }
}

/// A daemon with a segment that is an RDMA device.
struct Host<'b> {
    bed: &'b Bed,
    ginnel: Installation<'b>,
}

impl<'b> Host<'b> {
    fn new(bed: &'b Bed) -> Result<Self> {
        let ginnel = Plan::new(bed).segment(SEGMENT, 2048, &["host"]).with_verbs().start()?;
        verbs_libraries(&bed.dir().join("verbs"))?;
        std::fs::write(bed.dir().join("exchange.c"), EXCHANGE)?;
        Ok(Self { bed, ginnel })
    }

    fn compile(&self, library: &Library) -> Result<()> {
        let (folder, name) = (self.bed.dir(), library.name);
        let compiled = Command::new(format!("mpicc.{name}"))
            .args(["-O2", "-o"])
            .arg(folder.join(format!("exchange.{name}")))
            .arg(folder.join("exchange.c"))
            .status();
        let is_compiled = compiled.is_ok_and(|status| status.success());
        ensure!(is_compiled, "mpicc.{name} is missing or fails: `scripts/setup bench` installs it");
        Ok(())
    }

    /// What rank 0 says, in microseconds: over shared memory of the MPI's own or, without that, over the segment.
    fn run(&self, library: &Library, shared: Option<&Shared>, ranks: usize, arguments: &str) -> Result<f64> {
        let folder = self.bed.dir();
        let (environment, settings) = match shared {
            Some(shared) => (String::new(), shared.settings),
            None => {
                let libraries = folder.join("verbs");
                let libraries = libraries.display();
                let line = format!("export GINNEL_VERBS={libraries}; eval \"$(ginnel mpi-env {SEGMENT})\";");
                (line, OVER_SEGMENT)
            }
        };
        let line = format!(
            "{environment} exec env {settings} {} -n {ranks} {} {arguments}",
            library.command,
            folder.join(format!("exchange.{}", library.name)).display()
        );
        let output = self.bed.host_spawn(&self.ginnel.on_host(&line)?)?.wait(PATIENCE)?.ok()?;
        let number = output.stdout.lines().last().and_then(|line| line.trim().parse().ok());
        number.with_context(|| format!("no time: {output:?}"))
    }
}
