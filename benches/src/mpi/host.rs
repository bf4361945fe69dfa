//! Between processes of the host.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmtest::Bed;
use vmtest::installation::{Installation, Plan, verbs_libraries};

use super::{EXCHANGE, Mpi};
use crate::report::Better;

/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The segment.
const SEGMENT: &str = "rdma";
/// Puts bytes into the memory of another PE; OpenSHMEM.
const PUT: &str = include_str!("put.c");

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
    /// How many exchanges of all ranks a run has.
    exchanges: &'static str,
    /// Of the exchange of all ranks.
    target: Option<f64>,
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
        // They take long over its own shared memory.
        exchanges: "20",
        target: Some(1.0 / 0.7),
        own: Shared { name: "own shared memory", settings: "" },
        two_copies: Shared { name: "two copies", settings: "UCX_TLS=self,posix" },
        one_copy: Shared { name: "CMA", settings: "UCX_TLS=self,posix,cma" },
    },
    Library {
        name: "openmpi",
        command: "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none",
        exchanges: "2000",
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

/// UCX's shared memory, for OpenSHMEM. It has to be told that any device will do.
const OF_UCX: Shared = Shared {
    name: "UCX's shared memory",
    settings: "UCX_TLS=self,sm OMPI_MCA_pml=ucx OMPI_MCA_spml=ucx OMPI_MCA_opal_common_ucx_tls=any \
        OMPI_MCA_opal_common_ucx_devices=any",
};

impl Mpi<'_> {
    /// Between processes of the host.
    pub fn host(&mut self) -> Result<()> {
        let bed = Bed::new("bench-mpi")?;
        let host = Host::new(&bed)?;
        for library in &LIBRARIES {
            host.compile(&format!("mpicc.{}", library.name), &program(library), EXCHANGE)?;
            let alltoall = format!("alltoall 1024 {}", library.exchanges);
            for (what, ranks, arguments, peer, target) in [
                ("8 B, one way", 2, "pingpong 8 20000", &library.own, Some(1.0 / 1.6)),
                ("64 KiB, one way", 2, "pingpong 65536 1000", &library.two_copies, Some(1.0 / 0.8)),
                ("64 KiB, one way", 2, "pingpong 65536 1000", &library.one_copy, Some(1.0 / 1.05)),
                ("1 MiB, one way", 2, "pingpong 1048576 100", &library.two_copies, Some(1.0 / 0.8)),
                ("1 MiB, one way", 2, "pingpong 1048576 100", &library.one_copy, Some(1.0 / 1.05)),
                ("alltoall, 1 KiB, 8 ranks on 2 CPUs", 8, &alltoall, &library.own, library.target),
            ] {
                let start = format!("{} -n {ranks} {{}}/{} {arguments}", library.command, program(library));
                self.compare(&host, &format!("{}, {what}", library.name), &start, peer, target)?;
            }
        }
        host.compile("oshcc", "put", PUT)?;
        let start =
            "SHMEM_SYMMETRIC_HEAP_SIZE=16M oshrun --allow-run-as-root --oversubscribe -n 2 {}/put 8 20000";
        self.compare(&host, "OpenSHMEM, put of 8 B and quiet", start, &OF_UCX, Some(1.0 / 1.6))
    }

    /// Measures what a command says over the segment, and over the peer.
    fn compare(
        &mut self,
        host: &Host<'_>,
        case: &str,
        start: &str,
        peer: &Shared,
        target: Option<f64>,
    ) -> Result<()> {
        if !self.is_wanted(case) {
            return Ok(());
        }
        let (mut figures, mut peers) = (Vec::new(), Vec::new());
        for pair in 0..self.pairs {
            // Whoever comes first changes, in case that matters.
            for own in [pair % 2 == 1, pair % 2 != 1] {
                let all = if own { &mut figures } else { &mut peers };
                all.push(host.run((!own).then_some(peer), start).with_context(|| case.to_owned())?);
            }
        }
        let note = "median of 11 runs";
        self.report.pairs(case, "us", Better::Lower, &figures, peer.name, &peers, target, note);
        Ok(())
    }
}

/// The name of the program that exchanges messages.
fn program(library: &Library) -> String {
    format!("exchange.{}", library.name)
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
        Ok(Self { bed, ginnel })
    }

    fn compile(&self, compiler: &str, name: &str, source: &str) -> Result<()> {
        let folder = self.bed.dir();
        std::fs::write(folder.join("source.c"), source)?;
        let compiled = Command::new(compiler)
            .args(["-O2", "-Wno-deprecated-declarations", "-o"])
            .args([folder.join(name), folder.join("source.c")])
            .status();
        let is_compiled = compiled.is_ok_and(|status| status.success());
        ensure!(is_compiled, "{compiler} is missing or fails: `scripts/setup bench` installs it");
        Ok(())
    }

    /// What rank 0 says, in microseconds: over shared memory of the MPI's own or, without that, over the segment. `{}` in the command stands
    /// for the folder of the programs.
    fn run(&self, shared: Option<&Shared>, start: &str) -> Result<f64> {
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
        let start = start.replace("{}", &folder.display().to_string());
        let line = format!("{environment} exec env {settings} {start}");
        let output = self.bed.host_spawn(&self.ginnel.on_host(&line)?)?.wait(PATIENCE)?;
        // Open MPI's OpenSHMEM crashes over shared memory when it ends, after the figure was printed.
        let is_good = |line: &str| line.trim().parse().ok();
        let number = output.stdout.lines().find_map(is_good);
        number.with_context(|| format!("no time: {output:?}"))
    }
}
