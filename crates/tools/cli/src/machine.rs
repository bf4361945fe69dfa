//! The kinds of machine that QEMU emulates, and the places for devices in them.
//!
//! A device can be unplugged only if its bus supports that. The root bus of PCI Express does not; a device behind a root port can be
//! unplugged. A `pc` has no PCI Express, and its root bus supports it.

/// The slots of all root ports have this chassis, so that they do not collide with other ports of the VM. A pair of chassis and slot
/// occurs only once in a VM.
const CHASSIS: u8 = 200;

/// The kind of a VM's machine (`-M`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Machine {
    /// PCI Express, for x86_64
    #[default]
    Q35,
    /// PCI (i440fx), for x86_64: the machine that QEMU has without -M
    Pc,
    /// PCI Express, for aarch64
    Virt,
}

/// The argument that says which machine the devices are for.
#[derive(Debug, clap::Args)]
pub struct MachineArgs {
    /// The kind of the VM's machine. On a q35 or virt machine each device gets a PCIe root port, because nothing can be
    /// unplugged from the root bus there; a pc machine has none, and needs none.
    #[arg(long, value_name = "KIND", default_value = "q35")]
    pub machine: Machine,
}

impl Machine {
    /// Returns the kind of machine that a value of QEMU's `-M` names, such as `pc-q35-7.2`.
    pub fn named(name: &str) -> Self {
        if name.contains("q35") {
            Self::Q35
        } else if name == "virt" || name.starts_with("virt-") {
            Self::Virt
        } else {
            Self::Pc
        }
    }

    /// Returns whether devices need root ports.
    pub fn has_ports(self) -> bool {
        self != Self::Pc
    }
}

/// The root ports of a VM, one for each device.
#[derive(Debug)]
pub struct Ports {
    machine: Machine,
    count: usize,
    /// How many of them keep their devices.
    for_good: usize,
}

impl Ports {
    pub fn new(machine: Machine) -> Self {
        Self { machine, count: 0, for_good: 0 }
    }

    /// Returns how many ports there are from which a device can be unplugged.
    pub fn count(&self) -> usize {
        self.count - self.for_good
    }

    /// Returns the values of QEMU's `-device` that put a device where it can be unplugged. `more` is for the one that is on the root
    /// bus.
    pub fn place(&mut self, device: String, more: &str) -> Vec<String> {
        if !self.machine.has_ports() {
            return vec![device + more];
        }
        let (id, port) = self.next();
        vec![port + more, format!("{device},bus={id}")]
    }

    /// Returns the values of QEMU's `-device` that put a device, written as an object of JSON, where it cannot be unplugged. QEMU
    /// refuses it then, and the guest has no slot that it could switch off. A machine without root ports has no such place.
    pub fn place_for_good(&mut self, device: String, more: &str) -> Vec<String> {
        let with = |key: &str, value: &str| match device.strip_suffix('}') {
            Some(open) if !value.is_empty() => format!("{open},\"{key}\":\"{value}\"}}"),
            _ => device.clone(),
        };
        if !self.machine.has_ports() {
            return vec![with("addr", more.trim_start_matches(",addr="))];
        }
        let (id, port) = self.next();
        self.for_good += 1;
        vec![format!("{port},hotplug=off{more}"), with("bus", &id)]
    }

    /// Returns the id of another port, and that port.
    fn next(&mut self) -> (String, String) {
        self.count += 1;
        let (n, id) = (self.count, format!("ginnel-port-{}", self.count));
        let port = format!("pcie-root-port,id={id},chassis={CHASSIS},slot={n}");
        (id, port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_qemu_are_known() {
        for (name, machine) in [
            ("q35", Machine::Q35),
            ("pc-q35-7.2", Machine::Q35),
            ("virt", Machine::Virt),
            ("virt-7.2", Machine::Virt),
            ("", Machine::Pc),
            ("pc", Machine::Pc),
            ("pc-i440fx-7.2", Machine::Pc),
        ] {
            assert_eq!(Machine::named(name), machine, "{name}");
        }
    }

    #[test]
    fn each_device_has_a_port_of_its_own_if_it_needs_one() {
        let mut ports = Ports::new(Machine::Q35);
        assert_eq!(
            ports.place("a".into(), ""),
            ["pcie-root-port,id=ginnel-port-1,chassis=200,slot=1", "a,bus=ginnel-port-1"]
        );
        assert_eq!(
            ports.place("b".into(), ",addr=0x8"),
            ["pcie-root-port,id=ginnel-port-2,chassis=200,slot=2,addr=0x8", "b,bus=ginnel-port-2"]
        );
        assert_eq!(
            ports.place_for_good("{\"a\":1}".into(), ",addr=0x9"),
            [
                "pcie-root-port,id=ginnel-port-3,chassis=200,slot=3,hotplug=off,addr=0x9",
                r#"{"a":1,"bus":"ginnel-port-3"}"#
            ]
        );
        assert_eq!(ports.count(), 2);
        let mut none = Ports::new(Machine::Pc);
        assert_eq!(none.place("a".into(), ",addr=0x8"), ["a,addr=0x8"]);
        assert_eq!(none.place_for_good("{\"a\":1}".into(), ",addr=0x8"), [r#"{"a":1,"addr":"0x8"}"#]);
        assert_eq!(none.place_for_good("{\"a\":1}".into(), ""), [r#"{"a":1}"#]);
        assert_eq!(none.count(), 0);
    }
}
