//! What all threads know of a disk.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ginnel_layout::virtio_blk::ID_LEN;
use ginnel_shmem::{Mapping, Memory};

/// A disk: a blk device has one, a scsi target one for each logical unit.
#[derive(Debug)]
pub struct Disk {
    /// Bytes of a block.
    pub block_size: u32,
    /// Refuses writes.
    pub read_only: bool,
    /// Whether there is a volatile cache at all, that a driver may turn off.
    pub write_cache: bool,
    /// Padded with zeros.
    pub serial: [u8; ID_LEN],
    /// Bytes; a multiple of the block size.
    bytes: AtomicU64,
    /// Whether the driver has left the cache on.
    cache_on: AtomicBool,
    /// Where that is noted for the next process.
    note: Mutex<Option<Mapping>>,
    /// Whether the driver flushes at all.
    flushes: AtomicBool,
}

/// What a note says of the cache. A fresh one says nothing.
mod note {
    pub const ON: u64 = 1;
    pub const OFF: u64 = 2;
}

impl Disk {
    /// A disk of so many bytes; those that fill no whole block are left out.
    pub fn new(bytes: u64, block_size: u32, read_only: bool, serial: &str) -> Self {
        let mut padded = [0; ID_LEN];
        let n = serial.len().min(ID_LEN);
        padded[..n].copy_from_slice(&serial.as_bytes()[..n]);
        let disk = Self {
            block_size,
            read_only,
            write_cache: true,
            serial: padded,
            bytes: AtomicU64::new(0),
            cache_on: AtomicBool::new(true),
            note: Mutex::default(),
            flushes: AtomicBool::new(true),
        };
        disk.set_bytes(bytes);
        disk
    }

    /// The same disk without a volatile cache: each write survives a power cut once it is done.
    pub fn without_cache(self) -> Self {
        self.cache_on.store(false, Ordering::Relaxed);
        Self { write_cache: false, ..self }
    }

    /// Its size now.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Changes its size. Requests that are under way end as they began.
    pub fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes - bytes % u64::from(self.block_size), Ordering::Relaxed);
    }

    /// Whether `len` bytes from `at` are whole blocks of the disk.
    #[inline]
    pub fn holds(&self, at: u64, len: u64) -> bool {
        let mask = u64::from(self.block_size) - 1;
        (at | len) & mask == 0 && at.checked_add(len).is_some_and(|end| end <= self.bytes())
    }

    /// Whether writes may wait for a flush.
    #[inline]
    pub fn write_back(&self) -> bool {
        self.is_cache_on() && self.flushes.load(Ordering::Relaxed)
    }

    /// Says whether the driver flushes. While it does not, no write waits for that.
    pub fn set_flushes(&self, flushes: bool) {
        self.flushes.store(flushes, Ordering::Relaxed);
    }

    /// Whether the driver sees a cache that is on.
    #[inline]
    pub fn is_cache_on(&self) -> bool {
        self.cache_on.load(Ordering::Relaxed)
    }

    /// Turns the cache on or off, as the driver wishes. Without a cache it stays off.
    pub fn turn_cache(&self, on: bool) {
        let on = on && self.write_cache;
        // Held over both, so that the note says what is so.
        let note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        self.cache_on.store(on, Ordering::Relaxed);
        if let Some(note) = &*note {
            note.store_relaxed_u64(0, if on { note::ON } else { note::OFF });
        }
    }

    /// Notes down from now on, in the first [`Disk::NOTE`] bytes of this memory, whether the cache is on. If they say so
    /// already, for a predecessor, that holds: a driver that has turned the cache off does not flush any more, and does not
    /// learn that the process is another one.
    pub fn keep_note(&self, memory: Option<Mapping>) {
        let said = memory.as_ref().map_or(0, |memory| memory.load_relaxed_u64(0));
        *self.note.lock().unwrap_or_else(PoisonError::into_inner) = memory;
        self.turn_cache(match said {
            note::ON => true,
            note::OFF => false,
            _ => self.is_cache_on(),
        });
    }

    /// Bytes of a note.
    pub const NOTE: usize = 8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_inside_are_held() {
        let disk = Disk::new(10_000, 4096, false, "a serial that is far too long");
        assert_eq!(disk.bytes(), 8192);
        assert!(disk.holds(0, 8192) && disk.holds(4096, 4096) && disk.holds(8192, 0));
        assert!(!disk.holds(512, 4096) && !disk.holds(0, 512) && !disk.holds(8192, 4096));
        assert!(!disk.holds(u64::MAX - 4095, 8192));
        assert_eq!(&disk.serial, b"a serial that is far");
    }

    #[test]
    fn the_drivers_choice_outlives_the_process() {
        let memory = Mapping::anonymous(4096).unwrap();
        let disk = || Disk::new(4096, 512, false, "");
        let first = disk();
        first.keep_note(Some(memory.clone()));
        assert!(first.write_back(), "a fresh note changes nothing");
        first.turn_cache(false);
        let second = disk();
        second.keep_note(Some(memory.clone()));
        assert!(!second.write_back());
        second.turn_cache(true);
        let uncached = disk().without_cache();
        uncached.keep_note(Some(memory.clone()));
        assert!(!uncached.write_back(), "there is none to turn on");
        second.keep_note(None);
        second.turn_cache(true);
        let third = disk();
        third.keep_note(Some(memory));
        assert!(!third.write_back(), "who keeps no note any more does not write it");
    }
}
