//! The floors: the least that two CPUs can do with shared memory, programmed by hand without any protection.

use super::pingpong::Echo;
use anyhow::Result;
use ginnel_layout::{PAGE, segment};
use ginnel_shmem::{Mapping, SharedMemory};

/// The offset of the words and buffers: in the arena of a segment that has no channels. The mapping begins after the reserved
/// front.
const PING: usize = (segment::ARENA - segment::RESERVED) as usize;
const PONG: usize = PING + 1024;
const BUFFERS: usize = PING + PAGE;

/// The size of a cache line in bytes.
const LINE: usize = 64;

/// Returns the number of cache lines that a message of `size` bytes and its header would take.
fn lines(size: usize) -> usize {
    (8 + size).div_ceil(LINE)
}

/// As many cache lines in each direction as a message has. The first word of each line is the number of the turn. The waiting
/// end looks at all lines, so that they arrive in parallel.
pub struct BarePing {
    memory: Mapping,
    lines: usize,
    turn: u64,
}

impl BarePing {
    /// Makes the timing end for messages of `size` bytes. The other end must have reset the words.
    pub fn new(memory: Mapping, size: usize) -> Self {
        Self { memory, lines: lines(size), turn: 0 }
    }
}

/// Passes the turn to the other end. The first line is written last.
fn say(memory: &Mapping, at: usize, lines: usize, turn: u64) {
    for line in (0..lines).rev() {
        memory.store_release_u64(at + line * LINE, turn);
    }
}

/// Looks once whether all lines contain the same turn. Returns that turn.
fn hear(memory: &Mapping, at: usize, lines: usize) -> Option<u64> {
    let turn = memory.load_acquire_u64(at);
    let differ = (1..lines).fold(0, |all, line| all | (memory.load_acquire_u64(at + line * LINE) ^ turn));
    (differ == 0).then_some(turn)
}

impl Echo for BarePing {
    fn exchange(&mut self, _message: &mut [u8]) -> Result<()> {
        self.turn += 1;
        say(&self.memory, PING, self.lines, self.turn);
        while hear(&self.memory, PONG, self.lines) != Some(self.turn) {}
        Ok(())
    }
}

/// Clears the words of an earlier measurement. Call it before the other end connects.
pub fn reset(memory: &Mapping, size: usize) {
    say(memory, PING, lines(size), 0);
    say(memory, PONG, lines(size), 0);
}

/// Answers without end, or until the word means stop (all ones).
pub fn bare_pong(memory: &Mapping, size: usize) {
    let lines = lines(size);
    let mut last = 0;
    loop {
        let Some(turn) = hear(memory, PING, lines) else { continue };
        if turn == u64::MAX {
            return;
        }
        if turn != last {
            say(memory, PONG, lines, turn);
            last = turn;
        }
    }
}

/// Ends [`bare_pong`].
pub fn stop(memory: &Mapping, size: usize) {
    say(memory, PING, lines(size), u64::MAX);
}

/// Sends messages one way as fast as possible, in an area of cache lines that is used again and again, with as many lines for
/// each message as it would have in a ring. The first word of a message is the number of the lap, and is stored last. The
/// reader publishes its position after each eighth of the area, and the writer looks there when it knows of no more room.
pub struct BareStores {
    memory: Mapping,
    size: usize,
    /// The number of lines written or read, and the number of lines that the writer knows to be free or that the reader has
    /// published as free.
    position: u64,
    free: u64,
}

impl BareStores {
    /// As many lines as the default ring has.
    const RUN: u64 = (256 << 10) / LINE as u64;
    /// The offset at which the reader publishes its position.
    const READ: usize = PING + 256;

    /// For messages of `size` bytes, a multiple of 8 such that a message's lines divide the area. The reading end must come
    /// first, because it resets the words.
    pub fn new(memory: Mapping, size: usize, reads: bool) -> Self {
        if reads {
            memory.zero(BUFFERS, Self::RUN as usize * LINE);
            memory.store_release_u64(Self::READ, 0);
        }
        Self { memory, size, position: 0, free: 0 }
    }

    /// Returns the place of the next message, and the number of the lap.
    fn next(&mut self) -> (usize, u64) {
        let (lap, line) = (self.position / Self::RUN + 1, self.position % Self::RUN);
        self.position += lines(self.size) as u64;
        (BUFFERS + line as usize * LINE, lap)
    }

    /// Writes `count` messages, and waits until they are read.
    pub fn write(&mut self, count: u64) {
        for number in 0..count {
            let (at, lap) = self.next();
            while self.position - self.free > Self::RUN {
                self.free = self.memory.load_acquire_u64(Self::READ);
            }
            for word in (0..self.size / 8).rev() {
                self.memory.store_relaxed_u64(at + 8 + word * 8, number);
            }
            self.memory.store_release_u64(at, lap);
        }
        while self.memory.load_acquire_u64(Self::READ) < self.position {}
    }

    /// Reads `count` messages.
    pub fn read(&mut self, count: u64) {
        let mut sum = 0u64;
        for _ in 0..count {
            let (at, lap) = self.next();
            while self.memory.load_acquire_u64(at) != lap {}
            for word in 0..self.size / 8 {
                sum = sum.wrapping_add(self.memory.load_relaxed_u64(at + 8 + word * 8));
            }
            if self.position - self.free >= Self::RUN / 8 {
                self.say();
            }
        }
        std::hint::black_box(sum);
        self.say();
    }

    fn say(&mut self) {
        self.free = self.position;
        self.memory.store_release_u64(Self::READ, self.position);
    }
}

/// Two buffers that are used in turns: the writer copies into one while the reader copies out of the other.
pub struct DoubleBuffer {
    memory: Mapping,
    chunk: usize,
    turn: u64,
}

impl DoubleBuffer {
    /// The words that count filled and emptied buffers.
    const FILLED: usize = PING + 256;
    const EMPTIED: usize = PING + 512;

    /// Uses `memory` in chunks of `chunk` bytes. The draining end must come first, because it resets the words.
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

    /// Copies `count` chunks in, and waits until they have been copied out.
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
