//! `ginnel libvirt-xml`.

use crate::output;
use crate::vm_devices::Devices;
use anyhow::Result;

/// Prints the XML of libvirt that joins a VM to its segments.
///
/// The elements go where the comments say, with `virsh edit`.
#[derive(clap::Args)]
pub struct Args {
    /// The VM, as the configuration names it.
    vm: String,
}

pub fn run(args: Args) -> Result<()> {
    output::line(xml(&Devices::of(&args.vm)?))
}

fn xml(devices: &Devices) -> String {
    let mut lines = vec![
        "<!-- into <devices> -->".to_owned(),
        "<shmem name='ginnel-control'>".into(),
        "  <model type='ivshmem-doorbell'/>".into(),
        format!("  <server path='{}'/>", escaped(&devices.socket.display().to_string())),
        format!("  <msi vectors='{}' ioeventfd='on'/>", devices.vectors),
        "</shmem>".into(),
    ];
    let mut elsewhere = Vec::new();
    for memory in &devices.memory {
        match memory.in_dev_shm() {
            Some(name) => lines.extend([
                format!("<shmem name='{}'>", escaped(name)),
                "  <model type='ivshmem-plain'/>".into(),
                format!("  <size unit='bytes'>{}</size>", memory.size),
                "</shmem>".into(),
            ]),
            None => elsewhere.push(memory),
        }
    }
    if !elsewhere.is_empty() {
        lines.push("<!-- into <domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>: libvirt's shmem knows /dev/shm only -->".into());
        lines.push("<qemu:commandline>".into());
        for memory in elsewhere {
            let path = memory.file.display().to_string().replace(',', ",,");
            let object = format!(
                "memory-backend-file,id={id},share=on,mem-path={path},size={},dump=off",
                memory.size,
                id = memory.id()
            );
            let device = format!("ivshmem-plain,memdev={}", memory.id());
            for (name, value) in [("-object", object), ("-device", device)] {
                lines.push(format!("  <qemu:arg value='{name}'/>"));
                lines.push(format!("  <qemu:arg value='{}'/>", escaped(&value)));
            }
        }
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

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm_devices::tests::devices;

    #[test]
    fn segments_in_dev_shm_are_shmem_and_others_arguments() {
        let xml = xml(&devices());
        for part in [
            "<shmem name='ginnel-control'>\n  <model type='ivshmem-doorbell'/>\n  <server path='/run/ginnel/vm-a.sock'/>\n  <msi vectors='32' ioeventfd='on'/>\n</shmem>",
            "<shmem name='ginnel-web'>\n  <model type='ivshmem-plain'/>\n  <size unit='bytes'>268435456</size>\n</shmem>",
            "  <qemu:arg value='-object'/>\n  <qemu:arg value='memory-backend-file,id=ginnel-huge,share=on,mem-path=/mnt/a,,b/ginnel-huge,size=1073741824,dump=off'/>",
        ] {
            assert!(xml.contains(part), "{part} is missing in\n{xml}");
        }
        assert_eq!(xml.matches("<shmem ").count(), 2);
    }

    #[test]
    fn values_are_escaped() {
        assert_eq!(escaped("a'b<c>&d"), "a&apos;b&lt;c&gt;&amp;d");
    }
}
