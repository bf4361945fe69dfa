//! Measures how fast a segment can be copied. A mapping that the CPU does not cache is a hundred times slower, and nothing else
//! shows it.

use super::memory_device::MemoryDevice;
use anyhow::{Context, Result};
use ginnel_layout::{PAGE, segment};
use ginnel_shmem::{Mapping, Protection, SharedMemory};
use std::time::{Duration, Instant};

/// The place in a segment's mapping that is measured: the spare pages between its header and its arena, which nobody uses.
const AT: usize = PAGE;
/// The bytes that are copied again and again.
const PIECE: usize = (segment::ARENA - segment::RESERVED) as usize - AT;
/// The bytes that are mapped for the measurement. Every segment has them behind its front, and they are whole pages of any kind.
const MAPPED: usize = segment::SIZE_UNIT as usize;
/// The time for which each direction is measured.
const TIME: Duration = Duration::from_millis(4);
/// The factor from which on memory counts as uncached. Uncached memory is slower than private memory by a factor of fifty or
/// more; cached memory by less than two.
const UNCACHED: u32 = 8;

/// Copy speeds in MB/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    /// The speed of reading from the segment.
    pub read: u32,
    /// The speed of writing into the segment; 0 if that is forbidden.
    pub write: u32,
    /// The speed of copying private memory, for comparison: an emulated CPU is slow everywhere.
    pub private: u32,
}

impl Speed {
    /// Measures a device; takes some ten milliseconds.
    pub fn measure(device: &MemoryDevice) -> Result<Self> {
        let memory = Mapping::of_file(&device.memory, device.offset, MAPPED, device.protection)
            .context("cannot map it")?;
        let memory = memory.part(AT, PIECE).context("it is too short")?;
        let mut buffer = vec![0; PIECE];
        memory.read(0, &mut buffer); // This keeps page faults out of the measurement.
        let read = rate(|| memory.read(0, &mut buffer));
        let write = match device.protection {
            Protection::Read => 0,
            Protection::ReadWrite => rate(|| memory.write(0, &buffer)), // This writes what was just read, so nothing changes.
        };
        let other = Mapping::anonymous(PIECE).context("cannot map memory")?;
        other.write(0, &buffer);
        let private = rate(|| other.read(0, &mut buffer));
        Ok(Self { read, write, private })
    }

    /// Returns whether the mapping behaves as if it was not cached.
    pub fn looks_uncached(self) -> bool {
        let write = if self.write == 0 { self.read } else { self.write };
        self.read.min(write) < self.private / UNCACHED
    }
}

/// Returns the MB/s of the fastest copy of [`PIECE`] bytes, because slower ones were interrupted.
fn rate(mut copy: impl FnMut()) -> u32 {
    let begun = Instant::now();
    let mut best = Duration::MAX;
    loop {
        let before = Instant::now();
        copy();
        best = best.min(before.elapsed());
        if begun.elapsed() >= TIME {
            let rate = PIECE as f64 / best.as_secs_f64() / 1e6;
            return (rate as u32).max(1); // 0 would mean that nothing was measured.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowness_is_judged_relative_to_private_memory() {
        assert!(!Speed { read: 719, write: 712, private: 900 }.looks_uncached(), "an emulated CPU");
        assert!(!Speed { read: 11_000, write: 9000, private: 20_000 }.looks_uncached());
        assert!(Speed { read: 120, write: 8000, private: 15_000 }.looks_uncached(), "write-combining");
        assert!(!Speed { read: 11_000, write: 0, private: 20_000 }.looks_uncached(), "read-only");
        assert!(Speed { read: 90, write: 300, private: 15_000 }.looks_uncached());
    }
}
