//! Writing files without the page cache.
//!
//! Bytes go from the ring into aligned memory, are added to the checksum on the way, and go from there to the disk in
//! large pieces. So a guest's processor touches each byte only once, and its page cache keeps its contents. Whether
//! this is faster depends on the processor and the disk, by up to a factor of ten in either direction, so it is tried
//! out.

use super::checksum::Checksum;
use ginnel::{Mapping, SharedSlice};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, write};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The alignment in memory and in the file that suffices for direct writes to every disk.
const PAGE: usize = 4096;
/// Number of bytes that are written at once.
const PIECE: usize = 4 << 20;
/// Number of pieces that are written in each way before one is chosen.
const TRIALS: usize = 2;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);
const _: () = assert!(size_of::<Page>() == PAGE && align_of::<Page>() == PAGE);

/// The bytes that are not written yet.
pub struct Direct {
    pages: Vec<Page>,
    filled: usize,
    /// How long each piece so far has taken: first the direct ones, then the others. `None` once the way is chosen.
    trial: Option<Vec<Duration>>,
}

/// The way in which the next bytes are written.
#[derive(PartialEq, Eq, Debug)]
pub enum Way {
    /// Through this buffer, as before.
    Direct,
    /// Through the page cache, which is faster here. All bytes so far are written.
    PageCache,
}

impl Direct {
    /// Switches a file to direct writes, permanently or on trial. Returns `None` if its file system does not support
    /// them.
    pub fn begin(fd: BorrowedFd<'_>, on_trial: bool) -> Option<Self> {
        set_direct(fd, true).ok()?;
        Some(Self { pages: Vec::new(), filled: 0, trial: on_trial.then(Vec::new) })
    }

    /// Takes shared bytes, and adds the bytes that it has taken to the checksum.
    pub fn take(&mut self, sum: &mut Checksum, slice: &SharedSlice<'_, Mapping>) {
        let need = (self.filled + slice.len()).div_ceil(PAGE);
        if self.pages.len() < need {
            self.pages.resize_with(need, Page::new_zeroed);
        }
        let room = &mut self.pages.as_mut_bytes()[self.filled..][..slice.len()];
        self.filled += slice.len();
        sum.take_shared(slice, room);
    }

    /// Writes the buffered bytes once they fill a piece.
    pub fn write_if_full(&mut self, fd: BorrowedFd<'_>) -> io::Result<Way> {
        if self.filled < PIECE {
            return Ok(Way::Direct);
        }
        let begun = Instant::now();
        self.write_pages(fd)?;
        let Some(times) = &mut self.trial else { return Ok(Way::Direct) };
        times.push(begun.elapsed());
        match times.len() {
            TRIALS => set_direct(fd, false)?,
            len if len == 2 * TRIALS => {
                let (direct, cached) = times.split_at(TRIALS);
                if cached.iter().min() < direct.iter().min() && self.filled == 0 {
                    return Ok(Way::PageCache);
                }
                self.trial = None;
                set_direct(fd, true)?;
            }
            _ => {}
        }
        Ok(Way::Direct)
    }

    /// Writes all remaining bytes.
    pub fn write_rest(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.write_pages(fd)?;
        set_direct(fd, false)?;
        write_all(fd, &self.pages.as_bytes()[..self.filled])?;
        self.filled = 0;
        Ok(())
    }

    fn write_pages(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let whole = self.filled - self.filled % PAGE;
        write_all(fd, &self.pages.as_bytes()[..whole])?;
        self.pages.as_mut_bytes().copy_within(whole..self.filled, 0);
        self.filled -= whole;
        Ok(())
    }
}

fn set_direct(fd: BorrowedFd<'_>, on: bool) -> rustix::io::Result<()> {
    let mut flags = fcntl_getfl(fd)?;
    flags.set(OFlags::DIRECT, on);
    fcntl_setfl(fd, flags)
}

fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match write(fd, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            // The disk needs a larger alignment, or a short write ended in the middle of a page.
            Err(Errno::INVAL) if fcntl_getfl(fd)?.contains(OFlags::DIRECT) => set_direct(fd, false)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn every_length_arrives_whole() {
        let dir = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
        let memory = Mapping::anonymous(1 << 20).unwrap();
        let bytes: Vec<u8> = (0..1 << 20).map(|i: usize| (i * 31 + i / 4099) as u8).collect();
        SharedSlice::new(&memory, 0, 1 << 20).write(0, &bytes);
        for blocks in
            [vec![], vec![1], vec![4096], vec![4096, 4097], vec![1 << 20; 9], vec![100, 32, 4096, 5, 4096]]
        {
            let file = std::fs::File::create(dir.path().join("f")).unwrap();
            let direct = Direct::begin(file.as_fd(), false);
            kit::require!(direct.is_some(), "this file system has no direct writing");
            let mut direct = direct.unwrap();
            let (mut sum, mut expected) = (Checksum::new(), Vec::new());
            for len in blocks {
                direct.take(&mut sum, &SharedSlice::new(&memory, 0, len));
                assert_eq!(direct.write_if_full(file.as_fd()).unwrap(), Way::Direct);
                expected.extend_from_slice(&bytes[..len]);
            }
            direct.write_rest(file.as_fd()).unwrap();
            assert!(std::fs::read(dir.path().join("f")).unwrap() == expected, "{} bytes", expected.len());
            let mut whole = Checksum::new();
            whole.add(&expected);
            assert_eq!((sum.value(), sum.len()), (whole.value(), whole.len()));
        }
    }
    #[test]
    fn a_trial_ends_with_a_choice_and_loses_nothing() {
        let dir = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
        let memory = Mapping::anonymous(PIECE).unwrap();
        SharedSlice::new(&memory, 0, 3).write(0, b"abc");
        let path = dir.path().join("f");
        let file = std::fs::File::create(&path).unwrap();
        let direct = Direct::begin(file.as_fd(), true);
        kit::require!(direct.is_some(), "this file system has no direct writing");
        let mut direct = direct.unwrap();
        let mut sum = Checksum::new();
        for piece in 1..=2 * TRIALS {
            direct.take(&mut sum, &SharedSlice::new(&memory, 0, PIECE));
            let way = direct.write_if_full(file.as_fd()).unwrap();
            assert_eq!(file.metadata().unwrap().len(), (piece * PIECE) as u64);
            let on = fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT);
            // Off in the second half of the trial, and at the end as chosen.
            assert_eq!(on, piece < TRIALS || piece == 2 * TRIALS && way == Way::Direct, "{piece}");
            assert_eq!(direct.trial.is_some(), piece < 2 * TRIALS || way == Way::PageCache, "{piece}");
        }
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.chunks(PIECE).all(|piece| piece[..4] == *b"abc\0"));
    }
}
