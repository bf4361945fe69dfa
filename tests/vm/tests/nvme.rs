//! NVMe volumes under a QEMU that has vfio-user, with a stock guest: the process that has QEMU's connection, and the device that the
//! guest sees.

use anyhow::{Result, ensure};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use vmtest::{HostJob, TestBed, Vm, VmBuilder, artifact, newer_qemu};

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
            "exec {} {name} --holder --device nvme --backend ram --size 64M --socket {} {flags}",
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

/// Describes a VM with controllers. Its memory can be shared.
fn vm(bed: &TestBed, name: &str, holders: &[&Holder]) -> Result<VmBuilder> {
    let vm = bed
        .vm(name)
        .qemu(newer_qemu()?)
        .memory_mib(256)
        .cpus(2)
        .qemu_args("-object memory-backend-memfd,id=ram,size=256M,share=on -machine memory-backend=ram")
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
    let bed = TestBed::new("nvme-list")?;
    let shadow = Holder::start(&bed, "shadow", "--queues 2")?;
    let mapped = Holder::start(&bed, "mapped", "--queues 2 --wait poll")?;
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
