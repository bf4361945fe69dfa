//! NVMe volumes under a QEMU that has vfio-user, with the nvme driver of a stock guest: the device that the guest sees without an
//! engine; the driver binds, and fio finds what it has written; the engine is killed under load; the machine is reset, the driver
//! unloaded and loaded; the holder dies; the VM's memory is not shared; the guest polls.

#[path = "nvme/boot.rs"]
mod boot;
#[path = "nvme/polled.rs"]
mod polled;
#[path = "nvme/tools.rs"]
mod tools;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmtest::{Exit, HostJob, TestBed, Vm, VmBuilder, artifact, newer_qemu, wait_until};

kit::test_that_skips_are_seen!();

const PROMPT: Duration = Duration::from_secs(60);

/// The holder of an NVMe volume.
struct Holder {
    socket: PathBuf,
    job: Arc<HostJob>,
}

impl Holder {
    fn start(bed: &TestBed, name: &str, flags: &str) -> Result<Self> {
        let (program, socket) = (artifact("ginnel-volume")?, bed.dir().join(format!("{name}.sock")));
        let job = bed.host_spawn(&format!(
            "exec {} {name} --holder --nvme --socket {} {flags}",
            program.display(),
            socket.display()
        ))?;
        job.wait_for_line("holding", PROMPT)?;
        Ok(Self { socket, job })
    }

    /// Returns QEMU's argument for the controller. QEMU stands still while it waits for an answer, so it waits for long.
    fn device(&self) -> String {
        let socket = self.socket.display();
        format!(
            r#"{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{socket}"}},"x-msg-timeout":120000}}"#
        )
    }
}

/// A volume: its holder, and its engine, which may be killed and started again.
struct Volume<'b> {
    bed: &'b TestBed,
    holder: Holder,
    command: String,
    engine: Arc<HostJob>,
}

impl<'b> Volume<'b> {
    fn start(bed: &'b TestBed, name: &str, flags: &str) -> Result<Self> {
        let holder = Holder::start(bed, name, flags)?;
        let (program, socket) = (artifact("ginnel-volume")?, holder.socket.display());
        let command = format!("exec {} {name} --nvme --socket {socket} {flags}", program.display());
        let engine = run(bed, &command)?;
        Ok(Self { bed, holder, command, engine })
    }

    /// Kills the engine with SIGKILL and starts another one.
    fn kill_and_restart(&mut self) -> Result<()> {
        self.engine.kill(9)?;
        self.engine.wait(PROMPT)?;
        self.engine = run(self.bed, &self.command)?;
        Ok(())
    }

    /// Returns the sum of a number over all queues.
    fn count(&self, what: &str) -> Result<u64> {
        Ok(queues(&self.holder.socket)?.iter().filter_map(|queue| queue[what].as_u64()).sum())
    }
}

/// Returns the statistics of each queue of the volume with this socket for QEMU.
fn queues(socket: &Path) -> Result<Vec<Value>> {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket.with_extension("ctl"))?;
    stream.set_read_timeout(Some(PROMPT))?;
    writeln!(stream, r#"{{"op":"stat"}}"#)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    let mut answer: Value = serde_json::from_str(&answer).context(answer)?;
    match answer["stat"]["queues"].take() {
        Value::Array(queues) => Ok(queues),
        _ => anyhow::bail!("no queues in {answer}"),
    }
}

fn run(bed: &TestBed, command: &str) -> Result<Arc<HostJob>> {
    let job = bed.host_spawn(command)?;
    job.wait_for_line("serving", PROMPT)?;
    Ok(job)
}

/// Describes a VM with controllers. Its memory can be shared.
fn vm(bed: &TestBed, name: &str, holders: &[&Holder]) -> Result<VmBuilder> {
    let vm = bed
        .vm(name)
        .qemu(newer_qemu()?)
        .memory_mib(512)
        .cpus(2)
        .qemu_args("-object memory-backend-memfd,id=ram,size=512M,share=on -machine memory-backend=ram")
        // SeaBIOS waits two minutes for a controller without an engine.
        .qemu_args("-bios qboot.rom");
    Ok(holders.iter().fold(vm, |vm, holder| vm.qemu_arg("-device").qemu_arg(&holder.device())))
}

/// Returns vendor, device, class and size of BAR 0 of each NVMe controller.
fn controllers(vm: &Vm) -> Result<Vec<String>> {
    let script = "for d in /sys/bus/pci/devices/*; do [ $(cat $d/class) = 0x010802 ] && \
                  echo $(cat $d/vendor $d/device) $(awk 'NR == 1 { print $1, $2 }' $d/resource); done; true";
    let said = vm.run(script)?.ok()?.stdout;
    Ok(said.lines().map(str::to_owned).collect())
}

#[test]
fn a_guest_lists_controllers_without_engines_and_reboots() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let bed = TestBed::new("nvme-list")?;
    let shadow = Holder::start(&bed, "shadow", "--backend ram --size 64M --queues 2")?;
    let mapped = Holder::start(&bed, "mapped", "--backend ram --size 64M --queues 2 --wait poll")?;
    let vm = vm(&bed, "list", &[&shadow, &mapped])?.boot()?;
    let sizes = |lines: Vec<String>| -> Result<Vec<u64>> {
        lines
            .iter()
            .map(|line| {
                let words: Vec<&str> = line.split(' ').collect();
                ensure!(words[..2] == ["0x4e47", "0x0001"], "{line}");
                let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16);
                Ok(number(words[3])? - number(words[2])? + 1)
            })
            .collect()
    };
    let found = sizes(controllers(&vm)?)?;
    ensure!(found == [0x2000, 0x8000], "{found:x?}");
    // The reset of a device waits for its engine, and there is none to wait for.
    vm.reboot_and_wait()?;
    let found = sizes(controllers(&vm)?)?;
    ensure!(found == [0x2000, 0x8000], "after a reboot: {found:x?}");
    vm.shutdown()?;
    for holder in [shadow, mapped] {
        holder.job.wait_for_line("the VM has gone", PROMPT)?;
    }
    Ok(())
}

fn wait_for_disk(vm: &Vm) -> Result<()> {
    vm.run("until [ -b /dev/nvme0n1 ]; do usleep 20000; done")?.ok()?;
    Ok(())
}

fn image(bed: &TestBed, bytes: u64) -> Result<PathBuf> {
    let path = bed.dir().join("disk");
    std::fs::File::create(&path)?.set_len(bytes)?;
    Ok(path)
}

fn fio(more: &str) -> String {
    format!(
        "fio --name=load --filename=/dev/nvme0n1 --ioengine=libaio --direct=1 --bs=4k --verify=crc32c --verify_fatal=1 \
         --group_reporting {more}"
    )
}

/// Returns the guest's messages about errors of its disks.
fn errors(vm: &Vm) -> Result<String> {
    Ok(vm.run("dmesg | grep -iE 'i/o error|nvme.*(timeout|abort|reset|fail)'; true")?.ok()?.stdout)
}

#[test]
fn the_stock_driver_finds_what_it_has_written() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    for wait in ["poll", "adaptive", "interrupt"] {
        let bed = TestBed::new("nvme-driver")?;
        let image = image(&bed, 64 << 20)?;
        let flags = format!("--queues 2 --wait {wait} --path {}", image.display());
        let volume = Volume::start(&bed, "disk", &flags)?;
        let vm = vm(&bed, "guest", &[&volume.holder])?
            .module("nvme")
            .module("crc32c_generic")
            .program("/usr/bin/fio")
            .boot()?;
        wait_for_disk(&vm)?;
        let said =
            vm.run("cd /sys/block/nvme0n1; cat size device/serial device/model; dmesg | grep -i nvme")?;
        println!("{wait}: {}", said.ok()?.stdout);
        let before = (volume.count("done")?, volume.count("kicks")?);
        vm.run_within(
            4 * PROMPT,
            &fio("--size=16M --rw=randrw --iodepth=16 --numjobs=2 --offset_increment=16M"),
        )?
        .ok()?;
        let done = volume.count("done")? - before.0;
        let kicks = volume.count("kicks")? - before.1;
        println!("{wait}: {kicks} notifications for {done} commands");
        ensure!(done > 8192, "{done} commands");
        if wait == "poll" {
            ensure!(kicks == 0, "{kicks} doorbells were trapped");
        }
        ensure!(errors(&vm)?.is_empty(), "{}", errors(&vm)?);
        vm.shutdown()?;
    }
    Ok(())
}

/// Kills the engine many times under a load that checks all blocks. `rounds` is how often.
fn survives_kills(wait: &str, rounds: u32) -> Result<()> {
    let bed = TestBed::new("nvme-kills")?;
    let image = image(&bed, 64 << 20)?;
    let flags = format!("--queues 2 --wait {wait} --path {}", image.display());
    let mut volume = Volume::start(&bed, "disk", &flags)?;
    let vm = vm(&bed, "guest", &[&volume.holder])?.module("nvme").program(artifact("blocks")?).boot()?;
    wait_for_disk(&vm)?;
    let load = vm.spawn("exec blocks /dev/nvme0n1 32 8 /tmp/end")?;
    let mut longest = Duration::ZERO;
    for _ in 0..rounds {
        let before = volume.count("done")?;
        wait_until("the load runs", PROMPT, || Ok(volume.count("done")? > before + 20))?;
        let begin = Instant::now();
        volume.kill_and_restart()?;
        wait_until("the next completion", PROMPT, || Ok(volume.count("done")? > 0))?;
        longest = longest.max(begin.elapsed());
    }
    vm.run("touch /tmp/end")?.ok()?;
    let said = load.wait(4 * PROMPT)?.ok()?.stdout;
    ensure!(said.contains("checked 8192 blocks"), "{said}");
    ensure!(errors(&vm)?.is_empty(), "the guest saw errors: {}", errors(&vm)?);
    println!("{wait}: {rounds} kills, at most {longest:?} until the next engine has completed a command");
    vm.shutdown()
}

#[test]
fn the_engine_is_killed_under_load() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let rounds = if std::env::var_os("GINNEL_SOAK").is_some() { 500 } else { 25 };
    ["poll", "adaptive"].into_iter().try_for_each(|wait| survives_kills(wait, rounds))
}

#[test]
fn resets_and_drivers_come_and_go() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let bed = TestBed::new("nvme-resets")?;
    let image = image(&bed, 64 << 20)?;
    let mut volume = Volume::start(&bed, "disk", &format!("--queues 2 --path {}", image.display()))?;
    let vm = vm(&bed, "guest", &[&volume.holder])?.module("nvme").program(artifact("blocks")?).boot()?;
    wait_for_disk(&vm)?;
    // The controller is reset while the load runs; the driver submits what was lost again.
    let load = vm.spawn("exec blocks /dev/nvme0n1 32 8 /tmp/end")?;
    for _ in 0..5 {
        let before = volume.count("done")?;
        wait_until("the load runs", PROMPT, || Ok(volume.count("done")? > before + 20))?;
        vm.run_within(PROMPT, "echo 1 > /sys/class/nvme/nvme0/reset_controller")?.ok()?;
    }
    vm.run("touch /tmp/end")?.ok()?;
    let said = load.wait(4 * PROMPT)?.ok()?.stdout;
    ensure!(said.contains("checked 8192 blocks"), "{said}");
    for round in 0..10 {
        vm.run_within(PROMPT, "rmmod nvme && modprobe nvme")?.ok()?;
        wait_for_disk(&vm)?;
        if round % 4 == 1 {
            volume.kill_and_restart()?;
        }
    }
    vm.run("dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64 iflag=direct")?.ok()?;
    // A reset in the middle of requests, and none of the old ones writes into the new system's memory.
    vm.spawn("exec blocks /dev/nvme0n1 32 8 /tmp/never")?;
    let before = volume.count("done")?;
    wait_until("the load runs", PROMPT, || Ok(volume.count("done")? > before + 20))?;
    vm.reboot_and_wait()?;
    wait_for_disk(&vm)?;
    vm.run("dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64 iflag=direct")?.ok()?;
    vm.shutdown()
}

#[test]
fn without_a_holder_the_guest_gets_errors() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let bed = TestBed::new("nvme-holder")?;
    let image = image(&bed, 64 << 20)?;
    let volume = Volume::start(&bed, "disk", &format!("--path {}", image.display()))?;
    let vm = vm(&bed, "guest", &[&volume.holder])?.module("nvme").boot()?;
    wait_for_disk(&vm)?;
    volume.holder.job.kill(9)?;
    let end = volume.engine.wait(PROMPT)?;
    ensure!(end.exit != Exit::Code(0) && end.stderr.contains("the holder has ended"), "{end:?}");
    let read = vm.run_within(4 * PROMPT, "dd if=/dev/nvme0n1 of=/dev/null bs=4k count=1 iflag=direct")?;
    ensure!(read.exit != Exit::Code(0), "the disk is gone, and nobody says so");
    vm.run("true")?.ok()?;
    vm.kill_qemu()
}

#[test]
fn memory_that_is_not_shared_is_named() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let bed = TestBed::new("nvme-private")?;
    let image = image(&bed, 64 << 20)?;
    let volume = Volume::start(&bed, "disk", &format!("--path {}", image.display()))?;
    let vm = bed
        .vm("guest")
        .qemu(qemu?)
        .memory_mib(512)
        .cpus(1)
        .module("nvme")
        .qemu_args("-object memory-backend-memfd,id=ram,size=512M,share=off -machine memory-backend=ram")
        .qemu_arg("-device")
        .qemu_arg(&volume.holder.device())
        .boot()?;
    volume.engine.wait_for_line("share=on", PROMPT)?;
    let said = vm
        .run_within(PROMPT, "until dmesg | grep -q 'nvme nvme0'; do usleep 20000; done; dmesg | grep nvme")?;
    println!("{}", said.ok()?.stdout);
    ensure!(vm.run("[ -b /dev/nvme0n1 ]")?.exit != Exit::Code(0), "there is no disk");
    vm.shutdown()
}
