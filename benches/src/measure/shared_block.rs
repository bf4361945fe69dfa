//! The classic pair: a writer and a reader share one block, guarded by a lock and a condition variable. One of them works on it
//! at a time, so what is not copying is what the locks cost.

use super::locks::Signal;
use super::{Timing, cpu_seconds};
use anyhow::{Context, Result, ensure};
use ginnel::{Block, BlockOptions, Endpoint, Mapping, Memory, Rights};
use std::time::{Duration, Instant};

const BLOCK: &str = "bench-block";
/// In front of the bytes: what is in the block, and at the end how long the reader has copied, in nanoseconds.
const STATE: usize = 0;
const COPIED: usize = 8;
const BYTES: usize = 4096;

const EMPTY: u64 = 0;
const FULL: u64 = 1;
const LAST: u64 = 2;

/// What the two share.
pub trait Shared {
    /// Copies out.
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()>;
    /// Copies in.
    fn write(&self, at: usize, from: &[u8]) -> Result<()>;
}

impl Shared for Block {
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        Ok(Block::read(self, at, into)?)
    }
    fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        Ok(Block::write(self, at, from)?)
    }
}

/// A file mapped with mmap.
impl Shared for Mapping {
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        Memory::read(self, at, into);
        Ok(())
    }
    fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        Memory::write(self, at, from);
        Ok(())
    }
}

/// Makes the block, for the reader, who comes first.
pub fn make(endpoint: &Endpoint, size: usize) -> Result<Block> {
    Ok(endpoint.create_block(BLOCK, BYTES + size, &BlockOptions::default())?)
}

/// Opens it.
pub fn open(endpoint: &Endpoint, size: usize) -> Result<Block> {
    let block = endpoint.open_block_within(BLOCK, Rights::READ_WRITE, Duration::from_secs(10))?;
    ensure!(block.len() == BYTES + size, "the block has another size");
    Ok(block)
}

/// Maps a file that both know.
pub fn map(path: &str, size: usize) -> Result<Mapping> {
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    let len = BYTES + size;
    file.set_len(len as u64)?;
    Ok(Mapping::of_file(&file, 0, len, ginnel_shmem::Protection::ReadWrite)?)
}

/// One of the two.
pub struct End {
    shared: Box<dyn Shared>,
    pair: Box<dyn Signal>,
    private: Vec<u8>,
    copied: Duration,
}

impl End {
    /// Over what both share, with their lock.
    pub fn new(shared: Box<dyn Shared>, pair: Box<dyn Signal>, size: usize) -> Self {
        // Not zeros, or the first touch of each page would be counted as copying.
        Self { shared, pair, private: vec![0x5a; size], copied: Duration::ZERO }
    }

    fn word(&self, at: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        self.shared.read(at, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn set(&self, at: usize, value: u64) -> Result<()> {
        self.shared.write(at, &value.to_ne_bytes())
    }

    /// Locks, once the block is empty or once it is not; returns its state.
    fn lock_when(&mut self, empty: bool) -> Result<u64> {
        self.pair.lock()?;
        loop {
            let state = self.word(STATE)?;
            if (state == EMPTY) == empty {
                return Ok(state);
            }
            self.pair.wait()?;
        }
    }

    fn unlock(&mut self, state: u64) -> Result<()> {
        self.set(STATE, state)?;
        self.pair.notify()?;
        self.pair.unlock()
    }

    /// Empties the block of an earlier game. Before the writer comes.
    pub fn reset(&mut self) -> Result<()> {
        self.set(STATE, EMPTY)
    }

    /// Copies blocks out until the last one.
    pub fn read(mut self) -> Result<()> {
        loop {
            let state = self.lock_when(false)?;
            let begin = Instant::now();
            self.shared.read(BYTES, &mut self.private)?;
            self.copied += begin.elapsed();
            self.set(COPIED, u64::try_from(self.copied.as_nanos()).context("a long time")?)?;
            self.unlock(EMPTY)?;
            if state == LAST {
                // The block lives as long as this process: until the writer has seen how long it took.
                self.lock_when(false)?;
                return self.unlock(EMPTY);
            }
        }
    }

    /// Copies `count` blocks in; gigabytes a second, and the part of the time in which nobody copied.
    pub fn write(mut self, count: u64) -> Result<Timing> {
        let (cpu, start) = (cpu_seconds(), Instant::now());
        for left in (0..count).rev() {
            self.lock_when(true)?;
            let begin = Instant::now();
            self.shared.write(BYTES, &self.private)?;
            self.copied += begin.elapsed();
            self.unlock(if left == 0 { LAST } else { FULL })?;
        }
        self.lock_when(true)?;
        let took = start.elapsed().as_secs_f64();
        let theirs = self.word(COPIED)? as f64 * 1e-9;
        self.unlock(LAST)?;
        let rate = (count * self.private.len() as u64) as f64 / took / 1e9;
        let waiting = Some(1.0 - (self.copied.as_secs_f64() + theirs) / took);
        Ok(Timing { waiting, ..Timing::of(vec![rate], (cpu_seconds() - cpu) / took) })
    }
}
