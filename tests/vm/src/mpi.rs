//! Machines (VMs, and the host) that start MPI jobs on each other by ssh, set up as docs/mpi.md describes.

use crate::installation::{Installation, program, verbs_libraries};
use crate::{HOST_ADDRESS, HostJob, Job, TestBed, Vm, VmBuilder};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// The folder with the programs of a job, the same on each machine. Every Debian has this folder, so the host's files in a VM
/// have it too.
pub const FILES: &str = "/mnt";
/// The name of the host as one of the machines.
pub const HOST: &str = "host";
/// A program that replaces ssh and ends `mpirun` when a machine has died, as in docs/mpi.md.
pub const LAUNCHER: &str = "/root/.ssh/launcher";
/// Programs that all machines need.
pub const PROGRAMS: [&str; 3] = ["ssh", "sshd", "ssh-keygen"];
/// How long an ssh server may take to start.
const START: Duration = Duration::from_secs(120);

/// Machines that can start programs on each other.
pub struct Cluster<'b> {
    /// The VMs, in the order of their names.
    pub vms: Vec<Vm>,
    /// The installation of Ginnel, with the host's daemon.
    pub ginnel: Installation<'b>,
    /// The test bed in which the VMs run.
    pub bed: &'b TestBed,
    files: PathBuf,
    more: More,
    daemons: Vec<Job>,
}

/// Completes the description of the VM of this name.
pub type More = fn(&str, VmBuilder) -> VmBuilder;

impl<'b> Cluster<'b> {
    /// Starts these VMs, each with its guest daemon and its ssh server.
    pub fn new(bed: &'b TestBed, ginnel: Installation<'b>, names: &[&str], more: More) -> Result<Self> {
        let files = bed.dir().join("files");
        verbs_libraries(&files.join("verbs"))?;
        prepare_ssh(&files, &[names, &[HOST]].concat())?;
        let mut cluster = Self { vms: Vec::new(), ginnel, bed, files, more, daemons: Vec::new() };
        // All VMs boot at the same time.
        cluster.vms = names.iter().map(|name| cluster.boot(name)).collect::<Result<_>>()?;
        let mut hosts = format!("127.0.0.1 localhost\n{HOST_ADDRESS} {HOST}\n");
        for vm in &cluster.vms {
            hosts += &format!("{} {}\n", vm.address()?, vm.name());
        }
        fs::write(cluster.files.join("hosts"), hosts)?;
        cluster.daemons = cluster.vms.iter().map(|vm| cluster.serve(vm)).collect::<Result<_>>()?;
        Ok(cluster)
    }

    /// Starts a VM again that has ended.
    pub fn restart(&mut self, vm: usize) -> Result<()> {
        self.vms[vm] = self.boot(self.vms[vm].name())?;
        self.daemons[vm] = self.serve(&self.vms[vm])?;
        Ok(())
    }

    fn boot(&self, name: &str) -> Result<Vm> {
        let vm = self.ginnel.vm(name)?.memory_mib(1024).host_files().share(&self.files, FILES);
        (self.more)(name, vm).start()
    }

    /// Waits until a VM has booted, and starts its guest daemon and its ssh server. Returns the guest daemon.
    fn serve(&self, vm: &Vm) -> Result<Job> {
        vm.wait_ready()?;
        let daemon = self.ginnel.start_guest(vm)?;
        vm.run(&prepare("/host", &format!("mount -o bind {FILES} /host{FILES}")))?.ok()?;
        vm.spawn(&format!("exec chroot /host {SSHD}"))?.wait_for_line("Server listening", START)?;
        Ok(daemon)
    }

    /// Makes the host a machine like the VMs, in its own namespaces. It stays one as long as the test bed exists.
    pub fn add_host(&self) -> Result<Arc<HostJob>> {
        let socket = self.ginnel.socket();
        let run = socket.parent().context("a socket without a folder")?;
        // Programs and the daemon's socket get the same paths as in a VM.
        let own = format!(
            "hostname {HOST}
             mount -t tmpfs tmpfs /run
             mkdir /run/ginnel
             mount -o bind {} /run/ginnel
             mount -t tmpfs tmpfs /usr/local
             mkdir /usr/local/bin /usr/local/lib
             cp {} /usr/local/bin
             mount -o bind {} {FILES}
             mount -t tmpfs tmpfs /tmp",
            run.display(),
            program("ginnel")?.display(),
            self.files.display()
        );
        let script = self.files.join("host.sh");
        fs::write(&script, format!("{}\nexec {SSHD}\n", prepare("", &own)))?;
        let line = format!("exec unshare -m -u -p -f --kill-child --mount-proc sh {}", script.display());
        self.bed.host_in_net("true")?.ok()?;
        let sshd = self.bed.host_spawn(&line)?;
        sshd.wait_for_line("Server listening", START)?;
        Ok(sshd)
    }

    /// Returns the folder on the host that each machine has as [`FILES`].
    pub fn files(&self) -> &Path {
        &self.files
    }

    /// Returns the VM of this name.
    pub fn vm(&self, name: &str) -> Result<&Vm> {
        self.vms.iter().find(|vm| vm.name() == name).with_context(|| format!("no VM {name}"))
    }

    /// Starts shell commands in the first VM, as its user would.
    pub fn start(&self, lines: &str) -> Result<Job> {
        // Open MPI must be told that root may run programs, and that idle ranks should yield, because a VM has one processor.
        let script = format!(
            "cd {FILES}\nexport HOME=/root OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n\
             export OMPI_MCA_mpi_yield_when_idle=1\n{lines}\n"
        );
        fs::write(self.files.join("job"), script)?;
        self.vms[0].spawn(&format!("exec chroot /host sh {FILES}/job"))
    }

    /// Runs shell commands in the same way. They must succeed. Returns what they print.
    pub fn run(&self, lines: &str, timeout: Duration) -> Result<String> {
        let job = self.start(lines)?;
        let output = job.wait(timeout).inspect_err(|_| {
            let _ = job.kill(9);
        })?;
        let said = output.stdout + &output.stderr;
        ensure!(output.exit == crate::Exit::Code(0), "{lines}: {}: {said}", output.exit);
        Ok(said)
    }

    /// Kills the guest daemon of a VM with SIGKILL and starts another one.
    pub fn replace_daemon(&mut self, vm: usize) -> Result<()> {
        self.daemons[vm].kill_process(9)?;
        self.daemons[vm].wait(START)?;
        self.daemons[vm] = self.ginnel.start_guest(&self.vms[vm])?;
        Ok(())
    }

    /// Compiles a program with a compiler of the host, such as `mpicc.mpich`. Returns its path on the machines.
    pub fn compile(&self, compiler: &str, source: &Path) -> Result<String> {
        let name = source.file_stem().and_then(|name| name.to_str()).context("a source without a name")?;
        let name = format!("{name}.{}", compiler.trim_start_matches("mpicc."));
        let made = Command::new(compiler)
            .args(["-O2", "-Wno-stringop-overflow", "-pthread", "-o"])
            .arg(self.files.join(&name))
            .arg(source)
            .arg("-lm")
            .status()?;
        ensure!(made.success(), "{compiler}: {made}");
        Ok(format!("{FILES}/{name}"))
    }
}

/// The command that serves ssh.
const SSHD: &str = "/usr/sbin/sshd -D -e -f /mnt/sshd_config";

/// Returns the commands that prepare a machine for ssh. `root` is the folder that its programs have as root; `own` are the
/// commands that provide [`FILES`] there.
fn prepare(root: &str, own: &str) -> String {
    format!(
        "set -e
         {own}
         mkdir -p /run/sshd /usr/local/lib/ginnel
         ln -s {FILES}/verbs /usr/local/lib/ginnel/verbs
         mount -o bind {FILES}/hosts {root}/etc/hosts
         mount -o bind {FILES}/root {root}/root"
    )
}

/// Makes the keys, the configuration of the ssh server, and the home of a user who may log in to each machine and knows its
/// key.
fn prepare_ssh(files: &Path, names: &[&str]) -> Result<()> {
    let ssh = files.join("root/.ssh");
    fs::create_dir_all(&ssh)?;
    let key = |path: &Path| -> Result<String> {
        let made =
            Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status()?;
        ensure!(made.success(), "ssh-keygen: {made}");
        Ok(fs::read_to_string(path.with_extension("pub"))?)
    };
    fs::write(ssh.join("authorized_keys"), key(&ssh.join("id_ed25519"))?)?;
    // All machines have the same host key.
    fs::write(ssh.join("known_hosts"), format!("{} {}", names.join(","), key(&files.join("host_key"))?))?;
    // As in docs/mpi.md, so that a job ends when a machine has died.
    fs::write(ssh.join("config"), "ServerAliveInterval 2\n")?;
    let launcher = ssh.join("launcher");
    fs::write(
        &launcher,
        "#!/bin/sh\nssh \"$@\"\nstatus=$?\n[ $status -ne 255 ] || kill -KILL $PPID\nexit $status\n",
    )?;
    fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755))?;
    let server =
        format!("HostKey {FILES}/host_key\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n");
    fs::write(files.join("sshd_config"), server)?;
    Ok(())
}
