//! The rules with which AppArmor lets a VM's QEMU open what libvirt does not know. libvirt makes a profile for each VM from its XML, in
//! which it knows the socket of `<shmem>`, and neither arguments for QEMU nor the sockets of `<disk type='vhostuser'>`.

use crate::vm_devices::Devices;
use crate::volume_devices::VolumeDevice;
use std::path::Path;

/// Returns the rules for one VM.
pub fn rules(devices: Option<&Devices>, volumes: &[VolumeDevice]) -> Vec<String> {
    let memory = devices.into_iter().flat_map(|devices| &devices.memory);
    let memory = memory.map(|memory| rule(&memory.file, if memory.read_only { "r" } else { "rw" }));
    // QEMU makes this socket.
    let qmp = devices.and_then(|devices| devices.qmp.as_deref()).map(|qmp| rule(qmp, "rw"));
    let volumes = volumes.iter().map(|volume| rule(&volume.socket, "rw"));
    let mut rules: Vec<String> = memory.chain(qmp).chain(volumes).collect();
    // Slices of one file are several segments.
    rules.dedup();
    rules
}

fn rule(path: &Path, rights: &str) -> String {
    let mut text = String::new();
    for c in path.display().to_string().chars() {
        if "*?[]{}^\\\"@".contains(c) {
            text.push('\\');
        }
        text.push(c);
    }
    format!("  \"{text}\" {rights},")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_means_itself() {
        assert_eq!(rule(Path::new("/a b/c*{\"}"), "r"), r#"  "/a b/c\*\{\"\}" r,"#);
    }
}
