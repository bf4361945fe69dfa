//! How a segment's memory reaches a guest: page tables, rights, and what a guest can do to its devices.

use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use vmtest::installation::{Installation, MemoryKind, Plan, program};
use vmtest::{Job, TestBed, Vm, VmBuilder, wait_until};

vmtest::test_both_memories!(page_tables_are_as_the_device_promises, a_store_to_a_read_only_segment_is_lost);

const PROMPT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Shell functions that do what tools such as ndctl and daxctl do.
const TOOLS: &str = r#"
nd=/sys/bus/nd/drivers
# The DAX device of a segment of this many MiB, such as dax0.0, and what it is made of.
dax_of() {
    for d in /sys/bus/dax/devices/dax*; do
        if [ -e $d ] && [ $(cat $d/size) = $((($1 - 2) << 20)) ]; then echo ${d##*/}; fi
    done
}
# Overwrites the info block in front of a DAX device, as `ndctl destroy-namespace -f` does.
destroy_block() {
    modprobe nd_pmem
    made=$(readlink -f /sys/bus/dax/devices/$1/..) region=$(readlink -f /sys/bus/dax/devices/$1/../..)
    namespace=$(basename $region/namespace*.0)
    echo ${made##*/} > $nd/dax_pmem/unbind
    echo > $made/namespace
    echo 1 > $region/$namespace/force_raw
    echo $namespace > $nd/nd_pmem/bind
    dd if=/dev/zero of=/dev/$(basename $region/$namespace/block/pmem*) bs=4096 seek=1 count=1 conv=fsync
    echo $namespace > $nd/nd_pmem/unbind
    echo 0 > $region/$namespace/force_raw
    echo $namespace > $nd/nd_pmem/bind
}
# Makes memory of the guest of it, as `daxctl reconfigure-device -m system-ram` does.
to_system_ram() {
    modprobe kmem
    echo $1 > /sys/bus/dax/drivers/device_dax/unbind
    echo $1 > /sys/bus/dax/drivers/kmem/new_id
    for state in /sys/devices/system/memory/memory*/state; do
        [ $(cat $state) = online ] || echo online > $state
    done
}
"#;

fn tools(vm: &Vm, command: &str) -> Result<String> {
    Ok(vm.run(&format!("set -e; . /etc/tools; {command}"))?.ok()?.stdout.trim().to_owned())
}

fn vm(ginnel: &Installation<'_>, name: &str) -> Result<VmBuilder> {
    let vm = ginnel.vm(name)?.program(program("load")?).program(program("by-hand")?);
    Ok(vm.content("/etc/tools", 0o644, TOOLS))
}

/// Returns the file that a program maps, the offset in it, and the physical address of that offset.
fn device(vm: &Vm, memory: MemoryKind, mib: u64) -> Result<(String, u64, u64)> {
    let (file, start, resource) = match memory {
        MemoryKind::Dax => {
            let name = tools(vm, &format!("dax_of {mib}"))?;
            let resource = tools(vm, &format!("cat /sys/bus/dax/devices/{name}/resource"))?;
            (format!("/dev/{name}"), 0, resource)
        }
        MemoryKind::Bar => {
            let find = format!("find /sys/devices -name resource2 -size {}k", mib << 10);
            let file = tools(vm, &find)?;
            let resource = tools(
                vm,
                &format!("awk 'NR == 3 {{ print $1 }}' {}", file.replace("resource2", "resource")),
            )?;
            (file, 2 * MIB, resource)
        }
    };
    let digits = resource.strip_prefix("0x").context("no address")?;
    Ok((file, start, u64::from_str_radix(digits, 16)? + start))
}

/// Parses two hexadecimal numbers with a `-` between them.
fn range(text: &str) -> Option<(u64, u64)> {
    let (start, end) = text.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    Some((number(start)?, number(end)?))
}

/// Returns the cache type that the guest's kernel has noted for a physical address.
fn memory_type(vm: &Vm, address: u64) -> Result<String> {
    vm.run("grep -q debugfs /proc/mounts || mount -t debugfs none /sys/kernel/debug")?.ok()?;
    // A line of the list looks like "PAT: [mem 0x0000000100000000-0x0000000101000000] write-back".
    let list = vm.run("cat /sys/kernel/debug/x86/pat_memtype_list")?.ok()?.stdout;
    let mut types = list.lines().rev().filter_map(|line| {
        let (mem, kind) = line.strip_prefix("PAT: [mem ")?.split_once("] ")?;
        let (start, end) = range(mem)?;
        (start..end).contains(&address).then(|| kind.to_owned())
    });
    types.next().with_context(|| format!("{address:#x} is not in {list}"))
}

/// Returns the flags of the page table entry for a physical address, while a program that has it mapped runs.
fn entry_flags(vm: &Vm, address: u64) -> Result<String> {
    let page = |address: u64| address & !(2 * MIB - 1);
    let mut flags = None;
    wait_until("the page to be in the page table", PROMPT, || {
        let ask = r#"{"execute": "human-monitor-command", "arguments": {"command-line": "info tlb"}}"#;
        let table = vm.qmp(ask)?;
        // A line looks like "00007f9d40000000: 0000000100200000 X-PDA--UW". Only entries of user pages count, because the
        // kernel has mapped the address as well.
        flags = table.as_str().unwrap_or_default().lines().find_map(|line| {
            let (_, entry) = line.split_once(": ")?;
            let (physical, flags) = entry.split_once(' ')?;
            let physical = u64::from_str_radix(physical, 16).ok()?;
            (page(physical) == page(address) && flags.contains('U')).then(|| flags.trim().to_owned())
        });
        Ok(flags.is_some())
    })?;
    flags.context("no flags")
}

/// Returns the `KernelPageSize` of a process's mapping of a file.
fn page_size(vm: &Vm, pid: u32, file: &str) -> Result<String> {
    let name = file.rsplit('/').next().unwrap_or(file);
    let smaps = vm.run(&format!("cat /proc/{pid}/smaps"))?.ok()?.stdout;
    let mut lines = smaps.lines().skip_while(|line| !line.ends_with(name));
    let size = lines.find_map(|line| line.strip_prefix("KernelPageSize:"));
    Ok(size.with_context(|| format!("{name} is not mapped: {smaps}"))?.trim().to_owned())
}

fn page_tables_are_as_the_device_promises(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("page-tables")?;
    let mut plan = Plan::new(&bed).memory(memory).vm("a").segment("web", 16, &["host", "a"]);
    if memory == MemoryKind::Dax {
        plan = plan.config("[segment.fine]\nsize = \"18M\"\nmembers = [\"a\"]\npage = \"4K\"");
    }
    let ginnel = plan.start()?;
    let vm = vm(&ginnel, "a")?.boot()?;
    let _daemon = ginnel.start_guest(&vm)?;

    // A program that uses the library, and one that does not.
    let echo = vm.spawn("exec load echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    let (file, start, address) = device(&vm, memory, 16)?;
    let spin = vm.spawn(&format!("exec by-hand spin {file} {start}"))?;
    spin.wait_for_line("spinning", PROMPT)?;
    let (kind, flags) = (memory_type(&vm, address)?, entry_flags(&vm, address)?);
    let pages = [page_size(&vm, echo.pid(), &file)?, page_size(&vm, spin.pid(), &file)?];
    println!("{file} at {address:#x}: {kind}, page table entry {flags}, pages of {pages:?}");
    // P is a large page; C is PCD, which means uncached.
    let (wanted, page) = match memory {
        MemoryKind::Dax => (("write-back", true, false), "2048 kB"),
        MemoryKind::Bar => (("uncached-minus", false, true), "4 kB"),
    };
    ensure!((kind.as_str(), flags.contains('P'), flags.contains('C')) == wanted, "{kind}, {flags}");
    ensure!(pages == [page; 2], "{pages:?}");
    spin.kill_process(9)?;

    if memory == MemoryKind::Dax {
        // A segment with small pages.
        let echo = vm.spawn("exec load echo fine echo")?;
        echo.wait_for_line("listening", PROMPT)?;
        let (file, _, address) = device(&vm, memory, 18)?;
        ensure!(page_size(&vm, echo.pid(), &file)? == "4 kB");
        ensure!(memory_type(&vm, address)? == "write-back");

        // Mapping the device does not need root, only the rights to its file.
        let poke = format!("su user -c 'by-hand poke {file} 0'");
        let refused = vm.run(&poke)?;
        ensure!(refused.code() == Some(1) && refused.stderr.contains("Permission denied"), "{refused:?}");
        vm.run(&format!("chgrp user {file}; chmod 660 {file}"))?.ok()?;
        ensure!(vm.run(&poke)?.ok()?.stdout.contains("was 0, is 1"));
    }
    Ok(())
}

fn a_store_to_a_read_only_segment_is_lost(memory: MemoryKind) -> Result<()> {
    let bed = TestBed::new("read-only")?;
    let plan = Plan::new(&bed).memory(memory).vm("a").vm("w");
    let ginnel = plan
        .segment_with_readers("feed", 16, &["host", "w"], &["a"])
        .segment("web", 32, &["host", "a"])
        .start()?;
    let vm = vm(&ginnel, "a")?.boot()?;
    let daemon = ginnel.start_guest(&vm)?;
    daemon.wait_for_line("segment feed is", PROMPT)?;

    // The library knows that the segment is read-only, and says so before anything is lost.
    for role in ["echo feed name", "drive feed name 1"] {
        let refused = vm.run(&format!("load {role}"))?;
        ensure!(refused.code() == Some(1) && refused.stderr.contains("read"), "{role}: {refused:?}");
        println!("load {role}: {}", refused.stderr.lines().last().unwrap_or_default());
    }

    // A program that maps the device itself stores without effect, and reads what is there.
    let (device, start, _) = device(&vm, memory, 16)?;
    let file = File::options().read(true).write(true).open(ginnel.segment_file("feed"))?;
    let word = 2 * MIB + MIB;
    file.write_all_at(&41u64.to_le_bytes(), word)?;
    let mut before = vec![0; 16 * MIB as usize];
    file.read_exact_at(&mut before, 0)?;
    let said = vm.run(&format!("by-hand poke {device} {start}"))?.ok()?.stdout;
    ensure!(said.contains("was 41, is 41"), "{said}");
    let mut after = vec![0; before.len()];
    file.read_exact_at(&mut after, 0)?;
    ensure!(before == after, "the store has reached the file");

    // Other programs are not affected.
    let echo = vm.spawn("exec load echo web echo")?;
    echo.wait_for_line("listening", PROMPT)?;
    bed.host(&ginnel.on_host("load drive web echo 1")?)?.ok()?;
    Ok(())
}

/// Returns how often the host's daemon has repaired a segment's info block.
fn repairs(bed: &TestBed, ginnel: &Installation<'_>, segment: &str) -> Result<u64> {
    let status = bed.host(&ginnel.on_host("ginnel status --json")?)?.ok()?.stdout;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    let segments = status["segments"].as_array().context("no segments in the status")?;
    let found = segments.iter().find(|s| s["name"] == segment).context("the segment is not in the status")?;
    found["info_block_repairs"].as_u64().with_context(|| format!("no repairs in {found:#}"))
}

/// Lets the host and a VM exchange messages in a segment.
fn talk(bed: &TestBed, ginnel: &Installation<'_>, vm: &Vm, segment: &str) -> Result<()> {
    let echo: Job = vm.spawn(&format!("exec load echo {segment} talk"))?;
    echo.wait_for_line("listening", PROMPT)?;
    bed.host(&ginnel.on_host(&format!("load drive {segment} talk 1"))?)?.ok()?;
    echo.kill_process(9)?;
    echo.wait(PROMPT)?;
    Ok(())
}

#[test]
fn damage_by_a_guest_to_its_devices_harms_nobody_else() -> Result<()> {
    let bed = TestBed::new("devices-spoilt")?;
    let ginnel = Plan::new(&bed)
        .vm("a")
        .vm("b")
        .segment("shared", 16, &["host", "a", "b"])
        .segment("private", 32, &["host", "b"])
        .segment("big", 384, &["host", "a"])
        .start()?;
    let a = vm(&ginnel, "a")?.start()?;
    // In this VM the kernel looks for the info blocks while it boots.
    let b = vm(&ginnel, "b")?.dax().boot()?;
    a.wait_ready()?;
    let daemon = ginnel.start_guest(&a)?;
    let _b_daemon = ginnel.start_guest(&b)?;
    for segment in ["shared", "private"] {
        b.spawn(&format!("exec load echo {segment} echo"))?.wait_for_line("listening", PROMPT)?;
    }
    let mut drives = Vec::new();
    for segment in ["shared", "private"] {
        let drive = bed.host_spawn(&ginnel.on_host(&format!("exec load drive {segment} echo 12"))?)?;
        drive.wait_for_line("connected", PROMPT)?;
        drives.push(drive);
    }

    // The guest destroys the info block of a shared segment, and makes ordinary memory of another segment.
    let big = tools(&a, "dax_of 384")?;
    tools(&a, "destroy_block $(dax_of 16)")?;
    let before = tools(&a, "awk '/MemTotal/ { print $2 }' /proc/meminfo")?.parse::<u64>()?;
    tools(&a, &format!("to_system_ram {big}"))?;
    let after = tools(&a, "awk '/MemTotal/ { print $2 }' /proc/meminfo")?.parse::<u64>()?;
    ensure!(after > before + (200 << 10), "the guest's memory was {before} KiB and is {after} KiB");
    // The guest uses it as such.
    tools(&a, "mount -t tmpfs -o size=100% none /mnt && dd if=/dev/urandom of=/mnt/fill bs=1M count=300")?;
    for (segment, why) in [("shared", "info block was damaged"), ("big", "system RAM")] {
        let refused = a.run(&format!("load drive {segment} echo 1"))?;
        ensure!(refused.code() == Some(1) && refused.stderr.contains(why), "{segment}: {refused:?}");
        println!("{}", refused.stderr.lines().last().unwrap_or_default());
    }
    ensure!(daemon.is_running(), "{:?}", daemon.said());

    // The neighbours notice nothing.
    for drive in drives {
        drive.wait(PROMPT)?.ok()?;
    }
    // The VM that misses the segment gets it back: the host repairs the block when it hears that it is missing.
    wait_until("the segment to be back", PROMPT, || {
        Ok(a.run("timeout 1 load echo shared probe")?.stdout.contains("listening"))
    })?;
    // A VM that boots with the block destroyed has the segment when its daemon has started.
    tools(&a, "destroy_block $(dax_of 16)")?;
    ensure!(!tools(&b, "dax_of 16")?.is_empty(), "the drivers are loaded");
    b.reboot_and_wait()?;
    ensure!(
        tools(&b, "dax_of 16")?.is_empty() && !tools(&b, "dax_of 32")?.is_empty(),
        "the block was not destroyed"
    );
    let _b_daemon = ginnel.start_guest(&b)?;
    talk(&bed, &ginnel, &b, "shared")?;
    talk(&bed, &ginnel, &b, "private")?;
    ensure!(repairs(&bed, &ginnel, "shared")? == 2 && repairs(&bed, &ginnel, "private")? == 0);

    // The next start of that VM works too.
    a.kill_qemu()?;
    let a = vm(&ginnel, "a")?.boot()?;
    let _daemon = ginnel.start_guest(&a)?;
    talk(&bed, &ginnel, &a, "shared")?;
    talk(&bed, &ginnel, &a, "big")?;
    Ok(())
}

#[test]
fn the_reason_for_a_missing_dax_segment_is_reported() -> Result<()> {
    let bed = TestBed::new("no-dax")?;
    let ginnel = Plan::new(&bed).vm("a").segment("web", 16, &["host", "a"]).start()?;
    let refused = |vm: &Vm, why: &str| -> Result<()> {
        let refused = vm.run("load drive web echo 1")?;
        ensure!(refused.code() == Some(1) && refused.stderr.contains(why), "{refused:?}");
        println!("{}", refused.stderr.lines().last().unwrap_or_default());
        Ok(())
    };

    // A QEMU without room for the segment does not start.
    let args = ginnel.devices("a")?;
    let error = bed.vm("a").qemu_args(&args).start().map(drop).unwrap_err();
    let error = format!("{error:#}");
    ensure!(error.contains("maxmem"), "{error}");
    println!("{}", error.lines().find(|line| line.contains("maxmem")).unwrap_or_default());

    // Remove each of the modules from the kernel, one at a time.
    let vm = vm(&ginnel, "a")?.boot()?;
    let _daemon = ginnel.start_guest(&vm)?;
    ensure!(!tools(&vm, "dax_of 16")?.is_empty(), "the daemon has not loaded the modules");
    for module in ["device_dax", "dax_pmem", "virtio_pmem"] {
        vm.reboot_and_wait()?;
        vm.run(&format!(
            "cd /lib/modules/*/; sed -i '/\\/{module}.ko:/d' modules.dep; rm $(find . -name {module}.ko)"
        ))?
        .ok()?;
        let daemon = ginnel.start_guest(&vm)?;
        refused(&vm, &format!("the module {module} is not loaded"))?;
        ensure!(daemon.is_running(), "{:?}", daemon.said());
    }

    // The block is destroyed meanwhile.
    vm.reboot_and_wait()?;
    let daemon = ginnel.start_guest(&vm)?;
    tools(&vm, "destroy_block $(dax_of 16)")?;
    refused(&vm, "info block was damaged")?;
    daemon.kill_process(9)?;
    daemon.wait(PROMPT)?;
    // The host repairs it when the next guest daemon starts, which makes the kernel look again.
    let daemon = ginnel.start_guest(&vm)?;
    daemon.wait_for_line("has been repaired", PROMPT)?;
    talk(&bed, &ginnel, &vm, "web")?;
    Ok(())
}

#[test]
fn a_second_vm_with_the_devices_of_the_first_is_refused() -> Result<()> {
    let bed = TestBed::new("same-devices")?;
    let ginnel = Plan::new(&bed).vm("a").vm("b").segment("web", 16, &["host", "a"]).start()?;
    let a = vm(&ginnel, "a")?.boot()?;
    let _daemon = ginnel.start_guest(&a)?;

    // Before QEMU starts, `qemu-args --check` reports it for the command line that was meant for b.
    let devices = ginnel.devices("a")?.replace('\n', " ");
    let check =
        bed.host(&ginnel.on_host(&format!("ginnel qemu-args b --check '-m 256M,maxmem=2G {devices}'"))?)?;
    ensure!(check.code() == Some(1), "{check:?}");
    println!("{}", check.stderr.trim());

    // When it starts, QEMU ends, and the daemon logs the reason.
    let error = bed.vm("b").device_memory_mib(2048).qemu_args(&devices).boot().map(drop).unwrap_err();
    let error = format!("{error:#}");
    ensure!(error.contains("server sent version -1"), "{error}");
    println!("{}", error.lines().find(|line| line.contains("version")).unwrap_or_default());
    ginnel.daemon()?.wait_for_line("a second QEMU is refused: this VM runs already", PROMPT)?;
    talk(&bed, &ginnel, &a, "web")
}

#[test]
fn a_dax_segment_is_plugged_in_and_stays() -> Result<()> {
    let bed = TestBed::new("dax-hotplug")?;
    let members = ["host", "a"];
    let ginnel =
        Plan::new(&bed).vm("a").segment("web", 16, &members).segment("late", 32, &members).start()?;
    let devices = ginnel.devices("a")?;
    let devices: Vec<_> = devices.lines().filter(|line| !line.contains("ginnel-late")).collect();
    let vm = bed
        .vm("a")
        .device_memory_mib(ginnel.device_memory_mib())
        .program(program("ginneld")?)
        .program(program("ginnel")?)
        .program(program("load")?)
        .qemu_args(&devices.join("\n"))
        .qemu_args("-device pcie-root-port,id=root1,chassis=1")
        .boot()?;
    let _daemon = ginnel.start_guest(&vm)?;
    let refused = vm.run("load drive late echo 1")?;
    ensure!(refused.code() == Some(1) && refused.stderr.contains("no virtio-pmem device"), "{refused:?}");

    let file = ginnel.segment_file("late");
    vm.qmp(&format!(
        r#"{{"execute": "object-add", "arguments": {{"qom-type": "memory-backend-file", "id": "late", "share": true,
            "mem-path": {file:?}, "size": {}}}}}"#,
        32 * MIB
    ))?;
    vm.qmp(
        r#"{"execute": "device_add", "arguments": {"driver": "virtio-pmem-pci", "id": "late-device", "memdev": "late",
            "bus": "root1"}}"#,
    )?;
    wait_until("the plugged device can be used", PROMPT, || {
        let echo = vm.run("timeout 1 load echo late probe")?;
        Ok(echo.stdout.contains("listening"))
    })?;
    talk(&bed, &ginnel, &vm, "late")?;

    let refused = vm.qmp(r#"{"execute": "device_del", "arguments": {"id": "late-device"}}"#);
    let refused = refused.map(|answer| answer.to_string()).unwrap_err();
    println!("unplugging: {refused:#}");
    talk(&bed, &ginnel, &vm, "late")?;
    Ok(())
}
