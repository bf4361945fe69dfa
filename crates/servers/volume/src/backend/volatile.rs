//! A file behind a write cache that a power cut empties; for tests.
//!
//! Writes stay in this process's memory, and reach the file with a flush, or at once if they must be durable. Killing
//! the process is the power cut: all writes that were not flushed are lost. Each third write goes to the file at once,
//! as real caches write back whenever they like, so that tests cannot rely on a cache that keeps everything.
//!
//! If a file `IMAGE.faults` exists at the start, its lines say which requests fail, from the next request on. A line
//! has the operation, first byte, length and error number. With `write 4096 512 28`, there is no space for that sector.
//! With `flush 0 0 5`, a flush fails.
//!
//! `writeback 4096 512 5` does what a page cache does: writes to that sector are acknowledged, and lost when any worker
//! writes them back. As in Linux, each worker gets one report of that, from its next flush or durable write that ends
//! afterwards.

use super::{Failure, Image, Op};
use ginnel_guest_memory::{Buffer, GuestMemory};
use ginnel_shmem::Mapping;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The unit of the cache, in bytes.
const BLOCK: u64 = 512;

/// The disk, with its cache and its faults.
pub struct Volatile {
    image: Image,
    cache: Mutex<Cache>,
    faults: Option<File>,
}

struct Cache {
    blocks: BTreeMap<u64, [u8; BLOCK as usize]>,
    /// Number of writes so far.
    writes: u32,
    /// For each worker, and after them for [`Volatile::sync`], the error of a write-back that was not reported to it.
    untold: Vec<Option<i32>>,
}

/// A line of `IMAGE.faults`.
struct Fault {
    word: String,
    from: u64,
    len: u64,
    errno: i32,
}

impl Fault {
    fn meets(&self, word: &str, from: u64, len: u64) -> bool {
        self.word == word && self.from < from + len && from < self.from + self.len
    }
}

impl Volatile {
    /// Returns a disk with an empty cache, for this many workers.
    pub fn new(image: Image, workers: usize) -> Self {
        let mut faults = image.path().as_os_str().to_owned();
        faults.push(".faults");
        let cache = Cache { blocks: BTreeMap::new(), writes: 0, untold: vec![None; workers + 1] };
        Self { image, cache: Mutex::new(cache), faults: File::open(faults).ok() }
    }

    /// Returns the file behind the cache.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Does what [`Backend::sync`](super::Backend::sync) does.
    pub fn sync(&self) -> Result<(), Failure> {
        let nobody = self.cache().untold.len() - 1;
        self.flush(nobody)
    }

    /// Does what [`Image::take_errors`] does.
    pub fn take_errors(&self) -> io::Result<()> {
        let faults = self.faults();
        let mut cache = self.cache();
        self.write_back(&mut cache, &faults)?;
        cache.untold.fill(None);
        match self.flush_fault(&faults) {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => self.image.file().sync_data(),
        }
    }

    pub(super) fn perform(
        &self,
        worker: usize,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
    ) -> Result<(), Failure> {
        let len = op.span().unwrap_or_else(|| data.iter().map(|buffer| u64::from(buffer.len)).sum());
        let faults = self.faults();
        if let Some(fault) = faults.iter().find(|fault| fault.meets(op.word(), op.at(), len)) {
            return Err(Failure::Errno(fault.errno));
        }
        let failed = |e: io::Error| Failure::Errno(e.raw_os_error().unwrap_or(libc::EIO));
        match op {
            Op::Read { at } => {
                let mut bytes = vec![0; len as usize];
                self.read(at, &mut bytes).map_err(failed)?;
                memory.write(data, 0, &bytes);
            }
            Op::Write { at, through } => {
                let mut bytes = vec![0; len as usize];
                memory.read(data, 0, &mut bytes);
                self.write(at, &bytes, through, &faults).map_err(failed)?;
            }
            Op::WriteZeroes { at, len, through, .. } => {
                self.write(at, &vec![0; len as usize], through, &faults).map_err(failed)?;
            }
            Op::Flush => return self.flush(worker),
            // A discard may do nothing.
            Op::Discard { .. } => {}
        }
        if op.is_durable() { self.report(worker) } else { Ok(()) }
    }

    fn flush(&self, worker: usize) -> Result<(), Failure> {
        let faults = self.faults();
        if let Some(errno) = self.flush_fault(&faults) {
            return Err(Failure::Lost(errno));
        }
        self.write_back(&mut self.cache(), &faults).map_err(Failure::lost)?;
        self.report(worker)
    }

    /// Returns whether all data that a worker relies on is on the disk.
    fn report(&self, worker: usize) -> Result<(), Failure> {
        self.image.file().sync_data().map_err(Failure::lost)?;
        self.cache().untold[worker].take().map_or(Ok(()), |errno| Err(Failure::Lost(errno)))
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the current faults.
    fn faults(&self) -> Vec<Fault> {
        let mut bytes = [0; 4096];
        let read = self.faults.as_ref().and_then(|file| file.read_at(&mut bytes, 0).ok());
        let text = String::from_utf8_lossy(&bytes[..read.unwrap_or(0)]);
        let fault = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [word, from, len, errno] = words[..] else { return None };
            Some(Fault {
                word: word.to_owned(),
                from: from.parse().ok()?,
                len: len.parse().ok()?,
                errno: errno.parse().ok()?,
            })
        };
        text.lines().filter_map(fault).collect()
    }

    fn flush_fault(&self, faults: &[Fault]) -> Option<i32> {
        faults.iter().find(|fault| fault.word == Op::Flush.word()).map(|fault| fault.errno)
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let cache = self.cache();
        self.image.file().read_exact_at(into, at)?;
        for (block, bytes) in cache.blocks.range(at..at + into.len() as u64) {
            let from = (block - at) as usize;
            into[from..from + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8], through: bool, faults: &[Fault]) -> io::Result<()> {
        let mut cache = self.cache();
        cache.writes = cache.writes.wrapping_add(1);
        let at_once = through || cache.writes.is_multiple_of(3);
        for (i, block) in bytes.as_chunks::<{ BLOCK as usize }>().0.iter().enumerate() {
            let place = at + i as u64 * BLOCK;
            if at_once {
                cache.blocks.remove(&place);
                self.write_block(&mut cache, place, block, faults)?;
            } else {
                cache.blocks.insert(place, *block);
            }
        }
        Ok(())
    }

    /// Writes all cached blocks to the file.
    fn write_back(&self, cache: &mut Cache, faults: &[Fault]) -> io::Result<()> {
        for (place, block) in std::mem::take(&mut cache.blocks) {
            self.write_block(cache, place, &block, faults)?;
        }
        Ok(())
    }

    /// Writes a block to the file, or loses it if there is a fault for it.
    fn write_block(&self, cache: &mut Cache, place: u64, block: &[u8], faults: &[Fault]) -> io::Result<()> {
        match faults.iter().find(|fault| fault.meets("writeback", place, BLOCK)) {
            Some(fault) => cache.untold.fill(Some(fault.errno)),
            None => self.image.file().write_all_at(block, place)?,
        }
        Ok(())
    }
}
