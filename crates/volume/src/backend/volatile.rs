//! A file behind a write cache that a power cut empties; for tests.
//!
//! Writes are kept in this process's memory and reach the file with a flush, or when they must be durable at once. Who
//! kills the process cuts the power: all that was not flushed is gone. So that tests do not rest on a cache that is kind,
//! each third write goes to the file at once, as real caches write back when they like.

use std::collections::BTreeMap;
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
}

impl Volatile {
    /// With an empty cache.
    pub fn new(image: Image) -> Self {
        Self { image, cache: Mutex::default(), writes: AtomicU32::new(0) }
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

    fn flush(&self) -> io::Result<()> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        for (place, block) in cache.iter() {
            self.image.file().write_all_at(block, *place)?;
        }
        self.image.file().sync_data()?;
        cache.clear();
        Ok(())
    }
}
