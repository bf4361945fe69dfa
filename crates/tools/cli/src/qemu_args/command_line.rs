//! Checks whether a command line of QEMU connects a VM to its segments, and to no others.

use crate::inspect::{Inspect, MemoryKind};
use crate::machine::Machine;
use crate::vm_devices::{Devices, MemoryDevice, control_socket};
use ginnel_config::Bytes;
use serde_json::Value as Json;
use std::collections::HashMap;
use std::path::Path;

/// The value of an option of QEMU: `kind,key=value,...`, or an object of JSON, as libvirt writes it.
#[derive(Debug, Default)]
pub struct Value {
    pub kind: String,
    keys: HashMap<String, String>,
}

impl Value {
    /// Parses a value. The quotation marks around JSON may come from a shell or from libvirt's log.
    fn parse(text: &str) -> Self {
        let bare = text.trim_matches(['\'', '"']);
        if bare.starts_with('{') {
            let mut value = Self::default();
            // What is no JSON has no keys, and so is found to be missing.
            if let Ok(object) = serde_json::from_str(bare) {
                value.take_in(object);
            }
            return value;
        }
        Self::of_pairs(text)
    }

    /// Takes in the members of an object, and of the objects in it, such as the address of a socket.
    fn take_in(&mut self, object: serde_json::Map<String, Json>) {
        for (key, value) in object {
            let text = match value {
                Json::Object(inner) => {
                    self.take_in(inner);
                    continue;
                }
                Json::String(text) => text,
                Json::Bool(is_on) => (if is_on { "on" } else { "off" }).into(),
                Json::Number(number) => number.to_string(),
                Json::Array(_) | Json::Null => continue,
            };
            match key.as_str() {
                "driver" | "qom-type" => self.kind = text,
                _ => drop(self.keys.entry(key).or_insert(text)),
            }
        }
    }

    /// Parses `kind,key=value,...`. A comma in a value is written twice.
    fn of_pairs(text: &str) -> Self {
        const COMMA: &str = "\u{1f}";
        let text = text.replace(",,", COMMA);
        let mut value = Self::default();
        for (i, part) in text.split(',').enumerate() {
            let part = part.replace(COMMA, ",");
            match part.split_once('=') {
                Some((key, text)) => drop(value.keys.insert(key.into(), text.into())),
                None if i == 0 => value.kind = part,
                // QEMU's old form of `key=on`.
                None => drop(value.keys.insert(part, "on".into())),
            }
        }
        value
    }

    pub fn key(&self, key: &str) -> &str {
        self.keys.get(key).map_or("", String::as_str)
    }

    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.key(key), "on" | "yes" | "true" | "y")
    }
}

/// Returns all values of an option, in order. QEMU accepts one dash or two.
pub fn values(line: &str, option: &str) -> Vec<Value> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let is_option =
        |word: &str| word.strip_prefix('-').is_some_and(|w| w.strip_prefix('-').unwrap_or(w) == option);
    words.windows(2).filter(|pair| is_option(pair[0])).map(|pair| Value::parse(pair[1])).collect()
}

/// Whether a backend is the memory of a segment, or the slice of it that is this VM's.
fn shows(backend: &Value, memory: &MemoryDevice) -> bool {
    let offset = number(backend.key("offset"), 1).unwrap_or(0);
    Path::new(backend.key("mem-path")) == memory.file && offset == memory.offset
}

/// Parses a size as QEMU does. Without a unit, the number counts units of `default` bytes.
pub fn number(text: &str, default: u64) -> Option<u64> {
    match text.parse::<u64>() {
        Ok(number) => number.checked_mul(default),
        Err(_) => text.trim_end_matches('B').to_ascii_uppercase().parse().ok().map(|Bytes(number)| number),
    }
}

/// Returns all problems, each on one line.
pub fn problems(line: &str, devices: &Devices, inspect: &Inspect) -> Vec<String> {
    let mut problems = Vec::new();
    control(line, devices, inspect, &mut problems);
    monitor(line, devices, &mut problems);
    let objects = values(line, "object");
    let backends: Vec<&Value> = objects.iter().filter(|o| !o.key("mem-path").is_empty()).collect();
    let attached = values(line, "device");
    for memory in &devices.memory {
        segment(memory, &backends, &attached, &mut problems);
    }
    unplugging(line, devices, &backends, &attached, &mut problems);
    for backend in backends {
        stranger(backend, devices, inspect, &mut problems);
    }
    address_space(line, devices, &mut problems);
    problems
}

/// Checks that there is one control device, and that it is this VM's.
fn control(line: &str, devices: &Devices, inspect: &Inspect, problems: &mut Vec<String>) {
    let vm = &devices.vm;
    let chardevs = values(line, "chardev");
    for chardev in &chardevs {
        let path = chardev.key("path");
        let other = inspect.members.iter().find(|m| m.name != *vm && m.socket.as_deref() == Some(path));
        if let Some(other) = other.filter(|_| !path.is_empty()) {
            problems.push(format!(
                "the control device is VM {}'s: give this one its own, path={}",
                other.name,
                devices.socket.display()
            ));
            return;
        }
    }
    let own = chardevs.iter().filter(|c| Path::new(c.key("path")) == devices.socket).map(|c| c.key("id"));
    let own: Vec<&str> = own.collect();
    let attached = values(line, "device");
    let control: Vec<&Value> =
        attached.iter().filter(|d| d.kind == "ivshmem-doorbell" && own.contains(&d.key("chardev"))).collect();
    match control[..] {
        [] => {
            problems.push(format!("VM {vm} has no control device: add what `ginnel qemu-args {vm}` prints"))
        }
        [device] if number(device.key("vectors"), 1) != Some(u64::from(devices.vectors)) => {
            problems.push(format!(
                "the control device has vectors={}, and the daemon's configuration {}: write the same",
                device.key("vectors"),
                devices.vectors
            ))
        }
        [_] => {}
        _ => problems.push("there are several control devices of this VM: keep one".into()),
    }
}

/// Checks that this QEMU has a QMP socket for the daemon.
fn monitor(line: &str, devices: &Devices, problems: &mut Vec<String>) {
    let Some(qmp) = &devices.qmp else { return };
    let (short, chardevs) = (values(line, "qmp"), values(line, "chardev"));
    let short = short.iter().filter_map(|value| value.kind.strip_prefix("unix:"));
    if !short.chain(chardevs.iter().map(|chardev| chardev.key("path"))).any(|path| Path::new(path) == qmp) {
        problems
            .push(format!("the daemon cannot stop this VM when it hangs: add -qmp {}", control_socket(qmp)));
    }
}

/// Checks that a segment is there once, with the right kind of device.
fn segment(memory: &MemoryDevice, backends: &[&Value], attached: &[Value], problems: &mut Vec<String>) {
    let name = &memory.segment;
    let mut own = backends.iter().filter(|backend| shows(backend, memory));
    let Some(backend) = own.next() else {
        problems.push(format!(
            "segment {name} has no -object: add -object {} -device {}",
            memory.object(),
            memory.device()
        ));
        return;
    };
    let mut wrong = |what: &str, fix: String| problems.push(format!("segment {name} {what}: {fix}"));
    if own.next().is_some() {
        return wrong(
            "occurs twice",
            "keep one, because no machine may see the same memory both ways".into(),
        );
    }
    if !backend.is_on("share") {
        wrong("is a private copy", "its -object needs share=on".into());
    }
    if number(backend.key("size"), 1) != Some(memory.size) {
        wrong(
            &format!("has size={}", backend.key("size")),
            format!("its -object needs size={}", memory.size),
        );
    }
    match (backend.is_on("readonly"), memory.read_only) {
        (false, true) => wrong("is given to a reader for writing", "its -object needs readonly=on".into()),
        (true, false) => wrong("is given to a member for reading only", "remove readonly=on".into()),
        _ => {}
    }
    let users: Vec<&str> =
        attached.iter().filter(|d| d.key("memdev") == backend.key("id")).map(|d| d.kind.as_str()).collect();
    let right = if memory.kind == MemoryKind::Dax { "virtio-pmem-pci" } else { "ivshmem-plain" };
    match users[..] {
        [] => wrong("has no -device", format!("add -device {right},memdev={}", backend.key("id"))),
        [model] if model == right => {}
        [model] => wrong(
            &format!("is a {model}"),
            format!("its memory is {:?}: make it a {right}", memory.kind.to_string()),
        ),
        _ => wrong(
            "has several devices",
            "keep one, because no machine may see the same memory both ways".into(),
        ),
    }
}

/// Checks that the daemon can take BARs away from a VM that hangs: nothing can be unplugged from the root bus of PCI Express.
fn unplugging(
    line: &str,
    devices: &Devices,
    backends: &[&Value],
    attached: &[Value],
    problems: &mut Vec<String>,
) {
    let mut machines = values(line, "M").into_iter().chain(values(line, "machine"));
    // One of the options may name only other properties of the machine.
    let name = |value: &Value| [value.kind.as_str(), value.key("type")].concat();
    if devices.qmp.is_none() || !machines.any(|value| Machine::named(&name(&value)).has_ports()) {
        return;
    }
    for memory in devices.memory.iter().filter(|memory| memory.kind == MemoryKind::Bar) {
        let Some(backend) = backends.iter().find(|backend| shows(backend, memory)) else { continue };
        let device = attached.iter().find(|d| d.key("memdev") == backend.key("id"));
        if device.is_some_and(|device| matches!(device.key("bus"), "" | "pcie.0")) {
            problems.push(format!(
                "segment {} is on the root bus, from which it cannot be unplugged when the VM hangs: put it on a PCIe \
                 root port, as `ginnel qemu-args {}` prints it",
                memory.segment, devices.vm
            ));
        }
    }
}

/// Checks that the memory is not another VM's segment.
fn stranger(backend: &Value, devices: &Devices, inspect: &Inspect, problems: &mut Vec<String>) {
    let path = backend.key("mem-path");
    if devices.memory.iter().any(|memory| shows(backend, memory)) {
        return;
    }
    if let Some(other) = inspect.segments.iter().find(|s| s.path.as_deref() == Some(path)) {
        problems.push(format!(
            "the -object {} shows VM {} segment {}, of which it is not a member: remove it",
            backend.key("id"),
            devices.vm,
            other.name
        ));
    }
}

/// Checks that there is room for DAX segments.
fn address_space(line: &str, devices: &Devices, problems: &mut Vec<String>) {
    const MIB: u64 = 1 << 20;
    let more = devices.hot_pluggable();
    if more == 0 {
        return;
    }
    // If a key occurs several times, the last one counts. The default is 128 MiB.
    let (mut ram, mut max) = (Some(128 * MIB), None);
    for value in values(line, "m") {
        for text in [value.kind.as_str(), value.key("size")] {
            if !text.is_empty() {
                ram = number(text, MIB);
            }
        }
        if !value.key("maxmem").is_empty() {
            max = number(value.key("maxmem"), MIB);
        }
    }
    let Some(ram) = ram else {
        problems.push("-m has no size: write one, such as -m 2G,maxmem=4G".into());
        return;
    };
    if max.is_none_or(|max| max.saturating_sub(ram) < more) {
        let has = max.map_or("is missing".into(), |max| format!("of {} is too small", Bytes(max)));
        let least = Bytes(ram.saturating_add(more));
        problems.push(format!(
            "maxmem {has} for the DAX segments: write -m {},maxmem={least} or more",
            Bytes(ram)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Ports;
    use crate::qemu_args::{Target, arguments};
    use crate::qemu_version::QemuVersion;

    const ANSWER: &str = r#"{
        "members": [{"number": 0, "name": "host"},
                    {"number": 1, "name": "a", "socket": "/run/ginnel/a.sock", "vectors": 32,
                     "qmp": "/run/ginnel/a.qmp"},
                    {"number": 2, "name": "b", "socket": "/run/ginnel/b.sock", "vectors": 32}],
        "segments": [
            {"name": "web", "size": 268435456, "path": "/dev/shm/ginnel/web", "members": ["a"], "memory": "dax"},
            {"name": "old", "size": 4194304, "path": "/dev/shm/ginnel/old", "members": ["a"], "memory": "bar"},
            {"name": "news", "size": 4194304, "path": "/x,y/news", "readers": ["a"], "memory": "dax"},
            {"name": "other", "size": 4194304, "path": "/dev/shm/ginnel/other", "members": ["b"]}]}"#;

    /// A VM with two slices of one file.
    const SLICES: &str = r#"{
        "members": [{"number": 1, "name": "a", "socket": "/run/ginnel/a.sock", "vectors": 32,
                     "qmp": "/run/ginnel/a.qmp"}],
        "segments": [
            {"name": "one", "size": 4194304, "path": "/dev/shm/ginnel/s", "members": ["a"], "memory": "bar"},
            {"name": "two", "size": 4194304, "offset": 4194304, "path": "/dev/shm/ginnel/s", "members": ["a"],
             "memory": "bar"}]}"#;

    /// Returns the problems after `from` was replaced by `to` in the correct command line.
    fn after(from: &str, to: &str) -> Vec<String> {
        after_in(ANSWER, from, to)
    }

    fn after_in(answer: &str, from: &str, to: &str) -> Vec<String> {
        let inspect = crate::inspect::parse(answer).unwrap();
        let devices = Devices::from(&inspect, "a").unwrap();
        let target = Target { qemu: QemuVersion::OLDEST, ram: Some(2 << 30), iommu: true };
        let line = format!(
            "qemu-system-x86_64 -nodefaults {}",
            arguments(Some(&devices), &[], target, &mut Ports::new(Machine::Q35)).join(" ")
        );
        assert!(line.contains(from), "{from} is not in {line}");
        problems(&line.replacen(from, to, 1), &devices, &inspect)
    }

    #[test]
    fn the_printed_arguments_pass_the_check() {
        assert_eq!(after("-nodefaults", "--nodefaults"), [""; 0]);
        assert_eq!(after("size=4194304", "size=4M"), [""; 0]);
        assert_eq!(after("share=on", "share=true"), [""; 0]);
        assert_eq!(after("-m 2G", "-m size=2048"), [""; 0]);
        assert_eq!(after("-M q35", "-machine usb=on -machine type=pc-q35-7.2"), [""; 0]);
        let long =
            "-mon chardev=m,mode=control -chardev socket,id=m,server=on,wait=off,path=/run/ginnel/a.qmp";
        assert_eq!(after("-qmp unix:/run/ginnel/a.qmp,server=on,wait=off", long), [""; 0]);
    }

    #[test]
    fn every_lie_is_one_line() {
        for (from, to, said) in [
            ("a.sock", "b.sock", "the control device is VM b's"),
            ("a.sock", "c.sock", "VM a has no control device"),
            ("vectors=32", "vectors=8", "vectors=8"),
            ("a.qmp", "b.qmp", "add -qmp unix:/run/ginnel/a.qmp,server=on,wait=off"),
            ("ginnel/old,size", "ginnel/other,size", "segment old has no -object"),
            ("share=on", "share=off", "segment web is a private copy"),
            ("size=268435456", "size=256", "segment web has size=256"),
            (",readonly=on", "", "segment news is given to a reader for writing"),
            ("ginnel/web,size=268435456,dump=off", "ginnel/web,size=256M,readonly=on", "remove readonly=on"),
            (
                "virtio-pmem-pci,memdev=ginnel-web",
                "ivshmem-plain,memdev=ginnel-web",
                "make it a virtio-pmem-pci",
            ),
            ("-device virtio-pmem-pci,memdev=ginnel-web", "", "segment web has no -device"),
            ("ginnel-old,bus=ginnel-port-3", "ginnel-old", "segment old is on the root bus"),
            ("ginnel-old,bus=ginnel-port-3", "ginnel-old,bus=pcie.0", "segment old is on the root bus"),
            ("-nodefaults", "-device ivshmem-plain,memdev=ginnel-web", "several devices"),
            (
                "-nodefaults",
                "-object memory-backend-file,id=x,mem-path=/dev/shm/ginnel/web,size=256M",
                "segment web occurs twice",
            ),
            (
                "-nodefaults",
                "-object memory-backend-file,id=x,mem-path=/dev/shm/ginnel/other,size=4M",
                "shows VM a segment other, of which it is not a member",
            ),
            (",maxmem=3332M", "", "maxmem is missing for the DAX segments: write -m 2G,maxmem=2308M"),
            ("maxmem=3332M", "maxmem=2200M", "maxmem of 2200M is too small"),
            ("-m 2G", "-m lots", "-m has no size"),
        ] {
            let problems = after(from, to);
            assert!(problems.iter().any(|p| p.contains(said)), "{to}: {said} is missing in {problems:?}");
            assert!(problems.iter().all(|p| p.lines().count() == 1), "{problems:?}");
        }
    }

    #[test]
    fn each_slice_of_a_file_has_a_device_of_its_own() {
        assert_eq!(after_in(SLICES, "-nodefaults", ""), [""; 0]);
        for (segment, port) in [("one", 2), ("two", 3)] {
            let device = format!("memdev=ginnel-{segment}");
            let problems = after_in(SLICES, &format!("{device},bus=ginnel-port-{port}"), &device);
            let [problem] = &problems[..] else { panic!("{problems:?}") };
            assert!(problem.starts_with(&format!("segment {segment} is on the root bus")), "{problem}");
        }
    }

    #[test]
    fn values_in_json_are_read_as_libvirt_writes_them() {
        let pairs = "-device virtio-pmem-pci,memdev=ginnel-web,bus=ginnel-port-2";
        let json = r#"-device '{"driver":"virtio-pmem-pci","id":"m","memdev":"ginnel-web","bus":"pci.2","addr":"0x0"}'"#;
        assert_eq!(after(pairs, json), [""; 0]);
        let object = "-object memory-backend-file,id=ginnel-news,share=on,mem-path=/x,,y/news,size=4194304,dump=off,readonly=on";
        let json = r#"-object {"qom-type":"memory-backend-file","id":"ginnel-news","mem-path":"/x,y/news","share":true,"size":4194304,"dump":false,"readonly":true,"host-nodes":[0]}"#;
        assert_eq!(after(object, json), [""; 0]);
        let problems = after(
            object,
            &json.replace("true}", "false}").replace(r#""readonly":true"#, r#""readonly":false"#),
        );
        assert!(
            problems.len() == 1 && problems[0].contains("is given to a reader for writing"),
            "{problems:?}"
        );
        let chardev = "-chardev socket,id=ginnel-control,path=/run/ginnel/a.sock";
        let json = r#"-chardev {"id":"ginnel-control","backend":{"type":"socket","data":{"addr":{"type":"unix","data":{"path":"/run/ginnel/a.sock"}},"server":false}}}"#;
        assert_eq!(after(chardev, json), [""; 0]);
        assert!(!after(chardev, &json.replace("a.sock", "b.sock")).is_empty());
        // A device in JSON is a device too.
        let second = r#"-device {"driver":"ivshmem-plain","memdev":"ginnel-web"}"#;
        assert!(after("-nodefaults", second).iter().any(|problem| problem.contains("several devices")));
    }

    #[test]
    fn any_text_is_read() {
        for text in [
            "",
            "-m",
            "-m ,,,=,",
            "-object =",
            "-device ,",
            "-m 99999999999999999999T,maxmem=-1",
            "-device {",
            "-device '{\"driver\":7}'",
        ] {
            let inspect = crate::inspect::parse(ANSWER).unwrap();
            assert!(!problems(text, &Devices::from(&inspect, "a").unwrap(), &inspect).is_empty(), "{text}");
        }
    }
}
