//! What administrators and kernels do with a disk: nvme-cli, blkdiscard, and another kernel by kexec.

use super::*;

const MIB: u64 = 1 << 20;

#[test]
fn nvme_cli_finds_what_it_knows() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    kit::require_programs!(&["nvme", "blkdiscard"]);
    let bed = TestBed::new("nvme-cli")?;
    let image = image(&bed, 64 * MIB)?;
    let volume = Volume::start(&bed, "disk", &format!("--queues 2 --path {}", image.display()))?;
    let vm = vm(&bed, "guest", &[&volume.holder])?
        .module("nvme")
        .program("/usr/sbin/nvme")
        .program("/usr/sbin/blkdiscard")
        .boot()?;
    wait_for_disk(&vm)?;
    let json = |what: &str| -> Result<Value> {
        let said = vm.run(&format!("nvme {what} -o json"))?.ok()?.stdout;
        serde_json::from_str(&said).with_context(|| format!("nvme {what}: {said}"))
    };
    let controller = json("id-ctrl /dev/nvme0")?;
    let word = |key: &str| controller[key].as_str().unwrap_or_default().trim().to_owned();
    ensure!(word("sn") == "disk" && word("mn").contains("Ginnel"), "{controller}");
    ensure!(
        controller["nn"] == 1 && controller["oacs"].as_u64().is_some_and(|oacs| oacs & 1 << 8 != 0),
        "{controller}"
    );
    let namespace = json("id-ns /dev/nvme0n1")?;
    ensure!(namespace["nsze"] == 64 * MIB / 512, "{namespace}");
    let list = vm.run("nvme list-ns /dev/nvme0")?.ok()?.stdout;
    ensure!(list.contains("0x1") && list.lines().count() == 1, "{list}");
    let health = json("smart-log /dev/nvme0")?;
    ensure!(health["critical_warning"] == 0, "{health}");
    let slots = json("fw-log /dev/nvme0")?;
    ensure!(slots.to_string().contains("Active Firmware Slot"), "{slots}");
    json("error-log /dev/nvme0")?;
    // What a volume does not do is refused, and not forgotten or half done.
    for what in [
        "format /dev/nvme0n1 --force",
        "sanitize /dev/nvme0 -a 2",
        "delete-ns /dev/nvme0 -n 1",
        "fw-commit /dev/nvme0 -s 1 -a 1",
        "security-recv /dev/nvme0 -p 0 -s 0 -t 512 -x 512",
        "admin-passthru /dev/nvme0 --opcode=0xc1",
        // Before nvme-cli makes a namespace, it asks about those to come.
        "admin-passthru /dev/nvme0 --opcode=0x0d --data-len=4096 --write",
        "io-passthru /dev/nvme0n1 --opcode=0x85 --namespace-id=1",
    ] {
        let said = vm.run(&format!("nvme {what} 2>&1"))?;
        println!("nvme {what}: {}", said.stdout.trim());
        ensure!(said.exit != Exit::Code(0), "nvme {what}: {said:?}");
        ensure!(said.stdout.contains("Invalid Command Opcode"), "nvme {what}: {said:?}");
    }
    // What it does: on blocks 100 to 107.
    let write = "head -c 4096 /dev/urandom > /tmp/a && nvme write /dev/nvme0n1 -s 100 -c 7 -z 4096 -d /tmp/a && \
                 nvme flush /dev/nvme0n1 -n 1 && nvme read /dev/nvme0n1 -s 100 -c 7 -z 4096 -d /tmp/b && cmp /tmp/a /tmp/b && \
                 nvme write-zeroes /dev/nvme0n1 -s 100 -c 3 && \
                 dd if=/dev/nvme0n1 bs=512 skip=100 count=4 iflag=direct | cmp -n 2048 - /dev/zero && \
                 dd if=/dev/nvme0n1 bs=512 skip=104 count=4 iflag=direct > /tmp/c && tail -c 2048 /tmp/a | cmp - /tmp/c";
    vm.run(write)?.ok()?;
    // Discarded blocks are free on the host.
    let allocated = || -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(std::fs::metadata(&image)?.blocks() * 512)
    };
    vm.run("dd if=/dev/urandom of=/dev/nvme0n1 bs=1M count=16 oflag=direct conv=fsync")?.ok()?;
    let full = allocated()?;
    vm.run("cd /usr/local/bin && ./blkdiscard -o 4M -l 8M /dev/nvme0n1 && ./blkdiscard -z -o 0 -l 1M /dev/nvme0n1")?.ok()?;
    let left = allocated()?;
    println!("{full} bytes were allocated, {left} after blkdiscard");
    ensure!(full >= 16 * MIB && left + 7 * MIB < full);
    ensure!(errors(&vm)?.is_empty(), "{}", errors(&vm)?);
    vm.run("nvme reset /dev/nvme0 && dd if=/dev/nvme0n1 of=/dev/null bs=64k count=16 iflag=direct")?.ok()?;
    vm.shutdown()
}

/// A kernel that is started by another one finds a controller that works. The first kernel's driver has ended a load in the middle, and
/// left the controller shut down, not reset.
#[test]
fn another_kernel_takes_the_controller_over() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    kit::require_programs!(&["kexec", "cpio"]);
    // The channel to the harness does not outlive its kernel, so the second one says by the console what it finds.
    const INIT: &str = "#!/bin/sh\n\
        mount -t devtmpfs devtmpfs /dev; mount -t proc proc /proc; mount -t sysfs sysfs /sys\n\
        modprobe nvme\n\
        until [ -b /dev/nvme0n1 ]; do usleep 20000; done\n\
        echo second kernel: $(dd if=/dev/nvme0n1 bs=1M skip=40 count=8 iflag=direct | md5sum) > /dev/console\n\
        sleep 1000\n";
    let bed = TestBed::new("nvme-kexec")?;
    let image = image(&bed, 64 * MIB)?;
    let volume = Volume::start(&bed, "disk", &format!("--queues 2 --path {}", image.display()))?;
    let vm = vm(&bed, "guest", &[&volume.holder])?
        .module("nvme")
        .program("/usr/sbin/kexec")
        .program(artifact("blocks")?)
        .boot()?;
    wait_for_disk(&vm)?;
    // An archive behind another one replaces its files.
    let (root, initrd) = (bed.dir().join("second"), bed.dir().join("second-initrd"));
    std::fs::create_dir(&root)?;
    std::fs::write(root.join("init"), INIT)?;
    bed.host(&format!(
        "chmod 755 {root}/init && cp {first} {initrd} && cd {root} && echo init | cpio -o -H newc --quiet >> {initrd}",
        root = root.display(),
        first = bed.dir().join("guest/initrd").display(),
        initrd = initrd.display(),
    ))?
    .ok()?;
    vm.push(&bed.kernel().image, "/tmp/linux")?;
    vm.push(&initrd, "/tmp/initrd")?;
    let line = "console=ttyS0 quiet no_timer_check";
    vm.run(&format!("kexec --load /tmp/linux --initrd=/tmp/initrd --command-line='{line}'"))?.ok()?;
    let sum = "dd if=/dev/urandom bs=1M count=8 | tee /tmp/data | md5sum && \
               dd if=/tmp/data of=/dev/nvme0n1 bs=1M seek=40 oflag=direct conv=notrunc";
    let sum = vm.run(sum)?.ok()?.stdout;
    let sum = sum.split_whitespace().next().context("a sum")?.to_owned();
    // It has blocks of its own, before those.
    vm.spawn("exec blocks /dev/nvme0n1 32 8 /tmp/never")?;
    let before = volume.count("done")?;
    wait_until("the load runs", PROMPT, || Ok(volume.count("done")? > before + 20))?;
    vm.spawn("kexec --exec")?;
    let console = bed.dir().join("guest/console");
    wait_until("the second kernel has read", 2 * PROMPT, || {
        Ok(std::fs::read_to_string(&console)?.contains(&format!("second kernel: {sum}")))
    })
    .with_context(|| format!("{:?}", std::fs::read_to_string(&console)))?;
    vm.kill_qemu()
}
