//! MPI jobs over two VMs, as people start them: `mpirun` in one VM starts ranks in both, over ssh, and the ranks send over the segment that
//! the VMs share.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmtest::installation::{Installation, Plan, program, verbs_libraries};
use vmtest::skip::missing;
use vmtest::{Bed, Job, Vm};

/// How long a job may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// Where VMs have the test's folder.
const FILES: &str = "/tmp/files";
const PORT: u16 = 2222;

/// An MPI, and what starts a job with it: on VMs `a` and `b`, with `ssh` of the test's folder.
struct Mpi {
    name: &'static str,
    mpirun: &'static str,
}

const MPIS: [Mpi; 2] = [
    Mpi { name: "mpich", mpirun: "mpirun.mpich -launcher-exec /tmp/files/ssh -hosts a,b" },
    Mpi {
        name: "openmpi",
        mpirun: "mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent /tmp/files/ssh --host a:2,b:2",
    },
];

/// VMs, each with its guest daemon and its server of ssh.
struct Stage<'b> {
    vms: Vec<Vm>,
    files: PathBuf,
    _jobs: Vec<Job>,
    _ginnel: Installation<'b>,
}

impl<'b> Stage<'b> {
    /// Starts these VMs. Those in `with_rxe` have an RDMA device of their kernel's as well, over their network.
    fn new(bed: &'b Bed, ginnel: Installation<'b>, names: &[&str], with_rxe: &[&str]) -> Result<Self> {
        const MODULES: [&str; 4] = ["virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe"];
        let files = bed.dir().join("files");
        verbs_libraries(&files.join("verbs"))?;
        let mut vms = Vec::new();
        for name in names {
            let mut vm = ginnel.vm(name)?.memory_mib(1024).host_files().share(&files, FILES);
            if with_rxe.contains(name) {
                vm = MODULES.iter().fold(vm, |vm, module| vm.module(module));
            }
            vms.push(vm.library(program("libginnel_preload.so")?).start()?);
        }
        prepare_ssh(&files)?;
        let mut hosts = String::from("127.0.0.1 localhost\n");
        for (vm, name) in vms.iter().zip(names) {
            hosts += &format!("{} {name}\n", vm.address()?);
        }
        fs::write(files.join("hosts"), hosts)?;
        let mut jobs = Vec::new();
        for (vm, name) in vms.iter().zip(names) {
            vm.wait_ready()?;
            jobs.push(ginnel.start_guest(vm)?);
            if with_rxe.contains(name) {
                vm.run("chroot /host rdma link add rxe0 type rxe netdev eth0")?.ok()?;
            }
            // Programs of the host find the VMs by name. sshd confines itself to a folder.
            vm.run(&format!("mount -o bind {FILES}/hosts /host/etc/hosts && mkdir -p /run/sshd"))?.ok()?;
            let line = format!("exec chroot /host /usr/sbin/sshd -D -e -p {PORT} -f {FILES}/sshd_config");
            let sshd = vm.spawn(&line)?;
            let listens = format!(
                "until netstat -ltn | grep -q :{PORT}; do [ -d /proc/{} ] || exit 1; sleep 0.1; done",
                sshd.pid()
            );
            vm.run_within(PATIENCE, &listens)?.ok()?;
            jobs.push(sshd);
        }
        Ok(Self { vms, files, _jobs: jobs, _ginnel: ginnel })
    }

    /// Runs a job that is started in VM `a`, over a segment; what it says.
    fn run(&self, segment: &str, mpirun: &str, ranks: usize, program: &str) -> Result<String> {
        let script = format!(
            "cd {FILES} && export HOME=/tmp GINNEL_VERBS={FILES}/verbs\n\
             eval \"$(ginnel mpi-env {segment})\"\n\
             exec {mpirun} -n {ranks} {program}\n"
        );
        fs::write(self.files.join("job"), script)?;
        let output = self.vms[0].run_within(PATIENCE, &format!("exec chroot /host sh {FILES}/job"))?;
        let said = output.stdout.clone() + &output.stderr;
        ensure!(output.code() == Some(0), "{mpirun}, {ranks} ranks: {:?}: {said}", output.code());
        Ok(said)
    }
}

/// Keys, and the configurations of server and client.
fn prepare_ssh(files: &Path) -> Result<()> {
    for key in ["host", "user"] {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(files.join(key))
            .status()?;
        ensure!(made.success(), "ssh-keygen: {made}");
    }
    let server = format!(
        "HostKey {FILES}/host\nAuthorizedKeysFile {FILES}/user.pub\nStrictModes no\nUsePAM no\n\
         PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
    );
    fs::write(files.join("sshd_config"), server)?;
    let client = format!(
        "#!/bin/sh\nexec ssh -F none -p {PORT} -i {FILES}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=no \
         -o UserKnownHostsFile=/tmp/known -o LogLevel=ERROR \"$@\"\n"
    );
    fs::write(files.join("ssh"), client)?;
    ensure!(Command::new("chmod").arg("755").arg(files.join("ssh")).status()?.success(), "chmod");
    Ok(())
}

/// Compiles the checks of the tests on one machine for an MPI.
fn compile(mpi: &Mpi, files: &Path) -> Result<String> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/cli/tests/command/mpi/checks.c");
    let name = format!("checks.{}", mpi.name);
    let compiler = format!("mpicc.{}", mpi.name);
    let made = Command::new(&compiler)
        .args(["-O2", "-Wno-stringop-overflow", "-pthread", source, "-o"])
        .arg(files.join(&name))
        .status()?;
    ensure!(made.success(), "{compiler}: {made}");
    Ok(format!("{FILES}/{name}"))
}

const PROGRAMS: [&str; 7] =
    ["mpicc.mpich", "mpirun.mpich", "mpicc.openmpi", "mpirun.openmpi", "ssh", "sshd", "ssh-keygen"];

#[test]
fn jobs_over_two_vms_send_over_the_segment() -> Result<()> {
    let missing = missing(&PROGRAMS);
    vmtest::require!(missing.is_none(), "{missing:?} is not installed: `scripts/setup test` installs it");
    let bed = Bed::new("mpi")?;
    let plan = Plan::new(&bed).vm("a").vm("b");
    let ginnel = plan.segment("rdma", 512, &["host", "a", "b"]).with_verbs().start()?;
    let stage = Stage::new(&bed, ginnel, &["a", "b"], &[])?;
    // Open MPI takes three times as long under emulation.
    let soak = std::env::var_os("GINNEL_SOAK").is_some();
    for mpi in MPIS.into_iter().filter(|mpi| soak || mpi.name == "mpich") {
        let program = compile(&mpi, &stage.files)?;
        for &ranks in if soak { &[2, 4][..] } else { &[4] } {
            let begun = std::time::Instant::now();
            let proof = format!("ginnel verbs rdma --json >{FILES}/proof");
            let said = stage.run("rdma", mpi.mpirun, ranks, &format!("{program} '{proof}'"))?;
            let expected = format!("all data are right: {ranks} ranks");
            ensure!(said.contains(&expected), "{}: {said}", mpi.name);
            let devices: Value = serde_json::from_slice(&fs::read(stage.files.join("proof"))?)?;
            let endpoints = devices[0]["endpoints"].as_array().context("endpoints")?;
            // Within a VM, ranks use its own shared memory.
            let have_sent = endpoints.iter().filter(|endpoint| sent(endpoint) > 1_000_000).count();
            ensure!(have_sent == ranks, "{}, {ranks} ranks: {have_sent} have sent: {devices}", mpi.name);
            println!("{}, {ranks} ranks: {:.1} s", mpi.name, begun.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

/// Three VMs, and no segment that all of them have: `b` shares one with each of the others, which reach each other by RDMA devices of
/// their kernels, as they would reach another host by real ones.
#[test]
fn a_job_takes_segments_to_neighbours_and_real_devices_to_others() -> Result<()> {
    let missing = missing(&[&PROGRAMS[..], &["rdma"]].concat());
    vmtest::require!(missing.is_none(), "{missing:?} is not installed: `scripts/setup test` installs it");
    let bed = Bed::new("mpi-devices")?;
    let plan = Plan::new(&bed).vm("a").vm("b").vm("c");
    let plan = plan.segment("ab", 256, &["host", "a", "b"]).with_verbs();
    let ginnel = plan.segment("bc", 256, &["host", "b", "c"]).with_verbs().start()?;
    let stage = Stage::new(&bed, ginnel, &["a", "b", "c"], &["a", "c"])?;
    let program = compile(&MPIS[0], &stage.files)?;
    let packets = |vm: usize| -> Result<u64> {
        let file = "/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts";
        Ok(stage.vms[vm].run(&format!("cat {file}"))?.ok()?.stdout.trim().parse()?)
    };
    let before = [packets(0)?, packets(2)?];
    // UCX 1.13 takes rxe's address of IPv4 by itself, and drops all datagrams that come to it.
    let mpirun = "env UCX_IB_GID_INDEX=0 mpirun.mpich -launcher-exec /tmp/files/ssh -hosts a,b,c";
    // VM b has no device but the segments, so what reached c from it went over bc. VM a, where the proof is made, sees ab alone.
    let said = stage.run(
        "ab --all-devices",
        mpirun,
        3,
        &format!("{program} 'ginnel verbs --json >{FILES}/proof'"),
    )?;
    ensure!(said.contains("all data are right: 3 ranks"), "{said}");
    let devices: Value = serde_json::from_slice(&fs::read(stage.files.join("proof"))?)?;
    let endpoints = devices[0]["endpoints"].as_array().context("endpoints")?;
    let bytes: Vec<_> = endpoints.iter().map(sent).collect();
    ensure!(bytes.len() == 2 && bytes.iter().all(|bytes| *bytes > 1_000_000), "{devices}");
    // A packet of rxe has 1024 bytes at most here; the ring of the checks has sent megabytes from c to a.
    let sent = [packets(0)? - before[0], packets(2)? - before[1]];
    println!("over segment ab: {bytes:?} bytes; by the kernels' devices: {sent:?} packets");
    ensure!(sent.iter().all(|packets| *packets > 1000), "{sent:?} packets by the kernels' devices: {said}");
    Ok(())
}

/// The bytes that the connected queue pairs of a program have sent, written and read.
fn sent(endpoint: &Value) -> u64 {
    let pairs = endpoint["queue_pairs"].as_array().into_iter().flatten();
    pairs.filter(|pair| pair["kind"] == "rc").filter_map(|pair| pair["bytes"].as_u64()).sum()
}
