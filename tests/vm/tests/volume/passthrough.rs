//! Volumes on NVMe namespaces by passthrough (`backend = "uring-cmd"`), inside a guest that has emulated NVMe disks.

use super::*;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A guest with three NVMe disks, of which the third fails all flushes.
struct Guest {
    vm: Vm,
    /// The file of the first disk.
    disk: PathBuf,
}

impl Guest {
    fn boot(bed: &TestBed) -> Result<Self> {
        let disk = image(bed, "disk", 64 * MIB, None)?;
        let more = ["mounted", "fails"].map(|name| image(bed, name, 32 * MIB, None));
        let [mounted, fails] = more;
        let (mounted, fails) = (mounted?, fails?);
        let rules = bed.dir().join("rules");
        std::fs::write(
            &rules,
            "[inject-error]\nevent = \"none\"\niotype = \"flush\"\nerrno = \"5\"\nonce = \"off\"\n",
        )?;
        let drive = |id: &str, file: String| {
            format!(
                "-drive if=none,id={id},format=raw,discard=unmap,cache=writeback,file={file} \
                 -device nvme,serial={id},drive={id}"
            )
        };
        let vm = bed
            .vm("passthrough")
            .memory_mib(512)
            .cpus(2)
            .module("nvme")
            .module("crc32c_generic")
            .module("ext4")
            .kernel_arg("nvme.poll_queues=1")
            .program(artifact("ginnel-volume")?)
            .program(artifact("ginnel-volume-bench")?)
            .program(artifact("ginnel")?)
            .program("/usr/sbin/mkfs.ext4")
            .qemu_args(&drive("good", disk.display().to_string()))
            .qemu_args(&drive("mounted", mounted.display().to_string()))
            .qemu_args(&drive("fails", format!("blkdebug:{}:{}", rules.display(), fails.display())))
            .boot()?;
        ["nvme0n1", "nvme1n1", "nvme2n1"].into_iter().try_for_each(|name| wait_for_disk(&vm, name))?;
        Ok(Self { vm, disk })
    }

    /// Returns the number of the disk with this serial: the kernel numbers them in the order in which they answered.
    fn number(&self, serial: &str) -> Result<u32> {
        let find = format!("grep -l '^{serial}' /sys/class/nvme/nvme*/serial");
        let said = self.vm.run(&find)?.ok()?.stdout;
        let number = said.strip_prefix("/sys/class/nvme/nvme").and_then(|said| said.split('/').next());
        Ok(number.with_context(|| said.clone())?.parse()?)
    }

    fn serve(&self, name: &str, flags: &str) -> Result<vmtest::Job> {
        let command =
            format!("exec ginnel-volume {name} --socket /tmp/{name}.sock --backend uring-cmd {flags}");
        let job = self.vm.spawn(&command)?;
        job.wait_for_line("serving", PROMPT)?;
        Ok(job)
    }

    /// Expects that a volume does not start, and returns what it says.
    fn refused(&self, flags: &str) -> Result<String> {
        let output =
            self.vm.run(&format!("ginnel-volume no --socket /tmp/no.sock --backend uring-cmd {flags}"))?;
        ensure!(output.exit != Exit::Code(0), "{output:?}");
        Ok(output.stderr)
    }

    fn load(&self, name: &str, flags: &str) -> Result<vmtest::Output> {
        let command = format!("ginnel-volume-bench --socket /tmp/{name}.sock --sleep --json {flags}");
        self.vm.run_within(4 * PROMPT, &command)
    }

    /// Returns the requests that the kernel's block layer has made to a disk: reads, writes, discards and flushes.
    fn of_block_layer(&self, number: u32) -> Result<Vec<u64>> {
        let said = self.vm.run(&format!("cat /sys/block/nvme{number}n1/stat"))?.ok()?.stdout;
        let words: Vec<u64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        Ok([0, 4, 11, 15].into_iter().filter_map(|at| words.get(at).copied()).collect())
    }

    fn interrupts(&self, number: u32) -> Result<u64> {
        let sum = format!(
            "awk '/nvme{number}q/ {{ for (i = 2; i <= 3; i++) sum += $i }} END {{ print sum }}' /proc/interrupts"
        );
        Ok(self.vm.run(&sum)?.ok()?.stdout.trim().parse()?)
    }
}

#[test]
fn a_volume_sends_nvme_commands_to_a_namespace() -> Result<()> {
    let bed = TestBed::new("volume-passthrough")?;
    let guest = Guest::boot(&bed)?;
    let good = guest.number("good")?;
    let path = format!("--path /dev/ng{good}n1");
    for (flags, polled) in [("", false), ("--iopoll", true)] {
        let volume = guest.serve("good", &format!("{path} {flags}"))?;
        // Requests of one piece, of many pieces that no page begins with, and larger ones than the device takes at once.
        for shape in ["--bs 4k", "--bs 16k --segment 1536", "--bs 2M --qd 4 --requests 60"] {
            // The client knows blocks of one length only.
            let clear = format!("dd if=/dev/zero of=/dev/nvme{good}n1 bs=1M oflag=direct");
            guest.vm.run_within(2 * PROMPT, &clear)?;
            let (before, interrupts) = (guest.of_block_layer(good)?, guest.interrupts(good)?);
            let requests = if shape.contains("--requests") { "" } else { "--requests 4000" };
            let load = format!("--rw randrw --verify --flush-every 64 {requests} {shape}");
            let said =
                guest.load("good", &load)?.ok().with_context(|| format!("{:?}", volume.said()))?.stdout;
            let said: Value = serde_json::from_str(&said)?;
            let number = |kind: &str| said[kind]["requests"].as_u64().unwrap_or(0);
            let (moved, flushes) = (number("reads") + number("writes"), number("flushes"));
            let took = guest.interrupts(good)? - interrupts;
            println!("{flags} {shape}: {moved} reads and writes, {flushes} flushes, {took} interrupts");
            ensure!(moved >= 60, "{said}");
            ensure!(guest.of_block_layer(good)? == before, "they went through the block layer");
            if polled && moved >= 4000 {
                ensure!(took < flushes + moved / 20, "they were not polled");
            }
        }
        // Nobody else can have the disk meanwhile.
        let mount = guest.vm.run(&format!("mkdir -p /mnt && mount -t ext4 /dev/nvme{good}n1 /mnt"))?;
        ensure!(mount.exit != Exit::Code(0) && mount.stderr.contains("busy"), "{mount:?}");
        let other = guest.refused(&path)?;
        ensure!(other.contains("in use"), "{other}");
        volume.kill(15)?;
        volume.wait(PROMPT)?.ok()?;
    }

    // What is not needed any more is given back to the host.
    let fill = format!("dd if=/dev/urandom of=/dev/nvme{good}n1 bs=1M count=32 oflag=direct conv=fsync");
    guest.vm.run_within(2 * PROMPT, &fill)?.ok()?;
    let full = allocated(&guest.disk)?;
    let volume = guest.serve("gives", &path)?;
    guest.vm.run("ginnel-volume-bench --socket /tmp/gives.sock --discard 0:32M")?.ok()?;
    let left = allocated(&guest.disk)?;
    ensure!(
        full >= 32 * MIB && left + 31 * MIB < full,
        "{full} bytes were allocated, {left} after the discard"
    );
    volume.kill(15)?;
    volume.wait(PROMPT)?.ok()?;
    guest.vm.shutdown()
}

#[test]
fn a_killed_volume_takes_its_commands_up_again() -> Result<()> {
    let enough = if std::env::var_os("GINNEL_SOAK").is_some() { 300 } else { 12 };
    let bed = TestBed::new("volume-passthrough-kills")?;
    let guest = Guest::boot(&bed)?;
    let path = format!("--path /dev/ng{}n1", guest.number("good")?);
    kill_under_load(&guest.vm, enough, || guest.serve("killed", &path))?;
    guest.vm.shutdown()
}

#[test]
fn what_a_namespace_cannot_be_is_said() -> Result<()> {
    let bed = TestBed::new("volume-passthrough-says")?;
    let guest = Guest::boot(&bed)?;
    let (good, mounted) = (guest.number("good")?, guest.number("mounted")?);
    let says = |flags: &str, words: &str| {
        let said = guest.refused(flags)?;
        ensure!(said.contains(words), "{flags}: {said}");
        println!("{}", said.trim());
        Ok(())
    };
    says(&format!("--path /dev/nvme{good}n1"), "is no character device")?;
    says("--path /dev/null", "is no namespace of an NVMe device")?;
    says(&format!("--path /dev/nvme{good}"), "is no namespace of an NVMe device")?;
    says("--path /dev/ng9n9", "cannot be opened")?;
    guest
        .vm
        .run_within(
            2 * PROMPT,
            &format!("mkfs.ext4 -q /dev/nvme{mounted}n1 && mkdir -p /mnt && mount /dev/nvme{mounted}n1 /mnt"),
        )?
        .ok()?;
    says(&format!("--path /dev/ng{mounted}n1"), "unmount its file systems")?;
    // Since Linux 6.2 an ordinary user may do it, as far as the device reports the commands as harmless.
    let release = guest.vm.run("uname -r")?.ok()?.stdout;
    let mut numbers = release.split('.').map(|number| number.parse().unwrap_or(0));
    if (numbers.next(), numbers.next()) < (Some(6), Some(2)) {
        says(&format!("--path /dev/ng{good}n1 --user 65534 --group 65534"), "CAP_SYS_ADMIN")?;
    } else {
        kit::skip!("the guest has Linux {release}, which lets an ordinary user send NVMe commands");
    }
    guest.vm.shutdown()
}

#[test]
fn a_failed_flush_of_a_namespace_is_not_forgotten() -> Result<()> {
    let bed = TestBed::new("volume-passthrough-fails")?;
    let guest = Guest::boot(&bed)?;
    let volume = guest.serve("fails", &format!("--path /dev/ng{}n1", guest.number("fails")?))?;
    let has_lost = || -> Result<bool> {
        let said = guest.vm.run("ginnel volume stat fails --json --sockets /tmp")?.ok()?.stdout;
        let stat: Value = serde_json::from_str(&said)?;
        stat["disks"][0]["lost_writes"].as_bool().with_context(|| stat.to_string())
    };
    guest.load("fails", "--rw randwrite --requests 400")?.ok()?;
    ensure!(!has_lost()?, "{:?}", volume.said());
    let flushing = guest.load("fails", "--rw randwrite --requests 400 --flush-every 16")?;
    ensure!(flushing.exit == Exit::Code(1), "a flush succeeded on a disk that fails it: {flushing:?}");
    ensure!(has_lost()?, "{:?}", volume.said());
    guest.load("fails", "--rw randread --requests 400")?.ok()?;
    guest.vm.shutdown()
}
