//! The best that the machine can do, measured beside each program.

use crate::measure::pin;
use crate::measure::pingpong::{self, Echo};
use anyhow::{Context, Result};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The value that ends the measurement.
const STOP: u64 = u64::MAX;

/// A word in a cache line of its own, and without another user of the line that some processors fetch together with it.
#[repr(align(128))]
struct Line(AtomicU64);

/// One end: it makes the word odd, and waits until the other end has made it even.
struct Bounce<'l> {
    line: &'l Line,
    turn: u64,
}

impl Echo for Bounce<'_> {
    fn exchange(&mut self, _message: &mut [u8]) -> Result<()> {
        self.line.0.store(self.turn + 1, Ordering::Release);
        self.turn += 2;
        while self.line.0.load(Ordering::Acquire) != self.turn {}
        Ok(())
    }
}

fn answer(line: &Line) {
    loop {
        let turn = line.0.load(Ordering::Acquire);
        if turn == STOP {
            return;
        }
        if turn % 2 == 1 {
            line.0.store(turn + 1, Ordering::Release);
        }
    }
}

/// Returns the nanoseconds that a cache line takes from one CPU to another: half of the median round trip between two threads.
pub fn one_way(cpus: [usize; 2], rounds: u32) -> Result<f64> {
    let line = Line(AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(cpus[0]);
            answer(&line);
        });
        let timing = scope.spawn(|| {
            pin(cpus[1]);
            let timing = pingpong::run(&mut Bounce { line: &line, turn: 0 }, 0, rounds);
            line.0.store(STOP, Ordering::Release);
            timing
        });
        Ok(timing.join().ok().context("a thread has panicked")??.median)
    })
}

#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "it is only copied")] [u8; 4096]);

/// Memory that begins at a page boundary, like that of the programs.
fn pages(bytes: usize, with: u8) -> Vec<Page> {
    vec![Page([with; 4096]); bytes.div_ceil(4096)]
}

/// Returns the gigabytes per second of `count` calls of memcpy from one buffer to another on one CPU.
pub fn memcpy(cpu: usize, bytes: usize, count: u32) -> Result<f64> {
    let copying = std::thread::spawn(move || {
        pin(cpu);
        let (from, mut to) = (pages(bytes, 1), pages(bytes, 2));
        let mut begin = Instant::now();
        for round in 0..count + count / 10 {
            // The first calls only warm the caches, as the programs do before they read the clock.
            if round == count / 10 {
                begin = Instant::now();
            }
            black_box(&mut to).copy_from_slice(black_box(&from));
        }
        f64::from(count) * bytes as f64 / begin.elapsed().as_nanos() as f64
    });
    copying.join().ok().context("a thread has panicked")
}
