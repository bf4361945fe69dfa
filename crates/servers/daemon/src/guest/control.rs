//! The control device: the control memory, which only this VM and the host's daemon share, and the doorbells.

use super::pci::{self, Function};
use crate::control_link::{BadHeader, Identity};
use anyhow::{Result, bail, ensure};
use ginnel_layout::{HOST_MEMBER, PAGE, control};
use ginnel_shmem::device::Registers;
use ginnel_shmem::{Mapping, Protection};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time that the host's daemon may take to write a header. It does so in microseconds when it starts.
const PATIENCE: Duration = Duration::from_secs(10);

/// The VM's control device.
pub struct Control {
    /// The PCI function.
    pub function: Function,
    /// The VM's identity, as the control memory says it.
    pub identity: Identity,
    /// The control memory.
    pub memory: Mapping,
    /// The file of the doorbell registers, for programs.
    pub registers_file: Arc<OwnedFd>,
    registers: Registers,
}

impl Control {
    /// Finds and maps the control device. Waits a moment if the host's daemon is just starting.
    pub fn find(sysfs: &Path) -> Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let mut others = Vec::new();
        for function in pci::ivshmem_functions(sysfs)?.into_iter().filter(Function::has_doorbells) {
            match Self::open(function.clone(), deadline) {
                Ok(Some(control)) => return Ok(control),
                Ok(None) => others.push(format!("{function} belongs to another ivshmem server")),
                Err(error) => others.push(format!("{error:#}")),
            }
        }
        let others = if others.is_empty() { String::new() } else { format!(" ({})", others.join("; ")) };
        bail!(
            "this VM has no control device{others}; add the lines that `ginnel qemu-args` prints on the host (-chardev \
             socket,... -device ivshmem-doorbell,...) to its QEMU"
        )
    }

    /// Returns `None` if the device belongs to another ivshmem server.
    fn open(function: Function, deadline: Instant) -> Result<Option<Self>> {
        let (Some(registers), Some(memory)) = (function.bar(0), function.bar(2)) else { return Ok(None) };
        if memory.len < control::SIZE as u64 {
            return Ok(None);
        }
        function.enable()?;
        let refused = |what: &str, error: std::io::Error| {
            let why = pci::why_unmapped(&error);
            anyhow::Error::new(error).context(format!("cannot map the {what} of {function}{why}"))
        };
        let file = function.open_bar(2, false)?;
        let memory = Mapping::of_file(&file, 0, control::SIZE, Protection::ReadWrite)
            .inspect(Mapping::keep_from_children)
            .map_err(|error| refused("memory", error))?;
        let identity = loop {
            match Identity::read(&memory) {
                None => return Ok(None),
                Some(Ok(identity)) => break identity,
                Some(Err(BadHeader::NotReady)) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Some(Err(error)) => bail!("the control memory of {function} cannot be used: {error}"),
            }
        };
        ensure!(
            registers.start.is_multiple_of(PAGE as u64),
            "the registers of {function} share a page with other devices; boot this VM's kernel with \
             pci=resource_alignment=12@{}",
            function.address()
        );
        let registers_file = function.open_bar(0, false)?;
        let registers = Registers::map(&registers_file).map_err(|error| refused("registers", error))?;
        Ok(Some(Self { function, identity, memory, registers_file: Arc::new(registers_file), registers }))
    }

    /// Rings the host's daemon.
    pub fn ring_host(&self) {
        self.registers.ring(HOST_MEMBER << 16 | control::DAEMON_VECTOR);
    }

    /// Checks that QEMU has told the device its member number, and that the control memory says the same.
    pub fn check_position(&self) -> Result<()> {
        let position = self.registers.position();
        ensure!(
            position == self.identity.member,
            "{} is peer {position} and its memory says member {}; restart its QEMU",
            self.function,
            self.identity.member
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::pci::tests::Tree;
    use super::*;
    use crate::control_link::HostLink;
    use ginnel_layout::Name;
    use std::fs::File;

    const SIZE: u64 = control::SIZE as u64;

    /// Adds a device with doorbells to `tree`, and returns its memory.
    fn device(tree: &Tree, address: &str, registers: u64, memory: u64) -> Mapping {
        let bars = [(0, registers, 4096), (1, 0xfebd_4000, 4096), (2, 0x7_0000_0000, memory)];
        let file = tree.ivshmem(address, &bars).join("resource2");
        let file = File::options().read(true).write(true).open(file).unwrap();
        Mapping::of_file(&file, 0, control::SIZE, Protection::ReadWrite).unwrap()
    }

    fn error(tree: &Tree) -> String {
        Control::find(tree.path()).err().unwrap().to_string()
    }

    #[test]
    fn the_control_device_of_our_daemon_is_found() {
        let tree = Tree::new();
        device(&tree, "0000:00:03.0", 0xfebd_5000, SIZE);
        let memory = device(&tree, "0000:00:04.0", 0xfebd_6000, SIZE);
        let _host = HostLink::new(memory, 7, 16, Name::new("vm-a").unwrap());
        let control = Control::find(tree.path()).unwrap();
        assert_eq!(control.function.address(), "0000:00:04.0");
        assert_eq!((control.identity.member, control.identity.vectors), (7, 16));
        // The register file is all zeros here, as in a device that has not been told its number.
        assert!(control.check_position().unwrap_err().to_string().contains("peer 0"));
    }

    #[test]
    fn the_error_for_a_missing_device_says_how_to_fix_it() {
        let tree = Tree::new();
        assert!(error(&tree).contains("no control device; add the lines that `ginnel qemu-args`"));
        device(&tree, "0000:00:03.0", 0xfebd_5000, SIZE);
        assert!(error(&tree).contains("PCI device 0000:00:03.0 belongs to another ivshmem server"));
    }

    #[test]
    fn registers_that_share_a_page_are_refused() {
        let tree = Tree::new();
        let memory = device(&tree, "0000:00:04.0", 0xfebd_6100, SIZE);
        let _host = HostLink::new(memory, 7, 16, Name::new("vm-a").unwrap());
        assert!(error(&tree).contains("pci=resource_alignment=12@0000:00:04.0"), "{}", error(&tree));
    }
}
