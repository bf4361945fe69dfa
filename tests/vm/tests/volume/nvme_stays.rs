//! A VM with an nvme volume, from the printed arguments: what QEMU cannot do, or does not survive, is refused before it hurts.

use super::*;
use vmtest::newer_qemu;

/// Serves the volume `fast` as its user does without systemd, which also starts its holder.
fn serve(bed: &TestBed) -> Result<Arc<HostJob>> {
    let (ginnel, folder) = (artifact("ginnel")?, bed.dir().display());
    artifact("ginnel-volume")?;
    run(bed, &format!("exec {} volume --sockets {folder} --configs {folder} serve fast", ginnel.display()))
}

#[test]
fn an_nvme_volume_stays_where_it_is() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let qemu = qemu?;
    let bed = TestBed::new("volume-nvme-stays")?;
    let image = image(&bed, "disk", 8 << 20, Some(1))?;
    let config =
        format!("device = 'nvme'\nvm = 'guest'\nqueues = 2\n[[disk]]\npath = '{}'\n", image.display());
    std::fs::write(bed.dir().join("fast.toml"), config)?;
    let engine = serve(&bed)?;
    let (ginnel, folder) = (artifact("ginnel")?, bed.dir().display());
    let arguments = bed.host(&format!(
        "{} qemu-args guest --quiet --qemu {} --volume-configs {folder} --volume-sockets {folder}",
        ginnel.display(),
        qemu.display()
    ))?;
    let vm = vm(&bed, "guest").module("nvme").qemu(&qemu).qemu_args(&arguments.ok()?.stdout);
    let vm = vm.boot()?;
    wait_for_disk(&vm, "nvme0n1")?;
    let sum = |command: &str| -> Result<String> { Ok(vm.run(command)?.ok()?.stdout) };
    let before = sum("md5sum < /dev/nvme0n1")?;

    let devices = vm.qmp(r#"{"execute":"qom-list","arguments":{"path":"/machine/peripheral-anon"}}"#)?;
    let devices = devices.as_array().context("a list")?;
    let nvme = devices.iter().find(|entry| entry["type"] == "child<vfio-user-pci>");
    let name = nvme.and_then(|entry| entry["name"].as_str()).with_context(|| format!("{devices:?}"))?;
    let unplug =
        format!(r#"{{"execute":"device_del","arguments":{{"id":"/machine/peripheral-anon/{name}"}}}}"#);
    let refused = vm.qmp(&unplug).err().context("QEMU unplugs the device")?;
    ensure!(format!("{refused:#}").contains("does not support hotplugging"), "{refused:#}");
    let migrate = r#"{"execute":"migrate","arguments":{"uri":"exec:cat > /dev/null"}}"#;
    let refused = vm.qmp(migrate).err().context("QEMU migrates the VM")?;
    ensure!(format!("{refused:#}").contains("ivshmem"), "{refused:#}");
    // The guest cannot switch the slot off either.
    let slots = sum("cat /sys/bus/pci/slots/*/power 2> /dev/null; true")?;
    ensure!(slots.is_empty(), "the guest has slots with a switch: {slots}");

    // The holder is another process, so the engine may be killed.
    engine.kill(9)?;
    engine.wait(PROMPT)?;
    let engine = serve(&bed)?;
    let after = sum("echo 3 > /proc/sys/vm/drop_caches; md5sum < /dev/nvme0n1")?;
    ensure!(before == after && vm.is_running(), "{before} is now {after}");
    vm.shutdown()?;
    engine.kill(15)?;
    engine.wait(PROMPT)?;
    // The holder ends by itself some seconds later, and its lock with it. A connection would keep it alive.
    let lock = format!("flock -n {}/fast.sock.holder.lock true", bed.dir().display());
    wait_until("the holder has ended", PROMPT, || Ok(bed.host(&lock)?.exit == Exit::Code(0)))
}
