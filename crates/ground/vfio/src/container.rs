//! Containers and groups: which device may reach which memory.

use crate::ioctl::{self, DmaMap, DmaUnmap, GroupStatus, IommuInfo, by_pointer, by_value, structure};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// A set of addresses for devices, in which pages of this process lie.
#[derive(Debug)]
pub struct Container {
    pub(crate) file: File,
}

/// The devices that the IOMMU cannot tell apart.
#[derive(Debug)]
pub struct Group {
    pub(crate) file: File,
    number: u32,
}

/// What devices may do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// They read it.
    Read,
    /// They read and write it.
    ReadWrite,
}

impl Container {
    /// Opens a new container. `dev` is `/dev`.
    pub fn open(dev: &Path) -> Result<Self> {
        let path = dev.join("vfio/vfio");
        let file = File::options().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let version = by_value(&file, ioctl::GET_API_VERSION, 0).context("asking for VFIO's version")?;
        ensure!(
            version == ioctl::API_VERSION,
            "this kernel has version {version} of VFIO, and this program knows version {}",
            ioctl::API_VERSION
        );
        let type1 = by_value(&file, ioctl::CHECK_EXTENSION, ioctl::TYPE1V2_IOMMU)
            .context("asking for VFIO's kinds of IOMMU")?;
        ensure!(type1 == 1, "this kernel's VFIO knows no type 1 IOMMU; load its module vfio_iommu_type1");
        Ok(Self { file })
    }

    /// Adds the first group. Only then can memory be mapped.
    pub fn add(&self, group: &Group) -> Result<()> {
        let raw: libc::c_int = self.file.as_raw_fd();
        by_pointer(&group.file, &raw).context("giving the IOMMU group to its container")?;
        by_value(&self.file, ioctl::SET_IOMMU, ioctl::TYPE1V2_IOMMU).context("choosing the type 1 IOMMU")?;
        Ok(())
    }

    /// Returns the addresses that the devices can use, in ascending order. (Since Linux 5.4; before, nobody knows.)
    pub fn ranges(&self) -> Result<Vec<RangeInclusive<u64>>> {
        let mut info = IommuInfo::default();
        structure(&self.file, ioctl::IOMMU_GET_INFO, &mut info)
            .context("asking for the IOMMU's addresses")?;
        Ok(if info.flags & IommuInfo::CAPS == 0 { Vec::new() } else { ranges(&info) })
    }

    /// Lets the devices use `len` bytes of this process's memory at `iova`. The kernel pins the pages, and allocates those that are not
    /// there yet, which may take long.
    ///
    /// # Safety
    ///
    /// Devices write to the memory as another process would, until it is unmapped here or the container's last descriptor is closed: no
    /// reference to it exists meanwhile. (The memory may be unmapped from the process before: the pages stay.)
    ///
    /// # Errors
    ///
    /// Those of `VFIO_IOMMU_MAP_DMA`, with the raw error number: `ENOMEM` if the process may not lock so much memory (`RLIMIT_MEMLOCK`),
    /// `EINVAL` if the devices cannot use such addresses, `EEXIST` if they are in use.
    pub unsafe fn map(&self, memory: *mut u8, len: u64, iova: u64, access: Access) -> io::Result<()> {
        let flags = match access {
            Access::Read => DmaMap::READ,
            Access::ReadWrite => DmaMap::READ | DmaMap::WRITE,
        };
        let map = DmaMap { flags, vaddr: memory as u64, iova, size: len, ..DmaMap::default() };
        // SAFETY: the kernel reads the structure, whose first field is its size; and what the devices do with the memory is the caller's
        // promise.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), ioctl::IOMMU_MAP_DMA, &raw const map) };
        ioctl::checked(result).map(drop)
    }

    /// Takes memory away from the devices. When this returns, none of them can reach it any more.
    pub fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        let mut unmap = DmaUnmap { iova, size: len, ..DmaUnmap::default() };
        structure(&self.file, ioctl::IOMMU_UNMAP_DMA, &mut unmap)?;
        match unmap.size == len {
            true => Ok(()),
            false => Err(io::Error::other(format!("{} bytes of {len} were mapped", unmap.size))),
        }
    }
}

impl AsRawFd for Container {
    fn as_raw_fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

impl From<Container> for OwnedFd {
    fn from(container: Container) -> Self {
        container.file.into()
    }
}

impl Group {
    /// Opens a group. `dev` is `/dev`.
    ///
    /// # Errors
    ///
    /// An [`io::Error`] with `EBUSY` is below the error if another process has the group.
    pub fn open(dev: &Path, number: u32) -> Result<Self> {
        let path = dev.join(format!("vfio/{number}"));
        let file = File::options().read(true).write(true).open(&path).map_err(|error| {
            let why = match error.raw_os_error() {
                Some(libc::EBUSY) => "; another process has it, see `fuser` for that file",
                Some(libc::EACCES | libc::EPERM) => "; give this process's user access to it",
                _ => "",
            };
            anyhow::Error::new(error).context(format!("cannot open {}{why}", path.display()))
        })?;
        Ok(Self { file, number })
    }

    /// Returns its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns whether all its devices are for user space, or have no driver.
    pub fn is_viable(&self) -> Result<bool> {
        let mut status = GroupStatus::default();
        structure(&self.file, ioctl::GROUP_GET_STATUS, &mut status)
            .context("asking for the IOMMU group's state")?;
        Ok(status.flags & GroupStatus::VIABLE != 0)
    }
}

impl From<Group> for OwnedFd {
    fn from(group: Group) -> Self {
        group.file.into()
    }
}

/// Finds the addresses among the capabilities of an IOMMU. (struct vfio_iommu_type1_info_cap_iova_range: id and version, offset of the next
/// capability from the start of the whole, number of ranges, a reserved word, and then for each range its first and last address.)
fn ranges(info: &IommuInfo) -> Vec<RangeInclusive<u64>> {
    const HEAD: usize = 6;
    let word = |at: usize| info.more.get(at.checked_sub(HEAD)?).copied();
    let long = |at: usize| Some(u64::from(word(at)?) | u64::from(word(at + 1)?) << 32);
    let (mut at, mut ranges) = (info.cap_offset as usize / 4, Vec::new());
    // Each capability has two words at least, so a chain that goes round is left.
    for _ in 0..info.more.len() / 2 {
        let (Some(id), Some(next)) = (word(at), word(at + 1)) else { break };
        if id & 0xffff == IommuInfo::CAP_IOVA_RANGE {
            let count = word(at + 2).unwrap_or(0) as usize;
            let range = |n: usize| Some(long(at + 4 + 4 * n)?..=long(at + 6 + 4 * n)?);
            ranges.extend((0..count).map_while(range));
        }
        if next == 0 {
            break;
        }
        at = next as usize / 4;
    }
    ranges.sort_by_key(|range| *range.start());
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_among_other_capabilities() {
        let mut info = IommuInfo { cap_offset: 24, ..IommuInfo::default() };
        assert_eq!(ranges(&info), []);
        // Another capability, and then the ranges.
        info.more[..4].copy_from_slice(&[3, 40, 9, 9]);
        info.more[4..8].copy_from_slice(&[1 | 1 << 16, 0, 2, 0]);
        info.more[8..16].copy_from_slice(&[0xfef0_0000, 0, 0xffff_ffff, 0x7f, 0, 0, 0xfedf_ffff, 0]);
        assert_eq!(ranges(&info), [0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff]);
        // What lies behind the end is not there, and a chain that goes round ends.
        info.more[6] = u32::MAX;
        assert!(ranges(&info).len() < info.more.len());
        info.more[5] = 24;
        ranges(&info);
        info.cap_offset = u32::MAX;
        assert_eq!(ranges(&info), []);
        info.cap_offset = 4;
        assert_eq!(ranges(&info), []);
    }
}
