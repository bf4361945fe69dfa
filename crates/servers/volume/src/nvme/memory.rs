//! The guest's memory: the ranges of addresses that the holder has handed over.

use crate::attach;
use crate::session::map_region;
use ginnel_guest_memory::{Area, GuestMemory, Region};
use ginnel_layout::nvme::PAGE;
use ginnel_layout::vhost_user::MemoryRegion;
use ginnel_shmem::Mapping;
use rustix::fs::fstat;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// All ranges that are mapped at present.
#[derive(Default)]
pub(super) struct Memory {
    /// Sorted by address.
    ranges: Vec<Range>,
    /// The same ranges as the workers see them; `None` if they have changed since.
    whole: Option<Arc<GuestMemory<Mapping>>>,
}

struct Range {
    iova: u64,
    len: u64,
    file: Arc<OwnedFd>,
    /// Device and inode of the file.
    identity: (u64, u64),
    offset: u64,
    region: Region<Mapping>,
}

impl Memory {
    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Adds a range. An error says why it cannot be used; the guest's commands that use it fail.
    pub fn map(&mut self, range: attach::Range, file: OwnedFd) -> Result<(), String> {
        let attach::Range { iova, len, offset, writable } = range;
        if !writable {
            // The device would have to refuse each command that writes to it, and no guest has its queues or buffers in
            // a ROM.
            return Ok(());
        }
        if iova.checked_add(len).is_none() {
            return Err(format!("the range at {iova:#x}, {len} bytes, ends at 2^64"));
        }
        let at = self.ranges.partition_point(|range| range.iova < iova);
        let end = |range: &Range| range.iova.saturating_add(range.len);
        let overlaps = at.checked_sub(1).is_some_and(|before| end(&self.ranges[before]) > iova)
            || self.ranges.get(at).is_some_and(|after| after.iova < iova.saturating_add(len));
        if overlaps {
            return Err(format!("the range at {iova:#x}, {len} bytes, overlaps another one"));
        }
        // vhost-user's front ends have a second address for each region; here it is the same.
        let region = map_region(&MemoryRegion { guest: iova, size: len, user: iova, offset }, &file)?;
        let identity = fstat(&file).map_err(|e| e.to_string())?;
        let identity = (identity.st_dev, identity.st_ino);
        // Many ranges need few descriptors. All of them can be mapped for writing, since they were.
        let same = self.ranges.iter().rev().find(|range| range.identity == identity);
        let file = same.map_or_else(|| Arc::new(file), |range| range.file.clone());
        self.ranges.insert(at, Range { iova, len, file, identity, offset, region });
        self.whole = None;
        Ok(())
    }

    /// Removes a range. The queues that use it are stopped.
    pub fn unmap(&mut self, iova: u64, len: u64) {
        self.ranges.retain(|range| (range.iova, range.len) != (iova, len));
        self.whole = None;
    }

    /// Returns the memory for the workers.
    pub fn whole(&mut self) -> Result<Arc<GuestMemory<Mapping>>, String> {
        if let Some(whole) = &self.whole {
            return Ok(whole.clone());
        }
        let regions = self.ranges.iter().map(|range| range.region.clone()).collect();
        let whole = Arc::new(GuestMemory::new(regions).map_err(|e| e.to_string())?);
        self.whole = Some(whole.clone());
        Ok(whole)
    }

    /// Returns `len` bytes at an address, as one contiguous area. Behind an IOMMU, a queue may consist of several
    /// ranges.
    pub fn area(&self, iova: u64, len: usize) -> Result<Area<Mapping>, String> {
        let outside = || format!("{len} bytes at {iova:#x} are not in the memory that the VM has shared");
        let end = iova.checked_add(len as u64).ok_or_else(outside)?;
        let first =
            self.ranges.partition_point(|range| range.iova <= iova).checked_sub(1).ok_or_else(outside)?;
        let range = &self.ranges[first];
        if end <= range.iova + range.len {
            let at = (iova - range.iova) as usize;
            return Ok(Area { memory: range.region.memory.clone(), at, len, guest: iova });
        }
        let start = iova - iova % PAGE;
        let mut parts = Vec::new();
        let mut next = start;
        for range in &self.ranges[first..] {
            // The first range contains the start of the page, since all ranges begin at one.
            let skip = next.checked_sub(range.iova).filter(|skip| *skip < range.len).ok_or_else(outside)?;
            let part = (range.len - skip).min(end.next_multiple_of(PAGE) - next);
            parts.push((&range.file, range.offset + skip, part as usize));
            next += part;
            if next >= end {
                let memory = Mapping::joined(&parts).map_err(|error| {
                    format!("{len} bytes at {iova:#x} lie in several ranges, which cannot be joined: {error}")
                })?;
                return Ok(Area { memory, at: (iova - start) as usize, len, guest: iova });
            }
        }
        Err(outside())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_shmem::SharedMemory;
    use std::fs::File;

    fn file(bytes: u64) -> File {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    fn range(iova: u64, len: u64, offset: u64) -> attach::Range {
        attach::Range { iova, len, offset, writable: true }
    }

    #[test]
    fn ranges_come_and_go() {
        let file = file(1 << 20);
        let fd = || OwnedFd::from(file.try_clone().unwrap());
        let mut memory = Memory::default();
        memory.map(range(0x10_0000, 0x8000, 0), fd()).unwrap();
        memory.map(range(0, 0x8000, 0x8000), fd()).unwrap();
        for (iova, len) in
            [(0x10_0000, 0x1000), (0xf_f000, 0x1001), (0x10_7fff, 1), (0, u64::MAX), (0x7000, 0x2000)]
        {
            let error = memory.map(range(iova, len, 0), fd()).unwrap_err();
            assert!(error.contains("overlaps"), "{error}");
        }
        assert!(memory.map(range(0x20_0000, 0x1000, 1 << 20), fd()).is_err(), "behind the end of the file");
        assert_eq!(memory.whole().unwrap().regions().len(), 2);
        memory.unmap(0, 0x4000);
        assert_eq!(memory.whole().unwrap().regions().len(), 2, "there is no such range");
        memory.unmap(0, 0x8000);
        assert_eq!(memory.whole().unwrap().regions().len(), 1);
        let rom = attach::Range { writable: false, ..range(0, 0x8000, 0) };
        memory.map(rom, fd()).unwrap();
        assert!(memory.area(0, 16).is_err());
    }

    #[test]
    fn an_area_may_consist_of_several_ranges() {
        let (one, two) = (file(1 << 16), file(1 << 16));
        let fd = |file: &File| OwnedFd::from(file.try_clone().unwrap());
        let mut memory = Memory::default();
        memory.map(range(0x4000, 0x1000, 0x3000), fd(&one)).unwrap();
        memory.map(range(0x5000, 0x1000, 0x1000), fd(&two)).unwrap();
        memory.map(range(0x6000, 0x2000, 0x8000), fd(&one)).unwrap();
        let area = memory.area(0x4ff0, 0x1800).unwrap();
        area.memory.write(area.at, &[7; 0x1800]);
        let look = |file: &File, offset, len| {
            let mapping = Mapping::of_file(file, offset, 4096, ginnel_shmem::Protection::Read).unwrap();
            let mut bytes = vec![0; len];
            mapping.read(0, &mut bytes);
            bytes
        };
        assert_eq!(look(&one, 0x3000, 0x1000)[0xff0..], [7; 16]);
        assert_eq!(look(&one, 0x3000, 0x1000)[..0xff0], [0; 0xff0]);
        assert_eq!(look(&two, 0x1000, 0x1000), [7; 0x1000]);
        assert_eq!(look(&one, 0x8000, 0x7f0), [7; 0x7f0]);
        assert_eq!(look(&one, 0x8000, 0x7f1)[0x7f0], 0);
        let inside = memory.area(0x6010, 0x1ff0).unwrap();
        assert_eq!((inside.at, inside.len, inside.memory.len()), (0x10, 0x1ff0, 0x2000));
        for (iova, len) in [(0x3000, 16), (0x6010, 0x1ff1), (0x4000, 1 << 20), (u64::MAX, 16), (0x8000, 1)] {
            assert!(memory.area(iova, len).is_err(), "{len} bytes at {iova:#x}");
        }
        memory.unmap(0x5000, 0x1000);
        assert!(memory.area(0x4ff0, 0x1800).is_err(), "there is a hole");
    }
}
