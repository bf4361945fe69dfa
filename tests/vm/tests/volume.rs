//! Volumes under QEMU with the virtio_blk and virtio_scsi of a stock guest: file systems and large files, targets with several
//! LUNs, the death of the volume's process under load, guests that reboot, QEMUs that end and start again, disks that grow, VMs
//! that migrate, disks that fail, and disks that give space back.

#[path = "volume/failing.rs"]
mod failing;
#[path = "volume/in_flight.rs"]
mod in_flight;
#[path = "volume/migration.rs"]
mod migration;
#[path = "volume/nvme_stays.rs"]
mod nvme_stays;
#[path = "volume/passthrough.rs"]
mod passthrough;
#[path = "volume/thin.rs"]
mod thin;
#[path = "volume/vfio.rs"]
mod vfio;

use anyhow::{Context, Result, ensure};
use kit::random::Random;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtest::{Exit, HostJob, TestBed, Vm, VmBuilder, artifact, wait_until};

kit::test_that_skips_are_seen!();

const PROMPT: Duration = Duration::from_secs(60);

/// The process of a volume, which may be killed and started again.
struct Volume<'b> {
    bed: &'b TestBed,
    command: String,
    socket: PathBuf,
    queues: u16,
    job: Arc<HostJob>,
}

impl<'b> Volume<'b> {
    fn start(bed: &'b TestBed, name: &str, queues: u16, flags: &str) -> Result<Self> {
        let program = artifact("ginnel-volume")?;
        let socket = bed.dir().join(format!("{name}.sock"));
        let command = format!(
            "exec {} {name} --socket {} --queues {queues} {flags}",
            program.display(),
            socket.display()
        );
        let job = run(bed, &command)?;
        Ok(Self { bed, command, socket, queues, job })
    }

    /// Kills the process with SIGKILL and starts another one.
    fn kill_and_restart(&mut self) -> Result<()> {
        self.job.kill(9)?;
        self.job.wait(PROMPT)?;
        self.job = run(self.bed, &self.command)?;
        Ok(())
    }

    /// Returns QEMU's arguments for the disk.
    fn device(&self, id: &str, more: &str) -> String {
        self.device_with(id, "reconnect=1", more)
    }

    /// Returns QEMU's arguments for the disk, with an option that tells QEMU how to connect again.
    fn device_with(&self, id: &str, reconnect: &str, more: &str) -> String {
        let (socket, queues) = (self.socket.display(), self.queues);
        format!(
            " -chardev socket,id={id},path={socket},{reconnect} \
             -device vhost-user-blk-pci,chardev={id},num-queues={queues}{more}"
        )
    }

    /// Returns QEMU's arguments for a SCSI target.
    fn target(&self, id: &str) -> String {
        let (socket, queues) = (self.socket.display(), self.queues);
        format!(
            " -chardev socket,id={id},path={socket} -device vhost-user-scsi-pci,chardev={id},num_queues={queues}"
        )
    }

    fn control(&self, request: &str) -> Result<String> {
        use std::io::{BufRead, BufReader, Write};
        let mut stream = std::os::unix::net::UnixStream::connect(self.socket.with_extension("ctl"))?;
        stream.set_read_timeout(Some(PROMPT))?;
        writeln!(stream, "{request}")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        Ok(answer)
    }
}

fn run(bed: &TestBed, command: &str) -> Result<Arc<HostJob>> {
    let job = bed.host_spawn(command)?;
    job.wait_for_line("serving", PROMPT)?;
    Ok(job)
}

/// Describes a VM whose memory can be shared.
fn vm(bed: &TestBed, name: &str) -> VmBuilder {
    bed.vm(name)
        .memory_mib(512)
        .cpus(2)
        .module("virtio_blk")
        .qemu_args("-object memory-backend-memfd,id=ram,size=512M,share=on -machine memory-backend=ram")
}

fn wait_for_disk(vm: &Vm, disk: &str) -> Result<()> {
    vm.run(&format!("until [ -b /dev/{disk} ]; do usleep 20000; done"))?.ok()?;
    Ok(())
}

/// Kills a volume in a guest so many times while a client there writes to it and verifies what it reads. `serve` starts the volume,
/// whose name is `killed`.
fn kill_under_load(vm: &Vm, times: usize, serve: impl Fn() -> Result<vmtest::Job>) -> Result<()> {
    let mut volume = serve()?;
    let load = || {
        vm.spawn(
            "exec ginnel-volume-bench --socket /tmp/killed.sock --sleep --rw randrw --verify --flush-every 32 --qd 16 \
             --reconnect 60 --requests 3000",
        )
    };
    let mut running = load()?;
    for _ in 0..times {
        // Only a volume that has a front end has commands under way.
        let has_worked = || {
            if !running.is_running() {
                running.wait(PROMPT)?.ok()?;
                running = load()?;
            }
            let said = vm.run("ginnel volume stat killed --json --sockets /tmp")?.stdout;
            let stat: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
            let mut queues = stat["queues"].as_array().into_iter().flatten();
            Ok(queues.any(|queue| queue["done"].as_u64().is_some_and(|done| done > 0)))
        };
        wait_until("the volume has worked", PROMPT, has_worked)
            .with_context(|| format!("{:?}", volume.said()))?;
        volume.kill(9)?;
        volume.wait(PROMPT)?;
        volume = serve()?;
    }
    running.wait(4 * PROMPT)?.ok().with_context(|| format!("{:?}", volume.said()))?;
    Ok(())
}

/// Makes a file of bytes that look random, different for each seed.
fn image(bed: &TestBed, name: &str, bytes: u64, seed: Option<u64>) -> Result<PathBuf> {
    use std::io::Write;
    let path = bed.dir().join(name);
    let file = std::fs::File::create(&path)?;
    match seed {
        None => file.set_len(bytes)?,
        Some(seed) => {
            let mut random = Random::new(seed);
            let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
            for _ in 0..bytes / 8 {
                out.write_all(&random.next().to_le_bytes())?;
            }
            out.flush()?;
        }
    }
    Ok(path)
}

fn same(a: &Path, b: &Path) -> Result<bool> {
    use std::io::Read;
    let (mut a, mut b) = (std::fs::File::open(a)?, std::fs::File::open(b)?);
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let n = a.read(&mut left)?;
        if n == 0 {
            return Ok(b.read(&mut right)? == 0);
        }
        b.read_exact(&mut right[..n])?;
        if left[..n] != right[..n] {
            return Ok(false);
        }
    }
}

/// Returns the command line of fio in a guest, which checks all that it has written. `more` says what it does.
fn fio(more: &str) -> String {
    format!(
        "fio --name=load --ioengine=libaio --direct=1 --bs=4k --verify=crc32c --verify_fatal=1 --group_reporting {more}"
    )
}

#[test]
fn a_disk_serves_a_file_system_fio_and_a_large_file() -> Result<()> {
    const GIB: u64 = 1 << 30;
    let bed = TestBed::new("volume-files")?;
    let disk = image(&bed, "disk", 256 << 20, None)?;
    let source = image(&bed, "source", GIB, Some(0x5eed))?;
    let target = image(&bed, "target", GIB, None)?;
    let file = |path: &Path| format!("--path {}", path.display());
    let disk = Volume::start(&bed, "disk", 2, &format!("--threads 2 {}", file(&disk)))?;
    let from = Volume::start(&bed, "from", 1, &format!("--read-only {}", file(&source)))?;
    let to = Volume::start(&bed, "to", 1, &format!("--sector 4096 {}", file(&target)))?;
    let vm = vm(&bed, "files")
        .module("crc32c_generic")
        .module("ext4")
        .program("/usr/sbin/mkfs.ext4")
        .program("/usr/sbin/e2fsck")
        .program("/usr/bin/fio")
        .qemu_args(&disk.device("vd0", ""))
        .qemu_args(&from.device("vd1", ""))
        .qemu_args(&to.device("vd2", ",packed=on"))
        .boot()?;
    ["vda", "vdb", "vdc"].into_iter().try_for_each(|name| wait_for_disk(&vm, name))?;
    let said = vm.run("cd /sys/block; echo $(cat vda/serial) $(cat vdb/ro vdc/queue/logical_block_size)")?;
    ensure!(said.ok()?.stdout.split_whitespace().eq(["disk", "1", "4096"]), "serial, read-only, sectors");

    vm.run_within(2 * PROMPT, "mkfs.ext4 -q /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt")?.ok()?;
    let job = fio("--directory=/mnt --size=32M --rw=randrw --iodepth=16 --numjobs=2 --fsync=64");
    vm.run_within(6 * PROMPT, &job)?.ok()?;
    vm.run_within(PROMPT, "rm /mnt/load* && fstrim /mnt; umount /mnt")?.ok()?;
    vm.run_within(2 * PROMPT, "e2fsck -f -n /dev/vda")?.ok()?;

    let begin = Instant::now();
    vm.run_within(10 * PROMPT, "dd if=/dev/vdb of=/dev/vdc bs=1M iflag=direct oflag=direct conv=fsync")?
        .ok()?;
    println!("dd of 1 GiB from one volume to another: {:?}", begin.elapsed());
    ensure!(
        vm.run("dd if=/dev/zero of=/dev/vdb bs=4k count=1 oflag=direct")?.exit != Exit::Code(0),
        "read-only"
    );
    vm.shutdown()?;
    ensure!(same(&source, &target)?, "the copy is another");
    Ok(())
}

#[test]
fn a_scsi_target_serves_several_luns() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let bed = TestBed::new("volume-scsi")?;
    let disk = image(&bed, "disk", 128 * MIB, None)?;
    let source = image(&bed, "source", 64 * MIB, Some(0x5eed))?;
    let copy = image(&bed, "copy", 64 * MIB, None)?;
    let config = bed.dir().join("target.toml");
    let (path, from, to) = (disk.display(), source.display(), copy.display());
    std::fs::write(
        &config,
        format!(
            "device = 'scsi'\n\
             [[disk]]\npath = '{path}'\nserial = 'first-of-three'\n\
             [[disk]]\npath = '{from}'\nread-only = true\n\
             [[disk]]\npath = '{to}'\nsector = '4K'\n"
        ),
    )?;
    let volume = Volume::start(&bed, "target", 2, &format!("--threads 2 --config {}", config.display()))?;
    let vm = vm(&bed, "scsi")
        .module("virtio_scsi")
        .module("sd_mod")
        .module("crc32c_generic")
        .module("ext4")
        .program("/usr/sbin/mkfs.ext4")
        .program("/usr/sbin/e2fsck")
        .program("/usr/bin/fio")
        .qemu_args(&volume.target("vs0"))
        .boot()?;
    // The names of disks follow the order in which they were found, not their LUNs.
    let lun = |lun: u32| {
        let place = format!("/sys/bus/scsi/devices/*:0:0:{lun}/block/sd*");
        let found = format!("until ls -d {place} 2>/dev/null; do usleep 20000; done");
        let said = vm.run(&found)?.ok()?.stdout;
        let name = said.trim().rsplit('/').next().context("a disk")?.to_owned();
        wait_for_disk(&vm, &name)?;
        anyhow::Ok(name)
    };
    let (disk_name, source_name, copy_name) = (lun(0)?, lun(1)?, lun(2)?);
    let said = vm.run(&format!(
        "cd /sys/block; cat {source_name}/ro {disk_name}/ro {disk_name}/queue/logical_block_size \
         {copy_name}/queue/logical_block_size {disk_name}/size {copy_name}/size; \
         grep -c first-of-three {disk_name}/device/vpd_pg80"
    ))?;
    let expected = ["1", "0", "512", "4096", "262144", "131072", "1"];
    let said = said.ok()?.stdout;
    ensure!(said.split_whitespace().eq(expected), "read-only, sectors, sizes, serial: {said:?}");

    // A file system; what is deleted in it is given back to the host.
    let load = format!(
        "--filename=/dev/{disk_name} --size=8M --rw=randrw --iodepth=16 --numjobs=2 --offset_increment=8M --fsync=64"
    );
    vm.run_within(4 * PROMPT, &fio(&load))?.ok()?;
    vm.run_within(
        2 * PROMPT,
        &format!("mkfs.ext4 -q /dev/{disk_name} && mkdir -p /mnt && mount /dev/{disk_name} /mnt"),
    )?
    .ok()?;
    vm.run_within(2 * PROMPT, &format!("dd if=/dev/{source_name} of=/mnt/file bs=1M count=48 conv=fsync"))?
        .ok()?;
    let full = allocated(&disk)?;
    ensure!(full >= 48 * MIB, "{full} bytes are allocated");
    let check = format!(
        "umount /mnt && mount /dev/{disk_name} /mnt && dd if=/dev/{source_name} bs=1M count=48 | cmp - /mnt/file && \
         rm /mnt/file && sync && fstrim /mnt && umount /mnt"
    );
    vm.run_within(2 * PROMPT, &check)?.ok()?;
    let trimmed = allocated(&disk)?;
    ensure!(trimmed + 40 * MIB < full, "{full} bytes were allocated, {trimmed} after fstrim");
    vm.run_within(2 * PROMPT, &format!("e2fsck -f -n /dev/{disk_name}"))?.ok()?;

    // Copy from one LUN to another; the first of them cannot be written.
    let dd =
        format!("dd if=/dev/{source_name} of=/dev/{copy_name} bs=1M iflag=direct oflag=direct conv=fsync");
    vm.run_within(4 * PROMPT, &dd)?.ok()?;
    let refused = vm.run(&format!("dd if=/dev/zero of=/dev/{source_name} bs=4k count=1 oflag=direct"))?;
    ensure!(refused.exit != Exit::Code(0), "read-only");
    let errors = vm.run("dmesg | grep -ci 'i/o error' ; true")?.ok()?.stdout;
    ensure!(errors.trim() == "0", "the guest saw errors: {}", vm.run("dmesg | tail -20")?.stdout);
    ensure!(same(&source, &copy)?, "the copy is another");

    // One of them grows. Nobody tells the guest, which hears of it through the event queue.
    let bytes = 72 * MIB;
    let answer = volume.control(&format!(r#"{{"op":"resize","disk":2,"size":{bytes}}}"#))?;
    ensure!(answer.contains(&bytes.to_string()), "{answer}");
    wait_until("the guest sees the new size", PROMPT, || {
        let size = vm.run(&format!("cat /sys/block/{copy_name}/size"))?.ok()?.stdout;
        Ok(size.trim() == (bytes / 512).to_string())
    })
    .with_context(|| format!("the volume: {:?}", volume.job.said()))?;
    let last = bytes / 4096 - 1;
    vm.run(&format!(
        "dd if=/dev/urandom of=/tmp/x bs=4k count=1 && dd if=/tmp/x of=/dev/{copy_name} bs=4k seek={last} oflag=direct && \
         dd if=/dev/{copy_name} bs=4k skip={last} iflag=direct | cmp - /tmp/x"
    ))?
    .ok()?;
    vm.shutdown()
}

/// Returns how many bytes of a file are not holes.
fn allocated(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(path)?.blocks() * 512)
}

#[test]
fn volumes_killed_under_load_lose_nothing() -> Result<()> {
    // All disks at the same time, each with its own load.
    const DISKS: [&str; 4] = ["vda", "vdb", "vdc", "vdd"];
    let turns = if std::env::var_os("GINNEL_SOAK").is_some() { 100 } else { 12 };
    let bed = TestBed::new("volume-kills")?;
    let mut builder = vm(&bed, "kills").program("/usr/bin/fio");
    let mut volumes = Vec::new();
    for disk in DISKS {
        let image = image(&bed, disk, 32 << 20, None)?;
        let volume = Volume::start(&bed, disk, 2, &format!("--threads 2 --path {}", image.display()))?;
        builder = builder.qemu_args(&volume.device(disk, ""));
        volumes.push(volume);
    }
    let vm = builder.boot()?;
    let mut loads = Vec::new();
    for disk in DISKS {
        wait_for_disk(&vm, disk)?;
        // The load writes, reads back what it has written a while ago, and checks each block.
        let load = format!(
            "--filename=/dev/{disk} --size=16M --rw=randwrite --iodepth=16 --verify_backlog=128 --fsync=32 --loops=100000"
        );
        loads.push(vm.spawn(&format!("exec {}", fio(&load)))?);
    }
    let mut random = Random::new(0x5eed);
    let mut slowest = Duration::ZERO;
    let begin = Instant::now();
    for turn in 0..turns {
        // Each kill comes at a random moment, which is why the test sleeps here.
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        for volume in &mut volumes {
            volume.kill_and_restart()?;
        }
        // QEMU tries to connect once a second; then the queues run again and requests are executed.
        let restart = Instant::now();
        for (volume, load) in volumes.iter().zip(&loads) {
            wait_until("requests after a restart", PROMPT, || Ok(requests(volume)? > 0)).with_context(
                || {
                    format!(
                        "at turn {turn}: {:?}; the volume: {:?}; {}",
                        load.said(),
                        volume.job.said(),
                        volume.control(r#"{"op":"dump"}"#).unwrap_or_default()
                    )
                },
            )?;
            ensure!(load.is_running(), "at turn {turn}: {:?}", load.said());
        }
        slowest = slowest.max(restart.elapsed());
    }
    let kills = turns * DISKS.len();
    println!("{kills} kills in {:?}; slowest restart to the next request: {slowest:?}", begin.elapsed());
    // There was no error so far; one more pass checks everything that is there.
    for (load, disk) in loads.iter().zip(DISKS) {
        load.kill(2)?;
        let said = load.wait(2 * PROMPT)?;
        ensure!(said.stdout.contains("err= 0") && !said.stdout.contains("verify:"), "{said:?}");
        ensure!(!said.stderr.contains("verify:"), "{said:?}");
        let pass = format!("--filename=/dev/{disk} --size=8M --rw=randwrite --iodepth=16");
        vm.run_within(4 * PROMPT, &fio(&pass))?.ok()?;
    }
    let errors = vm.run("dmesg | grep -ci 'i/o error\\|blk_update_request' ; true")?.ok()?.stdout;
    ensure!(errors.trim() == "0", "the guest saw errors: {}", vm.run("dmesg | tail -20")?.stdout);
    vm.shutdown()
}

fn stat(volume: &Volume<'_>) -> Result<serde_json::Value> {
    let answer: serde_json::Value = serde_json::from_str(&volume.control(r#"{"op":"stat"}"#)?)?;
    Ok(answer["stat"].clone())
}

/// Returns whether writes may stay in a cache until the next flush.
fn write_back(volume: &Volume<'_>) -> Result<bool> {
    stat(volume)?["disks"][0]["write_back"].as_bool().context("a disk")
}

/// Returns which cache the guest believes that its disk has.
fn guest_cache(vm: &Vm) -> Result<String> {
    Ok(vm.run("cat /sys/block/vda/queue/write_cache")?.ok()?.stdout.trim().to_owned())
}

/// Returns how many requests this process of the volume has completed.
fn requests(volume: &Volume<'_>) -> Result<u64> {
    let queues = stat(volume)?["queues"].as_array().context("queues")?.clone();
    Ok(queues.iter().filter_map(|queue| queue["done"].as_u64()).sum())
}

#[test]
fn a_disk_survives_reboots_and_new_qemus_and_can_grow() -> Result<()> {
    let bed = TestBed::new("volume-life")?;
    let image = image(&bed, "disk", 32 << 20, None)?;
    let mut volume = Volume::start(&bed, "disk", 2, &format!("--path {}", image.display()))?;
    for more in ["", ",packed=on"] {
        let vm = vm(&bed, "life").program("/usr/bin/fio").qemu_args(&volume.device("vd0", more)).boot()?;
        wait_for_disk(&vm, "vda")?;
        // Before, the firmware used the disk. It cannot flush, so its writes were written through.
        ensure!(write_back(&volume)? && guest_cache(&vm)? == "write back", "the guest has its cache");
        let load = fio("--filename=/dev/vda --size=4M --rw=randwrite --iodepth=8");
        vm.run_within(4 * PROMPT, &load)?.ok()?;
        vm.run("echo 'write through' > /sys/block/vda/cache_type")?.ok()?;
        ensure!(!write_back(&volume)?, "the guest has turned its cache off");
        volume.kill_and_restart()?;
        vm.run("echo here to stay > /tmp/x; dd if=/tmp/x of=/dev/vda seek=60000 conv=fsync")?.ok()?;
        ensure!(!write_back(&volume)?, "and the next process knows that");
        vm.reboot_and_wait()?;
        wait_for_disk(&vm, "vda")?;
        ensure!(
            !write_back(&volume)? || guest_cache(&vm)? == "write back",
            "no write waits for a flush that never comes"
        );
        let back = vm.run("dd if=/dev/vda skip=60000 count=1 | head -n 1")?.ok()?.stdout;
        ensure!(back.trim() == "here to stay", "{back:?}");
        vm.run_within(4 * PROMPT, &load)?.ok()?;

        let before: u64 = vm.run("cat /sys/block/vda/size")?.ok()?.stdout.trim().parse()?;
        let bytes = before * 512 + (8 << 20);
        let answer = volume.control(&format!(r#"{{"op":"resize","size":{bytes}}}"#))?;
        ensure!(answer.contains(&bytes.to_string()), "{answer}");
        wait_until("the guest sees the new size", PROMPT, || {
            Ok(vm.run("cat /sys/block/vda/size")?.ok()?.stdout.trim() == (bytes / 512).to_string())
        })?;
        let last =
            format!("dd if=/dev/urandom of=/dev/vda bs=4k count=1 seek={} conv=fsync", bytes / 4096 - 1);
        vm.run(&last)?.ok()?;
        // The volume is not told.
        vm.kill_qemu()?;
    }
    wait_until("the front end is gone", PROMPT, || {
        Ok(volume.job.said().1.matches("the front end has gone").count() == 1)
    })?;
    volume.job.kill(15)?;
    let end = volume.job.wait(PROMPT)?;
    ensure!(end.exit == Exit::Code(0), "{end:?}");
    Ok(())
}

/// A volume inside a guest, on an NVMe disk with queues that its driver polls. Reads and writes use these queues, other
/// requests use another way, and a second disk in the same target has nothing to poll.
#[test]
fn a_disk_works_with_polled_completions() -> Result<()> {
    let bed = TestBed::new("volume-iopoll")?;
    let disk = image(&bed, "disk", 64 << 20, None)?;
    let config = "device = 'scsi'\n[[disk]]\npath = '/dev/nvme0n1'\ndirect = 'on'\niopoll = true\n\
                  [[disk]]\npath = '/tmp/other'\nsize = '16M'\ndirect = 'off'\n";
    let vm = bed
        .vm("polls")
        .memory_mib(512)
        .cpus(2)
        .module("nvme")
        .kernel_arg("nvme.poll_queues=1")
        .program(artifact("ginnel-volume")?)
        .program(artifact("ginnel-volume-bench")?)
        .content("/etc/v.toml", 0o644, config)
        // The disk is polled; how long the host takes to write to its own disk is not tested.
        .qemu_args(&format!("-drive if=none,id=d,format=raw,cache=unsafe,file={}", disk.display()))
        .qemu_args("-device nvme,serial=polled,drive=d")
        .boot()?;
    wait_for_disk(&vm, "nvme0n1")?;
    let said = vm.run("cat /sys/block/nvme0n1/queue/io_poll")?.ok()?.stdout;
    ensure!(said.trim() == "1", "the driver has no queues to poll: {said}");
    let volume = vm.spawn("exec ginnel-volume v --create --config /etc/v.toml --socket /tmp/v.sock")?;
    volume.wait_for_line("serving", PROMPT)?;
    let load = |lun: u32| -> Result<serde_json::Value> {
        let command = format!(
            "ginnel-volume-bench --socket /tmp/v.sock --scsi 0:{lun} --rw randrw --verify --flush-every 64 --qd 16 \
             --sleep --requests 20000 --json"
        );
        Ok(serde_json::from_str(&vm.run_within(4 * PROMPT, &command)?.ok()?.stdout)?)
    };
    let interrupts = || -> Result<u64> {
        let sum = "awk '/nvme0q/ { for (i = 2; i <= 3; i++) sum += $i } END { print sum }' /proc/interrupts";
        Ok(vm.run(sum)?.ok()?.stdout.trim().parse()?)
    };
    let before = interrupts()?;
    let said = load(0).with_context(|| format!("{:?}", volume.said()))?;
    let (took, number) = (interrupts()? - before, |kind: &str| said[kind]["requests"].as_u64().unwrap_or(0));
    let (moved, flushes) = (number("reads") + number("writes"), number("flushes"));
    println!("{moved} reads and writes, {flushes} flushes: {took} interrupts of the disk");
    ensure!(moved >= 20000 && flushes > 50, "{said}");
    // A flush takes one interrupt, and a few more happen in a guest.
    ensure!(took >= flushes && took < flushes + moved / 20, "{took} interrupts: {said}");
    load(1).with_context(|| format!("{:?}", volume.said()))?;
    // Without work the volume sleeps again, even though it polls.
    let ticks = || -> Result<u64> {
        let sum = "awk '{ print $14 + $15 }' /proc/$(pidof ginnel-volume)/stat";
        Ok(vm.run(sum)?.ok()?.stdout.trim().parse()?)
    };
    wait_until("the volume sleeps", PROMPT, || {
        let before = ticks()?;
        std::thread::sleep(Duration::from_millis(500));
        Ok(ticks()? == before)
    })?;
    let said = volume.said();
    ensure!(!said.1.contains("no queues to poll"), "{said:?}");
    vm.shutdown()
}
