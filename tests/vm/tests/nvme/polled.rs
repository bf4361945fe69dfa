//! A guest that polls its disks: the stock drivers have a queue without an interrupt on NVMe volumes with mapped and with shadow
//! doorbells, and on a virtio-blk volume. fio uses it by io_uring, and the volume does not call.

use super::*;

/// How many blocks of 4 KiB fio writes and reads in each way.
const BLOCKS: u64 = 512;

/// A disk of the guest.
struct Disk {
    name: String,
    /// Its volume's socket for QEMU.
    socket: PathBuf,
    /// A pattern that its interrupts have in their names, those of its requests only.
    interrupts: String,
}

/// What a run of fio has caused.
#[derive(Debug)]
struct Caused {
    interrupts: u64,
    /// The requests of each queue of the volume, and how often the volume called the driver for them.
    queues: Vec<(u64, u64)>,
    /// How often the guest has written a register of an NVMe volume by way of QEMU.
    traps: usize,
}

impl Disk {
    fn find(vm: &Vm, serial: &str, socket: &Path) -> Result<Self> {
        let find = format!(
            "until for disk in /sys/block/*; do \
                 grep -sqx '{serial} *' $disk/serial $disk/device/serial && echo ${{disk##*/}} $(basename $(readlink $disk/device)); \
             done | grep .; do usleep 20000; done"
        );
        let found = vm.run(&find)?.ok()?.stdout;
        let (name, device) = found.trim().split_once(' ').context(found.clone())?;
        let interrupts = if name.starts_with("nvme") { "q[1-9]" } else { "-req" };
        Ok(Self {
            name: name.to_owned(),
            socket: socket.to_owned(),
            interrupts: format!("{device}{interrupts}"),
        })
    }

    /// Returns the sum of its interrupts on all processors.
    fn interrupts(&self, vm: &Vm) -> Result<u64> {
        let sum = format!(
            "awk '/{}/ {{ for (i = 2; $i ~ /^[0-9]+$/; i++) n += $i }} END {{ print n + 0 }}' /proc/interrupts",
            self.interrupts
        );
        Ok(vm.run(&sum)?.ok()?.stdout.trim().parse()?)
    }

    fn queues(&self) -> Result<Vec<(u64, u64)>> {
        let number = |queue: &Value, key: &str| queue[key].as_u64().unwrap_or(0);
        Ok(queues(&self.socket)?
            .iter()
            .map(|queue| (number(queue, "done"), number(queue, "calls")))
            .collect())
    }

    fn fio(&self, vm: &Vm, how: &str) -> Result<Caused> {
        let (queues, interrupts, trapped) = (self.queues()?, self.interrupts(vm)?, traps(vm));
        vm.run_within(4 * PROMPT, &fio(&self.name, how, BLOCKS))?.ok()?;
        let caused = Caused {
            interrupts: self.interrupts(vm)? - interrupts,
            queues: self
                .queues()?
                .iter()
                .zip(queues)
                .map(|(now, was)| (now.0 - was.0, now.1 - was.1))
                .collect(),
            traps: traps(vm) - trapped,
        };
        println!("{}, {how}: {caused:?}", self.name);
        Ok(caused)
    }
}

/// Returns a command that writes blocks and reads them again.
fn fio(disk: &str, how: &str, blocks: u64) -> String {
    format!(
        "fio --name=load --filename=/dev/{disk} --ioengine=io_uring {how} --direct=1 --bs=4k --rw=randwrite --size={}k --iodepth=8 \
         --verify=crc32c --verify_fatal=1",
        4 * blocks
    )
}

/// Returns how many writes to registers QEMU has handed on to holders since it was told to write them down.
fn traps(vm: &Vm) -> usize {
    vm.console().1.matches("vfio_region_write").count()
}

#[test]
fn a_guest_polls_its_disks_without_interrupts() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let bed = TestBed::new("nvme-polled")?;
    // For two processors, the drivers make two queues with interrupts and a polled one on NVMe, and one of each on virtio-blk.
    let image = image(&bed, 16 << 20)?;
    let flags = format!("--path {} --queues 3 --wait poll", image.display());
    let mut mapped = Volume::start(&bed, "mapped", &flags)?;
    let shadow = Volume::start(&bed, "shadow", "--backend ram --size 16M --queues 3")?;
    let (program, virtio) = (artifact("ginnel-volume")?, bed.dir().join("virtio.sock"));
    let flags = format!("--backend ram --size 16M --queues 2 --socket {}", virtio.display());
    run(&bed, &format!("exec {} virtio {flags}", program.display()))?;
    let vm = vm(&bed, "guest", &[&mapped.holder, &shadow.holder])?
        .qemu_args(&format!("-chardev socket,id=virtio,path={}", virtio.display()))
        .qemu_args("-device vhost-user-blk-pci,chardev=virtio,num-queues=2")
        .module("nvme")
        .module("virtio_blk")
        .module("crc32c_generic")
        .kernel_arg("nvme.poll_queues=1")
        .kernel_arg("virtio_blk.poll_queues=1")
        .program("/usr/bin/fio")
        .boot()?;
    let disks = [
        Disk::find(&vm, "mapped", &mapped.holder.socket)?,
        Disk::find(&vm, "shadow", &shadow.holder.socket)?,
        Disk::find(&vm, "virtio", &virtio)?,
    ];
    println!("{}", vm.run("dmesg | grep 'poll queues'")?.ok()?.stdout);
    vm.qmp(r#"{"execute":"trace-event-set-state","arguments":{"name":"vfio_region_write","enable":true}}"#)?;
    for disk in &disks {
        let polls = vm.run(&format!("cat /sys/block/{}/queue/io_poll", disk.name))?.ok()?.stdout;
        ensure!(polls.trim() == "1", "{}: io_poll is {polls}", disk.name);
        let polls = disk.fio(&vm, "--hipri=1")?;
        // Both drivers number their polled queue last.
        let (polled, others) = polls.queues.split_last().context("no queues")?;
        ensure!(polled.0 >= 2 * BLOCKS && others.iter().all(|queue| queue.0 == 0), "{polls:?}");
        ensure!(polls.interrupts == 0, "{polls:?}");
        // The event index of a virtqueue that is polled stays where it is, and is passed once in 65,536 requests.
        ensure!(polled.1 <= u64::from(disk.name.starts_with("vd")), "{polls:?}");
        ensure!(disk.name != disks[0].name || polls.traps == 0, "{polls:?}");
        // The same counters with a load that waits for interrupts.
        let waits = disk.fio(&vm, "--hipri=0")?;
        let (polled, others) = waits.queues.split_last().context("no queues")?;
        ensure!(polled.0 == 0 && others.iter().any(|queue| queue.0 > 0 && queue.1 > 0), "{waits:?}");
        ensure!(waits.interrupts > 0, "{waits:?}");
    }
    // The next engine goes on with a queue that is polled.
    let before = mapped.count("done")?;
    let load = vm.spawn(&fio(&disks[0].name, "--hipri=1 --rate_iops=500", 4 * BLOCKS))?;
    wait_until("the load runs", PROMPT, || Ok(mapped.count("done")? > before + 20))?;
    mapped.kill_and_restart()?;
    load.wait(4 * PROMPT)?.ok()?;
    ensure!(errors(&vm)?.is_empty(), "{}", errors(&vm)?);
    ensure!(traps(&vm) > 0, "QEMU has written no traps down, although the queues of one volume slept");
    vm.shutdown()
}
