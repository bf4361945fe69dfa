//! `ginnel libvirt-xml`.

use crate::machine::{Machine, MachineArgs, Ports};
use crate::qemu_version::QemuVersion;
use crate::vm_devices::{Devices, control_socket};
use crate::volume_devices::{VolumeDevice, VolumePathArgs, stay};
use crate::{apparmor, one_line, output};
use anyhow::Result;
use ginnel_volume_control::config::Device;
use std::ops::RangeInclusive;

/// Prints the XML with which libvirt connects a VM to its segments and gives it its volumes.
///
/// The comments say where each element goes. Insert them with `virsh edit`. Where AppArmor or SELinux confines QEMU, it must be told of
/// some of these files: see libvirt.md of Ginnel's documentation.
#[derive(clap::Args)]
pub struct Args {
    /// The VM, as the configuration names it.
    vm: String,

    #[command(flatten)]
    machine: MachineArgs,

    /// Print AppArmor's rules for the files of this VM that libvirt does not know, in place of the XML.
    #[arg(long)]
    apparmor: bool,

    #[command(flatten)]
    volume_paths: VolumePathArgs,
}

pub fn run(args: Args) -> Result<()> {
    let mut volumes = args.volume_paths.volumes()?;
    volumes.retain(|v| v.vm.as_ref() == Some(&args.vm));
    let devices = match Devices::of(&args.vm) {
        Ok(devices) => Some(devices),
        Err(error) if !volumes.is_empty() => {
            output::note(format!("# no segments, only volumes: {}", one_line(&error)));
            None
        }
        Err(error) => return Err(error),
    };
    if args.apparmor {
        return output::line(apparmor::rules(devices.as_ref(), &volumes).join("\n"));
    }
    let mut parts = vec![CONFINED.to_owned()];
    let mut places = Places::new(args.machine.machine);
    let has_segments = devices.is_some();
    parts.extend(devices.map(|devices| xml(&devices, &mut places)));
    if !volumes.is_empty() {
        parts.push(disks(&volumes, has_segments, &mut places));
    }
    output::line(parts.join("\n"))
}

/// Two dashes cannot be in a comment, so the option is written without them.
const CONFINED: &str = "<!-- AppArmor and SELinux: QEMU must be let open files that libvirt does not know; see libvirt.md of Ginnel's
     documentation. The option `apparmor` of this command prints the rules for AppArmor -->";

/// What nvme volumes need.
const NVME: &str = "<!-- nvme volumes take QEMU 10.1 or later (this command does not know the VM's). The VM cannot migrate live, and they cannot be
     unplugged: QEMU would leave the device behind, or end. So their root ports have hotplug=off, and an ivshmem device keeps QEMU
     from migrating the VM -->";

/// Returns the XML for volumes. A VM that `has_segments` has an ivshmem device already. All but that of nvme volumes was tried by hand with
/// libvirt 9.0 and QEMU 7.2; Ginnel's tests run QEMU without libvirt.
fn disks(volumes: &[VolumeDevice], has_segments: bool, places: &mut Places) -> String {
    let mut lines: Vec<String> = [
        "<!-- for the volumes (libvirt 7.1.0 or later). Into <domain>, so that they see the VM's RAM -->",
        "<memoryBacking>",
        "  <source type='memfd'/>",
        "  <access mode='shared'/>",
        "</memoryBacking>",
    ]
    .map(str::to_owned)
    .into();
    let (disks, others): (Vec<_>, Vec<_>) = volumes.iter().partition(|v| v.device == Device::Blk);
    if !disks.is_empty() {
        lines.push("<!-- into <devices>; each <target> needs a name that no other disk has -->".into());
        lines.extend(places.comment());
    }
    for (volume, letter) in disks.iter().zip(('b'..='z').cycle()) {
        let packed = if volume.packed { " packed='on'" } else { "" };
        let (controller, address) = places.element();
        lines.extend(controller);
        lines.extend([
            "<disk type='vhostuser' device='disk' snapshot='no'>".into(),
            format!("  <driver name='qemu' type='raw' queues='{}'{packed}/>", volume.queues),
            format!("  <source type='unix' path='{}'>", escaped(&volume.socket.display().to_string())),
            "    <reconnect enabled='yes' timeout='1'/>".into(),
            "  </source>".into(),
            format!("  <target dev='vd{letter}' bus='virtio'/>"),
        ]);
        lines.extend(address);
        lines.push("</disk>".into());
    }
    if !others.is_empty() {
        let has_nvme = others.iter().any(|v| v.device == Device::Nvme);
        if has_nvme {
            lines.push(NVME.into());
        }
        lines.push("<!-- into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: libvirt has no element for scsi and nvme volumes -->".into());
        lines.push("<qemu:commandline>".into());
        for volume in others {
            // The arguments of a scsi target are the same for all versions of QEMU.
            let chardev = volume.chardev(QemuVersion::OLDEST);
            lines.extend(chardev.iter().flat_map(|value| argument("-chardev", value)));
            // From the opposite end of the range to those of segments.
            let slot = places.slots.next();
            lines.extend(places.arguments(slot, |ports, slot| volume.place(ports, slot)));
        }
        if has_nvme && !has_segments {
            let [(object, memory), (option, device)] = stay();
            let slot = places.slots.next();
            lines.extend(argument(object, &memory));
            lines.extend(argument(option, &(device + &on_root_bus(slot))));
        }
        lines.push("</qemu:commandline>".into());
    }
    lines.join("\n")
}

fn xml(devices: &Devices, places: &mut Places) -> String {
    let mut lines = address_space(devices);
    lines.push("<!-- into <devices> -->".into());
    lines.extend(places.comment());
    let (controller, address) = places.element();
    lines.extend(controller);
    lines.extend([
        "<shmem name='ginnel-control'>".into(),
        "  <model type='ivshmem-doorbell'/>".into(),
        format!("  <server path='{}'/>", escaped(&devices.socket.display().to_string())),
        format!("  <msi vectors='{}' ioeventfd='on'/>", devices.vectors),
    ]);
    lines.extend(address);
    lines.push("</shmem>".into());
    let mut arguments = Vec::new();
    if let Some(qmp) = &devices.qmp {
        arguments.extend(argument("-qmp", &control_socket(qmp)));
    }
    // libvirt's `<shmem>` takes files that lie in /dev/shm itself only, and knows no offset. It has `<memory model='virtio-pmem'>`, but
    // libvirt 9.0 ends the VM when its QEMU (7.2) reports such a device.
    for memory in &devices.memory {
        arguments.extend(argument("-object", &memory.object()));
        let slot = places.slots.next_back();
        arguments.extend(places.arguments(slot, |ports, slot| ports.place(memory.device(), slot)));
    }
    if !arguments.is_empty() {
        lines.push("<!-- into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: devices for which libvirt has no element -->".into());
        lines.push("<qemu:commandline>".into());
        lines.extend(arguments);
        lines.push("</qemu:commandline>".into());
    }
    lines.extend(
        [
            "<!-- for interrupts instead of polling, with machine='q35' and intel_iommu=on on the guest kernel's command line:",
            "     into <features>: <ioapic driver='qemu'/>",
            "     into <devices>:  <iommu model='intel'><driver intremap='on'/></iommu>",
            "     with TCG instead of KVM, the VM needs 2 or more <vcpu>, or memory is not ordered -->",
        ]
        .map(str::to_owned),
    );
    lines.join("\n")
}

/// Returns the elements that DAX segments need around them. They were tried by hand with libvirt 9.0 and QEMU 7.2;
/// Ginnel's tests run QEMU without libvirt.
fn address_space(devices: &Devices) -> Vec<String> {
    let more = devices.hot_pluggable();
    if more == 0 {
        return Vec::new();
    }
    // In KiB, as libvirt itself writes sizes. Segments are multiples of 2 MiB.
    vec![
        "<!-- for the DAX segments, into <domain>. RAM is that of the VM, and MORE at least what the segments have:".to_owned(),
        format!("     {} KiB; write the sum into <maxMemory>. libvirt wants a NUMA node with it (for <cpu>; name all processors).", more >> 10),
        "     QEMU's user must be able to open the files: name that user as the segment's `owner` -->".into(),
        "<maxMemory slots='16' unit='KiB'>RAM + MORE</maxMemory>".into(),
        "<cpu>".into(),
        "  <numa><cell id='0' cpus='0-LAST' memory='RAM' unit='KiB'/></numa>".into(),
        "</cpu>".into(),
    ]
}

/// Slots of the machine's root bus for what is given as arguments: devices on a pc, and the root ports of devices on other machines. QEMU
/// creates those before libvirt's devices, and if they had no address, would put them into the first slots, which libvirt gives to its own.
/// libvirt counts from 1 on, and the chipset's devices are above these slots. If the arguments need more slots than these, QEMU chooses.
const SLOTS: RangeInclusive<u8> = 0x8..=0x19;

/// The first index of libvirt's controllers. Usually libvirt has fewer of its own; it fills a gap with further root ports.
const FIRST_CONTROLLER: usize = 16;

/// The places of devices.
struct Places {
    machine: Machine,
    /// The number of elements that have a controller of their own.
    elements: usize,
    /// The ports of devices that are arguments.
    ports: Ports,
    slots: RangeInclusive<u8>,
}

impl Places {
    fn new(machine: Machine) -> Self {
        Self { machine, elements: 0, ports: Ports::new(machine), slots: SLOTS }
    }

    /// Returns what is to be said about the controllers, if there are any.
    fn comment(&self) -> Option<String> {
        let text = "<!-- a device can be unplugged because it is on a root port of its own; if the domain has a controller with the same
     index, choose another one, and the same number as bus in the device's address -->";
        self.machine.has_ports().then(|| text.into())
    }

    /// Returns the controller for another element, which stands in front of it, and the element's address on that.
    fn element(&mut self) -> (Option<String>, Option<String>) {
        if !self.machine.has_ports() {
            return (None, None);
        }
        let index = FIRST_CONTROLLER + self.elements;
        self.elements += 1;
        (
            Some(format!("<controller type='pci' index='{index}' model='pcie-root-port'/>")),
            Some(format!(
                "  <address type='pci' domain='0x0000' bus='{index:#04x}' slot='0x00' function='0x0'/>"
            )),
        )
    }

    /// Returns the arguments for a device that `place` puts in a slot of the root bus, if there is one left.
    fn arguments(
        &mut self,
        slot: Option<u8>,
        place: impl FnOnce(&mut Ports, &str) -> Vec<String>,
    ) -> Vec<String> {
        // libvirt's own root ports exist too late for devices that are arguments.
        let values = place(&mut self.ports, &on_root_bus(slot));
        values.iter().flat_map(|value| argument("-device", value)).collect()
    }
}

/// Returns the property of a device that puts it in this slot of the root bus.
fn on_root_bus(slot: Option<u8>) -> String {
    slot.map(|slot| format!(",addr={slot:#x}")).unwrap_or_default()
}

/// Returns an argument of QEMU as XML.
fn argument(name: &str, value: &str) -> [String; 2] {
    [format!("  <qemu:arg value='{name}'/>"), format!("  <qemu:arg value='{}'/>", escaped(value))]
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::MemoryKind;
    use crate::vm_devices::tests::devices;

    #[test]
    fn segments_are_arguments() {
        let xml = xml(&devices(), &mut Places::new(Machine::Q35));
        for part in [
            "<controller type='pci' index='16' model='pcie-root-port'/>\n<shmem name='ginnel-control'>\n  <model type='ivshmem-doorbell'/>\n  <server path='/run/ginnel/vm-a.sock'/>\n  <msi vectors='32' ioeventfd='on'/>\n  <address type='pci' domain='0x0000' bus='0x10' slot='0x00' function='0x0'/>\n</shmem>",
            "size=268435456,dump=off'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='pcie-root-port,id=ginnel-port-1,chassis=200,slot=1,addr=0x19'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='virtio-pmem-pci,memdev=ginnel-web,bus=ginnel-port-1'/>",
            "mem-path=/dev/shm/ginnel/old,size=4194304,dump=off'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='pcie-root-port,id=ginnel-port-2,chassis=200,slot=2,addr=0x18'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='ivshmem-plain,memdev=ginnel-old,bus=ginnel-port-2'/>",
            "  <qemu:arg value='-object'/>\n  <qemu:arg value='memory-backend-file,id=ginnel-huge,share=on,mem-path=/mnt/a,,b/ginnel/huge,size=1073741824,dump=off'/>",
            "offset=6291456,size=6291456,dump=off,readonly=on'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='pcie-root-port,id=ginnel-port-4,chassis=200,slot=4,addr=0x16'/>",
            "<qemu:commandline>\n  <qemu:arg value='-qmp'/>\n  <qemu:arg value='unix:/run/ginnel/vm-a.qmp,server=on,wait=off'/>\n",
            "<maxMemory slots='16' unit='KiB'>",
            "what the segments have:\n     268288 KiB;",
            "<numa><cell ",
        ] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
        assert_eq!(xml.matches("<shmem ").count(), 1);
        // Two dashes end a comment.
        for comment in xml.split("<!--").skip(1) {
            assert!(!comment.split("-->").next().unwrap().contains("--"), "{comment}");
        }
    }

    #[test]
    fn volumes_are_disks_and_arguments() {
        let xml = disks(&crate::volume_devices::tests::volumes()[..2], false, &mut Places::new(Machine::Q35));
        for part in [
            "<access mode='shared'/>",
            "queues='4'/>\n  <source type='unix' path='/run/ginnel/volumes/data.sock'>",
            "<target dev='vdb' bus='virtio'/>\n  <address type='pci' domain='0x0000' bus='0x10' slot='0x00' function='0x0'/>\n</disk>",
            "<qemu:arg value='pcie-root-port,id=ginnel-port-1,chassis=200,slot=1,addr=0x8'/>",
            "<qemu:arg value='vhost-user-scsi-pci,chardev=ginnel-volume-many,num_queues=2,bus=ginnel-port-1'/>",
        ] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
        assert_eq!(xml.matches("<disk ").count(), 1);
        for comment in xml.split("<!--").skip(1) {
            assert!(!comment.split("-->").next().unwrap().contains("--"), "{comment}");
        }
    }

    #[test]
    fn an_nvme_volume_stays_where_it_is() {
        let nvme = [crate::volume_devices::tests::nvme()];
        let xml = disks(&nvme, false, &mut Places::new(Machine::Q35));
        for part in [
            "<access mode='shared'/>",
            "value='pcie-root-port,id=ginnel-port-1,chassis=200,slot=1,hotplug=off,addr=0x8'/>",
            r#"value='{"driver":"vfio-user-pci","socket":{"path":"/run/ginnel/volumes/fast.sock","type":"unix"},"x-msg-timeout":120000,"bus":"ginnel-port-1"}'/>"#,
            "value='memory-backend-ram,id=ginnel-no-migration,size=4K'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='ivshmem-plain,memdev=ginnel-no-migration,addr=0x9'/>",
            "QEMU 10.1 or later",
        ] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
        assert!(!xml.contains("-chardev") && !xml.contains("<disk "), "{xml}");
        for comment in xml.split("<!--").skip(1) {
            assert!(!comment.split("-->").next().unwrap().contains("--"), "{comment}");
        }
        let pc = disks(&nvme, true, &mut Places::new(Machine::Pc));
        assert!(pc.contains(r#""addr":"0x8"}'/>"#) && !pc.contains("no-migration"), "{pc}");
    }

    /// Returns the paths that QEMU opens. libvirt knows that of `<server>`.
    fn paths(xml: &str) -> Vec<String> {
        let mut paths = Vec::new();
        for line in xml.lines().filter(|line| !line.contains("<server ")) {
            let (start, end) = match line {
                _ if line.contains("mem-path=") => ("mem-path=", ",size="),
                _ if line.contains("value='unix:") => ("unix:", ",server="),
                _ if line.contains("value='socket,") => ("path=", "'"),
                _ if line.contains("<source type='unix'") => ("path='", "'"),
                _ if line.contains("\"vfio-user-pci\"") => ("\"path\":\"", "\""),
                _ => {
                    assert!(!line.contains("='/") && !line.contains("=/"), "which path is this? {line}");
                    continue;
                }
            };
            let path = line.split_once(start).unwrap().1.split(end).next().unwrap();
            let path = path.split(",offset=").next().unwrap().replace(",,", ",");
            paths.push(path);
        }
        paths
    }

    /// Returns whether AppArmor's pattern matches. `*` matches within a folder.
    fn matches(pattern: &str, path: &str) -> bool {
        if let Some((before, rest)) = pattern.split_once('{') {
            let (choices, after) = rest.split_once('}').unwrap();
            return choices.split(',').any(|choice| matches(&format!("{before}{choice}{after}"), path));
        }
        match pattern.split_once('*') {
            None => pattern == path,
            Some((before, after)) => path.strip_prefix(before).is_some_and(|rest| {
                let part = rest.split('/').next().unwrap_or_default();
                (0..=part.len()).filter(|n| part.is_char_boundary(*n)).any(|n| matches(after, &rest[n..]))
            }),
        }
    }

    #[test]
    fn apparmor_lets_qemu_open_what_libvirt_does_not_know() {
        let (mut devices, mut volumes) = (devices(), crate::volume_devices::tests::volumes());
        volumes.push(crate::volume_devices::tests::nvme());
        devices.socket = "/run/ginnel/a.sock".into();
        let mut places = Places::new(Machine::Q35);
        let paths = paths(&(xml(&devices, &mut places) + "\n" + &disks(&volumes, true, &mut places)));
        assert!(paths.len() >= devices.memory.len() + 1 + volumes.len(), "{paths:?}");
        let rules = apparmor::rules(Some(&devices), &volumes);
        let snippet = include_str!("../../../../packaging/apparmor/libvirt-qemu");
        let patterns: Vec<&str> =
            snippet.lines().filter_map(|line| line.trim().strip_suffix(" rw,")).collect();
        assert!(patterns.len() >= 5, "{patterns:?}");
        for path in &paths {
            assert!(rules.iter().any(|rule| rule.contains(&format!("\"{path}\""))), "{path}: {rules:?}");
            // The backing of one segment is a folder of its administrator's.
            let covered = patterns.iter().any(|pattern| matches(pattern, path));
            assert_eq!(covered, !path.starts_with("/mnt/"), "{path}");
        }
        assert_eq!(rules.len(), paths.iter().collect::<std::collections::BTreeSet<_>>().len(), "{rules:?}");
        // It is no way to the sockets of others.
        for path in
            ["/run/ginnel/ginnel.sock", "/run/ginnel/keeper.sock", "/run/ginnel/b.sock", "/dev/shm/x/y"]
        {
            assert!(!patterns.iter().any(|pattern| matches(pattern, path)), "{path}");
        }
    }

    /// Runs a compiler on a text. Returns false if this machine does not have it.
    fn compiles(program: &str, arguments: &[&str], name: &str, text: &str) -> bool {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), text).unwrap();
        let mut command = std::process::Command::new(program);
        let Ok(output) = command.args(arguments).arg(name).current_dir(&folder).output() else {
            return false;
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program}: {said}\n{text}");
        true
    }

    #[test]
    fn the_rules_can_be_compiled() {
        let snippet = include_str!("../../../../packaging/apparmor/libvirt-qemu");
        let rules = apparmor::rules(Some(&devices()), &crate::volume_devices::tests::volumes()).join("\n");
        let profile = format!("profile x {{\n{snippet}\n{rules}\n}}\n");
        // Neither loads a profile nor reads or writes a cache of compiled ones.
        let arguments = ["--skip-kernel-load", "--skip-cache", "--stdout"];
        let parsers = ["apparmor_parser", "/sbin/apparmor_parser"];
        let compiled = parsers.iter().any(|parser| compiles(parser, &arguments, "profile", &profile));
        kit::require!(compiled, "no apparmor_parser (package apparmor)");
    }

    #[test]
    fn the_policy_module_can_be_compiled() {
        let module = include_str!("../../../../packaging/selinux/ginnel_libvirt.te");
        let arguments = ["-M", "-m", "-o", "ginnel_libvirt.mod"];
        let compiled = compiles("checkmodule", &arguments, "ginnel_libvirt.te", module);
        kit::require!(compiled, "no checkmodule (package checkpolicy)");
    }

    /// The folders of the daemon, of segments and of volumes must be labelled.
    #[test]
    fn selinux_labels_what_qemu_opens() {
        let contexts = include_str!("../../../../packaging/selinux/ginnel_libvirt.fc");
        for path in [r"/dev/shm/ginnel(/.*)?", r"/run/ginnel/[^/]+\.sock", r"/run/ginnel/volumes/[^/]+\.sock"]
        {
            assert!(contexts.lines().any(|line| line.split('\t').next() == Some(path)), "{path}");
        }
    }

    #[test]
    fn a_pc_has_no_root_ports() {
        let mut places = Places::new(Machine::Pc);
        let volumes = crate::volume_devices::tests::volumes();
        let xml = xml(&devices(), &mut places) + &disks(&volumes[..2], true, &mut places);
        assert!(!xml.contains("root-port") && !xml.contains("<address "), "{xml}");
        for part in ["memdev=ginnel-web,addr=0x19'/>", "num_queues=2,addr=0x8'/>"] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
    }

    #[test]
    fn bars_need_no_address_space() {
        let mut devices = devices();
        devices.memory.retain(|memory| memory.kind == MemoryKind::Bar);
        assert!(!xml(&devices, &mut Places::new(Machine::Q35)).contains("maxMemory"));
    }

    #[test]
    fn values_are_escaped() {
        assert_eq!(escaped("a'b<c>&d"), "a&apos;b&lt;c&gt;&amp;d");
    }
}
