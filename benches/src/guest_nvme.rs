//! NVMe volumes in a guest, beside virtio-blk volumes and QEMU's own NVMe disk, each with the stock driver: while fio polls for its
//! completions, and while it waits for interrupts. No disk stores anything, so that the way of a request is measured.

use crate::guest_disks::fio_said;
use crate::nvme_volume::{LIMIT, NOTHING, NvmeServer};
use crate::report::{Better, Report};
use crate::volume::{Backing, Plan, Server, Wait};
use anyhow::{Result, ensure};
use ginnel_volume_bench::Options;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::Child;
use std::time::Duration;
use vmtest::{TestBed, Vm, newer_qemu};

const BYTES: u64 = 256 << 20;
/// How many commands the traps are counted for.
const COMMANDS: u64 = 5000;
const TIMED: &str = "--time_based --runtime=2 --ramp_time=1";
const PROMPT: Duration = Duration::from_secs(60);
const QEMU: &str = "QEMU's NVMe disk, null-co";
const BLK: &str = "the same volume as virtio-blk";
/// The number of the first PCI slot of the disks. They have one after the other, by which the guest's names for them are found.
const SLOT: usize = 0x10;
/// How the volumes wait, and what they are called.
const WAITS: [(Wait, &str); 3] =
    [(Wait::Poll, "poll"), (Wait::Adaptive, "adaptive"), (Wait::Patient, "adaptive-10ms")];
/// What QEMU writes down when a guest has written a doorbell of an NVMe volume, and of its own disk.
const TRAPS: [&str; 2] = ["vfio_region_write", "pci_nvme_mmio_doorbell"];

/// Adds the rows.
pub fn rows(report: &mut Report, pairs: usize) -> Result<()> {
    let qemu = match newer_qemu() {
        Ok(qemu) => qemu,
        Err(why) => {
            report.omit("guest, NVMe", &format!("{why:#}"));
            return Ok(());
        }
    };
    let bed = TestBed::new("nvme-bench")?;
    let accel = bed.accel()?;
    println!("guests run under {accel:?}");
    let folders = tempfile::tempdir()?;
    let servers: Vec<_> = WAITS
        .map(|(wait, how)| Servers::start(folders.path(), wait, how))
        .into_iter()
        .collect::<Result<_>>()?;
    let guest = Guest::boot(&bed, &qemu, servers)?;
    let note = format!("guest under {accel}");
    for polled in [true, false] {
        for depth in [32, 1] {
            guest.rates(report, polled, depth, pairs, &note)?;
        }
    }
    guest.traps(report, &note)
}

/// The volumes that wait in the same way.
struct Servers {
    wait: Wait,
    how: &'static str,
    nvme: NvmeServer,
    blk: Server,
}

impl Servers {
    fn start(folders: &Path, wait: Wait, how: &'static str) -> Result<Self> {
        let folder = folders.join(how);
        std::fs::create_dir(&folder)?;
        // A queue with interrupts and a polled one. No thread has its own CPU, because the guest's processor has none either.
        let plan = Plan { backing: Backing::Null(BYTES), queues: 2, cpus: vec![], wait };
        // Their names differ, because they are the serial numbers, and a driver takes two controllers of one number for one device.
        let nvme = NvmeServer::start(&folder, how, &plan)?;
        let mut blk = Server::ours(&folder, &plan)?;
        // The server must be ready, because QEMU tries to connect only once.
        blk.connect(Options::new(blk.socket()))?.close()?;
        Ok(Self { wait, how, nvme, blk })
    }
}

/// Lets a process run for as long as this value lives. Volumes that poll take a processor each, also if nobody uses them, so
/// only one of all is not stopped.
struct Running<'a>(&'a Child);

impl<'a> Running<'a> {
    fn new(process: &'a Child) -> Result<Self> {
        kill_process(Pid::from_child(process), Signal::CONT)?;
        Ok(Self(process))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(self.0), Signal::STOP);
    }
}

/// A VM with all disks.
struct Guest {
    vm: Vm,
    servers: Vec<Servers>,
    /// The guest's names: of the NVMe volume and of the virtio-blk volume of each of the servers, then of QEMU's disk.
    names: Vec<String>,
}

impl Guest {
    fn boot(bed: &TestBed, qemu: &Path, servers: Vec<Servers>) -> Result<Self> {
        let mut vm = bed
            .vm("nvme")
            .qemu(qemu)
            .memory_mib(512)
            .program("/usr/bin/fio")
            .module("nvme")
            .module("virtio_blk")
            .kernel_arg("nvme.poll_queues=1")
            .kernel_arg("virtio_blk.poll_queues=1")
            .qemu_args("-object memory-backend-memfd,id=ram,size=512M,share=on -machine memory-backend=ram")
            .qemu_args("-bios qboot.rom");
        for (n, Servers { nvme, blk, .. }) in servers.iter().enumerate() {
            let (slot, nvme, blk) = (SLOT + 2 * n, nvme.socket().display(), blk.socket().display());
            vm = vm.qemu_arg("-device").qemu_arg(&format!(
                r#"{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{nvme}"}},"x-msg-timeout":120000,"addr":"{slot:#x}"}}"#
            ));
            vm = vm.qemu_args(&format!(
                "-chardev socket,id=blk{n},path={blk} -device vhost-user-blk-pci,chardev=blk{n},num-queues=2,addr={:#x}",
                slot + 1
            ));
        }
        let disks = 2 * servers.len() + 1;
        let vm = vm
            .qemu_args(&format!("-blockdev driver=null-co,node-name=null,size={BYTES},read-zeroes=off"))
            .qemu_args(&format!(
                "-device nvme,drive=null,serial=null,max_ioqpairs=2,addr={:#x}",
                SLOT + disks - 1
            ))
            .boot()?;
        let names = (SLOT..SLOT + disks).map(|slot| name_at(&vm, slot)).collect::<Result<_>>()?;
        println!("{}", vm.run("dmesg | grep 'poll queues'; true")?.ok()?.stdout.trim());
        for Servers { nvme, blk, .. } in &servers {
            for process in [nvme.engine(), blk.process()] {
                drop(Running(process));
            }
        }
        Ok(Self { vm, servers, names })
    }

    /// Runs something on each disk in turn, while only its volume runs.
    fn each<T>(&self, mut run: impl FnMut(&str) -> Result<T>) -> Result<Vec<T>> {
        let processes =
            self.servers.iter().flat_map(|servers| [servers.nvme.engine(), servers.blk.process()]);
        let processes = processes.map(Some).chain([None]);
        let mut on = |(name, process): (&String, Option<&Child>)| {
            let _running = process.map(Running::new).transpose()?;
            run(name)
        };
        self.names.iter().zip(processes).map(&mut on).collect()
    }

    /// Measures random reads.
    fn rates(&self, report: &mut Report, polled: bool, depth: u16, pairs: usize, note: &str) -> Result<()> {
        let how = format!("--iodepth={depth} --hipri={} {TIMED}", u8::from(polled));
        let mut runs = Vec::new();
        for _ in 0..pairs {
            runs.push(self.each(|name| fio_said(self.fio(name, &how)?.as_bytes()))?);
        }
        let kiops = |disk: usize| runs.iter().map(|run| run[disk].0 / 1000.0).collect::<Vec<_>>();
        let us = |disk: usize| runs.iter().map(|run| run[disk].1 / 1000.0).collect::<Vec<_>>();
        let qemu = self.names.len() - 1;
        for (n, servers) in self.servers.iter().enumerate() {
            let (nvme, blk) = (2 * n, 2 * n + 1);
            let case = format!("{}, QD {depth}", case(servers.how, polled));
            let target = if depth == 1 { 1.5 } else { 3.0 };
            for (peer, theirs, target) in [(QEMU, qemu, Some(target)), (BLK, blk, None)] {
                let what = format!("{case}: reads");
                report.pairs(what, "kIOPS", Better::Higher, &kiops(nvme), peer, &kiops(theirs), target, note);
                if depth == 1 {
                    let what = format!("{case}: p50");
                    report.pairs(what, "us", Better::Lower, &us(nvme), peer, &us(theirs), None, note);
                }
            }
        }
        Ok(())
    }

    /// Counts the doorbells that the guest writes by way of QEMU.
    fn traps(&self, report: &mut Report, note: &str) -> Result<()> {
        for event in TRAPS {
            self.vm.qmp(&format!(
                r#"{{"execute":"trace-event-set-state","arguments":{{"name":"{event}*","enable":true}}}}"#
            ))?;
        }
        for polled in [true, false] {
            for depth in [32, 1] {
                let how = format!("--iodepth={depth} --hipri={} --number_ios={COMMANDS}", u8::from(polled));
                let count =
                    || TRAPS.iter().map(|trap| self.vm.console().1.matches(trap).count()).sum::<usize>();
                let traps = self.each(|name| {
                    let before = count();
                    self.fio(name, &how)?;
                    Ok(((count() - before) as f64 * 1000.0 / COMMANDS as f64).max(NOTHING))
                })?;
                let qemu = traps[traps.len() - 1];
                for (n, Servers { wait, how, .. }) in self.servers.iter().enumerate() {
                    let most = if *wait == Wait::Poll { NOTHING } else { 5.0 };
                    // Between two commands of a guest that has only one, such a thread sleeps, and wants to be woken.
                    let target = Some(1.0).filter(|_| depth == 32 || *wait != Wait::Adaptive);
                    let case =
                        format!("{}, QD {depth}: trapped doorbells per 1000 commands", case(how, polled));
                    let note = format!("{note}; 0.001 stands for none");
                    for (peer, theirs, target) in [(LIMIT, most, target), (QEMU, qemu, None)] {
                        let ours = [traps[2 * n]];
                        report.pairs(&case, "traps", Better::Lower, &ours, peer, &[theirs], target, &note);
                    }
                }
            }
        }
        Ok(())
    }

    fn fio(&self, name: &str, how: &str) -> Result<String> {
        let command = format!(
            "fio --name=bench --filename=/dev/{name} --ioengine=io_uring --direct=1 --rw=randread --bs=4k --norandommap \
             --size={BYTES} --lat_percentiles=1 --output-format=json {how}"
        );
        Ok(self.vm.run_within(2 * PROMPT, &command)?.ok()?.stdout)
    }
}

fn case(how: &str, polled: bool) -> String {
    let guest = if polled { "fio polls" } else { "interrupts" };
    format!("guest, NVMe, null, {how}, {guest}")
}

/// Waits for the disk in a PCI slot, and returns its name.
fn name_at(vm: &Vm, slot: usize) -> Result<String> {
    let find = format!(
        "until for disk in /sys/block/*; do readlink -f $disk | grep -q '/0000:00:{slot:x}.0/' && echo ${{disk##*/}}; done | grep .; \
         do usleep 20000; done"
    );
    let name = vm.run_within(PROMPT, &find)?.ok()?.stdout.trim().to_owned();
    let about = vm.run(&format!("cat /sys/block/{name}/size /sys/block/{name}/queue/io_poll"))?.ok()?.stdout;
    ensure!(about == format!("{}\n1\n", BYTES / 512), "{name}: {about}");
    Ok(name)
}
