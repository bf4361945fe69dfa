//! What `ginnel qemu-args` says about nvme volumes, and checks of a command line of QEMU with them.

use super::command_line::{Value, number, values};
use crate::machine::Machine;
use crate::volume_devices::{NVME_MODEL, NVME_TIMEOUT_MS, VolumeDevice, stay};
use std::path::Path;

/// Returns hints about what the arguments alone do not say.
pub fn hints(machine: Machine) -> Vec<String> {
    let mut hints = vec![
        "an nvme volume takes QEMU 10.1 or later; in a script, write the JSON between single quotes".to_owned(),
        "a VM with an nvme volume cannot migrate live: QEMU would leave the device behind, so a device that QEMU never migrates keeps it here"
            .into(),
    ];
    hints.push(match machine {
        Machine::Pc => "do not unplug an nvme volume: QEMU 11.1 ends then, and a pc machine does not refuse it".into(),
        Machine::Q35 | Machine::Virt => {
            "an nvme volume cannot be unplugged while the VM runs: QEMU 11.1 would end, so its root port has hotplug=off".into()
        }
    });
    hints
}

/// Returns the device with this volume, if the command line has one.
pub fn find<'a>(volume: &VolumeDevice, devices: &'a [Value]) -> Vec<&'a Value> {
    let is_ours =
        |device: &&Value| device.kind == NVME_MODEL && Path::new(device.key("path")) == volume.socket;
    devices.iter().filter(is_ours).collect()
}

/// Checks the device of a volume that this VM has.
pub fn device(volume: &VolumeDevice, line: &str, devices: &[Value], problems: &mut Vec<String>) {
    let name = &volume.volume;
    let mut wrong = |what: &str, fix: String| problems.push(format!("volume {name} {what}: {fix}"));
    let device = match find(volume, devices)[..] {
        [] => return wrong("has no -device", format!("add -device {}", volume.device())),
        [device] => device,
        _ => return wrong("has several devices", "keep one, because a volume has one VM at a time".into()),
    };
    // QEMU's default is 5 seconds.
    if number(device.key("x-msg-timeout"), 1).is_none_or(|ms| ms < NVME_TIMEOUT_MS) {
        let fix = format!("its -device needs \"x-msg-timeout\":{NVME_TIMEOUT_MS}");
        wrong("is lost for the VM when its holder is slow once", fix);
    }
    let mut machines = values(line, "M").into_iter().chain(values(line, "machine"));
    let has_ports = machines.any(|m| Machine::named(&[m.kind.as_str(), m.key("type")].concat()).has_ports());
    let bus = device.key("bus");
    let port = devices.iter().find(|port| port.kind == "pcie-root-port" && port.key("id") == bus);
    // QEMU's default is on. Nothing can be unplugged from the root bus of PCI Express.
    if has_ports && port.is_some_and(|port| port.key("hotplug") != "off") {
        wrong(
            "can be unplugged, which ends QEMU 11.1",
            format!("its pcie-root-port {bus} needs hotplug=off"),
        );
    }
}

/// Checks that a VM with nvme volumes does not migrate live.
pub fn migration(line: &str, devices: &[Value], problems: &mut Vec<String>) {
    if !values(line, "incoming").is_empty() {
        problems.push(
            "a VM with an nvme volume cannot migrate: remove -incoming, or make it a blk volume".into(),
        );
    }
    if !devices.iter().any(|device| device.kind.starts_with("ivshmem-")) {
        let [(object, memory), (option, device)] = stay();
        problems.push(format!(
            "the VM could migrate live, and would lose its nvme volumes: add {object} {memory} {option} {device}, with which QEMU refuses it"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Ports;
    use crate::qemu_args::volumes::problems;
    use crate::volume_devices::shared_ram;
    use crate::volume_devices::tests::{nvme, volumes};

    fn after(from: &str, to: &str) -> Vec<String> {
        let qemu = "11.1".parse().unwrap();
        let volume = nvme();
        let placed =
            volume.place(&mut Ports::new(Machine::Q35), "").into_iter().map(|value| ("-device", value));
        let pairs = shared_ram(1 << 30).into_iter().chain(placed).chain(stay());
        let line = pairs.map(|(option, value)| format!("{option} {value}")).collect::<Vec<_>>().join(" ");
        let line = format!("qemu-system-x86_64 -nodefaults -M q35 -m 1G {line}");
        assert!(line.contains(from), "{from} is not in {line}");
        // The other volumes of this VM are no part of the matter.
        let all: Vec<_> = std::iter::once(volume).chain(volumes().into_iter().skip(2)).collect();
        problems(&line.replacen(from, to, 1), "a", &all, qemu)
    }

    #[test]
    fn the_printed_arguments_pass_the_check() {
        assert_eq!(after("-nodefaults", ""), [""; 0]);
        assert_eq!(after(",hotplug=off", ",hotplug=off,addr=0x9"), [""; 0]);
        assert_eq!(after(r#""bus":"ginnel-port-1""#, r#""bus":"pcie.0""#), [""; 0]);
    }

    #[test]
    fn every_lie_is_one_line() {
        for (from, to, said) in [
            ("fast.sock", "x.sock", "volume fast has no -device: add -device {\"driver\""),
            ("\"x-msg-timeout\":120000,", "", "is lost for the VM when its holder is slow once"),
            (":120000", ":5000", "needs \"x-msg-timeout\":120000"),
            (
                ",hotplug=off",
                "",
                "volume fast can be unplugged, which ends QEMU 11.1: its pcie-root-port ginnel-port-1 needs",
            ),
            (",hotplug=off", ",hotplug=on", "can be unplugged"),
            ("-nodefaults", "-incoming defer", "remove -incoming"),
            (
                "-device ivshmem-plain",
                "-x",
                "the VM could migrate live, and would lose its nvme volumes: add -object",
            ),
            ("share=on", "share=off", "needs share=on"),
            (
                "-nodefaults",
                r#"-device {"driver":"vfio-user-pci","socket":{"type":"unix","path":"/run/ginnel/volumes/fast.sock"}}"#,
                "several devices",
            ),
        ] {
            let problems = after(from, to);
            assert!(problems.iter().any(|p| p.contains(said)), "{to}: {said} is missing in {problems:?}");
            assert!(problems.iter().all(|p| p.lines().count() == 1), "{problems:?}");
        }
    }

    #[test]
    fn another_vm_does_not_get_it() {
        let line = format!("qemu-system-x86_64 -M q35 -device {}", nvme().device());
        let problems = problems(&line, "b", &[nvme()], "11.1".parse().unwrap());
        assert_eq!(problems, ["volume fast is for VM a: remove its -device"]);
    }
}
