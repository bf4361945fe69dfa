//! The ivshmem devices of this VM, as sysfs shows them.
//!
//! The folder of sysfs is a parameter, so that the parsing is tested on a tree of plain files.

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::{fmt, io};

/// Red Hat's vendor number, and the device number of ivshmem.
const IVSHMEM: (u32, u32) = (0x1af4, 0x1110);
/// The flag of a resource that is memory (`IORESOURCE_MEM`) and not ports.
const MEMORY: u64 = 0x200;

/// A base address register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// The physical address in the guest.
    pub start: u64,
    /// The length in bytes.
    pub len: u64,
}

/// An ivshmem function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// The function itself.
    pub pci: ginnel_vfio::Function,
    bars: [Option<Bar>; 6],
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pci.fmt(f)
    }
}

/// Returns all ivshmem functions below `sysfs`, in the order of their addresses. One that cannot be read is logged and
/// left out.
pub fn ivshmem_functions(sysfs: &Path) -> Result<Vec<Function>> {
    let folder = sysfs.join("bus/pci/devices");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot list {}", folder.display())),
    };
    let mut functions = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        match Function::read(&path) {
            Ok(Some(function)) => functions.push(function),
            Ok(None) => {}
            // The device may have been unplugged just now.
            Err(error) => tracing::warn!("{error:#}"),
        }
    }
    functions.sort_by(|a, b| a.address().cmp(b.address()));
    Ok(functions)
}

impl Function {
    /// Reads a device's folder. Returns `None` if it is not an ivshmem device.
    fn read(path: &Path) -> Result<Option<Self>> {
        if (hex(path, "vendor")?, hex(path, "device")?) != IVSHMEM {
            return Ok(None);
        }
        let pci = ginnel_vfio::Function::in_folder(path)?;
        let bars = bars(&text(path, "resource")?).with_context(|| format!("{}/resource", path.display()))?;
        Ok(Some(Self { pci, bars }))
    }

    /// Returns the address, such as `0000:00:03.0`.
    pub fn address(&self) -> &str {
        self.pci.address()
    }

    /// Returns a base address register that is memory, if the device has it.
    pub fn bar(&self, index: usize) -> Option<Bar> {
        self.bars.get(index).copied().flatten()
    }

    /// Returns whether the function has doorbells (`ivshmem-doorbell`), which need a table of MSI-X vectors; otherwise it is an
    /// `ivshmem-plain`.
    pub fn has_doorbells(&self) -> bool {
        self.bar(1).is_some()
    }

    /// Enables the device, so that it answers to memory accesses, unless that has been done.
    pub fn enable(&self) -> Result<()> {
        if text(self.pci.path(), "enable")?.trim() != "0" {
            return Ok(());
        }
        let file = self.pci.path().join("enable");
        fs::write(&file, "1").with_context(|| format!("cannot enable {self}: writing to {}", file.display()))
    }

    /// Opens a base address register. The file can only be mapped, and only for reading if `read_only`.
    pub fn open_bar(&self, index: usize, read_only: bool) -> Result<OwnedFd> {
        let path = self.pci.path().join(format!("resource{index}"));
        let file = File::options().read(true).write(!read_only).open(&path);
        Ok(file.with_context(|| format!("cannot open {}", path.display()))?.into())
    }
}

/// Returns what to do when mapping a base address register fails with this error.
pub fn why_unmapped(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            "; the kernel is locked down (secure boot), which forbids it: boot without secure boot or lockdown"
        }
        Some(libc::EINVAL | libc::EBUSY) => "; another driver uses the device, unbind it",
        _ => "",
    }
}

fn text(folder: &Path, file: &str) -> Result<String> {
    let path = folder.join(file);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

fn hex(folder: &Path, file: &str) -> Result<u32> {
    let text = text(folder, file)?;
    parse_hex(text.trim()).and_then(|n| u32::try_from(n).ok()).with_context(|| {
        format!("{}/{file} says '{}', which is not a hexadecimal number", folder.display(), text.trim())
    })
}

fn parse_hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// Parses the first six lines of `resource` in sysfs: `start end flags`, with an inclusive end, and all zero for a missing
/// register.
fn bars(text: &str) -> Result<[Option<Bar>; 6]> {
    let mut bars = [None; 6];
    for (bar, line) in bars.iter_mut().zip(text.lines()) {
        let numbers: Option<Vec<u64>> = line.split_whitespace().map(parse_hex).collect();
        let Some([start, end, flags]) = numbers.as_deref() else {
            bail!("the line '{line}' is not three numbers")
        };
        if flags & MEMORY != 0 && end > start {
            *bar = Some(Bar { start: *start, len: (end - start).saturating_add(1) });
        }
    }
    Ok(bars)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::PathBuf;

    /// A tree of plain files that looks like sysfs.
    pub struct Tree {
        pub root: tempfile::TempDir,
    }

    impl Tree {
        pub fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("bus/pci/devices")).unwrap();
            Self { root }
        }

        pub fn path(&self) -> &Path {
            self.root.path()
        }

        /// Returns a kernel that shows this tree, and that cannot load modules.
        pub fn kernel(&self) -> super::super::dax::Kernel {
            super::super::dax::Kernel {
                sysfs: self.path().to_owned(),
                dev: self.path().join("dev"),
                modprobe: "/bin/false".into(),
            }
        }

        /// Adds a device with these registers (index, start, bytes), whose files contain zeros.
        pub fn device(&self, address: &str, id: (&str, &str), bars: &[(usize, u64, u64)]) -> PathBuf {
            let folder = self.path().join("bus/pci/devices").join(address);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("vendor"), format!("{}\n", id.0)).unwrap();
            fs::write(folder.join("device"), format!("{}\n", id.1)).unwrap();
            fs::write(folder.join("enable"), "1\n").unwrap();
            let mut lines = vec!["0x0000000000000000 0x0000000000000000 0x0000000000000000".to_owned(); 13];
            for &(index, start, len) in bars {
                lines[index] = format!("{start:#018x} {:#018x} {:#018x}", start + len - 1, 0x14220c);
                File::create(folder.join(format!("resource{index}"))).unwrap().set_len(len).unwrap();
            }
            fs::write(folder.join("resource"), lines.join("\n") + "\n").unwrap();
            folder
        }

        pub fn ivshmem(&self, address: &str, bars: &[(usize, u64, u64)]) -> PathBuf {
            self.device(address, ("0x1af4", "0x1110"), bars)
        }
    }

    #[test]
    fn finds_ivshmem_among_others_and_tells_the_two_kinds_apart() {
        let tree = Tree::new();
        tree.device("0000:00:01.0", ("0x8086", "0x29c0"), &[(0, 0xf000_0000, 4096)]);
        tree.ivshmem("0000:00:05.0", &[(0, 0xfebd_6000, 256), (2, 0x8_0000_0000, 1 << 28)]);
        let doorbell = [(0, 0xfebd_5000, 256), (1, 0xfebd_4000, 4096), (2, 0x7_0000_0000, 1 << 18)];
        tree.ivshmem("0000:00:04.0", &doorbell);
        let found = ivshmem_functions(tree.path()).unwrap();
        let addresses: Vec<_> = found.iter().map(|f| (f.address(), f.has_doorbells())).collect();
        assert_eq!(addresses, [("0000:00:04.0", true), ("0000:00:05.0", false)]);
        assert_eq!(found[1].bar(2), Some(Bar { start: 0x8_0000_0000, len: 1 << 28 }));
        assert_eq!((found[1].bar(1), found[1].bar(9)), (None, None));
    }

    #[test]
    fn a_machine_without_pci_has_none() {
        assert_eq!(ivshmem_functions("/nonexistent".as_ref()).unwrap(), []);
    }

    #[test]
    fn an_unreadable_device_does_not_hide_others() {
        let tree = Tree::new();
        let broken = tree.ivshmem("0000:00:03.0", &[]);
        fs::write(broken.join("resource"), "rubbish\n").unwrap();
        let gone = tree.ivshmem("0000:00:04.0", &[]);
        fs::remove_file(gone.join("vendor")).unwrap();
        tree.ivshmem("0000:00:05.0", &[(2, 0, 1 << 22)]);
        assert_eq!(ivshmem_functions(tree.path()).unwrap().len(), 1);
    }

    #[test]
    fn a_device_is_enabled_once() {
        let tree = Tree::new();
        let folder = tree.ivshmem("0000:00:03.0", &[]);
        let function = &ivshmem_functions(tree.path()).unwrap()[0];
        for (before, after) in [("0\n", "1"), ("2\n", "2\n")] {
            fs::write(folder.join("enable"), before).unwrap();
            function.enable().unwrap();
            assert_eq!(fs::read_to_string(folder.join("enable")).unwrap(), after);
        }
    }

    proptest! {
        #[test]
        fn any_resource_file_is_parsed_or_refused(text in "[0-9a-fx \n]{0,200}") {
            let _ = bars(&text);
        }

        #[test]
        fn printed_resources_are_parsed_back(start in any::<u32>(), len in 2u64..1 << 40) {
            let start = u64::from(start) << 12;
            let text = format!("{:#018x} {:#018x} 0x0000000000140204\n", start, start + len - 1);
            prop_assert_eq!(bars(&text).unwrap()[0], Some(Bar { start, len }));
        }
    }
}
