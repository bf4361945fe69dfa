//! A guest program that writes numbered blocks to a disk from several threads, remembers which writes were acknowledged, and
//! reads blocks back all the time. When it is told to end, it checks every block.

use anyhow::{Context, Result, bail, ensure};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;

const USAGE: &str = "blocks DEVICE MIB THREADS END\n\
    Each thread has its part of the first MIB of DEVICE, and one request at a time. Ends when the file END is there.";

/// The size of a block in bytes.
const SIZE: usize = 4096;

/// The number of requests between two flushes of a thread.
const FLUSH: u64 = 64;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [device, mib, threads, end] = &args[..] else { bail!(USAGE) };
    let blocks = mib.parse::<u64>().context(USAGE)? << 20 >> SIZE.ilog2();
    let threads: u64 = threads.parse().context(USAGE)?;
    let parts = (0..threads).map(|n| n * blocks / threads..(n + 1) * blocks / threads);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(device)
        .with_context(|| device.clone())?;
    let work = |part| Part::new(&file, part).run(Path::new(end));
    let done = thread::scope(|scope| {
        let handles: Vec<_> = parts.map(|part| scope.spawn(move || work(part))).collect();
        let results = handles.into_iter().map(|handle| handle.join().expect("no panic"));
        results.collect::<Result<Vec<_>>>()
    })?;
    let sum = |f: fn(&(u64, u64)) -> u64| done.iter().map(f).sum::<u64>();
    println!("checked {blocks} blocks after {} writes and {} reads", sum(|d| d.0), sum(|d| d.1));
    Ok(())
}

/// Direct I/O needs aligned memory.
#[repr(align(4096))]
struct Block([u8; SIZE]);

/// The blocks of one thread.
struct Part<'f> {
    file: &'f File,
    first: u64,
    /// For each block, the number of the last acknowledged write.
    numbers: Vec<u64>,
    buffer: Box<Block>,
    random: u64,
}

impl<'f> Part<'f> {
    fn new(file: &'f File, range: std::ops::Range<u64>) -> Self {
        let numbers = vec![0; (range.end - range.start) as usize];
        let random = 0x9e37_79b9_7f4a_7c15 ^ range.start;
        Self { file, first: range.start, numbers, buffer: Box::new(Block([0; SIZE])), random }
    }

    fn run(mut self, end: &Path) -> Result<(u64, u64)> {
        let (mut writes, mut reads) = (0, 0);
        // Write each block once, so that each has a number.
        for at in 0..self.numbers.len() {
            self.write(at)?;
        }
        while !end.exists() {
            for _ in 0..FLUSH {
                let random = self.next();
                let at = (random >> 8) as usize % self.numbers.len();
                if random.is_multiple_of(2) {
                    self.write(at)?;
                    writes += 1;
                } else {
                    self.check(at)?;
                    reads += 1;
                }
            }
            self.file.sync_data().context("flush")?;
        }
        (0..self.numbers.len()).try_for_each(|at| self.check(at))?;
        Ok((writes, reads))
    }

    fn write(&mut self, at: usize) -> Result<()> {
        let number = self.numbers[at] + 1;
        let block = self.first + at as u64;
        fill(&mut self.buffer.0, block, number);
        self.file
            .write_all_at(&self.buffer.0, block * SIZE as u64)
            .with_context(|| format!("write of {block}"))?;
        self.numbers[at] = number;
        Ok(())
    }

    fn check(&mut self, at: usize) -> Result<()> {
        let block = self.first + at as u64;
        // Bytes that the disk does not fill in are noticed.
        self.buffer.0.fill(0xaa);
        self.file
            .read_exact_at(&mut self.buffer.0, block * SIZE as u64)
            .with_context(|| format!("read of {block}"))?;
        let mut wanted = [0; SIZE];
        fill(&mut wanted, block, self.numbers[at]);
        let word =
            |bytes: &[u8; SIZE], n: usize| u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().unwrap());
        let wrong = (0..SIZE / 8).find(|&n| word(&self.buffer.0, n) != word(&wanted, n));
        ensure!(
            wrong.is_none(),
            "block {block} is not number {} that was acknowledged: it begins with block {}, number {}, and differs at word {wrong:?}",
            self.numbers[at],
            word(&self.buffer.0, 0),
            word(&self.buffer.0, 1),
        );
        Ok(())
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// A block starts with its own number and the number of the write; these determine all its other words.
fn fill(bytes: &mut [u8; SIZE], block: u64, number: u64) {
    let seed = block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xff51_afd7_ed55_8ccd);
    for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match n {
            0 => block,
            1 => number,
            _ => seed.rotate_left(n as u32 & 63).wrapping_add(n as u64),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}
