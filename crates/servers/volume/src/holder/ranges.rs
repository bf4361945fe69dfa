//! The ranges of guest memory that QEMU has mapped, with their files. The holder never maps them: it keeps them for the engines.

use crate::attach::Range;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// Most ranges at a time, as the holder tells its client. A guest with an IOMMU that maps each page by itself needs many.
pub const MAX_RANGES: usize = 32768;

/// Most different files.
const MAX_FILES: usize = 256;

/// A range that is mapped.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// Where it lies.
    pub range: Range,
    /// Its file; `None` if this process cannot see the memory, so that no engine can use it.
    pub file: Option<Arc<OwnedFd>>,
}

/// All ranges. No two overlap.
#[derive(Debug, Default)]
pub struct Ranges {
    /// By their first addresses.
    ranges: BTreeMap<u64, Mapped>,
    /// QEMU sends a new descriptor of the same file with each range. One of each is kept.
    files: Vec<(Identity, Weak<OwnedFd>)>,
}

/// By which two descriptors are of the same file, with the same rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    access: u32,
}

impl Ranges {
    /// Adds a range. Its address and its end were checked.
    ///
    /// # Errors
    ///
    /// `EEXIST` if it overlaps another one, `ENOSPC` if there are [`MAX_RANGES`], `EMFILE` if there are too many different files.
    pub fn add(&mut self, range: Range, file: Option<OwnedFd>) -> Result<&Mapped, Errno> {
        let last = range.iova.saturating_add(range.len.saturating_sub(1));
        let before = self.ranges.range(..=last).next_back();
        if before.is_some_and(|(_, before)| last_of(&before.range) >= range.iova) {
            return Err(Errno::EXIST);
        }
        if self.ranges.len() >= MAX_RANGES {
            return Err(Errno::NOSPC);
        }
        let file = match file {
            Some(file) => self.keep(file)?,
            None => None,
        };
        Ok(self.ranges.entry(range.iova).or_insert(Mapped { range, file }))
    }

    /// Returns a descriptor of the same file that is kept already, or keeps this one. `None` if it is no file.
    fn keep(&mut self, file: OwnedFd) -> Result<Option<Arc<OwnedFd>>, Errno> {
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let access = (fcntl_getfl(&file)? & OFlags::ACCMODE).bits();
        let identity = Identity { device: stat.st_dev, inode: stat.st_ino, access };
        self.files.retain(|(_, file)| file.strong_count() > 0);
        let known = self.files.iter().find(|(known, _)| *known == identity);
        if let Some(known) = known.and_then(|(_, file)| file.upgrade()) {
            return Ok(Some(known));
        }
        if self.files.len() >= MAX_FILES {
            return Err(Errno::MFILE);
        }
        let file = Arc::new(file);
        self.files.push((identity, Arc::downgrade(&file)));
        Ok(Some(file))
    }

    /// Removes all ranges that lie between two addresses, both included. None that is not there is missed.
    ///
    /// # Errors
    ///
    /// `EINVAL` if only a part of a range lies there; then nothing is removed.
    pub fn remove(&mut self, first: u64, last: u64) -> Result<Vec<Mapped>, Errno> {
        let before = self.ranges.range(..first).next_back();
        let is_cut = |range: &Mapped, at: u64| last_of(&range.range) >= at;
        if before.is_some_and(|(_, before)| is_cut(before, first)) {
            return Err(Errno::INVAL);
        }
        let end = self.ranges.range(first..=last).next_back();
        if end.is_some_and(|(_, end)| last_of(&end.range) > last) {
            return Err(Errno::INVAL);
        }
        let starts: Vec<u64> = self.ranges.range(first..=last).map(|(start, _)| *start).collect();
        Ok(starts.iter().filter_map(|start| self.ranges.remove(start)).collect())
    }

    /// Returns all ranges, by address.
    pub fn iter(&self) -> impl Iterator<Item = &Mapped> {
        self.ranges.values()
    }
}

/// Returns the last address of a range.
fn last_of(range: &Range) -> u64 {
    range.iova.saturating_add(range.len.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::dup;

    fn range(iova: u64, len: u64) -> Range {
        Range { iova, len, offset: 0, writable: true }
    }

    fn memfd() -> OwnedFd {
        memfd_create("memory", MemfdFlags::CLOEXEC).unwrap()
    }

    fn starts(ranges: &[Mapped]) -> Vec<u64> {
        ranges.iter().map(|mapped| mapped.range.iova).collect()
    }

    #[test]
    fn ranges_do_not_overlap() {
        let mut ranges = Ranges::default();
        ranges.add(range(0x2000, 0x2000), None).unwrap();
        for (iova, len) in [(0x2000, 0x1000), (0x1000, 0x1001), (0x3fff, 1), (0, 0x10_0000), (0x2000, 0x2000)]
        {
            assert_eq!(ranges.add(range(iova, len), None).unwrap_err(), Errno::EXIST, "{iova:#x}");
        }
        ranges.add(range(0, 0x2000), None).unwrap();
        ranges.add(range(0x4000, 0x1000), None).unwrap();
        ranges.add(range(u64::MAX - 0xfff, 0x1000), None).unwrap();
        assert_eq!(ranges.add(range(u64::MAX, 1), None).unwrap_err(), Errno::EXIST);
        assert_eq!(ranges.iter().count(), 4);
    }

    #[test]
    fn only_whole_ranges_are_removed() {
        let mut ranges = Ranges::default();
        for iova in [0x1000, 0x3000, 0x5000, u64::MAX - 0xfff] {
            ranges.add(range(iova, 0x1000), None).unwrap();
        }
        assert_eq!(starts(&ranges.remove(0x8000, 0x9000).unwrap()), [0; 0]);
        for (first, last) in [(0x1001, 0x5fff), (0x1000, 0x37ff), (0x3800, 0x3900), (0, u64::MAX - 1)] {
            assert_eq!(ranges.remove(first, last).unwrap_err(), Errno::INVAL, "{first:#x}");
        }
        assert_eq!(starts(&ranges.remove(0x2000, 0x5fff).unwrap()), [0x3000, 0x5000]);
        assert_eq!(starts(&ranges.remove(0, u64::MAX).unwrap()), [0x1000, u64::MAX - 0xfff]);
        assert_eq!(ranges.iter().count(), 0);
    }

    #[test]
    fn one_descriptor_of_each_file_is_kept() {
        let mut ranges = Ranges::default();
        let file = memfd();
        for n in 0..100 {
            ranges.add(range(n << 12, 0x1000), Some(dup(&file).unwrap())).unwrap();
        }
        let other = ranges.add(range(100 << 12, 0x1000), Some(memfd())).unwrap().file.clone().unwrap();
        let files: Vec<_> = ranges.iter().map(|mapped| mapped.file.clone().unwrap()).collect();
        assert!(
            files[..100].iter().all(|file| Arc::ptr_eq(file, &files[0])) && !Arc::ptr_eq(&files[0], &other)
        );
        drop((files, other));
        // Those that no range has any more are forgotten.
        ranges.remove(0, u64::MAX).unwrap();
        for n in 0..MAX_FILES as u64 {
            ranges.add(range(n << 12, 0x1000), Some(memfd())).unwrap();
        }
        assert_eq!(ranges.add(range(1 << 40, 0x1000), Some(memfd())).unwrap_err(), Errno::MFILE);
        ranges.remove(0, 0xfff).unwrap();
        ranges.add(range(1 << 40, 0x1000), Some(memfd())).unwrap();
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(ranges.add(range(2 << 40, 0x1000), Some(reader)).unwrap().file.is_none());
    }

    #[test]
    fn there_is_a_most_of_ranges() {
        let mut ranges = Ranges::default();
        for n in 0..MAX_RANGES as u64 {
            ranges.add(range(n << 13, 0x1000), None).unwrap();
        }
        assert_eq!(ranges.add(range(1 << 60, 0x1000), None).unwrap_err(), Errno::NOSPC);
    }
}
