//! VMs that share an RDMA device with the host, and that run the host's programs.

use anyhow::{Result, ensure};
use std::fs;
use std::path::PathBuf;
use vmtest::installation::{Installation, MemoryKind, Plan, program, verbs_libraries};
use vmtest::{Job, TestBed, Vm};

/// The name of the device.
pub const DEVICE: &str = "ginnel_rdma";
/// The test's folder as VMs see it.
pub const FILES: &str = "/tmp/files";

/// A VM with its guest daemon.
pub struct Guest {
    pub vm: Vm,
    pub daemon: Job,
}

/// An installation whose members are the host and the VMs `a` and `b`.
pub struct Stage<'b> {
    pub bed: &'b TestBed,
    pub ginnel: Installation<'b>,
    /// The test's folder on the host.
    pub files: PathBuf,
}

impl<'b> Stage<'b> {
    pub fn new(bed: &'b TestBed, memory: MemoryKind) -> Result<Self> {
        let members = ["host", "a", "b"];
        let plan = Plan::new(bed).vm_with("a", "hang_after = 1").vm("b").memory(memory);
        let ginnel = plan.segment("rdma", 128, &members).with_verbs().start()?;
        let files = bed.dir().join("files");
        verbs_libraries(&files.join("verbs"))?;
        Ok(Self { bed, ginnel, files })
    }

    /// Boots VMs at the same time, and starts their daemons.
    pub fn boot<const N: usize>(&self, names: [&str; N]) -> Result<[Guest; N]> {
        let mut vms = Vec::new();
        for name in names {
            let vm = self.ginnel.vm(name)?.memory_mib(512).host_files().share(&self.files, FILES);
            vms.push(vm.library(program("libginnel_preload.so")?).start()?);
        }
        let mut guests = Vec::new();
        for vm in vms {
            vm.wait_ready()?;
            let daemon = self.ginnel.start_guest(&vm)?;
            guests.push(Guest { vm, daemon });
        }
        guests.try_into().map_err(|_| anyhow::anyhow!("as many guests as names"))
    }

    /// Returns a command line that runs a command of the host in a VM, over the segment. `name` names a file for it.
    pub fn in_guest(&self, name: &str, command: &str) -> Result<String> {
        let script = format!(
            "cd {FILES} && export HOME=/tmp GINNEL_PRELOAD=/usr/local/lib/libginnel_preload.so GINNEL_VERBS={FILES}/verbs\n\
             exec ginnel run --verbs --mode off -- {command}\n"
        );
        fs::write(self.files.join(name), script)?;
        Ok(format!("exec chroot /host sh {FILES}/{name}"))
    }

    /// Returns a command line that runs a command on the host, over the segment.
    pub fn on_host(&self, command: &str) -> Result<String> {
        let (preload, files) = (program("libginnel_preload.so")?, self.files.display());
        self.ginnel.on_host(&format!(
            "cd {files} && export GINNEL_PRELOAD={} GINNEL_VERBS={files}/verbs; \
             exec ginnel run --verbs --mode off -- {command}",
            preload.display()
        ))
    }

    /// Returns the JSON that `ginnel` prints on the host.
    pub fn ginnel(&self, arguments: &str) -> Result<serde_json::Value> {
        let said = self.bed.host(&self.ginnel.on_host(&format!("ginnel {arguments} --json"))?)?.ok()?.stdout;
        Ok(serde_json::from_str(&said)?)
    }

    /// Compiles one of the programs of `tests/programs` into the test's folder.
    pub fn compile(&self, name: &str) -> Result<()> {
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../programs/verbs");
        let line = format!(
            "cc -std=gnu11 -O1 -Wall -Wextra -Werror -pthread -o {}/{name} {sources}/{name}.c -libverbs",
            self.files.display()
        );
        let said = self.bed.host(&line)?;
        ensure!(said.code() == Some(0), "{name}.c cannot be compiled: {}", said.stderr);
        Ok(())
    }
}
