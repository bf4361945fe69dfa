//! The alignment that direct I/O requires of memory, and of offsets and lengths.
//!
//! `statx` reports it since Linux 6.1, but not for every file system. Where it does not, the block device below is
//! asked. Where there is none (NFS, CephFS, btrfs, tmpfs), reads are tried.
#![allow(unsafe_code)] // statx with STATX_DIOALIGN, which no safe crate tells yet.

use ginnel_shmem::{Mapping, SharedSlice};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// The alignment of memory, and of offsets and lengths, in bytes. Both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    pub memory: usize,
    pub offset: usize,
}

impl Alignment {
    /// The page cache does not require any alignment.
    pub const NONE: Self = Self::both(1);

    const fn both(bytes: usize) -> Self {
        Self { memory: bytes, offset: bytes }
    }

    /// Returns the alignment for a file that is open for direct I/O; `None` if the file uses the page cache all the
    /// same. If nothing is known, the alignment is a page, which always suffices.
    pub fn of(file: &File) -> Option<Self> {
        let known = told(file).or_else(|| device_below(file)).or_else(|| tried(file));
        let alignment = known.unwrap_or(Self::both(4096));
        // The kernel reports zero if there is no direct I/O.
        (alignment.memory.is_power_of_two() && alignment.offset.is_power_of_two()).then_some(alignment)
    }
}

/// Returns the alignment that the kernel reports, if it reports one.
fn told(file: &File) -> Option<Alignment> {
    // SAFETY: `statx` is a plain structure for which all zeros is a valid value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty C string, and the kernel fills `stat`.
    let result = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat)
    };
    let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
    let told = result == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0;
    told.then_some(Alignment { memory, offset })
}

/// Returns the size of the logical blocks of a block device, or of the device on which a file is stored.
fn device_below(file: &File) -> Option<Alignment> {
    let meta = file.metadata().ok()?;
    let bytes = if meta.file_type().is_block_device() {
        rustix::fs::ioctl_blksszget(file).ok()? as usize
    } else {
        queue_limit(meta.dev(), "logical_block_size")? as usize
    };
    bytes.is_power_of_two().then_some(Alignment::both(bytes))
}

/// Returns a limit of a block device's queue from sysfs; `None` if there is no such device, or no sysfs.
pub(super) fn queue_limit(device: u64, name: &str) -> Option<u64> {
    queue_word(device, name)?.parse().ok()
}

/// Returns an attribute of a block device's queue from sysfs; `None` if there is no such device, or no sysfs.
pub(super) fn queue_word(device: u64, name: &str) -> Option<String> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    // For a partition, its disk has the attributes.
    let read = |place: &str| {
        let path = format!("/sys/dev/block/{major}:{minor}/{place}queue/{name}");
        std::fs::read_to_string(path).ok().map(|word| word.trim().to_owned())
    };
    read("").or_else(|| read("../"))
}

/// Finds the smallest alignment with which reads succeed; `None` if the file is too short, or none succeeds.
fn tried(file: &File) -> Option<Alignment> {
    let memory = Mapping::anonymous(3 * 4096).ok()?;
    // Reads one block behind the beginning, so that the file offset has the alignment of the length.
    let reads = |at: usize, len: usize| {
        let place = SharedSlice::new(&memory, at, len).as_ptr();
        // SAFETY: the memory is that long, and lives until the call has returned.
        let read = unsafe { libc::pread(file.as_raw_fd(), place.cast(), len, len as libc::off_t) };
        read == len as isize
    };
    let offset = [512, 4096].into_iter().find(|&bytes| reads(0, bytes))?;
    let memory = [512, 4096].into_iter().find(|&bytes| reads(bytes, 4096))?;
    Some(Alignment { memory, offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    fn direct(path: &Path, bytes: usize) -> File {
        std::fs::write(path, vec![1; bytes]).unwrap();
        File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
    }

    #[test]
    fn all_ways_find_what_the_kernel_tells() {
        // On a disk, the kernel reports it.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = direct(&folder.path().join("image"), 16384);
        let below = device_below(&file);
        let read = tried(&file).unwrap();
        assert!(read.offset <= 4096 && read.memory <= 4096, "{read:?}");
        if let (Some(told), Some(below)) = (told(&file), below) {
            assert_eq!(told.offset, below.offset);
            assert!(told.memory <= below.memory && read.offset >= told.offset.min(512), "{told:?} {read:?}");
        }
    }

    #[test]
    fn where_nobody_tells_it_is_tried() {
        // tmpfs is on no device; it takes direct I/O since Linux 6.6.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = direct(&folder.path().join("image"), 16384);
        assert_eq!(device_below(&file), None);
        assert_eq!(tried(&file), Some(Alignment::both(512)));
        let short = direct(&folder.path().join("short"), 100);
        assert_eq!(tried(&short), None);
        assert!(Alignment::of(&short).unwrap().offset <= 4096);
    }
}
