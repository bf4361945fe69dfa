//! PCI functions as sysfs shows them.
//!
//! The folder of sysfs is a parameter, so that the parsing is tested on a tree of plain files.

use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

/// A function of a PCI device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    address: String,
    /// Its folder in sysfs.
    path: PathBuf,
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PCI device {}", self.address)
    }
}

impl Function {
    /// Returns the function in a folder of sysfs, whose name is its address.
    pub fn in_folder(path: &Path) -> Result<Self> {
        let address = path.file_name().and_then(|name| name.to_str());
        let address = address.with_context(|| format!("{} has no name", path.display()))?.to_owned();
        Ok(Self { address, path: path.to_owned() })
    }

    /// Finds a function by its address, such as `0000:00:03.0`. `sysfs` is `/sys`.
    pub fn find(sysfs: &Path, address: &str) -> Result<Self> {
        let is_address = |c: char| c.is_ascii_hexdigit() || ":.".contains(c);
        ensure!(
            !address.is_empty() && address.chars().all(is_address) && address.contains(':'),
            "{address:?} is no PCI address, such as 0000:01:00.0 (see `lspci -D`)"
        );
        let path = sysfs.join("bus/pci/devices").join(address);
        ensure!(path.is_dir(), "there is no PCI device {address}; see `lspci -D`");
        Self::in_folder(&path)
    }

    /// Returns its address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns its folder in sysfs.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its class, such as 0x010802 for an NVMe controller.
    pub fn class(&self) -> Result<u32> {
        let path = self.path.join("class");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let number = text.trim().strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        number.with_context(|| {
            format!("{} says '{}', which is not a hexadecimal number", path.display(), text.trim())
        })
    }

    /// Returns the driver to which it is bound.
    pub fn driver(&self) -> Option<String> {
        name_of_link(&self.path.join("driver"))
    }

    /// Returns the number of its IOMMU group; `None` without an IOMMU.
    pub fn iommu_group(&self) -> Option<u32> {
        name_of_link(&self.path.join("iommu_group"))?.parse().ok()
    }

    /// Returns all functions of its IOMMU group, itself included.
    pub fn companions(&self) -> Result<Vec<Self>> {
        let path = self.path.join("iommu_group/devices");
        let entries = fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?;
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let mut found = entries
            .map(|entry| Self::in_folder(&folder.join(entry?.file_name())))
            .collect::<Result<Vec<_>>>()?;
        found.sort_by(|a, b| a.address.cmp(&b.address));
        Ok(found)
    }

    /// Binds it to a driver, which must be loaded. Refuses to take it away from another driver.
    pub fn bind(&self, sysfs: &Path, driver: &str) -> Result<()> {
        match self.driver() {
            Some(bound) if bound == driver => return Ok(()),
            Some(bound) => bail!(
                "{self} is bound to the driver {bound}; unbind it (echo {} > {}/driver/unbind)",
                self.address,
                self.path.display()
            ),
            None => {}
        }
        self.prefer(Some(driver))?;
        self.probe(sysfs)?;
        ensure!(
            self.driver().as_deref() == Some(driver),
            "the driver {driver} did not take {self}; the kernel's log says why (dmesg)"
        );
        Ok(())
    }

    /// Lets only this driver take it from now on; with `None`, any that knows it.
    pub fn prefer(&self, driver: Option<&str>) -> Result<()> {
        write(&self.path.join("driver_override"), driver.unwrap_or("\n"))
    }

    /// Takes it away from its driver, if it has one. Blocks until the driver has let it go.
    pub fn unbind(&self) -> Result<()> {
        if self.driver().is_none() {
            return Ok(());
        }
        write(&self.path.join("driver/unbind"), &self.address)
    }

    /// Lets the kernel look for a driver.
    pub fn probe(&self, sysfs: &Path) -> Result<()> {
        write(&sysfs.join("bus/pci/drivers_probe"), &self.address)
    }
}

fn name_of_link(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

fn write(path: &Path, what: &str) -> Result<()> {
    fs::write(path, what).with_context(|| format!("cannot write '{}' to {}", what.trim(), path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const ADDRESS: &str = "0000:00:03.0";

    /// Returns a tree of plain files that looks like sysfs, with one device.
    fn tree() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("bus/pci/devices").join(ADDRESS);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("class"), "0x010802\n").unwrap();
        (root, folder)
    }

    #[test]
    fn driver_and_group_are_names_of_links() {
        let (root, folder) = tree();
        let function = Function::find(root.path(), ADDRESS).unwrap();
        assert_eq!((function.driver(), function.iommu_group()), (None, None));
        function.unbind().unwrap();
        symlink("../../../drivers/vfio-pci", folder.join("driver")).unwrap();
        let group = root.path().join("kernel/iommu_groups/7");
        fs::create_dir_all(group.join("devices/0000:00:03.1")).unwrap();
        fs::create_dir_all(group.join("devices").join(ADDRESS)).unwrap();
        symlink(&group, folder.join("iommu_group")).unwrap();
        assert_eq!((function.driver().as_deref(), function.iommu_group()), (Some("vfio-pci"), Some(7)));
        let companions = function.companions().unwrap();
        let addresses: Vec<_> = companions.iter().map(Function::address).collect();
        assert_eq!(addresses, [ADDRESS, "0000:00:03.1"]);
        assert_eq!(companions[0], function);
        function.bind(root.path(), "vfio-pci").unwrap();
        let error = function.bind(root.path(), "uio").unwrap_err().to_string();
        assert!(error.contains("bound to the driver vfio-pci; unbind it"), "{error}");
    }

    #[test]
    fn a_driver_that_does_not_take_the_device_is_an_error() {
        let (root, folder) = tree();
        let function = Function::find(root.path(), ADDRESS).unwrap();
        let error = function.bind(root.path(), "vfio-pci").unwrap_err().to_string();
        assert!(error.contains("did not take PCI device 0000:00:03.0"), "{error}");
        assert_eq!(fs::read_to_string(root.path().join("bus/pci/drivers_probe")).unwrap(), ADDRESS);
        assert_eq!(fs::read_to_string(folder.join("driver_override")).unwrap(), "vfio-pci");
        function.prefer(None).unwrap();
        assert_eq!(fs::read_to_string(folder.join("driver_override")).unwrap(), "\n");
        assert_eq!(function.class().unwrap(), 0x01_0802);
    }

    #[test]
    fn what_is_no_address_is_said() {
        let (root, _) = tree();
        for address in ["", "nvme0", "../0000:00:03.0", "0000"] {
            let error = Function::find(root.path(), address).unwrap_err().to_string();
            assert!(error.contains("is no PCI address"), "{error}");
        }
        let error = Function::find(root.path(), "0000:00:04.0").unwrap_err().to_string();
        assert!(error.contains("there is no PCI device 0000:00:04.0"), "{error}");
    }
}
