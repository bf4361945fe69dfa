//! Space that a guest gives back returns to the storage of its disk.
//!
//! There are two kinds of tests, because no VM can have both ends:
//!
//! - A VM's own fstrim, through virtio_blk, QEMU and a volume on the host, whose disk is a loop device over a sparse file:
//!   there a discard makes a hole. It runs once with the discard of io_uring, if the host's kernel has it, and once with
//!   BLKDISCARD, which the volume is told to use.
//! - A real thin pool (dm-thin) in a guest whose kernel has no discard in io_uring (Debian 12: 6.1). The volume runs in the
//!   same guest, so no VM can have its disk; a client discards the blocks that the file system reports as free, as fstrim does.

use super::*;

const MIB: u64 = 1 << 20;

#[test]
fn trimmed_space_is_returned_through_io_uring() -> Result<()> {
    a_guest_trims("volume-trim-uring", "")
}

#[test]
fn trimmed_space_is_returned_by_a_thread() -> Result<()> {
    a_guest_trims("volume-trim-thread", "GINNEL_TEST_NO_URING_DISCARD=1")
}

fn a_guest_trims(name: &str, environment: &str) -> Result<()> {
    kit::require!(rustix::process::geteuid().is_root(), "only root can make a loop device");
    let bed = TestBed::new(name)?;
    let file = image(&bed, "file", 256 * MIB, None)?;
    let socket = bed.dir().join("thin.sock");
    // The device vanishes when the process that holds it ends.
    let command = format!(
        "loop=$(losetup --find --show {file}) && exec 9<>$loop && losetup -d $loop && {environment} \
         exec {volume} thin --socket {socket} --path $loop --direct on",
        file = file.display(),
        volume = artifact("ginnel-volume")?.display(),
        socket = socket.display(),
    );
    let job = run(&bed, &command)?;
    let volume = Volume { bed: &bed, command, socket, queues: 1, job };
    let said = volume.job.said().1;
    let by_thread = said.contains("a thread does it");
    ensure!(by_thread || environment.is_empty(), "{said}");
    println!("discards by {}", if by_thread { "a thread" } else { "io_uring" });
    let vm = vm(&bed, "trims")
        .module("crc32c_generic")
        .module("ext4")
        .program("/usr/sbin/mkfs.ext4")
        .program("/usr/sbin/e2fsck")
        .qemu_args(&volume.device("vd0", ""))
        .boot()?;
    wait_for_disk(&vm, "vda")?;
    let fill = "mkfs.ext4 -q /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt && \
                dd if=/dev/urandom of=/mnt/stays bs=1M count=32 && dd if=/dev/urandom of=/mnt/goes bs=1M count=96 && \
                sync && md5sum < /mnt/stays > /tmp/sum";
    vm.run_within(4 * PROMPT, fill)?.ok()?;
    let full = allocated(&file)?;
    ensure!(full >= 128 * MIB, "{full} bytes are allocated");
    vm.run_within(2 * PROMPT, "rm /mnt/goes && sync && fstrim -v /mnt")?.ok()?;
    let trimmed = allocated(&file)?;
    println!("{full} bytes were allocated, {trimmed} after fstrim");
    ensure!(trimmed + 95 * MIB < full, "{full} bytes were allocated, {trimmed} after fstrim");
    let check = "umount /mnt && echo 3 > /proc/sys/vm/drop_caches && mount /dev/vda /mnt && \
                 md5sum < /mnt/stays | cmp - /tmp/sum && umount /mnt && e2fsck -f -n /dev/vda";
    vm.run_within(2 * PROMPT, check)?.ok()?;
    vm.shutdown()
}

#[test]
fn a_thin_pool_shrinks() -> Result<()> {
    /// The sizes, in sectors, of the metadata, of the data and of the thin device.
    const META: u64 = 8192;
    const DATA: u64 = 256 * MIB / 512;
    /// The number of sectors of a block of the pool.
    const BLOCK: u64 = 128;
    let bed = TestBed::new("volume-thin")?;
    let disk = image(&bed, "disk", (META + DATA) * 512, None)?;
    let vm = bed
        .vm("thin")
        .memory_mib(512)
        .cpus(2)
        .module("virtio_blk")
        .module("dm_thin_pool")
        .module("crc32c_generic")
        .module("ext4")
        .program(artifact("ginnel-volume")?)
        .program(artifact("ginnel-volume-bench")?)
        .program("/usr/sbin/dmsetup")
        .program("/usr/sbin/mkfs.ext4")
        .program("/usr/sbin/e2fsck")
        .program("/usr/sbin/dumpe2fs")
        .qemu_args(&format!("-drive if=none,id=d,format=raw,cache=unsafe,file={}", disk.display()))
        .qemu_args("-device virtio-blk-pci,drive=d")
        .boot()?;
    wait_for_disk(&vm, "vda")?;
    // No udev makes the names here.
    let device = |name: &str, table: String| {
        let make = format!("dmsetup create {name} --noudevsync --table '{table}' && dmsetup mknodes");
        vm.run(&make)?.ok().map(drop)
    };
    device("meta", format!("0 {META} linear /dev/vda 0"))?;
    device("data", format!("0 {DATA} linear /dev/vda {META}"))?;
    device(
        "pool",
        format!("0 {DATA} thin-pool /dev/mapper/meta /dev/mapper/data {BLOCK} 0 1 skip_block_zeroing"),
    )?;
    vm.run("dmsetup message pool 0 'create_thin 0'")?.ok()?;
    device("thin", format!("0 {DATA} thin /dev/mapper/pool 0"))?;
    let used = || {
        let said = vm.run("dmsetup status pool")?.ok()?.stdout;
        let blocks = said.split_whitespace().nth(5).and_then(|blocks| blocks.split_once('/'));
        let used: u64 = blocks.with_context(|| said.clone())?.0.parse()?;
        anyhow::Ok(used * BLOCK * 512)
    };
    // A file is deleted, and the file system does not report that by itself.
    let fill = "mkfs.ext4 -q -b 4096 -E nodiscard /dev/mapper/thin && mkdir -p /mnt && \
                mount -o nodiscard /dev/mapper/thin /mnt && \
                dd if=/dev/urandom of=/mnt/stays bs=1M count=32 && dd if=/dev/urandom of=/mnt/goes bs=1M count=96 && \
                sync && md5sum < /mnt/stays > /tmp/sum && rm /mnt/goes && umount /mnt";
    vm.run_within(4 * PROMPT, fill)?.ok()?;
    let full = used()?;
    ensure!(full >= 128 * MIB, "{full} bytes are used");

    let volume =
        vm.spawn("exec ginnel-volume thin --socket /tmp/thin.sock --path /dev/mapper/thin --direct on")?;
    volume.wait_for_line("serving", PROMPT)?;
    let release = vm.run("uname -r")?.ok()?.stdout;
    let by = if volume.said().1.contains("a thread does it") { "a thread" } else { "io_uring" };
    println!("Linux {}: discards by {by}", release.trim());
    let free = free(&vm.run("dumpe2fs /dev/mapper/thin")?.ok()?.stdout)?;
    let discard = format!("ginnel-volume-bench --socket /tmp/thin.sock --discard {free}");
    vm.run_within(2 * PROMPT, &discard)?.ok().with_context(|| format!("{:?}", volume.said()))?;
    let trimmed = used()?;
    println!("{full} bytes of the pool were used, {trimmed} after the discards");
    ensure!(trimmed + 90 * MIB < full, "{full} bytes were used, {trimmed} after the discards");
    volume.kill(15)?;
    volume.wait(PROMPT)?.ok()?;
    let check = "e2fsck -f -n /dev/mapper/thin && mount /dev/mapper/thin /mnt && md5sum < /mnt/stays | cmp - /tmp/sum && umount /mnt";
    vm.run_within(2 * PROMPT, check)?.ok()?;
    vm.shutdown()
}

/// Returns the free parts of a file system of 4 KiB blocks, as its `dumpe2fs` lists them, in the form for `--discard`.
fn free(dump: &str) -> Result<String> {
    let mut parts = Vec::new();
    // The superblock has a line with this name too, which has a number.
    for line in dump.lines().filter_map(|line| line.strip_prefix("  Free blocks: ")) {
        for range in line.split(',').map(str::trim).filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (u64, u64) = (first.parse()?, last.parse()?);
            parts.push(format!("{}:{}", first * 4096, (last + 1 - first) * 4096));
        }
    }
    ensure!(!parts.is_empty(), "nothing is free: {dump}");
    Ok(parts.join(","))
}
