//! The guest daemon in real VMs, over either kind of memory: interrupts through VFIO, their keeper, polling without an IOMMU,
//! devices that are missing or ambiguous, reboot. Only the daemon itself loads drivers of DAX devices.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use vmtest::installation::{Installation, MemoryKind, Plan, program};
use vmtest::{Job, TestBed, Vm, VmBuilder, wait_until};

const PROMPT: Duration = Duration::from_secs(60);

vmtest::test_both_memories!(
    interrupts_wake_programs_and_outlive_the_daemon,
    missing_devices_are_reported_and_the_rest_works,
);

/// Describes a VM with these `devices` and without an IOMMU.
fn plain(bed: &TestBed, ginnel: &Installation<'_>, name: &str, devices: &str) -> Result<VmBuilder> {
    Ok(bed
        .vm(name)
        .device_memory_mib(ginnel.device_memory_mib())
        .program(program("ginneld")?)
        .program(program("bell")?)
        .qemu_args(devices))
}

/// Returns the devices of a VM without that of one segment.
fn devices_without(ginnel: &Installation<'_>, vm: &str, segment: &str) -> Result<String> {
    let devices = ginnel.devices(vm)?;
    let others = devices.lines().filter(|line| !line.contains(&format!("ginnel-{segment}")));
    Ok(others.collect::<Vec<_>>().join("\n"))
}

/// Returns what the daemon logs when it has found the device of a segment.
fn found(segment: &str, memory: MemoryKind) -> String {
    let place = match memory {
        MemoryKind::Dax => "/dev/dax",
        MemoryKind::Bar => "PCI device",
    };
    format!("segment {segment} is {place}")
}

/// Starts the guest daemon and waits until it has a session with the host's.
fn start_daemon(vm: &Vm) -> Result<Job> {
    let job = vm.spawn("exec ginneld guest")?;
    job.wait_for_line("session with the host's daemon", PROMPT)?;
    Ok(job)
}

/// Returns how many interrupts of the control device have arrived.
fn interrupts(vm: &Vm) -> Result<u64> {
    let table = vm.run("grep vfio-msix /proc/interrupts")?.stdout;
    // A line looks like "27:  4  IR-PCI-MSI ...". It has one column for each processor, and VMs here have one.
    let counts = table.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    Ok(counts.sum())
}

/// Returns the processor time that a process has used, in clock ticks (10 ms).
fn ticks(vm: &Vm, pid: u32) -> Result<u64> {
    let stat = vm.run(&format!("cat /proc/{pid}/stat"))?.ok()?.stdout;
    let fields = stat[stat.rfind(')').context("no name")? + 1..].split_whitespace();
    Ok(fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum())
}

fn ring_from_host(bed: &TestBed, ginnel: &Installation<'_>, seconds: u64) -> Result<String> {
    let said = bed.host(&ginnel.on_host(&format!("exec bell ring web echo {seconds}"))?)?.ok()?.stdout;
    Ok(said.lines().last().unwrap_or_default().to_owned())
}

fn interrupts_wake_programs_and_outlive_the_daemon(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("guest-interrupts")?;
    let ginnel = Plan::new(&bed).memory(memory).vm("a").segment("web", 16, &["host", "a"]).start()?;
    let vm = plain(&bed, &ginnel, "a", &ginnel.devices("a")?)?.iommu().module("vfio-pci").boot()?;
    let daemon = start_daemon(&vm)?;
    daemon.wait_for_line(&found("web", memory), PROMPT)?;
    let said = daemon.said().1;
    ensure!(said.contains("32 interrupt vectors"), "{said}");
    ensure!(said.contains("this VM is a"), "{said}");

    // Without work, the daemon uses no processor time.
    let before = ticks(&vm, daemon.pid())?;
    let idle = Instant::now();
    vm.run("sleep 3")?.ok()?;
    let used = ticks(&vm, daemon.pid())? - before;
    ensure!(used == 0, "the idle daemon used {used} ticks in {:?}", idle.elapsed());

    // Host and guest sleep, and wake each other for each message.
    let echo = vm.spawn("exec bell echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    let before = interrupts(&vm)?;
    let said = ring_from_host(&bed, &ginnel, 2)?;
    let came = interrupts(&vm)? - before;
    println!("host to guest and back by doorbells: {said}; {came} interrupts in the guest");
    ensure!(came > 20, "only {came} interrupts");

    // The daemon is killed during a conversation, which continues. The next daemon gets the interrupts from the keeper.
    let line = ginnel.on_host("exec bell ring web echo 6")?;
    bed.host("true")?.ok()?;
    let ringing = bed.host_spawn(&line)?;
    // The echo program serves one channel at a time, so the first one is closed by now.
    ringing.wait_for_line("ringing", PROMPT)?;
    daemon.kill_process(9)?;
    daemon.wait(PROMPT)?;
    let daemon = start_daemon(&vm)?;
    daemon.wait_for_line(&found("web", memory), PROMPT)?;
    let said = daemon.said().1;
    ensure!(said.contains("32 interrupt vectors, as the earlier daemon had them"), "{said}");
    println!("daemon killed meanwhile: {}", ringing.wait(PROMPT)?.ok()?.stdout.trim());

    // The endpoint from before the kill still has its listener.
    println!("a new channel to the old endpoint: {}", ring_from_host(&bed, &ginnel, 1)?);

    // The keeper is killed: the daemon starts another one and hands everything to it.
    vm.run("kill -9 $(ps | awk '/[g]inneld keeper/ { print $1 }')")?.ok()?;
    daemon.wait_for_line("keeper has died", PROMPT)?;
    daemon.wait_for_line("the keeper holds the interrupts", PROMPT)?;
    daemon.kill_process(9)?;
    daemon.wait(PROMPT)?;
    let daemon = start_daemon(&vm)?;
    ensure!(daemon.said().1.contains("as the earlier daemon had them"), "{}", daemon.said().1);
    println!("after a new keeper: {}", ring_from_host(&bed, &ginnel, 1)?);

    // A second daemon is refused, and the first continues.
    let second = vm.run("ginneld guest")?;
    ensure!(second.code() == Some(1) && second.stderr.contains("another ginneld (process"), "{second:?}");

    // The daemon ends in order, and another one starts.
    daemon.kill_process(15)?;
    ensure!(daemon.wait(PROMPT)?.code() == Some(0), "{:?}", daemon.said());
    vm.run("test ! -e /run/ginnel/ginnel.sock")?.ok()?;
    let _daemon = start_daemon(&vm)?;
    println!("after a clean restart: {}", ring_from_host(&bed, &ginnel, 1)?);

    // After a reboot nothing of the earlier boot is left, and everything works again.
    let ringing = bed.host_spawn(&line)?;
    ringing.wait_for_line("ringing", PROMPT)?;
    vm.reboot_and_wait()?;
    start_daemon(&vm)?;
    let ended = ringing.wait(PROMPT)?;
    ensure!(ended.code() == Some(1) && ended.stderr.contains("died"), "{ended:?}");
    let echo = vm.spawn("exec bell echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    println!("after a reboot: {}", ring_from_host(&bed, &ginnel, 1)?);
    Ok(())
}

fn missing_devices_are_reported_and_the_rest_works(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("guest-lacks")?;
    let members = ["host", "a"];
    let ginnel = Plan::new(&bed)
        .memory(memory)
        .vm("a")
        .segment("web", 16, &members)
        .segment("twice", 16, &members)
        .segment("gone", 16, &members)
        .start()?;
    // All devices except that of one segment; the device of another segment is there twice.
    let twice = ginnel.segment_file("twice");
    let device = match memory {
        MemoryKind::Dax => "virtio-pmem-pci",
        MemoryKind::Bar => "ivshmem-plain",
    };
    let again = format!(
        "-object memory-backend-file,id=again,share=on,mem-path={},size=16M -device {device},memdev=again",
        twice.display()
    );
    let devices = devices_without(&ginnel, "a", "gone")?;
    let vm = plain(&bed, &ginnel, "a", &format!("{devices} {again}"))?.boot()?;
    let daemon = start_daemon(&vm)?;
    daemon.wait_for_line(&found("web", memory), PROMPT)?;
    let said = daemon.said().1;
    ensure!(said.contains("no interrupts") && said.contains("this VM has no IOMMU; give its QEMU"), "{said}");
    ensure!(said.contains("segment gone is missing") && said.contains("ginnel qemu-args"), "{said}");
    ensure!(said.contains("segment twice is missing") && said.contains("several devices claim"), "{said}");
    for (segment, why) in [("gone", "ginnel qemu-args"), ("twice", "several devices"), ("never", "never")] {
        let refused = vm.run(&format!("bell attach {segment}"))?;
        ensure!(refused.code() == Some(1) && refused.stderr.contains(why), "{segment}: {refused:?}");
    }

    // Without interrupts a program that wants to sleep naps instead, and works.
    let attached = vm.run("bell attach web")?.ok()?.stdout;
    ensure!(attached.contains("with no interrupts"), "{attached}");
    let echo = vm.spawn("exec bell echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    println!("polling guest: {}", ring_from_host(&bed, &ginnel, 2)?);

    // Only root may attach, unless the socket has other permissions.
    let refused = vm.run("su user -c 'bell attach web'")?;
    ensure!(refused.code() == Some(1) && refused.stderr.contains("Permission denied"), "{refused:?}");

    // The daemon is killed, and the endpoint stays.
    daemon.kill_process(9)?;
    daemon.wait(PROMPT)?;
    let daemon = vm.spawn("exec ginneld guest --socket-group user")?;
    daemon.wait_for_line("session with the host's daemon", PROMPT)?;
    println!("after a restart: {}", ring_from_host(&bed, &ginnel, 1)?);
    vm.run("su user -c 'bell attach web'")?.ok()?;

    // Napping for idle control memory costs almost nothing.
    let before = ticks(&vm, daemon.pid())?;
    vm.run("sleep 3")?.ok()?;
    let used = ticks(&vm, daemon.pid())? - before;
    println!("an idle polling daemon used {used} ticks of 10 ms in 3 s");
    ensure!(used <= 15, "the idle daemon used {used} ticks in 3 s");
    Ok(())
}

#[test]
fn a_segment_is_plugged_in_and_out() -> Result<()> {
    let bed = TestBed::new("guest-hotplug")?;
    let members = ["host", "a"];
    let ginnel = Plan::new(&bed)
        .memory(MemoryKind::Bar)
        .vm("a")
        .segment("web", 16, &members)
        .segment("late", 16, &members)
        .start()?;
    let port = "-device pcie-root-port,id=root1,chassis=1,pref64-reserve=64M";
    let devices = devices_without(&ginnel, "a", "late")?;
    let vm = plain(&bed, &ginnel, "a", &format!("{devices} {port}"))?.boot()?;
    let daemon = start_daemon(&vm)?;
    ensure!(vm.run("bell attach late")?.code() == Some(1));

    for round in 0..2 {
        let file = ginnel.segment_file("late");
        vm.qmp(&format!(
            r#"{{"execute": "object-add", "arguments": {{"qom-type": "memory-backend-file", "id": "late{round}", "share": true,
                "mem-path": {file:?}, "size": {}}}}}"#,
            16 << 20
        ))?;
        // Use another name each time: QEMU forgets the memory of an unplugged device a moment after it reports the unplugging,
        // and aborts if the name returns earlier.
        vm.qmp(&format!(
            r#"{{"execute": "device_add", "arguments": {{"driver": "ivshmem-plain", "id": "late-device",
                "memdev": "late{round}", "bus": "root1"}}}}"#
        ))?;
        wait_until("the plugged device can be used", PROMPT, || {
            Ok(vm.run("bell attach late")?.code() == Some(0))
        })?;
        if round == 0 {
            daemon.wait_for_line(&found("late", MemoryKind::Bar), PROMPT)?;
        }

        vm.qmp(r#"{"execute": "device_del", "arguments": {"id": "late-device"}}"#)?;
        vm.wait_event("DEVICE_DELETED", PROMPT)?;
        let refused = vm.run("bell attach late")?;
        ensure!(refused.code() == Some(1) && refused.stderr.contains("ginnel qemu-args"), "{refused:?}");
        vm.qmp(&format!(r#"{{"execute": "object-del", "arguments": {{"id": "late{round}"}}}}"#))?;
    }
    vm.run("bell attach web")?.ok()?;
    Ok(())
}

#[test]
fn a_vm_without_control_device_is_told_what_to_add() -> Result<()> {
    let bed = TestBed::new("guest-alone")?;
    let vm = bed.vm("alone").program(program("ginneld")?).boot()?;
    let refused = vm.run("ginneld guest")?;
    ensure!(refused.code() == Some(1), "{refused:?}");
    ensure!(
        refused.stderr.contains("no control device; add the lines that `ginnel qemu-args` prints"),
        "{refused:?}"
    );
    Ok(())
}
