//! Requests in flight migrate with their VM, under a QEMU newer than the distribution's: stopping does not wait for the disk.

use super::migration::{Speed, begin, wait_status};
use super::*;
use vmtest::newer_qemu;

/// The number of threads of the load, each with one request at a time.
const THREADS: u64 = 8;

/// Serves a volume with the configuration `data`, which several volumes may serve. Its socket is in a folder of its own.
fn serve<'b>(bed: &'b TestBed, folder: &str) -> Result<Volume<'b>> {
    let program = artifact("ginnel-volume")?;
    let socket = bed.dir().join(folder).join("data.sock");
    std::fs::create_dir(bed.dir().join(folder))?;
    let config = bed.dir().join("data.toml");
    let command = format!(
        "exec {} data --config {} --socket {}",
        program.display(),
        config.display(),
        socket.display()
    );
    let job = run(bed, &command)?;
    Ok(Volume { bed, command, socket, queues: 2, job })
}

/// Returns what `ginnel qemu-args` prints for the newer QEMU, with `inflight-migration=on` added.
fn arguments(bed: &TestBed, qemu: &Path, volume: &Volume<'_>) -> Result<String> {
    let ginnel = artifact("ginnel")?;
    let (ginnel, qemu, configurations) = (ginnel.display(), qemu.display(), bed.dir().display());
    let sockets = volume.socket.parent().context("a folder")?.display();
    let command = format!(
        "{ginnel} qemu-args guest --quiet --qemu {qemu} --volume-configs {configurations} --volume-sockets {sockets}"
    );
    let lines = bed.host(&command)?.ok()?.stdout;
    ensure!(lines.contains("reconnect-ms=1000"), "{lines}");
    Ok(lines.replace("-device vhost-user-blk-pci", "-device vhost-user-blk-pci,inflight-migration=on"))
}

/// Returns the number of requests that wait for an operator, and of those that have failed.
fn held_and_failed(volume: &Volume<'_>) -> Result<(u64, u64)> {
    let stat = stat(volume)?;
    let sum = |of: &str, what: &str| -> Result<u64> {
        let all = stat[of].as_array().with_context(|| stat.to_string())?;
        Ok(all.iter().filter_map(|one| one[what].as_u64()).sum())
    };
    Ok((sum("queues", "held")?, sum("operations", "errors")?))
}

fn wait_for_held(volume: &Volume<'_>, wanted: u64) -> Result<()> {
    let mut found = (0, 0);
    let mut look = || {
        found = held_and_failed(volume)?;
        Ok(found == (wanted, 0))
    };
    let result = wait_until("requests that are held", 2 * PROMPT, &mut look);
    result.with_context(|| format!("{found:?} instead of {wanted}; {:?}", volume.job.said()))
}

fn migrates_with_requests_in_flight(packed: bool) -> Result<()> {
    let bed = TestBed::new("volume-in-flight")?;
    let image = image(&bed, "disk", 32 << 20, None)?;
    let faults = bed.dir().join("disk.faults");
    std::fs::write(&faults, "")?;
    let config = format!(
        "vm = 'guest'\nqueues = 2\npacked = {packed}\n\
         [[disk]]\npath = '{}'\nbackend = 'volatile'\nlock = 'vm'\non-error = 'hold'\n",
        image.display()
    );
    std::fs::write(bed.dir().join("data.toml"), config)?;
    let (mut here, there) = (serve(&bed, "here")?, serve(&bed, "there")?);
    let qemu = newer_qemu()?;
    let guest = |name: &str, volume: &Volume<'_>| -> Result<VmBuilder> {
        let vm = vm(&bed, name).program(artifact("blocks")?);
        Ok(vm.qemu(&qemu).qemu_args(&arguments(&bed, &qemu, volume)?))
    };
    let source = guest("source", &here)?.boot()?;
    wait_for_disk(&source, "vda")?;
    // QEMU connects again.
    here.kill_and_restart()?;
    source.run("dd if=/dev/vda of=/dev/null bs=4k count=16 iflag=direct")?.ok()?;
    source.spawn(&format!("exec blocks /dev/vda 32 {THREADS} /tmp/end > /tmp/blocks.log 2>&1"))?;
    wait_until("the load runs", PROMPT, || Ok(requests(&here)? > 1000))?;

    // From now on no write ends, neither at the source nor at the destination.
    std::fs::write(&faults, format!("write 0 {} 28\n", 32 << 20))?;
    wait_for_held(&here, THREADS)?;
    let target = guest("target", &there)?.incoming().start()?;
    begin(&source, &target, Speed::ToTheEnd, false)?;
    let said = wait_status(&source, "completed")?;
    println!("packed {packed}: the guest stood still for {} ms", said["downtime"]);
    target.wait_ready()?;
    wait_for_held(&there, THREADS)?;
    ensure!(held_and_failed(&here)? == (0, 0), "what went along has not ended at the source");
    source.kill_qemu()?;

    std::fs::write(&faults, "")?;
    let before = requests(&there)?;
    let answer = there.control(r#"{"op":"resume"}"#)?;
    ensure!(answer.contains(&THREADS.to_string()), "{answer}");
    wait_until("the load goes on", PROMPT, || Ok(requests(&there)? > before + 1000))?;
    let ended = "touch /tmp/end; while pidof blocks > /tmp/pids; do usleep 20000; done; cat /tmp/blocks.log";
    let said = target.run_within(4 * PROMPT, ended)?.stdout;
    ensure!(said.contains("checked 8192 blocks"), "{said}");
    let errors = target.run("dmesg | grep -ci 'i/o error' ; true")?.ok()?.stdout;
    ensure!(errors.trim() == "0", "the guest saw errors: {}", target.run("dmesg | tail -20")?.stdout);
    target.shutdown()
}

#[test]
fn a_vm_migrates_while_no_write_ends() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    [false, true].into_iter().try_for_each(migrates_with_requests_in_flight)
}
