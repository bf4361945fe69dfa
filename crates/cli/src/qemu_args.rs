//! `ginnel qemu-args`.

use crate::output;
use crate::vm_devices::Devices;
use anyhow::Result;
use std::path::Path;

/// What gives a VM interrupts.
pub const IOMMU: &str = "-M q35,kernel-irqchip=split -device intel-iommu,intremap=on";

/// Prints the arguments of QEMU that join a VM to its segments.
///
/// For use as `qemu-system-x86_64 ... $(ginnel qemu-args VM)`: one argument pair a line on stdout, hints on stderr.
#[derive(clap::Args)]
pub struct Args {
    /// The VM, as the configuration names it.
    vm: String,

    /// Print what gives it interrupts too: a q35 machine with an IOMMU. Its kernel needs intel_iommu=on.
    #[arg(long)]
    iommu: bool,

    /// No hints.
    #[arg(short, long)]
    quiet: bool,
}

pub fn run(args: Args) -> Result<()> {
    let devices = Devices::of(&args.vm)?;
    output::line(arguments(&devices, args.iommu).join("\n"))?;
    if !args.quiet {
        if !args.iommu {
            output::note(format!("# for interrupts instead of polling: {IOMMU} (or --iommu)"));
        }
        output::note("# for interrupts, on the guest kernel's command line: intel_iommu=on");
        output::note(
            "# with TCG instead of KVM: -smp N,maxcpus=M with M of 2 or more, or memory is not ordered",
        );
    }
    Ok(())
}

/// One argument pair each.
fn arguments(devices: &Devices, iommu: bool) -> Vec<String> {
    let mut lines = Vec::new();
    if iommu {
        // In front of all devices, as QEMU wishes.
        lines.extend(
            IOMMU
                .split(" -")
                .enumerate()
                .map(|(i, pair)| if i == 0 { pair.into() } else { format!("-{pair}") }),
        );
    }
    lines.push(format!("-chardev socket,id=ginnel-control,path={}", escaped(&devices.socket)));
    lines.push(format!("-device ivshmem-doorbell,chardev=ginnel-control,vectors={}", devices.vectors));
    for memory in &devices.memory {
        let (id, path) = (memory.id(), escaped(&memory.file));
        lines.push(format!(
            "-object memory-backend-file,id={id},share=on,mem-path={path},size={},dump=off",
            memory.size
        ));
        lines.push(format!("-device ivshmem-plain,memdev={id}"));
    }
    lines
}

/// A comma in a value is written twice.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_devices::tests::devices;

    #[test]
    fn one_pair_a_line() {
        assert_eq!(
            arguments(&devices(), true),
            [
                "-M q35,kernel-irqchip=split",
                "-device intel-iommu,intremap=on",
                "-chardev socket,id=ginnel-control,path=/run/ginnel/vm-a.sock",
                "-device ivshmem-doorbell,chardev=ginnel-control,vectors=32",
                "-object memory-backend-file,id=ginnel-web,share=on,mem-path=/dev/shm/ginnel-web,size=268435456,dump=off",
                "-device ivshmem-plain,memdev=ginnel-web",
                "-object memory-backend-file,id=ginnel-huge,share=on,mem-path=/mnt/a,,b/ginnel-huge,size=1073741824,dump=off",
                "-device ivshmem-plain,memdev=ginnel-huge",
            ]
        );
    }
}
