//! Moving many bytes one way. The sending end measures the time from the first byte to the answer that all bytes have arrived.

use super::{Timing, cpu_seconds};
use anyhow::{Context, Result, ensure};
use ginnel::{MessageReceiver, MessageSender, StreamReceiver, StreamSender};
use std::time::Instant;

/// One word of each cache line is touched, as the work of a program that makes or reads data.
const LINE: usize = 64;

/// Measures `rounds` runs of `once`, each of which moves `bytes`. Returns gigabytes per second.
pub fn run(bytes: u64, rounds: u32, once: impl FnMut() -> Result<()>) -> Result<Timing> {
    sample(rounds, once, |nanoseconds| bytes as f64 / nanoseconds)
}

/// Measures `rounds` runs of `once`, each of which moves `count` messages. Returns nanoseconds for each message.
pub fn each(count: u64, rounds: u32, once: impl FnMut() -> Result<()>) -> Result<Timing> {
    sample(rounds, once, |nanoseconds| nanoseconds / count as f64)
}

fn sample(rounds: u32, mut once: impl FnMut() -> Result<()>, figure: impl Fn(f64) -> f64) -> Result<Timing> {
    once()?;
    let mut samples = Vec::new();
    let (cpu, start) = (cpu_seconds(), Instant::now());
    for _ in 0..rounds {
        let begin = Instant::now();
        once()?;
        samples.push(figure(begin.elapsed().as_nanos() as f64));
    }
    Ok(Timing::of(samples, (cpu_seconds() - cpu) / start.elapsed().as_secs_f64()))
}

/// Sends `message` `count` times, then waits for an empty one back.
pub fn fill_messages(
    to: &mut MessageSender,
    back: &mut MessageReceiver,
    message: &[u8],
    count: u64,
) -> Result<()> {
    for _ in 0..count {
        to.send(message)?;
    }
    back.recv_into(&mut []).context("the other end has gone")?;
    Ok(())
}

/// Receives `count` messages, then sends an empty one. Returns `false` if the peer has finished.
pub fn drain_messages(
    from: &mut MessageReceiver,
    back: &mut MessageSender,
    message: &mut [u8],
    count: u64,
) -> Result<bool> {
    for _ in 0..count {
        match from.recv_into(message) {
            Ok(_) => {}
            Err(ginnel::Error::Finished) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    back.send(&[])?;
    Ok(true)
}

/// Sends `count` chunks into a stream, then waits for one byte back.
pub fn fill_stream(to: &mut StreamSender, back: &mut StreamReceiver, chunk: &[u8], count: u64) -> Result<()> {
    for _ in 0..count {
        to.send_all(chunk)?;
    }
    ensure!(back.recv(&mut [0])? == 1, "the other end has gone");
    Ok(())
}

/// Receives `count` chunks of a stream, then sends one byte. Returns `false` at the end of the stream.
pub fn drain_stream(
    from: &mut StreamReceiver,
    back: &mut StreamSender,
    chunk: &mut [u8],
    count: u64,
) -> Result<bool> {
    let mut left = chunk.len() as u64 * count;
    let mut filled = 0;
    while left > 0 {
        let n = from.recv(&mut chunk[filled..])?;
        if n == 0 {
            return Ok(false);
        }
        left -= n as u64;
        filled = (filled + n) % chunk.len();
    }
    back.send_all(&[1])?;
    Ok(true)
}

/// Writes one word into each line of a private message and sends it (which copies), `count` times.
pub fn fill_copying(
    to: &mut MessageSender,
    back: &mut MessageReceiver,
    chunk: &mut [u8],
    touch: usize,
    count: u64,
) -> Result<()> {
    for turn in 0..count {
        let touched = touch.min(chunk.len());
        for line in chunk[..touched].chunks_exact_mut(LINE) {
            line[..8].copy_from_slice(&turn.to_le_bytes());
        }
        to.send(chunk)?;
    }
    back.recv().context("the other end has gone")?;
    Ok(())
}

/// Does the same in place, in the ring.
pub fn fill_in_place(
    to: &mut MessageSender,
    back: &mut MessageReceiver,
    len: usize,
    touch: usize,
    count: u64,
) -> Result<()> {
    for turn in 0..count {
        let claim = to.claim(len)?;
        let slice = claim.slice();
        for line in 0..touch.min(len) / LINE {
            slice.write(line * LINE, &turn.to_le_bytes());
        }
        claim.send(len)?;
    }
    back.recv().context("the other end has gone")?;
    Ok(())
}

/// Receives `count` messages (which copies) and reads one word of each line. Returns `false` if the peer has finished.
pub fn drain_copying(
    from: &mut MessageReceiver,
    back: &mut MessageSender,
    chunk: &mut [u8],
    touch: usize,
    count: u64,
) -> Result<bool> {
    let mut sum = 0u64;
    for _ in 0..count {
        let len = match from.recv_into(chunk) {
            Ok(len) => len,
            Err(ginnel::Error::Finished) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        for line in chunk[..len.min(touch)].as_chunks::<LINE>().0 {
            sum = sum.wrapping_add(u64::from_le_bytes([
                line[0], line[1], line[2], line[3], line[4], line[5], line[6], line[7],
            ]));
        }
    }
    back.send(&sum.to_le_bytes())?;
    Ok(true)
}

/// Does the same in place, in the ring.
pub fn drain_in_place(
    from: &mut MessageReceiver,
    back: &mut MessageSender,
    touch: usize,
    count: u64,
) -> Result<bool> {
    let mut sum = 0u64;
    for _ in 0..count {
        let message = match from.peek() {
            Ok(message) => message,
            Err(ginnel::Error::Finished) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let slice = message.slice();
        for line in 0..slice.len().min(touch) / LINE {
            let mut word = [0; 8];
            slice.read(line * LINE, &mut word);
            sum = sum.wrapping_add(u64::from_le_bytes(word));
        }
        message.release()?;
    }
    back.send(&sum.to_le_bytes())?;
    Ok(true)
}
