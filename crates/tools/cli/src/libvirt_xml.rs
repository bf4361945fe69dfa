//! `ginnel libvirt-xml`.

use crate::inspect::MemoryKind;
use crate::qemu_version::QemuVersion;
use crate::vm_devices::{Devices, MemoryDevice, control_socket};
use crate::volume_devices::{VolumeDevice, VolumePathArgs};
use crate::{one_line, output};
use anyhow::Result;
use ginnel_volume_control::config::Device;

/// Prints the XML with which libvirt connects a VM to its segments and gives it its volumes.
///
/// The comments say where each element goes. Insert them with `virsh edit`.
#[derive(clap::Args)]
pub struct Args {
    /// The VM, as the configuration names it.
    vm: String,

    #[command(flatten)]
    volume_paths: VolumePathArgs,
}

pub fn run(args: Args) -> Result<()> {
    let mut volumes = args.volume_paths.volumes()?;
    volumes.retain(|v| v.vm.as_ref() == Some(&args.vm));
    let mut parts = Vec::new();
    match Devices::of(&args.vm) {
        Ok(devices) => parts.push(xml(&devices)),
        Err(error) if !volumes.is_empty() => {
            output::note(format!("# no segments, only volumes: {}", one_line(&error)));
        }
        Err(error) => return Err(error),
    }
    if !volumes.is_empty() {
        parts.push(disks(&volumes));
    }
    output::line(parts.join("\n"))
}

/// Returns the XML for volumes. It was tried by hand with libvirt 9.0 and QEMU 7.2; Ginnel's tests run QEMU without
/// libvirt.
fn disks(volumes: &[VolumeDevice]) -> String {
    let mut lines: Vec<String> = [
        "<!-- for the volumes (libvirt 7.1.0 or later). Into <domain>, so that they see the VM's RAM -->",
        "<memoryBacking>",
        "  <source type='memfd'/>",
        "  <access mode='shared'/>",
        "</memoryBacking>",
    ]
    .map(str::to_owned)
    .into();
    let (disks, targets): (Vec<_>, Vec<_>) = volumes.iter().partition(|v| v.device == Device::Blk);
    if !disks.is_empty() {
        lines.push("<!-- into <devices>; each <target> needs a name that no other disk has -->".into());
    }
    for (volume, letter) in disks.iter().zip(('b'..='z').cycle()) {
        let packed = if volume.packed { " packed='on'" } else { "" };
        lines.extend([
            "<disk type='vhostuser' device='disk' snapshot='no'>".into(),
            format!("  <driver name='qemu' type='raw' queues='{}'{packed}/>", volume.queues),
            format!("  <source type='unix' path='{}'>", escaped(&volume.socket.display().to_string())),
            "    <reconnect enabled='yes' timeout='1'/>".into(),
            "  </source>".into(),
            format!("  <target dev='vd{letter}' bus='virtio'/>"),
            "</disk>".into(),
        ]);
    }
    if !targets.is_empty() {
        lines.push("<!-- into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: libvirt has no element for scsi volumes -->".into());
        lines.push("<qemu:commandline>".into());
        let mut slots = SLOTS;
        for volume in targets {
            // The arguments of a scsi target are the same for all versions of QEMU.
            let [chardev, (name, device)] = volume.arguments(QemuVersion::OLDEST);
            lines.extend(argument(chardev));
            lines.extend(argument((name, placed(device, slots.next()))));
        }
        lines.push("</qemu:commandline>".into());
    }
    lines.join("\n")
}

/// How libvirt can give a segment to a VM.
enum Element<'m> {
    /// As `<shmem>`, which names a file in /dev/shm.
    Shmem(&'m str),
    /// As arguments for QEMU: libvirt has no offset, no read-only devices of these kinds, and no BAR from another
    /// folder. It has `<memory model='virtio-pmem'>`, but libvirt 9.0 ends the VM when its QEMU (7.2) reports such a
    /// device.
    Arguments,
}

fn element(memory: &MemoryDevice) -> Element<'_> {
    match (memory.kind, memory.in_dev_shm()) {
        _ if memory.read_only || memory.offset > 0 => Element::Arguments,
        (MemoryKind::Bar, Some(name)) => Element::Shmem(name),
        _ => Element::Arguments,
    }
}

fn xml(devices: &Devices) -> String {
    let mut lines = address_space(devices);
    lines.extend([
        "<!-- into <devices> -->".to_owned(),
        "<shmem name='ginnel-control'>".into(),
        "  <model type='ivshmem-doorbell'/>".into(),
        format!("  <server path='{}'/>", escaped(&devices.socket.display().to_string())),
        format!("  <msi vectors='{}' ioeventfd='on'/>", devices.vectors),
        "</shmem>".into(),
    ]);
    // Taken from the opposite end of the range to those of volumes.
    let mut slots = SLOTS.rev();
    let mut arguments = Vec::new();
    if let Some(qmp) = &devices.qmp {
        arguments.push(("-qmp", control_socket(qmp)));
    }
    for memory in &devices.memory {
        match element(memory) {
            Element::Shmem(name) => lines.extend([
                format!("<shmem name='{}'>", escaped(name)),
                "  <model type='ivshmem-plain'/>".into(),
                format!("  <size unit='bytes'>{}</size>", memory.size),
                "</shmem>".into(),
            ]),
            Element::Arguments => {
                let device = placed(memory.device(), slots.next());
                arguments.extend([("-object", memory.object()), ("-device", device)]);
            }
        }
    }
    if !arguments.is_empty() {
        lines.push("<!-- into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: devices for which libvirt has no element -->".into());
        lines.push("<qemu:commandline>".into());
        lines.extend(arguments.into_iter().flat_map(argument));
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

/// Slots of the machine's PCI bus for devices that are given as arguments. QEMU creates those before libvirt's devices,
/// and would put them into slots that libvirt uses for others. libvirt counts from 1 on, and the chipset's devices are
/// above these slots.
const SLOTS: std::ops::RangeInclusive<u8> = 0x8..=0x19;

/// Puts a device into a slot, if there is one left.
fn placed(device: String, slot: Option<u8>) -> String {
    slot.map(|slot| format!("{device},addr={slot:#x}")).unwrap_or(device)
}

/// Returns an argument of QEMU as XML.
fn argument((name, value): (&str, String)) -> [String; 2] {
    [format!("  <qemu:arg value='{name}'/>"), format!("  <qemu:arg value='{}'/>", escaped(&value))]
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_devices::tests::devices;

    #[test]
    fn segments_are_elements_where_libvirt_has_some_and_arguments_elsewhere() {
        let xml = xml(&devices());
        for part in [
            "<shmem name='ginnel-control'>\n  <model type='ivshmem-doorbell'/>\n  <server path='/run/ginnel/vm-a.sock'/>\n  <msi vectors='32' ioeventfd='on'/>\n</shmem>",
            "size=268435456,dump=off'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='virtio-pmem-pci,memdev=ginnel-web,addr=0x19'/>",
            "<shmem name='ginnel-old'>\n  <model type='ivshmem-plain'/>\n  <size unit='bytes'>4194304</size>\n</shmem>",
            "  <qemu:arg value='-object'/>\n  <qemu:arg value='memory-backend-file,id=ginnel-huge,share=on,mem-path=/mnt/a,,b/ginnel-huge,size=1073741824,dump=off'/>",
            "offset=6291456,size=6291456,dump=off,readonly=on'/>\n  <qemu:arg value='-device'/>\n  <qemu:arg value='virtio-pmem-pci,memdev=ginnel-news.vm-a,addr=0x17'/>",
            "<qemu:commandline>\n  <qemu:arg value='-qmp'/>\n  <qemu:arg value='unix:/run/ginnel/vm-a.qmp,server=on,wait=off'/>\n",
            "<maxMemory slots='16' unit='KiB'>",
            "what the segments have:\n     268288 KiB;",
            "<numa><cell ",
        ] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
        assert_eq!(xml.matches("<shmem ").count(), 2);
        // Two dashes end a comment.
        for comment in xml.split("<!--").skip(1) {
            assert!(!comment.split("-->").next().unwrap().contains("--"), "{comment}");
        }
    }

    #[test]
    fn volumes_are_disks_and_arguments() {
        let xml = disks(&crate::volume_devices::tests::volumes()[..2]);
        for part in [
            "<access mode='shared'/>",
            "queues='4'/>\n  <source type='unix' path='/run/ginnel/volumes/data.sock'>",
            "<target dev='vdb' bus='virtio'/>",
            "<qemu:arg value='vhost-user-scsi-pci,chardev=ginnel-volume-many,num_queues=2,addr=0x8'/>",
        ] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
        assert_eq!(xml.matches("<disk ").count(), 1);
        for comment in xml.split("<!--").skip(1) {
            assert!(!comment.split("-->").next().unwrap().contains("--"), "{comment}");
        }
    }

    #[test]
    fn bars_need_no_address_space() {
        let mut devices = devices();
        devices.memory.retain(|memory| memory.kind == MemoryKind::Bar);
        assert!(!xml(&devices).contains("maxMemory"));
    }

    #[test]
    fn values_are_escaped() {
        assert_eq!(escaped("a'b<c>&d"), "a&apos;b&lt;c&gt;&amp;d");
    }
}
