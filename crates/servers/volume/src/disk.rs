//! The state of a disk that all threads share.

use ginnel_layout::virtio_blk::ID_LEN;
use ginnel_shmem::{Mapping, SharedMemory};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::error;

/// A disk: a blk device has one, and a scsi target has one for each logical unit.
#[derive(Debug)]
pub struct Disk {
    /// Size of a block, in bytes.
    pub block_size: u32,
    /// Whether the disk refuses writes.
    pub read_only: bool,
    /// Whether there is a volatile cache, which a driver may turn off.
    pub write_cache: bool,
    /// Whether requests that fail, because there is no space or the disk has an error, wait for an operator.
    pub holds_errors: bool,
    /// The serial number, padded with zeros.
    pub serial: [u8; ID_LEN],
    /// The size in bytes; a multiple of the block size.
    bytes: AtomicU64,
    /// Whether the driver has left the cache on.
    cache_on: AtomicBool,
    /// Flushes, and writes that must be durable, fail if they began before this time, in nanoseconds since the volume's
    /// start. 0 means that nothing was ever lost; [`u64::MAX`] means that writes are lost and no operator has accepted
    /// that.
    fails_before: AtomicU64,
    /// The note for the next process.
    note: Mutex<Note>,
    /// Whether the driver sends flushes at all.
    flushes: AtomicBool,
}

#[derive(Debug, Default)]
struct Note {
    memory: Option<Mapping>,
    /// How often writes were lost.
    losses: u64,
}

/// Bits of a note. A new note has none of them.
mod note {
    /// The cache is on.
    pub const ON: u64 = 1;
    /// The cache is off.
    pub const OFF: u64 = 2;
    /// Writes that had been accepted are lost.
    pub const LOST: u64 = 4;
}

impl Disk {
    /// Returns a disk of `bytes` bytes, rounded down to whole blocks.
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

    /// Returns the same disk without a volatile cache: each write is durable once it is complete.
    pub fn without_cache(self) -> Self {
        self.cache_on.store(false, Ordering::Relaxed);
        Self { write_cache: false, ..self }
    }

    /// Returns the same disk, with the choice whether failed requests wait for an operator.
    pub fn holding_errors(self, holds_errors: bool) -> Self {
        Self { holds_errors, ..self }
    }

    /// Returns its current size in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Changes its size. Requests that are under way are not affected.
    pub fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes - bytes % u64::from(self.block_size), Ordering::Relaxed);
    }

    /// Returns whether `len` bytes from `at` are whole blocks of the disk.
    #[inline]
    pub fn holds(&self, at: u64, len: u64) -> bool {
        let mask = u64::from(self.block_size) - 1;
        (at | len) & mask == 0 && at.checked_add(len).is_some_and(|end| end <= self.bytes())
    }

    /// Returns whether writes may stay in the cache until a flush.
    #[inline]
    pub fn write_back(&self) -> bool {
        self.is_cache_on() && self.flushes.load(Ordering::Relaxed)
    }

    /// Sets whether the driver sends flushes. While it does not, each write is made durable at once.
    pub fn set_flushes(&self, flushes: bool) {
        self.flushes.store(flushes, Ordering::Relaxed);
    }

    /// Returns whether the driver sees a cache that is on.
    #[inline]
    pub fn is_cache_on(&self) -> bool {
        self.cache_on.load(Ordering::Relaxed)
    }

    /// Turns the cache on or off for the driver. A disk without a cache keeps it off.
    pub fn turn_cache(&self, on: bool) {
        let on = on && self.write_cache;
        // The lock is held over both steps, so that the note matches the state.
        let note = self.note();
        self.cache_on.store(on, Ordering::Relaxed);
        self.write_note(&note);
    }

    /// From now on notes in the first [`Disk::NOTE`] bytes of this memory whether the cache is on and whether writes
    /// were lost. If the memory already has a predecessor's note, the disk takes over that state: a driver that has
    /// turned the cache off sends no more flushes, lost writes stay lost, and the driver does not learn that another
    /// process serves it.
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

    /// Notes that acknowledged writes are lost. From now on every flush fails.
    pub fn lose(&self) {
        let mut note = self.note();
        note.losses += 1;
        let before = self.fails_before.swap(u64::MAX, Ordering::Relaxed);
        self.write_note(&note);
        if before != u64::MAX {
            let serial = String::from_utf8_lossy(&self.serial);
            let fix = "check what the guest has there, then `ginnel volume reset-errors`";
            error!(
                "disk {:?}: acknowledged writes are lost; from now on no flush succeeds; {fix}",
                serial.trim_end_matches('\0')
            );
        }
    }

    /// Returns whether acknowledged writes are lost.
    pub fn has_lost(&self) -> bool {
        self.fails_before.load(Ordering::Relaxed) == u64::MAX
    }

    /// Returns whether a request that began at `began`, in nanoseconds since the volume's start, may be reported as
    /// durable. Its own worker must have received no report of a loss either.
    ///
    /// A driver that has learned of a loss from one queue finds it here with its next request on any queue: the two
    /// rings, and the driver between them, order the first worker's store before the other worker's load.
    #[inline]
    pub fn makes_durable(&self, began: u64) -> bool {
        began >= self.fails_before.load(Ordering::Relaxed)
    }

    /// Forgets the loss of writes. `accept` takes all reports of lost writes from the kernel, and `now` is called after
    /// that. Requests that were under way meanwhile fail. Returns the error of `accept`, or an error that says that
    /// more writes were lost meanwhile.
    pub fn forget_losses(
        &self,
        accept: impl FnOnce() -> Result<(), String>,
        now: impl FnOnce() -> u64,
    ) -> Result<(), String> {
        let losses = self.note().losses;
        accept()?;
        let note = self.note();
        if note.losses != losses {
            return Err("more writes were lost meanwhile: the disk still fails".to_owned());
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

    /// Size of a note, in bytes.
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
    fn a_loss_is_remembered_until_an_operator_accepts_it() {
        let memory = Mapping::anonymous(4096).unwrap();
        let disk = || Disk::new(4096, 512, false, "");
        let first = disk();
        first.keep_note(Some(memory.clone()));
        first.turn_cache(false);
        assert!(!first.has_lost() && first.makes_durable(0));
        first.lose();
        // The loss is still known after a restart of the process, whatever the driver does.
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
