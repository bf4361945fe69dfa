//! VMs migrate live with all their disks under load, between two QEMUs that each have their own volumes on the same images.

use super::*;
use serde_json::{Value, json};
use vmtest::{Accel, newer_qemu};

/// The volumes at one end: a disk of numbered blocks, one with a file system, and one that is only read.
struct End<'b> {
    blocks: Volume<'b>,
    files: Volume<'b>,
    cached: Volume<'b>,
}

impl<'b> End<'b> {
    fn start(bed: &'b TestBed, name: &str, images: &[PathBuf; 3], lock: &str) -> Result<Self> {
        let volume = |what: &str, image: &Path, more: &str| {
            let flags = format!("--serial {what} --lock {lock} --path {} {more}", image.display());
            Volume::start(bed, &format!("{name}-{what}"), 2, &flags)
        };
        Ok(Self {
            blocks: volume("blocks", &images[0], "--threads 2")?,
            files: volume("files", &images[1], "")?,
            cached: volume("cached", &images[2], "--read-only")?,
        })
    }

    /// Describes the VM, the same at both ends, in this QEMU if it is not the test bed's.
    fn vm(&self, name: &str, newer: Option<&Path>) -> Result<VmBuilder> {
        let reconnect = if newer.is_some() { "reconnect-ms=1000" } else { "reconnect=1" };
        let device = |volume: &Volume<'_>, id, more| volume.device_with(id, reconnect, more);
        let vm = vm(self.blocks.bed, name);
        let vm = newer.into_iter().fold(vm, VmBuilder::qemu);
        Ok(vm
            // A page of the cache is then written by the disk alone, and not filled with zeros by the kernel before.
            .kernel_arg("init_on_alloc=0")
            .module("crc32c_generic")
            .module("ext4")
            .program("/usr/sbin/e2fsck")
            .program("/usr/bin/fio")
            .program(artifact("blocks")?)
            .qemu_args(&device(&self.blocks, "vd0", ""))
            .qemu_args(&device(&self.files, "vd1", ",packed=on"))
            .qemu_args(&device(&self.cached, "vd2", "")))
    }

    fn logs(&self) -> String {
        [&self.blocks, &self.files, &self.cached].map(|volume| volume.job.said().1).concat()
    }
}

/// Sets the parameters of a migration and begins it.
pub(super) fn begin(from: &Vm, to: &Vm, speed: Speed, pause: bool) -> Result<()> {
    let capability = json!({"capability": "pause-before-switchover", "state": pause});
    qmp(from, "migrate-set-capabilities", json!({"capabilities": [capability]}))?;
    speed.set(from)?;
    from.migrate(to)
}

/// The speed of a migration.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Speed {
    /// The migration is as fast as possible, so that it completes.
    ToTheEnd,
    /// The migration does not complete as long as there is much to send.
    Steady,
    /// The migration does not complete while the guest is active. It could complete only if the guest changed at most one page for
    /// some time.
    Endless,
}

impl Speed {
    fn set(self, vm: &Vm) -> Result<()> {
        let (downtime_ms, bytes_a_second) = match self {
            Self::ToTheEnd => (60_000, 1 << 30),
            Self::Steady => (1, 64 << 20),
            Self::Endless => (1, 4 << 20),
        };
        let limits = json!({"downtime-limit": downtime_ms, "max-bandwidth": bytes_a_second});
        qmp(vm, "migrate-set-parameters", limits).map(drop)
    }
}

fn qmp(vm: &Vm, command: &str, arguments: Value) -> Result<Value> {
    vm.qmp(&json!({"execute": command, "arguments": arguments}).to_string())
}

/// Waits until the migration is in this state.
pub(super) fn wait_status(from: &Vm, wanted: &str) -> Result<Value> {
    let mut said = Value::Null;
    let mut look = || {
        said = qmp(from, "query-migrate", json!({}))?;
        let status = said["status"].as_str().unwrap_or("none");
        let over = ["completed", "failed", "cancelled"].contains(&status);
        ensure!(status == wanted || !over, "the migration is {said}");
        Ok(status == wanted)
    };
    let result = wait_until(&format!("a migration that is {wanted}"), 4 * PROMPT, &mut look);
    result.with_context(|| format!("{said}"))?;
    Ok(said)
}

/// Begins a migration and waits until all memory has been sent once, so that later changes are known only from the logs of
/// written pages. The migration continues like that and does not complete.
fn begin_second_round(from: &Vm, to: &Vm) -> Result<()> {
    const LITTLE: u64 = 32 << 20;
    begin(from, to, Speed::Steady, false)?;
    let mut speed = Speed::Steady;
    wait_until("the second round of a migration", 4 * PROMPT, || {
        let said = qmp(from, "query-migrate", json!({}))?;
        let active = ["setup", "active"].iter().any(|state| said["status"] == *state);
        ensure!(active, "the migration is {said}");
        let ram = |key: &str| said["ram"][key].as_u64();
        if speed == Speed::Steady && ram("remaining").is_some_and(|bytes| bytes < LITTLE) {
            speed = Speed::Endless;
            speed.set(from)?;
        }
        Ok(speed == Speed::Endless && ram("dirty-sync-count") >= Some(2))
    })
}

/// Waits until both loads have made progress.
fn wait_progress(vm: &Vm) -> Result<()> {
    let done = || -> Result<Vec<u64>> {
        let said = vm.run("awk '{print $1 + $5}' /sys/block/vda/stat /sys/block/vdb/stat")?.ok()?.stdout;
        said.split_whitespace().map(|number| Ok(number.parse()?)).collect()
    };
    let before = done()?;
    wait_until("the load goes on", PROMPT, || {
        Ok(done()?.iter().zip(&before).all(|(now, before)| *now > before + 20))
    })
}

/// Returns what the loads wait for and the state of the volumes, to explain a run that has failed.
fn state(end: &End<'_>, vm: &Vm) -> String {
    const LOOK: &str = "cat /tmp/*.log; for p in $(pidof fio blocks); do head -n 3 /proc/$p/status; \
                        grep -H . /proc/$p/task/*/stack; done; dmesg | tail -n 40";
    let guest = vm.run(LOOK).map_or_else(|error| format!("{error:#}"), |said| said.stdout);
    let dump = |volume: &Volume<'_>| volume.control(r#"{"op":"dump"}"#).unwrap_or_default();
    format!("the guest: {guest}\nits volumes: {} {}", dump(&end.blocks), dump(&end.files))
}

#[test]
fn a_vm_migrates_under_load_and_back() -> Result<()> {
    const CACHED: u64 = 64 << 20;
    let bed = TestBed::new("volume-migrates")?;
    // With TCG, a QEMU before 9.0 does not see all that a guest writes to its memory while it migrates (fixed by its commit
    // 03bfc2188f), with any disks: programs in the guest then die or wait for ever.
    let newer = match bed.accel()? {
        Accel::Kvm => Ok(None),
        Accel::Tcg => newer_qemu().map(Some),
    };
    kit::require!(newer.is_ok(), "{:#}", newer.unwrap_err());
    let newer = newer?;
    let newer = newer.as_deref();
    let images = [
        image(&bed, "blocks", 32 << 20, None)?,
        image(&bed, "files", 96 << 20, None)?,
        image(&bed, "cached", CACHED, Some(0x5eed))?,
    ];
    bed.host("mkfs.ext4 -q files")?.ok()?;
    let hash = bed.host("sha256sum < cached")?.ok()?.stdout;
    let here = End::start(&bed, "here", &images, "true")?;
    // The volume reports that another process uses the images, and waits for a VM.
    let there = End::start(&bed, "there", &images, "vm")?;
    ensure!(there.logs().matches("in use by a writer").count() == 2, "{}", there.logs());
    let source = here.vm("source", newer)?.boot()?;
    ["vda", "vdb", "vdc"].into_iter().try_for_each(|name| wait_for_disk(&source, name))?;
    source.run("mkdir -p /mnt && mount /dev/vdb /mnt")?.ok()?;
    source.spawn("exec blocks /dev/vda 32 8 /tmp/end > /tmp/blocks.log 2>&1")?;
    let load =
        "--directory=/mnt --size=16M --rw=randrw --iodepth=8 --verify_backlog=64 --fsync=32 --loops=100000";
    source.spawn(&format!("exec {} > /tmp/fio.log 2>&1", fio(load)))?;
    wait_progress(&source)?;

    // The kernel keeps a disk's cache while somebody has the disk open.
    source.spawn("exec sleep 100000 < /dev/vdc")?;

    // The migration is cancelled when the VM has stopped and the images are free for the other end. The VM then continues, and
    // its volume locks the images again.
    let target = there.vm("first", newer)?.incoming().start()?;
    begin(&source, &target, Speed::ToTheEnd, true)?;
    wait_status(&source, "pre-switchover")?;
    ensure!(here.logs().matches("its images are unlocked").count() == 3, "{}", here.logs());
    qmp(&source, "migrate_cancel", json!({}))?;
    wait_status(&source, "cancelled")?;
    wait_progress(&source)?;
    ensure!(here.logs().matches("its images are locked").count() == 3, "{}", here.logs());
    target.kill_qemu()?;

    // Failed half-way.
    let target = there.vm("second", newer)?.incoming().start()?;
    begin(&source, &target, Speed::Steady, false)?;
    wait_until("some memory has been sent", PROMPT, || {
        Ok(qmp(&source, "query-migrate", json!({}))?["ram"]["transferred"].as_u64() > Some(8 << 20))
    })?;
    target.kill_qemu()?;
    wait_status(&source, "failed")?;
    wait_progress(&source)?;

    // Completed. The guest's cache of a disk is written only by the volume. It is filled after all memory has been sent once,
    // and its content is checked at the destination.
    let target = there.vm("third", newer)?.incoming().start()?;
    begin_second_round(&source, &target)?;
    source.run_within(2 * PROMPT, "dd if=/dev/vdc of=/dev/null bs=1M")?.ok()?;
    let reads = |vm: &Vm| anyhow::Ok(vm.run("awk '{print $3}' /sys/block/vdc/stat")?.ok()?.stdout);
    let before = reads(&source)?;
    Speed::ToTheEnd.set(&source)?;
    let said = wait_status(&source, "completed")?;
    println!("there: {} ms, of which the guest stood still for {} ms", said["total-time"], said["downtime"]);
    target.wait_ready()?;
    let found = target.run_within(2 * PROMPT, "sha256sum < /dev/vdc")?.ok()?.stdout;
    ensure!(found == hash, "the guest's cache is not what the disk has: {found} instead of {hash}");
    ensure!(before == reads(&target)?, "the disk was read again, which proves nothing");
    wait_progress(&target)?;
    ensure!(
        !target.run("cat /tmp/blocks.log /tmp/fio.log")?.stdout.contains("verify"),
        "fio has found errors"
    );

    // The VM then migrates back to the first volumes.
    source.kill_qemu()?;
    let back = here.vm("back", newer)?.incoming().start()?;
    begin(&target, &back, Speed::ToTheEnd, false)?;
    let said = wait_status(&target, "completed")?;
    println!("back: {} ms, of which the guest stood still for {} ms", said["total-time"], said["downtime"]);
    back.wait_ready()?;
    wait_progress(&back)?;
    target.kill_qemu()?;

    let ended = "touch /tmp/end; killall -INT fio; while pidof fio blocks > /tmp/pids; do usleep 20000; done; cat /tmp/*.log";
    let ended = back.run_within(4 * PROMPT, ended);
    let said = ended.with_context(|| state(&here, &back))?.stdout;
    ensure!(said.contains("checked 8192 blocks"), "{said}");
    ensure!(said.contains("err= 0") && !said.contains("verify:"), "{said}");
    println!("{}", said.lines().find(|line| line.contains("checked")).unwrap_or_default());
    back.run_within(2 * PROMPT, "umount /mnt && e2fsck -f -n /dev/vdb")?.ok()?;
    let errors =
        back.run("dmesg | grep -ci 'i/o error\\|blk_update_request\\|ext4-fs error' ; true")?.ok()?.stdout;
    ensure!(errors.trim() == "0", "the guest saw errors: {}", back.run("dmesg | tail -20")?.stdout);
    for end in [&here, &there] {
        ensure!(!end.logs().contains("given up") && !end.logs().contains("the VM waits"), "{}", end.logs());
    }
    back.shutdown()
}
