//! A writer and a reader share one block, guarded by a lock and a condition variable. Only one of them works on it at a time,
//! so the time without copying is the cost of the locks: from the end of a copy at one end to the beginning of the next copy at
//! the other end. This includes unlocking and signalling, noticing, locking, everything that keeps the other end from its CPU,
//! and two looks at the clock. (Time that is taken from a process while it copies counts as copying.)
//!
//! Words in front of the block's bytes say what is in the block. They are used in place, as the C programs do.
//!
//! The same with a bare word in each direction instead of lock and condition variable shows the machine's own cost.

#![allow(unsafe_code)] // Words in place.

use super::locks::{Lock, Signal};
use super::{Handing, Timing, cpu_seconds};
use anyhow::{Context, Result, ensure};
use ginnel::{Block, BlockOptions, Endpoint, Mapping, Rights, SharedMemory, SharedSlice};
use ginnel_layout::{PAGE, segment};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: &str = "bench-block";
/// The offset of the words in front of the bytes: what is in the block, and at the end how long the reader has copied, in
/// nanoseconds.
const STATE: usize = 0;
const COPIED: usize = 1;
const BYTES: usize = 4096;

const EMPTY: u64 = 0;
const FULL: u64 = 1;
const LAST: u64 = 2;

/// The memory that the two ends share.
pub trait Shared {
    /// Returns the words in front. They live as long as this value.
    fn front(&self) -> Result<*const AtomicU64>;
    /// Copies the bytes from position `at` of the memory into `into`.
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()>;
    /// Copies `from` to position `at` of the memory.
    fn write(&self, at: usize, from: &[u8]) -> Result<()>;
}

impl Shared for Block {
    fn front(&self) -> Result<*const AtomicU64> {
        Ok(self.slice()?.as_ptr().cast())
    }
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        Ok(Block::read(self, at, into)?)
    }
    fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        Ok(Block::write(self, at, from)?)
    }
}

/// A file that is mapped with mmap.
impl Shared for Mapping {
    fn front(&self) -> Result<*const AtomicU64> {
        Ok(SharedSlice::new(self, 0, BYTES).as_ptr().cast())
    }
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        SharedMemory::read(self, at, into);
        Ok(())
    }
    fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        SharedMemory::write(self, at, from);
        Ok(())
    }
}

/// Makes the block. The reader does this, because it comes first.
pub fn make(endpoint: &Endpoint, size: usize) -> Result<Block> {
    Ok(endpoint.create_block(BLOCK, BYTES + size, &BlockOptions::default())?)
}

/// Opens the block.
pub fn open(endpoint: &Endpoint, size: usize) -> Result<Block> {
    let block = endpoint.open_block_within(BLOCK, Rights::READ_WRITE, Duration::from_secs(10))?;
    ensure!(block.len() == BYTES + size, "the block has another size");
    Ok(block)
}

/// Maps a file that both ends know.
pub fn map(path: &str, size: usize) -> Result<Mapping> {
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    let len = BYTES + size;
    file.set_len(len as u64)?;
    Ok(Mapping::of_file(&file, 0, len, ginnel_shmem::Protection::ReadWrite)?)
}

/// No lock and no condition variable: each end counts its word up when it has done its part, and looks at the other end's word.
pub struct Bare {
    memory: Mapping,
    mine: usize,
    theirs: usize,
    done: u64,
    seen: u64,
}

impl Bare {
    /// Uses two words of a segment that has no objects. The reader must come first, because it clears them.
    pub fn new(memory: Mapping, reader: bool) -> Self {
        let (a, b) = ((segment::ARENA - segment::RESERVED) as usize, PAGE);
        if reader {
            memory.store_release_u64(a, 0);
            memory.store_release_u64(a + b, 0);
        }
        let (mine, theirs) = if reader { (a, a + b) } else { (a + b, a) };
        Self { memory, mine, theirs, done: 0, seen: 0 }
    }
}

impl Lock for Bare {
    fn lock(&mut self) -> Result<()> {
        Ok(())
    }
    fn unlock(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Signal for Bare {
    fn wait(&mut self) -> Result<()> {
        loop {
            let word = self.memory.load_acquire_u64(self.theirs);
            if word != self.seen {
                self.seen = word;
                return Ok(());
            }
        }
    }
    fn notify(&mut self) -> Result<()> {
        self.done += 1;
        self.memory.store_release_u64(self.mine, self.done);
        Ok(())
    }
}

/// One of the two ends.
pub struct End {
    shared: Box<dyn Shared>,
    front: *const AtomicU64,
    pair: Box<dyn Signal>,
    private: Vec<u8>,
    copied: Duration,
}

impl End {
    /// Makes an end that uses this memory and this lock.
    pub fn new(shared: Box<dyn Shared>, pair: Box<dyn Signal>, size: usize) -> Result<Self> {
        let front = shared.front()?;
        // Not zeros, because then the first touch of each page would count as copying.
        Ok(Self { shared, front, pair, private: vec![0x5a; size], copied: Duration::ZERO })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: a page in front of the bytes, which `shared` keeps mapped; both sides use it as atomic words only.
        unsafe { &*self.front.add(at) }
    }

    fn get(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    fn set(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    /// Locks when the block is empty, or when it is not. Returns its state.
    fn lock_when(&mut self, empty: bool) -> Result<u64> {
        self.pair.lock()?;
        loop {
            let state = self.get(STATE);
            if (state == EMPTY) == empty {
                return Ok(state);
            }
            self.pair.wait()?;
        }
    }

    fn unlock(&mut self, state: u64) -> Result<()> {
        self.set(STATE, state);
        self.pair.notify()?;
        self.pair.unlock()
    }

    /// Empties the block of an earlier measurement. Call it before the writer connects.
    pub fn reset(&mut self) {
        self.set(STATE, EMPTY);
    }

    /// Copies blocks out until the last one.
    pub fn read(mut self) -> Result<()> {
        loop {
            let state = self.lock_when(false)?;
            let begin = Instant::now();
            self.shared.read(BYTES, &mut self.private)?;
            self.copied += begin.elapsed();
            self.set(COPIED, u64::try_from(self.copied.as_nanos()).context("a long time")?);
            self.unlock(EMPTY)?;
            if state == LAST {
                // The block lives only as long as this process, so wait until the writer has seen how long copying took.
                self.lock_when(false)?;
                return self.unlock(EMPTY);
            }
        }
    }

    /// Copies `count` blocks in. Returns gigabytes per second, and the part of the time in which neither end copied.
    pub fn write(mut self, count: u64) -> Result<Timing> {
        let cpu = cpu_seconds();
        let mut hand_overs = Vec::new();
        self.lock_when(true)?;
        let (start, mut theirs) = (Instant::now(), Duration::ZERO);
        let mut begin = start;
        for left in (1..=count).rev() {
            self.shared.write(BYTES, &self.private)?;
            let ours = begin.elapsed();
            self.unlock(if left == 1 { LAST } else { FULL })?;
            self.lock_when(true)?;
            let copied = Duration::from_nanos(self.get(COPIED));
            let end = Instant::now();
            // The other end's clock may be finer or coarser than ours.
            let both = ours + copied.saturating_sub(theirs);
            hand_overs.push((end - begin).saturating_sub(both));
            (begin, theirs) = (end, copied);
        }
        let took = start.elapsed().as_secs_f64();
        self.unlock(LAST)?;
        let rate = (count * self.private.len() as u64) as f64 / took / 1e9;
        let all: Duration = hand_overs.iter().sum();
        let spread = Timing::of(hand_overs.iter().map(|d| d.as_nanos() as f64).collect(), 0.0);
        let longest = hand_overs.iter().max().map_or(0.0, |d| d.as_nanos() as f64);
        let handing = Handing { share: all.as_secs_f64() / took, median: spread.median, longest };
        Ok(Timing { handing: Some(handing), ..Timing::of(vec![rate], (cpu_seconds() - cpu) / took) })
    }
}
