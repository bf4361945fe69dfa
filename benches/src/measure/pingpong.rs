//! Round trips; the result is half of the time of one.

use super::{Timing, cpu_seconds};
use anyhow::Result;
use std::time::Instant;

/// A transport that can send a message and receive one back.
pub trait Echo {
    /// Sends `message` and waits for as many bytes.
    fn exchange(&mut self, message: &mut [u8]) -> Result<()>;
}

/// The number of round trips in one sample. Reading the clock takes a considerable part of one round trip, even more in an
/// emulated guest.
const BATCH: u32 = 32;

/// Measures `rounds` round trips of `size` bytes. Returns nanoseconds one way.
pub fn run(echo: &mut dyn Echo, size: usize, rounds: u32) -> Result<Timing> {
    let mut message = vec![0x5a; size];
    for _ in 0..(rounds / 10).min(1000) {
        echo.exchange(&mut message)?;
    }
    let batch = BATCH.min(rounds);
    let mut samples = Vec::with_capacity((rounds / batch) as usize);
    let (cpu, start) = (cpu_seconds(), Instant::now());
    for _ in 0..rounds / batch {
        let begin = Instant::now();
        for _ in 0..batch {
            echo.exchange(&mut message)?;
        }
        samples.push(begin.elapsed().as_nanos() as f64 / f64::from(batch) / 2.0);
    }
    Ok(Timing::of(samples, (cpu_seconds() - cpu) / start.elapsed().as_secs_f64()))
}
