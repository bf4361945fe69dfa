//! The floors: the least that two CPUs can do with shared memory, written by hand, with nothing to protect anybody.

use super::pingpong::Echo;
use anyhow::Result;
use ginnel_layout::{PAGE, segment};
use ginnel_shmem::{Mapping, Memory};

/// Where the words and buffers lie: in the arena of a segment that has no channels. The mapping begins behind the
/// reserved front.
const PING: usize = (segment::ARENA - segment::RESERVED) as usize;
const PONG: usize = PING + 128;
const BUFFERS: usize = PING + PAGE;

/// One cache line in each direction; the payload is in the line (or in the lines behind it).
pub struct BarePing {
    memory: Mapping,
    turn: u64,
}

impl BarePing {
    /// The other end must have reset the words.
    pub fn new(memory: Mapping) -> Self {
        Self { memory, turn: 0 }
    }
}

impl Echo for BarePing {
    fn exchange(&mut self, _message: &mut [u8]) -> Result<()> {
        self.turn += 1;
        self.memory.store_release_u64(PING, self.turn);
        while self.memory.load_acquire_u64(PONG) != self.turn {}
        Ok(())
    }
}

/// Forgets an earlier game. Before the other end comes.
pub fn reset(memory: &Mapping) {
    memory.store_release_u64(PING, 0);
    memory.store_release_u64(PONG, 0);
}

/// Answers for ever, or until the word says stop (all ones).
pub fn bare_pong(memory: &Mapping) {
    let mut last = 0;
    loop {
        let turn = memory.load_acquire_u64(PING);
        if turn == u64::MAX {
            return;
        }
        if turn != last {
            memory.store_release_u64(PONG, turn);
            last = turn;
        }
    }
}

/// Ends [`bare_pong`].
pub fn stop(memory: &Mapping) {
    memory.store_release_u64(PING, u64::MAX);
}

/// Two buffers, taken in turns: the writer copies in while the reader copies out the other.
pub struct DoubleBuffer {
    memory: Mapping,
    chunk: usize,
    turn: u64,
}

impl DoubleBuffer {
    /// Words that count what has been filled and what has been emptied.
    const FILLED: usize = PING + 256;
    const EMPTIED: usize = PING + 512;

    /// Over `memory`, in chunks of `chunk` bytes. The draining end comes first, and resets the words.
    pub fn new(memory: Mapping, chunk: usize, drains: bool) -> Self {
        if drains {
            memory.store_release_u64(Self::FILLED, 0);
            memory.store_release_u64(Self::EMPTIED, 0);
        }
        Self { memory, chunk, turn: 0 }
    }

    fn at(&self) -> usize {
        BUFFERS + (self.turn as usize % 2) * self.chunk
    }

    /// Copies `count` chunks in, and waits until they are out.
    pub fn fill(&mut self, source: &[u8], count: u64) {
        for _ in 0..count {
            while self.turn - self.memory.load_acquire_u64(Self::EMPTIED) > 1 {}
            self.memory.write(self.at(), source);
            self.turn += 1;
            self.memory.store_release_u64(Self::FILLED, self.turn);
        }
        while self.memory.load_acquire_u64(Self::EMPTIED) < self.turn {}
    }

    /// Copies a chunk out.
    pub fn drain(&mut self, target: &mut [u8]) {
        while self.memory.load_acquire_u64(Self::FILLED) <= self.turn {}
        self.memory.read(self.at(), target);
        self.turn += 1;
        self.memory.store_release_u64(Self::EMPTIED, self.turn);
    }
}
