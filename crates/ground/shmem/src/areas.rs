//! This process's memory mappings, as the kernel reports them.

use rustix::fs::{Mode, OFlags, Stat, fstat, open};
use rustix::io::{Errno, read};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::{io, ptr};

/// A contiguous range of addresses that are mapped in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub at: Range<usize>,
    pub prot: ProtFlags,
    pub shared: bool,
    pub file: FileId,
    /// Offset in the file of `at.start`.
    pub offset: u64,
}

/// Identity of a file, as in `/proc/self/maps`; all zero if there is no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}
const _: () = assert!(size_of::<Query>() == 104);

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: rustix::ioctl::Opcode = 0xc068_6611;
const COVERING_OR_NEXT: u64 = 0x10;
const SHARED: u64 = 8;

fn prot(read: bool, write: bool, execute: bool) -> ProtFlags {
    let mut prot = ProtFlags::empty();
    prot.set(ProtFlags::READ, read);
    prot.set(ProtFlags::WRITE, write);
    prot.set(ProtFlags::EXEC, execute);
    prot
}

/// Returns the mappings in a range, in order and cut to the range. Another thread may change them at any time.
pub(crate) fn areas(range: Range<usize>) -> io::Result<Vec<Area>> {
    Maps::open()?.areas(range)
}

impl Maps {
    /// Returns the same as the function [`areas`].
    pub fn areas(&self, range: Range<usize>) -> io::Result<Vec<Area>> {
        let mut areas = Vec::new();
        let mut from = range.start;
        while from < range.end {
            match ask(self, from) {
                Ok(Some(area)) if area.at.start < range.end => {
                    from = area.at.end;
                    areas.push(area);
                }
                Ok(_) => break,
                Err(error) if is_too_old(error) => {
                    areas = read_all()?;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(areas.into_iter().filter_map(|area| area.within(&range)).collect())
    }

    /// Returns the whole mapping that contains an address, or else the next one.
    pub fn area_at(&self, address: usize) -> io::Result<Option<Area>> {
        match ask(self, address) {
            Err(error) if is_too_old(error) => Ok(read_all()?.into_iter().find(|area| area.at.end > address)),
            asked => Ok(asked?),
        }
    }
}

/// Returns whether the error means that the kernel does not have the query (Linux before 6.11).
fn is_too_old(error: Errno) -> bool {
    matches!(error, Errno::NOTTY | Errno::INVAL)
}

fn open_maps() -> Result<OwnedFd, Errno> {
    open(c"/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

fn read_all() -> io::Result<Vec<Area>> {
    parse(&text(&open_maps()?)?)
}

/// `/proc/self/maps`. To open it takes as long as several queries, so one descriptor stays open.
///
/// The descriptor is not safe from the program, which may close descriptors that it does not know (as daemons do when they
/// start) and get the same number for another file. Therefore the identity of the open file is checked each time, and this
/// library never closes the descriptor.
pub(crate) enum Maps {
    Kept(BorrowedFd<'static>),
    Own(OwnedFd),
}

/// The descriptor that stays open, in a page that a child finds empty after a fork: the inherited descriptor refers to the
/// memory of the parent.
struct Kept {
    /// The descriptor plus one; 0 while there is none, negative while a thread stores one.
    fd_and_one: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

/// Returns whether a range is mapped to `file` from `offset` on, as one area. This takes one system call. A result of `false`
/// is not certain.
pub(crate) fn is_certainly(range: &Range<usize>, file: FileId, offset: u64) -> bool {
    // The identity of the descriptor need not be checked, because no other file gives such an answer. (Only the maps of
    // another process could, if it had the same page of the same file at the same address.)
    let Some(Some(kept)) = KEPT.get() else { return false };
    let number = kept.fd_and_one.load(Ordering::Acquire);
    if number <= 0 {
        return false;
    }
    // SAFETY: if it is not open any more, or refers to another file, the query fails.
    let maps = Maps::Kept(unsafe { BorrowedFd::borrow_raw(number - 1) });
    let Ok(Some(area)) = ask(&maps, range.start) else { return false };
    let is_around = area.at.start <= range.start && range.end <= area.at.end;
    is_around
        && area.shared
        && area.file == file
        && area.offset.wrapping_add((range.start - area.at.start) as u64) == offset
}

static KEPT: OnceLock<Option<&'static Kept>> = OnceLock::new();

impl Maps {
    /// Opens the maps for a few queries.
    pub fn open() -> io::Result<Self> {
        let Some(kept) = KEPT.get_or_init(Kept::new) else { return Ok(Self::Own(open_maps()?)) };
        let number = kept.fd_and_one.load(Ordering::Acquire);
        if number > 0 {
            // SAFETY: if it is not open any more, or refers to another file, the next line finds that out.
            let fd = unsafe { BorrowedFd::borrow_raw(number - 1) };
            if fstat(fd).is_ok_and(|stat| kept.is(&stat)) {
                return Ok(Self::Kept(fd));
            }
        }
        let own = open_maps()?;
        let stat = fstat(&own)?;
        // If another thread is storing its descriptor too, this one is used only once.
        if number < 0
            || kept.fd_and_one.compare_exchange(number, -1, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return Ok(Self::Own(own));
        }
        kept.device.store(stat.st_dev, Ordering::Relaxed);
        kept.inode.store(stat.st_ino, Ordering::Relaxed);
        let fd = own.into_raw_fd();
        kept.fd_and_one.store(fd + 1, Ordering::Release);
        // SAFETY: it has just been opened, and is never closed here.
        Ok(Self::Kept(unsafe { BorrowedFd::borrow_raw(fd) }))
    }
}

impl Kept {
    fn new() -> Option<&'static Self> {
        const PAGE: usize = 4096;
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory. It is never unmapped, and zeros
        // are a valid `Kept`.
        unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            let page = mmap_anonymous(ptr::null_mut(), PAGE, rights, MapFlags::PRIVATE).ok()?;
            if madvise(page, PAGE, Advice::LinuxWipeOnFork).is_err() {
                let _ = munmap(page, PAGE);
                return None;
            }
            Some(&*page.cast::<Self>())
        }
    }

    fn is(&self, stat: &Stat) -> bool {
        stat.st_dev == self.device.load(Ordering::Relaxed)
            && stat.st_ino == self.inode.load(Ordering::Relaxed)
    }
}

impl AsFd for Maps {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Kept(fd) => *fd,
            Self::Own(fd) => fd.as_fd(),
        }
    }
}

/// Queries the area that contains an address, or else the next one.
fn ask(maps: &Maps, address: usize) -> Result<Option<Area>, Errno> {
    let mut query = Query {
        size: size_of::<Query>() as u64,
        query_flags: COVERING_OR_NEXT,
        query_addr: address as u64,
        ..Query::default()
    };
    // SAFETY: this request reads and writes a `procmap_query`, and no pointer in this one is set.
    let asked = unsafe {
        let request = rustix::ioctl::Updater::<PROCMAP_QUERY, Query>::new(&mut query);
        rustix::ioctl::ioctl(maps, request)
    };
    match asked {
        Ok(()) => {}
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error),
    }
    let has = |flag| query.vma_flags & flag != 0;
    Ok(Some(Area {
        at: query.vma_start as usize..query.vma_end as usize,
        prot: prot(has(1), has(2), has(4)),
        shared: has(SHARED),
        file: FileId { major: query.dev_major, minor: query.dev_minor, inode: query.inode },
        offset: query.vma_offset,
    }))
}

fn text(maps: &OwnedFd) -> io::Result<String> {
    let mut text = Vec::new();
    let mut bytes = vec![0; 64 << 10];
    loop {
        match read(maps, &mut bytes)? {
            // Names of files need not be UTF-8; they are not used here.
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            n => text.extend_from_slice(&bytes[..n]),
        }
    }
}

/// Parses the lines of `/proc/self/maps`: `start-end rwxp offset major:minor inode name`.
fn parse(text: &str) -> io::Result<Vec<Area>> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "/proc/self/maps has an unknown format");
    text.lines().map(|line| parse_line(line).ok_or_else(wrong)).collect()
}

fn parse_line(line: &str) -> Option<Area> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let &[r, w, x, s] = rights else { return None };
    let hex = |digits| usize::from_str_radix(digits, 16).ok();
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    Some(Area {
        at: hex(start)?..hex(end)?,
        prot: prot(r == b'r', w == b'w', x == b'x'),
        shared: s == b's',
        file: FileId { major: number(major)?, minor: number(minor)?, inode: words.next()?.parse().ok()? },
        offset,
    })
}

impl Area {
    /// Returns the part of the area that lies in a range.
    fn within(self, range: &Range<usize>) -> Option<Self> {
        let at = self.at.start.max(range.start)..self.at.end.min(range.end);
        let offset = self.offset.wrapping_add((at.start - self.at.start) as u64);
        // A private area without a file has an offset too, which has no meaning.
        let offset = if self.file.inode == 0 { 0 } else { offset };
        (!at.is_empty()).then_some(Self { at, offset, ..self })
    }

    pub fn start(&self) -> *mut c_void {
        self.at.start as *mut c_void
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, Protection};
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn the_query_and_the_text_of_maps_agree() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(64 << 10).unwrap();
        let m = Mapping::of_file(&file, 8192, 32 << 10, Protection::ReadWrite).unwrap();
        let start = m.pointer(0, 0) as usize;
        let range = start + 4096..start + 12288;
        let told = areas(range.clone()).unwrap();
        let read: Vec<_> = read_all().unwrap().into_iter().filter_map(|a| a.within(&range)).collect();
        assert_eq!(told, read);
        assert_eq!((told.len(), told[0].at.clone(), told[0].offset), (1, range, 12288));
        assert!(told[0].shared && told[0].prot == ProtFlags::READ | ProtFlags::WRITE);
        assert_eq!(areas(0..4096).unwrap(), []);
    }

    fn kept() -> BorrowedFd<'static> {
        loop {
            // Repeats if another test stores its descriptor at the same moment.
            if let Maps::Kept(fd) = Maps::open().unwrap() {
                return fd;
            }
        }
    }

    #[test]
    fn a_descriptor_that_the_program_has_closed_is_not_used() {
        let memory = Mapping::anonymous(4096).unwrap();
        let start = memory.pointer(0, 0) as usize;
        for _ in 0..3 {
            assert_eq!(areas(start..start + 4096).unwrap().len(), 1);
            let fd = kept();
            // Another file gets the same number.
            let other = File::open("/dev/null").unwrap();
            // SAFETY: programs do this, and the library must handle it.
            assert!(unsafe { libc::dup2(other.as_raw_fd(), fd.as_raw_fd()) } >= 0);
            let again = kept();
            assert_ne!(fd.as_raw_fd(), again.as_raw_fd());
            assert!(Maps::open().unwrap().area_at(start).unwrap().unwrap().at.contains(&start));
        }
    }

    #[test]
    fn a_child_asks_of_its_own_memory() {
        let memory = Mapping::anonymous(4096).unwrap();
        let start = memory.pointer(0, 0) as usize;
        assert_eq!(areas(start..start + 4096).unwrap().len(), 1);
        // SAFETY: the child makes system calls, and allocates a little, which the C library allows.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::munmap(start as *mut c_void, 4096);
                let is_gone = areas(start..start + 4096).is_ok_and(|areas| areas.is_empty());
                libc::_exit(i32::from(!is_gone));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
    }

    #[test]
    fn an_invalid_line_is_an_error() {
        for line in ["", "x", "1000-2000", "1000-2000 rw-p 0 0:0", "1-2 rwp 0 0:0 0", "1-2 rw-p 0 00 0"] {
            assert!(parse_line(line).is_none(), "{line}");
        }
        let area = parse_line("7f00-8f00 r-xs 00001000 fd:01 77 /a name (deleted)").unwrap();
        assert_eq!((area.at, area.shared, area.offset), (0x7f00..0x8f00, true, 4096));
        assert_eq!(area.file, FileId { major: 0xfd, minor: 1, inode: 77 });
    }
}
