//! A volume that drives an NVMe device itself, beside one that uses the kernel's driver by io_uring, on the same emulated disk. Both run
//! in a guest with an IOMMU, one after the other, with the same client.

use crate::report::{Better, Report};
use anyhow::{Context, Result};
use std::time::Duration;
use vmtest::{TestBed, Vm, artifact};

const PROMPT: Duration = Duration::from_secs(60);
const ADDRESS: &str = "0000:00:10.0";
const PEER: &str = "io_uring, kernel's driver";

/// What a client has measured: requests a second, and the median latency in microseconds.
struct Run {
    rate: f64,
    p50: f64,
}

/// Adds the rows.
pub fn rows(report: &mut Report, pairs: usize) -> Result<()> {
    let bed = TestBed::new("volume-own-driver")?;
    println!("the guest runs under {:?}", bed.accel()?);
    let vm = boot(&bed)?;
    for (what, flags, depth, target) in [
        ("reads", "--rw randread", 16, Some(5.0)),
        ("writes", "--rw randwrite", 16, Some(5.0)),
        ("reads", "--rw randread", 1, None),
    ] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let flags = format!("{flags} --qd {depth}");
            theirs.push(measure(&vm, &format!("--backend file --direct on --path {}", disk(&vm)?), &flags)?);
            vm.run(&format!("ginnel volume bind {ADDRESS}"))?.ok()?;
            ours.push(measure(&vm, &format!("--backend vfio --pci {ADDRESS}"), &flags)?);
            vm.run(&format!("ginnel volume unbind {ADDRESS}"))?.ok()?;
        }
        let case = format!("in a guest: vfio, 4 KiB random {what}, QD {depth}");
        let note = "emulated disk without data, emulated IOMMU; volume and client in the guest";
        let column = |runs: &[Run], of: fn(&Run) -> f64| runs.iter().map(of).collect::<Vec<_>>();
        let rate = |runs: &[Run]| column(runs, |run| run.rate / 1000.0);
        report.pairs(&case, "kIOPS", Better::Higher, &rate(&ours), PEER, &rate(&theirs), target, note);
        if depth == 1 {
            let p50 = |runs: &[Run]| column(runs, |run| run.p50);
            let case = format!("{case}, p50");
            report.pairs(case, "us", Better::Lower, &p50(&ours), PEER, &p50(&theirs), None, note);
        }
    }
    vm.shutdown()
}

fn boot(bed: &TestBed) -> Result<Vm> {
    let vm = bed
        .vm("own-driver")
        .memory_mib(768)
        .cpus(2)
        .iommu()
        .module("nvme")
        .module("vfio_iommu_type1")
        .module("vfio-pci")
        .program(artifact("ginnel-volume")?)
        .program(artifact("ginnel-volume-bench")?)
        .program(artifact("ginnel")?)
        .qemu_args("-blockdev driver=null-co,node-name=disk,size=268435456,read-zeroes=on -device nvme,serial=disk,drive=disk,addr=10")
        .boot()?;
    Ok(vm)
}

/// Returns the block device of the disk, which has a new name each time that the kernel gets it back. Waits until it is there.
fn disk(vm: &Vm) -> Result<String> {
    let find = format!(
        "until ls /sys/bus/pci/devices/{ADDRESS}/nvme/nvme*/ 2>/dev/null | grep -qx 'nvme[0-9]*n1'; do usleep 20000; done; \
         name=$(ls /sys/bus/pci/devices/{ADDRESS}/nvme/nvme*/ | grep -x 'nvme[0-9]*n1'); \
         until [ -b /dev/$name ]; do usleep 20000; done; echo /dev/$name"
    );
    Ok(vm.run_within(PROMPT, &find)?.ok()?.stdout.trim().to_owned())
}

fn measure(vm: &Vm, volume: &str, flags: &str) -> Result<Run> {
    let job = vm.spawn(&format!("exec ginnel-volume v --socket /tmp/v.sock {volume}"))?;
    job.wait_for_line("serving", PROMPT)?;
    let command = format!(
        "ginnel-volume-bench --socket /tmp/v.sock --sleep --json --bs 4k --seconds 3 --ramp 1 {flags}"
    );
    let said = vm.run_within(PROMPT, &command)?.ok()?.stdout;
    let said: serde_json::Value = serde_json::from_str(&said)?;
    job.kill(15)?;
    job.wait(PROMPT)?.ok()?;
    let kind = ["reads", "writes"].into_iter().find(|kind| !said[kind].is_null());
    let part = &said[kind.context("the client has done nothing")?];
    let p50 = part["p50"].as_f64().with_context(|| said.to_string())? / 1000.0;
    Ok(Run { rate: said["iops"].as_f64().with_context(|| said.to_string())?, p50 })
}
