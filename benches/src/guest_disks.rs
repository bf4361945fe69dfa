//! Disks in a guest: a volume beside QEMU's own virtio-blk with an iothread and virtio-scsi. All three are in the same VM, and
//! fio runs in the guest.

use crate::report::{Better, Report};
use crate::volume::{Backing, Plan, Server, Wait, make_file};
use anyhow::{Context, Result};
use ginnel_volume_bench::Options;
use std::path::Path;
use std::time::Duration;
use vmtest::{TestBed, Vm};

const BYTES: u64 = 256 << 20;
const SECONDS: u64 = 3;

/// Adds the rows.
pub fn rows(report: &mut Report, pairs: usize) -> Result<()> {
    let bed = TestBed::new("volume-bench")?;
    println!("guests run under {:?}", bed.accel()?);
    // The images are in the page cache, so that the way to the disk is measured and not a disk. They are not on tmpfs, because
    // io_uring hands its requests to other threads.
    let dir = tempfile::tempdir_in(crate::report::folder()?)?;
    let image = |name: &str| -> Result<_> {
        let path = dir.path().join(name);
        make_file(&path, BYTES)?;
        Ok(path)
    };
    let (ours, blk, scsi) = (image("ours")?, image("blk")?, image("scsi")?);
    // No thread has its own CPU, because QEMU's threads have none either: the guest's processor may be running there.
    let plan = Plan { backing: Backing::File(&ours), queues: 1, cpus: vec![], wait: Wait::Adaptive };
    let mut server = Server::ours(dir.path(), &plan)?;
    // The server must be ready, because QEMU tries to connect only once.
    server.connect(Options::new(server.socket()))?.close()?;
    let vm = boot(&bed, server.socket(), &blk, &scsi)?;
    let disks = ["vda", "vdb", "sda"];
    for (what, rw, depth) in [
        ("reads", "randread", 1),
        ("writes", "randwrite", 1),
        ("reads", "randread", 32),
        ("writes", "randwrite", 32),
    ] {
        let mut said = [const { Vec::new() }; 3];
        for _ in 0..pairs {
            for (disk, said) in disks.iter().zip(&mut said) {
                said.push(fio(&vm, disk, rw, depth)?);
            }
        }
        let [ours, blk, scsi] = said;
        for (name, peer) in [("virtio-blk, iothread", &blk), ("virtio-scsi, iothread", &scsi)] {
            let column = |runs: &[(f64, f64)], n: usize| -> Vec<f64> {
                runs.iter().map(|run| if n == 0 { run.0 / 1000.0 } else { run.1 / 1000.0 }).collect()
            };
            let case = format!("guest: 4 KiB random {what}, QD {depth}");
            report.pairs(&case, "kIOPS", Better::Higher, &column(&ours, 0), name, &column(peer, 0), None, "");
            if depth == 1 {
                report.pairs(
                    format!("{case}, p50"),
                    "us",
                    Better::Lower,
                    &column(&ours, 1),
                    name,
                    &column(peer, 1),
                    None,
                    "",
                );
            }
        }
    }
    Ok(())
}

/// Boots a VM with the three disks. QEMU's own disks have the same kind of image, use io_uring, and have a thread each.
fn boot(bed: &TestBed, socket: &Path, blk: &Path, scsi: &Path) -> Result<Vm> {
    let drive = |id: &str, path: &Path| {
        format!("-blockdev driver=file,node-name={id},filename={},aio=io_uring ", path.display())
    };
    let vm = bed
        .vm("disks")
        .memory_mib(512)
        .program("/usr/bin/fio")
        .module("virtio_blk")
        .module("virtio_scsi")
        .module("sd_mod")
        .qemu_args("-object memory-backend-memfd,id=ram,size=512M,share=on -machine memory-backend=ram")
        .qemu_args(&format!(
            "-chardev socket,id=ours,path={} -device vhost-user-blk-pci,chardev=ours,num-queues=1",
            socket.display()
        ))
        .qemu_args(&drive("blk", blk))
        .qemu_args("-object iothread,id=blk-thread -device virtio-blk-pci,drive=blk,iothread=blk-thread,num-queues=1")
        .qemu_args(&drive("scsi", scsi))
        .qemu_args("-object iothread,id=scsi-thread -device virtio-scsi-pci,iothread=scsi-thread,num_queues=1")
        .qemu_args("-device scsi-hd,drive=scsi")
        .boot()?;
    for disk in ["vda", "vdb", "sda"] {
        let wait = format!("until [ -b /dev/{disk} ]; do usleep 20000; done; cat /sys/block/{disk}/size");
        let said = vm.run_within(Duration::from_secs(30), &wait)?.ok()?.stdout;
        anyhow::ensure!(said.trim() == (BYTES / 512).to_string(), "/dev/{disk} has {said} sectors");
    }
    Ok(vm)
}

fn fio(vm: &Vm, disk: &str, rw: &str, depth: u16) -> Result<(f64, f64)> {
    // libaio is what the kernel and fio of a stable distribution have in common, with one system call per batch.
    let command = format!(
        "fio --name=bench --ioengine=libaio --direct=1 --rw={rw} --bs=4k --iodepth={depth} --filename=/dev/{disk} \
         --time_based --runtime={SECONDS} --ramp_time=1 --norandommap --output-format=json"
    );
    let said = vm.run_within(Duration::from_secs(60), &command)?.ok()?.stdout;
    fio_said(said.as_bytes())
}

/// Parses the JSON of fio. Returns the IOPS of reads and writes together, and the median latency in nanoseconds of the only
/// kind that occurs: from the submission on if fio ran with `--lat_percentiles=1`, otherwise from the end of the submission on.
pub fn fio_said(json: &[u8]) -> Result<(f64, f64)> {
    let start = json.iter().position(|byte| *byte == b'{').unwrap_or(0);
    let said: serde_json::Value = serde_json::from_slice(&json[start..]).context("fio prints JSON")?;
    let of = |kind: &str| {
        let part = &said["jobs"][0][kind];
        let number = |value: &serde_json::Value| value.as_f64().unwrap_or(0.0);
        let p50 = |latency: &str| number(&part[latency]["percentile"]["50.000000"]);
        (number(&part["iops"]), p50("lat_ns").max(p50("clat_ns")))
    };
    let (read, write) = (of("read"), of("write"));
    anyhow::ensure!(read.0 + write.0 > 0.0, "fio has done nothing: {}", String::from_utf8_lossy(json));
    Ok((read.0 + write.0, read.1.max(write.1)))
}
