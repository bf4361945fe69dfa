//! What all threads know of a disk.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ginnel_layout::virtio_blk::ID_LEN;
use ginnel_shmem::{Mapping, SharedMemory};
use tracing::error;

/// A disk: a blk device has one, a scsi target one for each logical unit.
#[derive(Debug)]
pub struct Disk {
    /// Bytes of a block.
    pub block_size: u32,
    /// Refuses writes.
    pub read_only: bool,
    /// Whether there is a volatile cache at all, that a driver may turn off.
    pub write_cache: bool,
    /// Whether requests that fail, because there is no space or the disk has an error, wait for an operator.
    pub holds_errors: bool,
    /// Padded with zeros.
    pub serial: [u8; ID_LEN],
    /// Bytes; a multiple of the block size.
    bytes: AtomicU64,
    /// Whether the driver has left the cache on.
    cache_on: AtomicBool,
    /// Flushes, and writes that must be durable, fail if they began before this time: nanoseconds since the volume's start. 0:
    /// nothing was ever lost; [`u64::MAX`]: something is, until an operator says otherwise.
    fails_before: AtomicU64,
    /// What is noted for the next process.
    note: Mutex<Note>,
    /// Whether the driver flushes at all.
    flushes: AtomicBool,
}

#[derive(Debug, Default)]
struct Note {
    memory: Option<Mapping>,
    /// How often something was lost.
    losses: u64,
}

/// Bits of a note. A fresh one has none.
mod note {
    /// The cache is on.
    pub const ON: u64 = 1;
    /// The cache is off.
    pub const OFF: u64 = 2;
    /// Writes that had been accepted are lost.
    pub const LOST: u64 = 4;
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
            holds_errors: false,
            serial: padded,
            bytes: AtomicU64::new(0),
            cache_on: AtomicBool::new(true),
            fails_before: AtomicU64::new(0),
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

    /// The same disk, where requests that fail wait for an operator, or do not.
    pub fn holding_errors(self, holds_errors: bool) -> Self {
        Self { holds_errors, ..self }
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
        let note = self.note();
        self.cache_on.store(on, Ordering::Relaxed);
        self.write_note(&note);
    }

    /// Notes down from now on, in the first [`Disk::NOTE`] bytes of this memory, whether the cache is on and whether writes were
    /// lost. If they say so already, for a predecessor, that holds: a driver that has turned the cache off does not flush any
    /// more, what was lost is so still, and the driver does not learn that the process is another one.
    pub fn keep_note(&self, memory: Option<Mapping>) {
        let said = memory.as_ref().map_or(0, |memory| memory.load_relaxed_u64(0));
        self.note().memory = memory;
        if said & note::LOST != 0 {
            self.lose();
        }
        self.turn_cache(match said & (note::ON | note::OFF) {
            note::ON => true,
            note::OFF => false,
            _ => self.is_cache_on(),
        });
    }

    /// Writes that had been accepted are lost. From now on nothing can be made durable.
    pub fn lose(&self) {
        let mut note = self.note();
        note.losses += 1;
        let before = self.fails_before.swap(u64::MAX, Ordering::Relaxed);
        self.write_note(&note);
        if before != u64::MAX {
            let serial = String::from_utf8_lossy(&self.serial);
            let fix = "check what the guest has there, then `ginnel volume reset-errors`";
            error!(
                "disk {:?}: accepted writes are lost; from now on no flush succeeds; {fix}",
                serial.trim_end_matches('\0')
            );
        }
    }

    /// Whether writes that had been accepted are lost.
    pub fn has_lost(&self) -> bool {
        self.fails_before.load(Ordering::Relaxed) == u64::MAX
    }

    /// Whether what began at `began`, in nanoseconds since the volume's start, may be said to be durable once its own worker was
    /// told of no loss.
    ///
    /// A driver that has heard of a loss from one queue finds it here with its next request on any: what the one worker has
    /// stored is ordered before what the other loads by the two rings and the driver between them.
    #[inline]
    pub fn makes_durable(&self, began: u64) -> bool {
        began >= self.fails_before.load(Ordering::Relaxed)
    }

    /// Forgets that writes are lost, after `accept` has taken all reports of them from the kernel; `now` is asked then. What was
    /// on its way meanwhile fails. An error is that of `accept`, or says that more was lost meanwhile.
    pub fn forget_losses(
        &self,
        accept: impl FnOnce() -> Result<(), String>,
        now: impl FnOnce() -> u64,
    ) -> Result<(), String> {
        let losses = self.note().losses;
        accept()?;
        let note = self.note();
        if note.losses != losses {
            return Err("more writes were lost meanwhile: the disk fails still".to_owned());
        }
        if self.has_lost() {
            self.fails_before.store(now(), Ordering::Relaxed);
            self.write_note(&note);
        }
        Ok(())
    }

    fn note(&self) -> MutexGuard<'_, Note> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_note(&self, note: &Note) {
        if let Some(memory) = &note.memory {
            let cache = if self.is_cache_on() { note::ON } else { note::OFF };
            memory.store_relaxed_u64(0, cache | if self.has_lost() { note::LOST } else { 0 });
        }
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
    fn what_is_lost_is_so_until_an_operator_accepts_it() {
        let memory = Mapping::anonymous(4096).unwrap();
        let disk = || Disk::new(4096, 512, false, "");
        let first = disk();
        first.keep_note(Some(memory.clone()));
        first.turn_cache(false);
        assert!(!first.has_lost() && first.makes_durable(0));
        first.lose();
        // Over a restart of the process, whatever the driver does.
        let second = disk();
        second.keep_note(Some(memory.clone()));
        second.turn_cache(true);
        assert!(second.has_lost() && !second.makes_durable(u64::MAX - 1));
        assert_eq!(second.forget_losses(|| Err("no".to_owned()), || 0), Err("no".to_owned()));
        let more = second.forget_losses(
            || {
                second.lose();
                Ok(())
            },
            || 0,
        );
        assert!(more.is_err() && second.has_lost());
        second.forget_losses(|| Ok(()), || 100).unwrap();
        assert!(!second.makes_durable(99), "its worker's report may have been taken away");
        assert!(second.makes_durable(100));
        second.forget_losses(|| Ok(()), || 200).unwrap();
        assert!(second.makes_durable(100), "nothing was lost since");
        let third = disk();
        third.keep_note(Some(memory));
        assert!(!third.has_lost() && third.write_back());
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
