//! Volumes that drive an NVMe device themselves (`backend = "vfio"`), inside a guest that has an IOMMU and emulated NVMe disks.

use super::*;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A guest with two NVMe disks, of which the second one fails all flushes.
struct Guest {
    vm: Vm,
    /// The file of the first disk.
    disk: PathBuf,
}

impl Guest {
    fn boot(bed: &TestBed) -> Result<Self> {
        let disk = image(bed, "disk", 64 * MIB, None)?;
        let fails = image(bed, "fails", 32 * MIB, None)?;
        let rules = bed.dir().join("rules");
        std::fs::write(
            &rules,
            "[inject-error]\nevent = \"none\"\niotype = \"flush\"\nerrno = \"5\"\nonce = \"off\"\n",
        )?;
        let drive = |id: &str, address: &str, file: String| {
            format!(
                "-drive if=none,id={id},format=raw,discard=unmap,cache=writeback,file={file} \
                 -device nvme,serial={id},drive={id},addr={address}"
            )
        };
        let vm = bed
            .vm("vfio")
            .memory_mib(768)
            .cpus(2)
            .iommu()
            .module("nvme")
            .module("vfio_iommu_type1")
            .module("vfio-pci")
            .module("crc32c_generic")
            .module("ext4")
            .program(artifact("ginnel-volume")?)
            .program(artifact("ginnel-volume-bench")?)
            .program(artifact("ginnel")?)
            .program("/usr/sbin/mkfs.ext4")
            .qemu_args(&drive("good", "10", disk.display().to_string()))
            .qemu_args(&drive("fails", "11", format!("blkdebug:{}:{}", rules.display(), fails.display())))
            .boot()?;
        ["nvme0n1", "nvme1n1"].into_iter().try_for_each(|name| wait_for_disk(&vm, name))?;
        Ok(Self { vm, disk })
    }

    fn serve(&self, name: &str, flags: &str) -> Result<vmtest::Job> {
        let command = format!("exec ginnel-volume {name} --socket /tmp/{name}.sock --backend vfio {flags}");
        let job = self.vm.spawn(&command)?;
        job.wait_for_line("serving", PROMPT)?;
        Ok(job)
    }

    /// Expects that a command fails, and returns what it says.
    fn refused(&self, command: &str) -> Result<String> {
        let output = self.vm.run(command)?;
        ensure!(output.exit != Exit::Code(0), "{output:?}");
        Ok(output.stderr)
    }

    fn load(&self, name: &str, flags: &str) -> Result<vmtest::Output> {
        let command = format!("ginnel-volume-bench --socket /tmp/{name}.sock --sleep --json {flags}");
        self.vm.run_within(4 * PROMPT, &command)
    }

    fn stat(&self, name: &str) -> Result<Value> {
        let said = self.vm.run(&format!("ginnel volume stat {name} --json --sockets /tmp"))?.ok()?.stdout;
        Ok(serde_json::from_str(&said)?)
    }
}

const GOOD: &str = "0000:00:10.0";
const FAILS: &str = "0000:00:11.0";

#[test]
fn a_volume_drives_a_device() -> Result<()> {
    let bed = TestBed::new("volume-vfio")?;
    let guest = Guest::boot(&bed)?;
    // A disk that is mounted, or open, is not taken away.
    let disk = guest
        .vm
        .run(&format!("ls /sys/bus/pci/devices/{GOOD}/nvme/*/ | grep -x 'nvme[0-9]*n1'"))?
        .ok()?
        .stdout;
    let disk = disk.trim().to_owned();
    let mount = format!("mkfs.ext4 -q /dev/{disk} && mkdir -p /mnt && mount /dev/{disk} /mnt");
    guest.vm.run_within(2 * PROMPT, &mount)?.ok()?;
    let said = guest.refused(&format!("ginnel volume bind {GOOD}"))?;
    ensure!(said.contains("is mounted at /mnt"), "{said}");
    guest.vm.run("umount /mnt")?.ok()?;
    let reader = guest.vm.spawn(&format!("exec sleep 1000 < /dev/{disk}"))?;
    let said = || guest.refused(&format!("ginnel volume bind {GOOD}"));
    wait_until("the reader is seen", PROMPT, || Ok(said()?.contains("(sleep) has a block device")))?;
    reader.kill(9)?;
    reader.wait(PROMPT)?;
    // Nor can a volume have what is the kernel's.
    let said =
        guest.refused(&format!("ginnel-volume no --socket /tmp/no.sock --backend vfio --pci {GOOD}"))?;
    ensure!(said.contains("belongs to the kernel's driver nvme"), "{said}");

    let bound = guest.vm.run(&format!("ginnel volume bind {GOOD}"))?.ok()?.stdout;
    println!("{}", bound.trim());
    ensure!(guest.vm.run(&format!("test -e /dev/{disk}"))?.exit != Exit::Code(0), "the block device stays");
    let volume = guest.serve("good", &format!("--pci {GOOD} --user 65534 --group 65534"));
    // An ordinary user must be given the device. (The volume opens it as root, so this is about its memory.)
    let volume = volume?;
    for shape in ["--bs 4k", "--bs 16k --segment 1536", "--bs 2M --qd 4 --requests 60", "--bs 64k --qd 64"] {
        let requests = if shape.contains("--requests") { "" } else { "--requests 3000" };
        // The client knows blocks of one length only.
        guest.load("good", "--discard 0:64M")?.ok()?;
        let load = format!("--rw randrw --verify --flush-every 64 {requests} {shape}");
        let said = guest.load("good", &load)?.ok().with_context(|| format!("{:?}", volume.said()))?.stdout;
        let said: Value = serde_json::from_str(&said)?;
        let number = |kind: &str| said[kind]["requests"].as_u64().unwrap_or(0);
        let (moved, flushes) = (number("reads") + number("writes"), number("flushes"));
        println!("{shape}: {moved} reads and writes, {flushes} flushes");
        ensure!(moved >= 60, "{said}");
    }
    // Nobody else can have the device meanwhile, and it is not taken away.
    let said = guest.refused(&format!("ginnel volume unbind {GOOD}"))?;
    ensure!(said.contains("stop its volume first"), "{said}");
    // The other end of a killed volume: the device is there at once for the next one.
    volume.kill(9)?;
    volume.wait(PROMPT)?;
    let volume = guest.serve("good", &format!("--pci {GOOD} --offset 32M"))?;
    ensure!(guest.stat("good")?["disks"][0]["size"] == 32 * MIB, "{}", guest.stat("good")?);
    guest.load("good", "--rw randwrite --verify --requests 1000")?.ok()?;
    volume.kill(15)?;
    volume.wait(PROMPT)?.ok()?;
    ensure!(volume.said().1.contains("the NVMe controller is shut down"), "{:?}", volume.said());

    // The kernel gets the device back, with what was written.
    let back = guest.vm.run(&format!("ginnel volume unbind {GOOD}"))?.ok()?.stdout;
    ensure!(back.contains("belongs to the driver nvme"), "{back}");
    wait_until("the block device is back", PROMPT, || {
        Ok(guest.vm.run(&format!("test -b /dev/{disk}"))?.exit == Exit::Code(0))
    })?;
    let sum = "dd if=/dev/urandom bs=1M count=8 of=/tmp/random && dd if=/tmp/random";
    guest.vm.run_within(2 * PROMPT, &format!("{sum} of=/dev/{disk} bs=1M oflag=direct conv=fsync"))?.ok()?;
    guest.vm.run(&format!("cmp -n 8388608 /tmp/random /dev/{disk}"))?.ok()?;
    ensure!(allocated(&guest.disk)? > 8 * MIB);
    guest.vm.shutdown()
}

#[test]
fn a_killed_volume_on_its_own_device_takes_its_requests_up_again() -> Result<()> {
    let enough = if std::env::var_os("GINNEL_SOAK").is_some() { 300 } else { 8 };
    let bed = TestBed::new("volume-vfio-kills")?;
    let guest = Guest::boot(&bed)?;
    guest.vm.run(&format!("ginnel volume bind {GOOD}"))?.ok()?;
    let place = format!("--pci {GOOD}");
    kill_under_load(&guest.vm, enough, || guest.serve("killed", &place))?;
    guest.vm.shutdown()
}

#[test]
fn what_a_device_cannot_be_is_said_and_a_failed_flush_is_not_forgotten() -> Result<()> {
    let bed = TestBed::new("volume-vfio-says")?;
    let guest = Guest::boot(&bed)?;
    guest.vm.run(&format!("ginnel volume bind {FAILS}"))?.ok()?;
    let volume = |flags: &str| format!("ginnel-volume no --socket /tmp/no.sock --backend vfio {flags}");
    for (command, words) in [
        (volume("--pci 0000:00:1f.0"), "is no NVMe controller"),
        (volume("--pci 0000:00:19.0"), "there is no PCI device"),
        (volume("--pci /dev/nvme0"), "is no PCI address"),
        (volume(&format!("--pci {FAILS} --namespace 7")), "namespace 7"),
        (volume(&format!("--pci {FAILS} --offset 1G")), "the disk ends at"),
        (volume(&format!("--pci {FAILS} --size 64M")), "the disk ends at"),
        (volume(&format!("--pci {FAILS} --queues 200 --threads 200")), "threads"),
        ("ginnel volume bind 0000:00:1f.0".into(), "is no NVMe controller"),
        ("ginnel volume unbind 0000:00:1f.0".into(), "is no NVMe controller"),
    ] {
        let said = guest.refused(&command)?;
        println!("{}", said.trim());
        ensure!(said.contains(words), "{command}: {said}");
    }
    // Two disks on one device, which have one cache.
    let disk = |place: &str| format!("[[disk]]\nbackend = \"vfio\"\npci = \"{FAILS}\"\n{place}\n");
    let disks = disk("size = \"16M\"") + &disk("offset = \"16M\"");
    guest.vm.run(&format!("cat > /tmp/fails.toml <<'END'\ndevice = \"scsi\"\n{disks}END"))?.ok()?;
    let volume =
        guest.vm.spawn("exec ginnel-volume fails --config /tmp/fails.toml --socket /tmp/fails.sock")?;
    volume.wait_for_line("serving", PROMPT)?;
    let has_lost = || -> Result<[Option<bool>; 2]> {
        let stat = guest.stat("fails")?;
        Ok([0, 1].map(|disk| stat["disks"][disk]["lost_writes"].as_bool()))
    };
    guest.load("fails", "--scsi 0:0 --rw randwrite --requests 400")?.ok()?;
    ensure!(has_lost()? == [Some(false); 2], "{:?}", volume.said());
    let flushing = guest.load("fails", "--scsi 0:1 --rw randwrite --requests 400 --flush-every 16")?;
    ensure!(flushing.exit == Exit::Code(1), "a flush succeeded on a disk that fails it: {flushing:?}");
    ensure!(has_lost()? == [Some(true); 2], "{:?}", volume.said());
    guest.load("fails", "--scsi 0:0 --rw randread --requests 400")?.ok()?;
    // No disk grows into another.
    let said = guest.refused("ginnel volume resize fails 17M --disk 0 --sockets /tmp")?;
    ensure!(said.contains("has only 16777216 bytes for it"), "{said}");
    guest.vm.shutdown()
}
