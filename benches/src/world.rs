//! The places where the peers run: the host, and two VMs of one installation.

use crate::measure::Timing;
use anyhow::{Context, Result};
use std::path::Path;
use std::time::Duration;
use vmtest::installation::{Installation, MemoryKind, Plan, program};
use vmtest::{Job, TestBed, Vm};

/// How long one measurement may take.
const PATIENCE: Duration = Duration::from_secs(240);

/// The place of one end.
#[derive(Clone, Copy)]
pub enum Place<'w> {
    /// A process of the host, kept on one CPU.
    Host(usize),
    /// A process in a VM.
    Vm(&'w Vm),
}

/// An installation with two segments of each kind of memory: `bench` for channels and `bare` for floors, and over BARs
/// `bench-bar` and `bare-bar`.
pub struct World<'b> {
    /// The test bed of the installation.
    pub bed: &'b TestBed,
    /// The installation.
    pub ginnel: Installation<'b>,
}

impl<'b> World<'b> {
    /// Starts the daemon. This needs no VM.
    pub fn new(bed: &'b TestBed) -> Result<Self> {
        let members = ["host", "a", "b"];
        let ginnel = Plan::new(bed)
            .vm("a")
            .vm("b")
            .segment("bench", 256, &members)
            .segment("bare", 64, &members)
            .memory(MemoryKind::Bar)
            .segment("bench-bar", 256, &members)
            .segment("bare-bar", 64, &members)
            .config("[limits]\nmax_ring = \"32M\"\nbytes_per_endpoint = \"128M\"")
            .start()?;
        Ok(Self { bed, ginnel })
    }

    /// Boots both VMs and their daemons. The first VM can have a shared folder and a disk.
    pub fn boot(&self, memory_mib: u32, shelf: Option<(&str, &Path)>) -> Result<Vec<(Vm, Job)>> {
        let mut vms = Vec::new();
        for name in ["a", "b"] {
            let mut vm = self
                .ginnel
                .vm(name)?
                .memory_mib(if name == "a" { memory_mib } else { 512 })
                .program(program("bench-peer")?)
                .program("/usr/bin/ssh")
                .program("/usr/bin/scp");
            if let Some((share, disk)) = shelf.filter(|_| name == "a") {
                vm =
                    ["virtio_blk", "crc32c_generic", "ext4"].into_iter().fold(vm, |vm, name| vm.module(name));
                vm = vm
                    .share(share, "/share")
                    .qemu_args(&format!("-drive file={},format=raw,if=virtio,cache=none", disk.display()));
            }
            vms.push(vm.start()?);
        }
        vms.into_iter()
            .map(|vm| {
                vm.wait_ready()?;
                let daemon = self.ginnel.start_guest(&vm)?;
                Ok((vm, daemon))
            })
            .collect()
    }

    /// Measures with one end at `server`, and the end that measures time at `client`.
    pub fn time(&self, server: Place<'_>, client: Place<'_>, args: &str) -> Result<Timing> {
        self.pair(server, client, args, args)
    }

    /// Does the same with different arguments for the two ends.
    pub fn pair(&self, server: Place<'_>, client: Place<'_>, serve: &str, time: &str) -> Result<Timing> {
        let result = self.pair_inner(server, client, serve, time);
        result.with_context(|| format!("measuring `bench-peer time {time}`"))
    }

    fn pair_inner(&self, server: Place<'_>, client: Place<'_>, serve: &str, time: &str) -> Result<Timing> {
        let _running = Running::start(self, server, serve)?;
        self.alone(client, time)
    }

    /// Measures without another end.
    pub fn alone(&self, place: Place<'_>, args: &str) -> Result<Timing> {
        let said = match place {
            Place::Host(cpu) => {
                let command = format!("exec bench-peer time {args} --cpu {cpu}");
                let job = self.bed.host_spawn(&self.ginnel.on_host(&command)?)?;
                job.wait(PATIENCE)?.ok()?.stdout
            }
            Place::Vm(vm) => vm.run_within(PATIENCE, &format!("bench-peer time {args}"))?.ok()?.stdout,
        };
        let line = said.lines().last().unwrap_or_default();
        serde_json::from_str(line).with_context(|| format!("not a timing: {said:?}"))
    }
}

/// An end that serves; it is ended when this value is dropped.
pub enum Running {
    /// On the host.
    Host(std::sync::Arc<vmtest::HostJob>),
    /// In a VM.
    Vm(Job),
}

impl Running {
    /// Starts the end and waits until the other end may connect.
    pub fn start(world: &World<'_>, place: Place<'_>, args: &str) -> Result<Self> {
        let running = match place {
            Place::Host(cpu) => {
                let command = format!("exec bench-peer serve {args} --cpu {cpu}");
                Self::Host(world.bed.host_spawn(&world.ginnel.on_host(&command)?)?)
            }
            Place::Vm(vm) => Self::Vm(vm.spawn(&format!("exec bench-peer serve {args}"))?),
        };
        let limit = Duration::from_secs(30);
        match &running {
            Self::Host(job) => job.wait_for_line("listening", limit)?,
            Self::Vm(job) => job.wait_for_line("listening", limit)?,
        };
        Ok(running)
    }

    /// Returns its process id, as seen at its place.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Host(job) => job.pid(),
            Self::Vm(job) => job.pid(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Most of them have ended by themselves together with their client.
        let limit = Duration::from_secs(10);
        match self {
            Self::Host(job) => drop(job.kill(9).and_then(|()| job.wait(limit))),
            Self::Vm(job) => drop(job.kill(9).and_then(|()| job.wait(limit))),
        }
    }
}
