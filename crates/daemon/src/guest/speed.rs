//! How fast a segment can be copied: a mapping that the CPU does not cache is a hundred times slower, and nothing else
//! tells.

use super::memory_device::MemoryDevice;
use anyhow::{Context, Result};
use ginnel_shmem::{Mapping, Memory, Protection};
use std::time::{Duration, Instant};

/// Where in a segment is measured: inside its reserved front, behind everything that any device keeps there. Whatever
/// is written there disturbs nobody.
const AT: u64 = 1 << 20;
/// Bytes that are copied, again and again.
const PIECE: usize = 64 << 10;
/// How long each direction is measured.
const TIME: Duration = Duration::from_millis(4);
/// Below this, in MB/s, the memory is surely not cached.
const UNCACHED: u32 = 600;

/// Copy speeds in MB/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// Out of the segment.
    pub read: u32,
    /// Into it.
    pub write: u32,
}

impl Speed {
    /// Measures; takes some ten milliseconds.
    pub fn measure(device: &MemoryDevice) -> Result<Self> {
        let memory = Mapping::of_file(&device.memory, device.offset + AT, PIECE, Protection::ReadWrite)
            .context("cannot map it")?;
        let mut private = vec![0; PIECE];
        memory.read(0, &mut private); // Page faults are not what is measured.
        let read = rate(|| memory.read(0, &mut private));
        let write = rate(|| memory.write(0, &private));
        Ok(Self { read, write })
    }

    /// Whether the mapping behaves as if it was not cached.
    pub fn looks_uncached(self) -> bool {
        self.read.min(self.write) < UNCACHED
    }
}

/// MB/s of the fastest copy of [`PIECE`] bytes: the others were interrupted.
fn rate(mut copy: impl FnMut()) -> u32 {
    let begun = Instant::now();
    let mut best = Duration::MAX;
    loop {
        let before = Instant::now();
        copy();
        best = best.min(before.elapsed());
        if begun.elapsed() >= TIME {
            let rate = PIECE as f64 / best.as_secs_f64() / 1e6;
            return (rate as u32).max(1); // 0 means: not measured.
        }
    }
}
