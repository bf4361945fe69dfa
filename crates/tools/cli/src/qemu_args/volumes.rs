//! Checks whether a command line of QEMU gives a VM its volumes, and no others.

use super::command_line::{Value, number, values};
use super::nvme;
use crate::qemu_version::QemuVersion;
use crate::volume_devices::{RAM, VolumeDevice};
use ginnel_volume_control::config::Device;
use std::path::Path;

/// Returns all problems, each on one line. `volumes` are all that have a configuration.
pub fn problems(line: &str, vm: &str, volumes: &[VolumeDevice], qemu: QemuVersion) -> Vec<String> {
    let mut problems = Vec::new();
    let (chardevs, devices) = (values(line, "chardev"), values(line, "device"));
    let own = |volume: &&VolumeDevice| volume.vm.as_deref() == Some(vm);
    for volume in volumes {
        let strange = |options: &str| {
            let vm = volume.vm.as_ref().map_or("no VM".into(), |vm| format!("VM {vm}"));
            format!("volume {} is for {vm}: remove its {options}", volume.volume)
        };
        let Some(proper) = volume.chardev(qemu) else {
            if own(&volume) {
                nvme::device(volume, line, &devices, &mut problems);
            } else if !nvme::find(volume, &devices).is_empty() {
                problems.push(strange("-device"));
            }
            continue;
        };
        let chardev = chardevs.iter().find(|c| Path::new(c.key("path")) == volume.socket);
        match (own(&volume), chardev) {
            (true, Some(chardev)) => disk(volume, chardev, &devices, qemu, &mut problems),
            (true, None) => problems.push(format!(
                "volume {} has no -chardev: add -chardev {proper} -device {}",
                volume.volume,
                volume.device()
            )),
            (false, Some(_)) => problems.push(strange("-chardev and -device")),
            (false, None) => {}
        }
    }
    if volumes.iter().any(|v| own(&v)) {
        memory(line, &mut problems);
    }
    if volumes.iter().any(|v| own(&v) && v.device == Device::Nvme) {
        nvme::migration(line, &devices, &mut problems);
    }
    problems
}

fn disk(
    volume: &VolumeDevice,
    chardev: &Value,
    devices: &[Value],
    qemu: QemuVersion,
    problems: &mut Vec<String>,
) {
    let name = &volume.volume;
    let mut wrong = |what: &str, fix: String| problems.push(format!("volume {name} {what}: {fix}"));
    let has = |key| !chardev.key(key).is_empty();
    for (key, taken) in [("reconnect", qemu.takes_reconnect()), ("reconnect-ms", qemu.takes_reconnect_ms())] {
        if has(key) && !taken {
            let fix = format!("its -chardev needs {} instead", qemu.reconnect());
            wrong(&format!("has a -chardev with {key}, which QEMU {qemu} does not have"), fix);
        }
    }
    if volume.device == Device::Blk && !has("reconnect") && !has("reconnect-ms") {
        let fix = format!("its -chardev needs {}", qemu.reconnect());
        wrong("is lost for the VM when it is restarted", fix);
    }
    let users: Vec<&Value> = devices.iter().filter(|d| d.key("chardev") == chardev.key("id")).collect();
    match users[..] {
        [] => wrong("has no -device", format!("add -device {}", volume.device())),
        [device] if device.kind.trim_end_matches("-pci") != volume.model().trim_end_matches("-pci") => {
            wrong(&format!("is a {}", device.kind), format!("make it a {}", volume.model()));
        }
        [device] => {
            let key = volume.queues_key().unwrap_or_default();
            // Only some versions of QEMU accept `-` for `_` in names of properties.
            let queues = device.key(key);
            if number(queues, 1) != Some(volume.queues.into()) {
                let what = if queues.is_empty() {
                    "does not say how many queues it has".into()
                } else {
                    format!("has {key}={queues}")
                };
                wrong(&what, format!("its -device needs {key}={}", volume.queues));
            }
        }
        _ => wrong("has several devices", "keep one, because a volume has one VM at a time".into()),
    }
}

/// Checks that the VM's RAM has a descriptor and is shared, because volumes map it by its descriptor.
fn memory(line: &str, problems: &mut Vec<String>) {
    let objects = values(line, "object");
    let machine = |v: &Value| v.key("memory-backend").to_owned();
    let used: Vec<String> = values(line, "machine")
        .iter()
        .chain(values(line, "M").iter())
        .map(machine)
        .chain(values(line, "numa").iter().map(|v| v.key("memdev").to_owned()))
        .filter(|id| !id.is_empty())
        .collect();
    if used.is_empty() {
        problems.push(format!(
            "volumes do not see the VM's RAM: add -object memory-backend-memfd,id={RAM},size=RAM,share=on -machine memory-backend={RAM}, with the size of -m"
        ));
    }
    for id in used {
        let Some(object) = objects.iter().find(|o| o.key("id") == id) else { continue };
        if object.kind == "memory-backend-ram" {
            problems.push(format!("volumes do not see the VM's RAM {id}: make it a memory-backend-memfd"));
        } else if !object.is_on("share") {
            problems.push(format!("volumes do not see the VM's RAM {id}: its -object needs share=on"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_devices::shared_ram;
    use crate::volume_devices::tests::volumes;

    fn after(from: &str, to: &str) -> Vec<String> {
        after_in("7.2", from, to)
    }

    /// Does the same for this version of QEMU.
    fn after_in(qemu: &str, from: &str, to: &str) -> Vec<String> {
        let (volumes, qemu) = (volumes(), qemu.parse().unwrap());
        let of = |volume: &VolumeDevice| {
            [("-chardev", volume.chardev(qemu).unwrap()), ("-device", volume.device())]
        };
        let pairs = shared_ram(1 << 30).into_iter().chain(volumes[..2].iter().flat_map(of));
        let line = pairs.map(|(option, value)| format!("{option} {value}")).collect::<Vec<_>>().join(" ");
        let line = format!("qemu-system-x86_64 -nodefaults -M q35 -m 1G {line}");
        assert!(line.contains(from), "{from} is not in {line}");
        problems(&line.replacen(from, to, 1), "a", &volumes, qemu)
    }

    #[test]
    fn the_printed_arguments_pass_the_check() {
        assert_eq!(after("-nodefaults", ""), [""; 0]);
        assert_eq!(after_in("11.0", "-nodefaults", ""), [""; 0]);
        assert_eq!(after_in("10.0", "reconnect-ms=1000", "reconnect=1"), [""; 0], "deprecated");
        assert_eq!(after("-machine memory-backend", "-M memory-backend"), [""; 0]);
    }

    #[test]
    fn properties_that_qemu_does_not_have_are_named() {
        for (qemu, from, to, said) in [
            ("7.2", "reconnect=1", "reconnect-ms=1000", "reconnect-ms, which QEMU 7.2 does not have"),
            ("10.2", "reconnect-ms=1000", "reconnect=1", "needs reconnect-ms=1000 instead"),
            ("10.2", ",reconnect-ms=1000", "", "its -chardev needs reconnect-ms=1000"),
        ] {
            let problems = after_in(qemu, from, to);
            assert!(problems.len() == 1 && problems[0].contains(said), "{problems:?}");
        }
    }

    #[test]
    fn every_lie_is_one_line() {
        for (from, to, said) in [
            ("data.sock", "other.sock", "volume other is for VM b: remove"),
            ("data.sock", "x.sock", "volume data has no -chardev: add -chardev socket"),
            (",reconnect=1", "", "reconnect=1"),
            ("num-queues=4", "num-queues=8", "volume data has num-queues=8"),
            (",num-queues=4", "", "does not say how many queues"),
            ("num_queues=2", "num_queues=1", "volume many has num_queues=1"),
            ("vhost-user-scsi-pci", "vhost-user-blk-pci", "volume many is a vhost-user-blk-pci: make it"),
            ("-device vhost-user-blk-pci", "-x", "volume data has no -device"),
            ("-nodefaults", "-device vhost-user-blk-pci,chardev=ginnel-volume-data", "several devices"),
            ("share=on", "share=off", "needs share=on"),
            ("memory-backend-memfd", "memory-backend-ram", "make it a memory-backend-memfd"),
            ("-machine memory-backend=ginnel-ram", "", "do not see the VM's RAM: add -object"),
        ] {
            let problems = after(from, to);
            assert!(problems.iter().any(|p| p.contains(said)), "{to}: {said} is missing in {problems:?}");
            assert!(problems.iter().all(|p| p.lines().count() == 1), "{problems:?}");
        }
    }

    #[test]
    fn a_vm_without_volumes_needs_nothing() {
        assert_eq!(problems("qemu-system-x86_64", "c", &volumes(), QemuVersion::OLDEST), [""; 0]);
    }
}
