//! `ginnel qemu-args`.

mod command_line;
mod files;
mod nvme;
mod volumes;

use crate::inspect::{Inspect, MemoryKind};
use crate::machine::{Machine, MachineArgs, Ports};
use crate::qemu_version::{QemuArgs, QemuVersion};
use crate::vm_devices::{Devices, control_socket, escaped};
use crate::volume_devices::{VolumeDevice, VolumePathArgs, check_version, shared_ram, stay};
use crate::{AlreadyReported, one_line, output};
use anyhow::{Result, ensure};
use ginnel::Daemon;
use ginnel_config::Bytes;
use ginnel_volume_control::config::Device;

/// The arguments that give a VM interrupts.
pub const IOMMU: &str = "-M q35,kernel-irqchip=split -device intel-iommu,intremap=on";

/// Prints the arguments with which QEMU connects a VM to its segments and gives it its volumes.
///
/// Use it as `qemu-system-x86_64 -M q35 ... $(ginnel qemu-args VM --memory 2G)`. It prints one argument pair per line on
/// stdout, and hints on stderr. If a segment's file is not as QEMU needs it, it reports that, prints no arguments, and
/// ends with status 1. The volumes of a VM are those whose configuration has `vm = "NAME"`; a VM that has volumes needs
/// no segments, and then no daemon either.
#[derive(clap::Args)]
pub struct Args {
    /// The VM, as the configuration names it.
    vm: String,

    /// The VM's RAM, such as 2G. Also prints `-m`, with the maxmem that DAX segments need, and memory that volumes can
    /// access.
    #[arg(long, value_name = "SIZE", value_parser = ram)]
    memory: Option<u64>,

    #[command(flatten)]
    machine: MachineArgs,

    /// Also print the arguments that give the VM interrupts: a q35 machine with an IOMMU. Its kernel needs
    /// intel_iommu=on.
    #[arg(long)]
    iommu: bool,

    /// Print no arguments. Instead check whether this command line of QEMU connects the VM correctly. It is one text,
    /// split at white space. Values may be JSON, as libvirt writes them.
    #[arg(long, value_name = "COMMAND LINE", allow_hyphen_values = true, conflicts_with_all = ["memory", "machine", "iommu"])]
    check: Option<String>,

    /// Print no hints.
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    qemu: QemuArgs,

    #[command(flatten)]
    volume_paths: VolumePathArgs,
}

/// What the arguments depend on, other than the devices.
#[derive(Clone, Copy)]
struct Target {
    qemu: QemuVersion,
    /// The VM's RAM in bytes, if that is to be printed.
    ram: Option<u64>,
    /// Whether the machine and its IOMMU are to be printed.
    iommu: bool,
}

pub fn run(args: Args) -> Result<()> {
    ensure!(
        !args.iommu || args.machine.machine == Machine::Q35,
        "--iommu prints an IOMMU that only a q35 machine has: leave out --iommu or --machine"
    );
    let all = args.volume_paths.volumes()?;
    let volumes: Vec<_> = all.iter().filter(|v| v.vm.as_ref() == Some(&args.vm)).cloned().collect();
    let segments = match ask(&args.vm) {
        Ok(found) => Some(found),
        Err(error) if !volumes.is_empty() => {
            output::note(format!("# no segments, only volumes: {}", one_line(&error)));
            None
        }
        Err(error) => return Err(error),
    };
    // The version does not matter for scsi volumes.
    let qemu = if volumes.iter().any(|v| v.device != Device::Scsi) {
        args.qemu.version()?
    } else {
        QemuVersion::OLDEST
    };
    check_version(&volumes, qemu)?;
    let mut problems = segments.iter().flat_map(|(_, devices)| files::problems(devices)).collect::<Vec<_>>();
    if let Some(line) = &args.check {
        problems.extend(segments.iter().flat_map(|(inspect, d)| command_line::problems(line, d, inspect)));
        problems.extend(volumes::problems(line, &args.vm, &all, qemu));
    }
    if !problems.is_empty() {
        problems.iter().for_each(|problem| output::note(format!("ginnel: {problem}")));
        return Err(AlreadyReported.into());
    }
    if args.check.is_some() {
        return output::line(format!("VM {}: the command line is good", args.vm));
    }
    let devices = segments.as_ref().map(|(_, devices)| devices);
    let mut ports = Ports::new(args.machine.machine);
    let target = Target { qemu, ram: args.memory, iommu: args.iommu };
    output::line(arguments(devices, &volumes, target, &mut ports).join("\n"))?;
    if !args.quiet {
        hints(devices, &volumes, &ports, &args).iter().for_each(|hint| output::note(format!("# {hint}")));
    }
    Ok(())
}

/// Asks the daemon for its status, and extracts the devices of this VM.
fn ask(vm: &str) -> Result<(Inspect, Devices)> {
    let inspect = crate::inspect::ask(&mut Daemon::connect()?)?;
    let devices = Devices::from(&inspect, vm)?;
    Ok((inspect, devices))
}

/// Returns the arguments, with one pair in each line.
fn arguments(
    devices: Option<&Devices>,
    volumes: &[VolumeDevice],
    target: Target,
    ports: &mut Ports,
) -> Vec<String> {
    let mut lines = Vec::new();
    let pair = |(option, value): (&str, String)| format!("{option} {value}");
    if target.iommu {
        // QEMU wants the IOMMU in front of all devices.
        lines.extend(
            IOMMU
                .split(" -")
                .enumerate()
                .map(|(i, pair)| if i == 0 { pair.into() } else { format!("-{pair}") }),
        );
    }
    if let Some(ram) = target.ram {
        let max = devices.and_then(|d| d.max_memory(ram)).map(|max| format!(",maxmem={}", Bytes(max)));
        lines.push(format!("-m {}{}", Bytes(ram), max.unwrap_or_default()));
        if !volumes.is_empty() {
            lines.extend(shared_ram(ram).map(pair));
        }
    }
    let mut place = |device| ports.place(device, "").into_iter().map(|value| format!("-device {value}"));
    if let Some(devices) = devices {
        lines.push(format!("-chardev socket,id=ginnel-control,path={}", escaped(&devices.socket)));
        lines.extend(place(format!("ivshmem-doorbell,chardev=ginnel-control,vectors={}", devices.vectors)));
        lines.extend(devices.qmp.iter().map(|qmp| format!("-qmp {}", control_socket(qmp))));
        for memory in &devices.memory {
            lines.push(format!("-object {}", memory.object()));
            lines.extend(place(memory.device()));
        }
    }
    for volume in volumes {
        lines.extend(volume.chardev(target.qemu).map(|value| format!("-chardev {value}")));
        lines.extend(volume.place(ports, "").iter().map(|value| format!("-device {value}")));
    }
    if devices.is_none() && volumes.iter().any(|v| v.device == Device::Nvme) {
        lines.extend(stay().map(pair));
    }
    lines
}

/// Returns hints about what the arguments alone do not say.
fn hints(devices: Option<&Devices>, volumes: &[VolumeDevice], ports: &Ports, args: &Args) -> Vec<String> {
    let mut hints = devices.map_or(Vec::new(), |devices| segment_hints(devices, args));
    if ports.count() > 0 {
        hints.push(format!(
            "{} PCIe root ports, one for each device, so that it can be unplugged; a VM with -M pc has none: --machine pc",
            ports.count()
        ));
    }
    if !volumes.is_empty() && args.memory.is_none() {
        let [(object, memory), (machine, backend)] = shared_ram(0);
        let memory = memory.replace("size=0", "size=SIZE");
        hints.push(format!(
            "for the volumes, the VM's RAM must be shared: {object} {memory} {machine} {backend} with the SIZE of -m (or --memory SIZE)"
        ));
    }
    if volumes.iter().any(|v| v.device == Device::Scsi) {
        hints.push("QEMU 7.2 does not reconnect to a scsi volume that was restarted".into());
    }
    if volumes.iter().any(|v| v.device == Device::Nvme) {
        hints.extend(nvme::hints(args.machine.machine));
    }
    if devices.is_none() {
        return hints;
    }
    match args.machine.machine {
        Machine::Q35 => {
            if !args.iommu {
                hints.push(format!("for interrupts instead of polling: {IOMMU} (or --iommu)"));
            }
            hints.push("for interrupts, on the guest kernel's command line: intel_iommu=on".into());
        }
        Machine::Pc => {
            hints.push("programs in this VM poll: QEMU has an IOMMU only for a q35 machine".into())
        }
        Machine::Virt => {}
    }
    hints.push(
        "with TCG instead of KVM: -smp N,maxcpus=M with M of 2 or more, or memory is not ordered".into(),
    );
    hints
}

fn segment_hints(devices: &Devices, args: &Args) -> Vec<String> {
    let mut hints = Vec::new();
    if let Some(pid) = devices.qemu {
        hints
            .push(format!("VM {} runs already, in process {pid}: a second QEMU will be refused", devices.vm));
    }
    let more = devices.hot_pluggable();
    if args.memory.is_none() && more > 0 {
        hints.push(format!(
            "for the DAX segments, the VM's -m SIZE,maxmem=MORE must have MORE of at least SIZE + {} (or --memory SIZE)",
            Bytes(more)
        ));
    }
    if let Some(sliced) = devices.memory.iter().find(|memory| memory.offset > 0) {
        hints.push(format!(
            "segment {} is a slice with offset=: this takes QEMU 8.1 or later",
            sliced.segment
        ));
    }
    if devices.memory.iter().any(|memory| memory.kind == MemoryKind::Dax) {
        hints.push("DAX segments cannot be unplugged while the VM runs".into());
    }
    if devices.qmp.is_some() {
        hints.push("the QMP socket is only for ginneld: add another one for yourself".into());
    }
    hints
}

/// Parses the size of a VM's RAM. It needs a unit: a bare number would mean MiB for QEMU, and bytes elsewhere.
fn ram(text: &str) -> Result<u64, String> {
    text.parse()
        .ok()
        .map(|Bytes(bytes)| bytes)
        .filter(|bytes| *bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20))
        .ok_or_else(|| {
            format!("{text:?} is not a size of RAM: write whole MiB with a unit, such as 512M or 2G")
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_devices::tests::devices;

    /// Returns the arguments for a machine with this much RAM.
    fn on(
        machine: Machine,
        devices: Option<&Devices>,
        volumes: &[VolumeDevice],
        ram: u64,
        iommu: bool,
    ) -> Vec<String> {
        let target = Target { qemu: QemuVersion::OLDEST, ram: Some(ram), iommu };
        arguments(devices, volumes, target, &mut Ports::new(machine))
    }

    #[test]
    fn one_pair_a_line() {
        assert_eq!(
            on(Machine::Q35, Some(&devices()), &[], 2 << 30, true),
            [
                "-M q35,kernel-irqchip=split",
                "-device intel-iommu,intremap=on",
                "-m 2G,maxmem=3334M",
                "-chardev socket,id=ginnel-control,path=/run/ginnel/vm-a.sock",
                "-device pcie-root-port,id=ginnel-port-1,chassis=200,slot=1",
                "-device ivshmem-doorbell,chardev=ginnel-control,vectors=32,bus=ginnel-port-1",
                "-qmp unix:/run/ginnel/vm-a.qmp,server=on,wait=off",
                "-object memory-backend-file,id=ginnel-web,share=on,mem-path=/dev/shm/ginnel/web,size=268435456,dump=off",
                "-device pcie-root-port,id=ginnel-port-2,chassis=200,slot=2",
                "-device virtio-pmem-pci,memdev=ginnel-web,bus=ginnel-port-2",
                "-object memory-backend-file,id=ginnel-old,share=on,mem-path=/dev/shm/ginnel/old,size=4194304,dump=off",
                "-device pcie-root-port,id=ginnel-port-3,chassis=200,slot=3",
                "-device ivshmem-plain,memdev=ginnel-old,bus=ginnel-port-3",
                "-object memory-backend-file,id=ginnel-huge,share=on,mem-path=/mnt/a,,b/ginnel/huge,size=1073741824,dump=off",
                "-device pcie-root-port,id=ginnel-port-4,chassis=200,slot=4",
                "-device ivshmem-plain,memdev=ginnel-huge,bus=ginnel-port-4",
                "-object memory-backend-file,id=ginnel-news.vm-a,share=on,mem-path=/dev/shm/ginnel/news,offset=6291456,size=6291456,dump=off,readonly=on",
                "-device pcie-root-port,id=ginnel-port-5,chassis=200,slot=5",
                "-device virtio-pmem-pci,memdev=ginnel-news.vm-a,bus=ginnel-port-5",
                "-object memory-backend-file,id=ginnel-quiet,share=on,mem-path=/dev/shm/ginnel/quiet,size=4194304,dump=off,readonly=on",
                "-device pcie-root-port,id=ginnel-port-6,chassis=200,slot=6",
                "-device ivshmem-plain,memdev=ginnel-quiet,bus=ginnel-port-6",
            ]
        );
    }

    #[test]
    fn a_machine_without_pci_express_has_no_ports() {
        let lines = on(Machine::Pc, Some(&devices()), &[], 2 << 30, false);
        assert!(lines.contains(&"-device ivshmem-plain,memdev=ginnel-old".into()), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains("port")), "{lines:?}");
        let virt = on(Machine::Virt, Some(&devices()), &[], 2 << 30, false);
        assert_eq!(virt, on(Machine::Q35, Some(&devices()), &[], 2 << 30, false));
    }

    #[test]
    fn a_vm_of_bars_needs_no_maxmem() {
        let mut devices = devices();
        devices.memory.retain(|memory| memory.kind == MemoryKind::Bar);
        assert_eq!(on(Machine::Q35, Some(&devices), &[], 512 << 20, false)[0], "-m 512M");
    }

    #[test]
    fn volumes_need_shared_ram_once() {
        let volumes = crate::volume_devices::tests::volumes();
        assert_eq!(
            on(Machine::Q35, None, &volumes[..2], 2 << 30, false),
            [
                "-m 2G",
                "-object memory-backend-memfd,id=ginnel-ram,size=2G,share=on",
                "-machine memory-backend=ginnel-ram",
                "-chardev socket,id=ginnel-volume-data,path=/run/ginnel/volumes/data.sock,reconnect=1",
                "-device pcie-root-port,id=ginnel-port-1,chassis=200,slot=1",
                "-device vhost-user-blk-pci,chardev=ginnel-volume-data,num-queues=4,bus=ginnel-port-1",
                "-chardev socket,id=ginnel-volume-many,path=/run/ginnel/volumes/many.sock",
                "-device pcie-root-port,id=ginnel-port-2,chassis=200,slot=2",
                "-device vhost-user-scsi-pci,chardev=ginnel-volume-many,num_queues=2,bus=ginnel-port-2",
            ]
        );
    }

    #[test]
    fn an_nvme_volume_stays_where_it_is() {
        let nvme = [crate::volume_devices::tests::nvme()];
        let port = "-device pcie-root-port,id=ginnel-port-1,chassis=200,slot=1,hotplug=off";
        let device = r#"-device {"driver":"vfio-user-pci","socket":{"path":"/run/ginnel/volumes/fast.sock","type":"unix"},"x-msg-timeout":120000,"bus":"ginnel-port-1"}"#;
        let stay = [
            "-object memory-backend-ram,id=ginnel-no-migration,size=4K",
            "-device ivshmem-plain,memdev=ginnel-no-migration",
        ];
        let lines = on(Machine::Q35, None, &nvme, 2 << 30, false);
        assert_eq!(lines[3..], [[port, device], stay].concat());
        // A VM with segments cannot migrate anyway.
        let lines = on(Machine::Q35, Some(&devices()), &nvme, 2 << 30, false);
        assert!(lines.iter().any(|line| line.contains("vfio-user-pci")), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains("no-migration")), "{lines:?}");
    }

    #[test]
    fn ram_has_a_unit() {
        assert_eq!(ram("2G"), Ok(2 << 30));
        for bad in ["2048", "1K", "1048577", "", "-1G"] {
            assert!(ram(bad).is_err(), "{bad}");
        }
    }
}
