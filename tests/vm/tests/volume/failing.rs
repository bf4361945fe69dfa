//! A volume whose disk fails: the disk is a device-mapper target in a guest, and the volume runs in the same guest.

use super::*;
use serde_json::Value;

/// The number of sectors of each of the two devices, which lie one behind the other on the guest's disk.
const SECTORS: u64 = 65536;

/// A guest with the devices `cached` and `direct` in `/dev/mapper`.
struct Guest {
    vm: Vm,
}

#[derive(Clone, Copy)]
enum Health {
    Good,
    /// The disk can be read, and fails all writes.
    FailsWrites,
}

impl Guest {
    fn boot(bed: &TestBed) -> Result<Self> {
        let disk = image(bed, "disk", 2 * SECTORS * 512, None)?;
        let vm = bed
            .vm("failing")
            .memory_mib(512)
            .cpus(2)
            .module("virtio_blk")
            .module("dm_flakey")
            .module("crc32c_generic")
            .module("ext4")
            .program(artifact("ginnel-volume")?)
            .program(artifact("ginnel-volume-bench")?)
            .program(artifact("ginnel")?)
            .program("/usr/sbin/dmsetup")
            .program("/usr/sbin/mkfs.ext4")
            .qemu_args(&format!(
                "-drive if=none,id=d,format=raw,discard=unmap,cache=unsafe,file={}",
                disk.display()
            ))
            .qemu_args("-device virtio-blk-pci,drive=d")
            .boot()?;
        wait_for_disk(&vm, "vda")?;
        let guest = Self { vm };
        for device in ["cached", "direct"] {
            let table = Self::table(device, Health::Good);
            guest.vm.run(&format!("dmsetup create {device} --noudevsync --table '{table}'"))?.ok()?;
        }
        // No udev makes the names here.
        guest.vm.run("dmsetup mknodes && ls /dev/mapper/cached /dev/mapper/direct")?.ok()?;
        Ok(guest)
    }

    fn table(device: &str, health: Health) -> String {
        let from = if device == "direct" { SECTORS } else { 0 };
        match health {
            Health::Good => format!("0 {SECTORS} linear /dev/vda {from}"),
            Health::FailsWrites => format!("0 {SECTORS} flakey /dev/vda {from} 0 86400 1 error_writes"),
        }
    }

    fn becomes(&self, device: &str, health: Health) -> Result<()> {
        let table = Self::table(device, health);
        let change = format!(
            "dmsetup load {device} --table '{table}' && dmsetup suspend {device} --nolockfs --noudevsync && \
             dmsetup resume {device} --noudevsync"
        );
        self.vm.run(&change)?.ok()?;
        Ok(())
    }

    fn serve(&self, name: &str, flags: &str) -> Result<vmtest::Job> {
        let command =
            format!("exec ginnel-volume {name} --socket /tmp/{name}.sock --queues 2 --threads 2 {flags}");
        let job = self.vm.spawn(&command)?;
        job.wait_for_line("serving", PROMPT)?;
        Ok(job)
    }

    /// Sends requests on two queues at once. Returns whether all of them succeeded.
    fn load(&self, name: &str, flags: &str) -> Result<bool> {
        let output = self.vm.run_within(4 * PROMPT, &load(name, flags))?;
        match output.exit {
            Exit::Code(0) => Ok(true),
            // A request has failed.
            Exit::Code(1) => Ok(false),
            _ => Err(anyhow::anyhow!("{output:?}")),
        }
    }

    fn stat(&self, name: &str) -> Result<Value> {
        let said = self.vm.run(&format!("ginnel volume stat {name} --json --sockets /tmp"))?.ok()?.stdout;
        Ok(serde_json::from_str(&said)?)
    }

    fn has_lost(&self, name: &str) -> Result<bool> {
        let stat = self.stat(name)?;
        stat["disks"][0]["lost_writes"].as_bool().with_context(|| stat.to_string())
    }

    fn held(&self, name: &str) -> Result<u64> {
        let stat = self.stat(name)?;
        let queues = stat["queues"].as_array().with_context(|| stat.to_string())?;
        Ok(queues.iter().filter_map(|queue| queue["held"].as_u64()).sum())
    }
}

fn load(name: &str, flags: &str) -> String {
    format!("ginnel-volume-bench --socket /tmp/{name}.sock --queues 2 --threads 1 --qd 4 --sleep {flags}")
}

/// With the page cache: the kernel reports only once, to each open file, that it could not write back data that it had
/// accepted.
#[test]
fn data_lost_by_a_failing_disk_is_never_acknowledged() -> Result<()> {
    let bed = TestBed::new("volume-lost")?;
    let guest = Guest::boot(&bed)?;
    // Without a journal, the file system continues as before when the disk works again.
    let make = "mkfs.ext4 -q -O ^has_journal /dev/mapper/cached && mkdir -p /mnt && mount /dev/mapper/cached /mnt && \
                dd if=/dev/zero of=/mnt/image bs=1M count=16 conv=fsync";
    guest.vm.run_within(2 * PROMPT, make)?.ok()?;
    let volume = guest.serve("lost", "--path /mnt/image --direct off")?;
    let flushing = "--rw randwrite --flush-every 16 --requests 400";
    ensure!(guest.load("lost", flushing)? && !guest.has_lost("lost")?, "{:?}", volume.said());

    guest.becomes("cached", Health::FailsWrites)?;
    ensure!(!guest.load("lost", flushing)?, "a flush succeeded on a disk that fails");
    ensure!(guest.has_lost("lost")?, "{:?}", volume.said());
    guest.becomes("cached", Health::Good)?;
    // The kernel has forgotten the error; the volume has not.
    guest.vm.run("sync")?.ok()?;
    for _ in 0..3 {
        ensure!(!guest.load("lost", flushing)?, "a flush succeeded after writes were lost");
    }
    ensure!(guest.load("lost", "--rw randread --requests 400")?, "reads go on");
    ensure!(guest.load("lost", "--rw randwrite --requests 400")?, "writes that are not flushed go on");
    guest.vm.run("ginnel volume reset-errors lost --sockets /tmp")?.ok()?;
    ensure!(
        guest.load("lost", &format!("{flushing} --verify"))? && !guest.has_lost("lost")?,
        "all is well again"
    );
    println!("{}", volume.said().1);
    guest.vm.shutdown()
}

/// Without the page cache: each write that fails is reported to the driver or waits for an operator, and nothing else is lost.
#[test]
fn requests_refused_by_a_failing_disk_fail_or_wait() -> Result<()> {
    let bed = TestBed::new("volume-fails")?;
    let guest = Guest::boot(&bed)?;
    let path = "--path /dev/mapper/direct --direct on";
    let volume = guest.serve("tells", path)?;
    let flushing = "--rw randwrite --flush-every 16 --requests 400";
    guest.becomes("direct", Health::FailsWrites)?;
    // Without flushes, because a flush that the disk fails means that the disk's own cache has lost something.
    ensure!(!guest.load("tells", "--rw randwrite --requests 400")?, "a write succeeded on a disk that fails");
    guest.becomes("direct", Health::Good)?;
    ensure!(!guest.has_lost("tells")?, "what failed was told: {:?}", volume.said());
    ensure!(guest.load("tells", &format!("{flushing} --verify"))?, "{:?}", volume.said());
    volume.kill(15)?;
    volume.wait(PROMPT)?;

    let volume = guest.serve("waits", &format!("{path} --on-error hold"))?;
    guest.becomes("direct", Health::FailsWrites)?;
    let writer = guest.vm.spawn(&load("waits", "--rw randwrite --requests 400 --verify"))?;
    // Both queues are full of requests that wait.
    wait_until("all requests wait", 2 * PROMPT, || Ok(guest.held("waits")? == 8))?;
    guest.becomes("direct", Health::Good)?;
    guest.vm.run("ginnel volume resume waits --sockets /tmp")?.ok()?;
    writer.wait(4 * PROMPT)?.ok().with_context(|| format!("{:?}", volume.said()))?;
    ensure!(guest.held("waits")? == 0 && !guest.has_lost("waits")?, "{}", guest.stat("waits")?);

    // The same for discards, which a thread executes if the guest's kernel has none in io_uring.
    guest.becomes("direct", Health::FailsWrites)?;
    let discards = guest.vm.spawn("exec ginnel-volume-bench --socket /tmp/waits.sock --discard 1M:1M")?;
    wait_until("the discard waits", 2 * PROMPT, || Ok(guest.held("waits")? == 1))?;
    let dump = guest.vm.run("ginnel volume dump waits --sockets /tmp")?.ok()?.stdout;
    ensure!(dump.contains("discard") && dump.contains("operator: Input/output error"), "{dump}");
    guest.becomes("direct", Health::Good)?;
    guest.vm.run("ginnel volume resume waits --sockets /tmp")?.ok()?;
    discards.wait(4 * PROMPT)?.ok().with_context(|| format!("{:?}", volume.said()))?;
    ensure!(guest.held("waits")? == 0 && !guest.has_lost("waits")?, "{}", guest.stat("waits")?);
    println!("{}", volume.said().1);
    guest.vm.shutdown()
}
