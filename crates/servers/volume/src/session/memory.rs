//! The guest's memory, as a front end shares it.

use ginnel_guest_memory::Region;
use ginnel_layout::vhost_user::{InflightArea, LogArea, MemoryRegion};
use ginnel_shmem::{Mapping, Protection};
use ginnel_virtqueue::DirtyLog;
use rustix::fs::{FileType, fstat, fstatfs};
use std::os::fd::OwnedFd;

/// The file system type that `fstatfs` reports for hugetlbfs.
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x958458f6;

/// Maps one region, which may have any size: front ends also share single rings and buffers. An error says what is
/// wrong with the region.
pub(crate) fn map_region(region: &MemoryRegion, file: &OwnedFd) -> Result<Region<Mapping>, String> {
    let what = |why: &str| format!("the memory region at {:#x}, {} bytes, {why}", region.guest, region.size);
    let memory = map(file, region.offset, region.size).map_err(|why| what(&why))?;
    Ok(Region { guest: region.guest, user: region.user, memory })
}

/// Maps an in-flight region.
pub(super) fn map_inflight(area: &InflightArea, file: &OwnedFd) -> Result<Mapping, String> {
    let size = area.size.checked_next_multiple_of(8).ok_or("passes the end of all files".to_owned());
    size.and_then(|size| map(file, area.offset, size)).map_err(|why| format!("the in-flight region {why}"))
}

/// Maps the log of written pages.
pub(super) fn map_log(area: &LogArea, file: &OwnedFd) -> Result<DirtyLog<Mapping>, String> {
    let memory = map(file, area.offset, area.size - area.size % 8);
    let memory = memory.map_err(|why| format!("the log of written pages {why}"))?;
    let len = usize::try_from(area.size - area.size % 8).map_err(|e| e.to_string())?;
    DirtyLog::new(memory, 0, len).ok_or_else(|| "the log of written pages is misaligned".to_owned())
}

/// Maps `size` bytes of a file from `offset`, if the file is that long.
fn map(file: &OwnedFd, offset: u64, size: u64) -> Result<Mapping, String> {
    let stat = fstat(file).map_err(|e| format!("has a descriptor that cannot be examined: {e}"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(
            "is not a file: the VM's memory must be shared (memory-backend-memfd,share=on)".to_owned()
        );
    }
    let end = offset.checked_add(size).ok_or("passes the end of all files")?;
    let have = u64::try_from(stat.st_size).unwrap_or(0);
    if size == 0 {
        return Err("is empty".to_owned());
    }
    if end > have {
        return Err(format!(
            "is not inside its file: it ends at byte {end}, but the file has only {have} bytes"
        ));
    }
    // A mapping begins at a page of the file system. A mapping of huge pages must also end at one.
    let page = match fstatfs(file) {
        Ok(fs) if fs.f_type == HUGETLBFS_MAGIC => u64::try_from(fs.f_bsize).unwrap_or(4096).max(4096),
        _ => 4096,
    };
    let start = offset - offset % page;
    let len = (end - start).next_multiple_of(page);
    let sizes = || {
        Some((usize::try_from(len).ok()?, usize::try_from(offset - start).ok()?, usize::try_from(size).ok()?))
    };
    let (len, skip, size) = sizes().ok_or("is larger than this process's address space")?;
    let whole = Mapping::of_file(file, start, len, Protection::ReadWrite)
        .map_err(|e| format!("cannot be mapped: {e}"))?;
    whole.part(skip, size).ok_or_else(|| "does not begin at a multiple of eight".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn file(bytes: u64) -> OwnedFd {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(bytes).unwrap();
        file.into()
    }

    fn region(size: u64, offset: u64) -> MemoryRegion {
        MemoryRegion { guest: 0x1000, size, user: 0x7000, offset }
    }

    #[test]
    fn only_what_the_file_has_is_mapped() {
        let shared = file(1 << 20);
        let good = map_region(&region(0x2000, 0x1008), &shared).unwrap();
        use ginnel_shmem::SharedMemory;
        assert_eq!((good.memory.len(), good.guest, good.user), (0x2000, 0x1000, 0x7000));
        // Neither the size nor the end need be a multiple of pages or words.
        for (size, offset) in [(100, 0), (4097, 8), (1, 4096), (1 << 20, 0)] {
            let good = map_region(&region(size, offset), &shared).unwrap();
            assert_eq!(good.memory.len() as u64, size);
            good.memory.read(0, &mut vec![1; size as usize]);
        }
        for (size, offset) in [
            (0, 0),
            (1 << 20, 4096),
            (1 << 40, 0),
            (u64::MAX - 4095, 0),
            (4096, u64::MAX - 4095),
            (4096, 1 << 20),
            (4096, 4),
        ] {
            assert!(map_region(&region(size, offset), &shared).is_err(), "{size:#x} from {offset:#x}");
        }
        let pipe: OwnedFd = File::open("/dev/zero").unwrap().into();
        let error = map_region(&region(4096, 0), &pipe).err().unwrap();
        assert!(error.contains("share=on"), "{error}");
    }
}
