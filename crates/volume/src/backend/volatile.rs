//! A file behind a write cache that a power cut empties; for tests.
//!
//! Writes are kept in this process's memory and reach the file with a flush, or when they must be durable at once. Who
//! kills the process cuts the power: all that was not flushed is gone. So that tests do not rest on a cache that is kind,
//! each third write goes to the file at once, as real caches write back when they like.
//!
//! If there is a file `IMAGE.faults` when it starts, its lines say what fails, from the next request on: operation, first
//! byte, length, error number. `write 4096 512 28`: there is no space for that sector. A flush fails at `flush 0 0 5`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use ginnel_shmem::Mapping;
use ginnel_virtqueue::{Buffer, GuestMemory};

use super::{Failure, Image, Op};

/// The unit of the cache.
const BLOCK: u64 = 512;

/// The disk.
pub struct Volatile {
    image: Image,
    cache: Mutex<BTreeMap<u64, [u8; BLOCK as usize]>>,
    writes: AtomicU32,
    faults: Option<File>,
}

impl Volatile {
    /// With an empty cache.
    pub fn new(image: Image) -> Self {
        let mut faults = image.path().as_os_str().to_owned();
        faults.push(".faults");
        Self { image, cache: Mutex::default(), writes: AtomicU32::new(0), faults: File::open(faults).ok() }
    }

    /// The file behind.
    pub fn image(&self) -> &Image {
        &self.image
    }

    pub(super) fn perform(
        &self,
        op: Op,
        data: &[Buffer],
        memory: &GuestMemory<Mapping>,
    ) -> Result<(), Failure> {
        let failed = |e: io::Error| Failure::Errno(e.raw_os_error().unwrap_or(libc::EIO));
        let len = data.iter().map(|buffer| u64::from(buffer.len)).sum();
        if let Some(errno) = self.fault(op, len) {
            return Err(Failure::Errno(errno));
        }
        match op {
            Op::Read { at } => {
                let mut bytes = vec![0; data.iter().map(|b| b.len as usize).sum()];
                self.read(at, &mut bytes).map_err(failed)?;
                memory.write(data, 0, &bytes);
                Ok(())
            }
            Op::Write { at, through } => {
                let mut bytes = vec![0; data.iter().map(|b| b.len as usize).sum()];
                memory.read(data, 0, &mut bytes);
                self.write(at, &bytes, through).map_err(failed)
            }
            Op::Flush => self.flush().map_err(failed),
            Op::WriteZeroes { at, len, through, .. } => {
                self.write(at, &vec![0; len as usize], through).map_err(failed)
            }
            // Permitted to do nothing.
            Op::Discard { .. } => Ok(()),
        }
    }

    /// With which error an operation is to fail.
    fn fault(&self, op: Op, len: u64) -> Option<i32> {
        let mut bytes = [0; 4096];
        let n = self.faults.as_ref()?.read_at(&mut bytes, 0).ok()?;
        let text = String::from_utf8_lossy(&bytes[..n]);
        text.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [word, from, long, errno] = words[..] else { return None };
            let (from, long): (u64, u64) = (from.parse().ok()?, long.parse().ok()?);
            let meets = op == Op::Flush || (op.at() < from + long && from < op.at() + len);
            if word == op.word() && meets { errno.parse().ok() } else { None }
        })
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        self.image.file().read_exact_at(into, at)?;
        for (block, bytes) in cache.range(at..at + into.len() as u64) {
            let from = (block - at) as usize;
            into[from..from + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8], through: bool) -> io::Result<()> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let at_once = through || self.writes.fetch_add(1, Ordering::Relaxed).is_multiple_of(3);
        for (i, block) in bytes.as_chunks::<{ BLOCK as usize }>().0.iter().enumerate() {
            let place = at + i as u64 * BLOCK;
            if at_once {
                cache.remove(&place);
            } else {
                cache.insert(place, *block);
            }
        }
        if at_once {
            self.image.file().write_all_at(bytes, at)?;
        }
        if through { self.image.file().sync_data() } else { Ok(()) }
    }

    /// Empties the cache into the file.
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, block) in cache.iter() {
            self.image.file().write_all_at(block, *place)?;
        }
        self.image.file().sync_data()?;
        cache.clear();
        Ok(())
    }
}
