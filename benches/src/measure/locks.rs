//! Locks and condition variables: ours and the C library's, measured by the same loops.

use super::{Timing, cpu_seconds};
use anyhow::{Context, Result};
use ginnel::{Mapping, SharedMemory};
use ginnel_layout::segment;
use std::time::Instant;

/// The offset of the words that the two ends share, in the arena of a segment that has no objects.
const WORDS: usize = (segment::ARENA - segment::RESERVED) as usize + 4096;
const TURN: usize = WORDS;
const COUNT: usize = WORDS + 64;

/// The value that means that the measurement is over.
const OVER: u64 = u64::MAX;
/// The number of operations between two looks at the clock.
const BATCH: u32 = 32;

/// A lock that gives mutual exclusion to the two ends.
pub trait Lock {
    /// Takes the lock, and waits for it if necessary.
    fn lock(&mut self) -> Result<()>;
    /// Releases the lock.
    fn unlock(&mut self) -> Result<()>;
}

/// A lock with a condition variable.
pub trait Signal: Lock {
    /// Waits for a signal. The caller must have the lock.
    fn wait(&mut self) -> Result<()>;
    /// Signals the other end.
    fn notify(&mut self) -> Result<()>;
}

/// Ginnel's lock and condition variable.
pub struct Ours {
    mutex: ginnel::sync::Mutex,
    condvar: ginnel::sync::Condvar,
}

impl Ours {
    /// Opens them in the endpoint's segment.
    pub fn open(endpoint: &ginnel::Endpoint) -> Result<Self> {
        Ok(Self { mutex: endpoint.mutex("bench")?, condvar: endpoint.condvar("bench-signal")? })
    }
}

impl Lock for Ours {
    #[inline]
    fn lock(&mut self) -> Result<()> {
        // As in a binding for C: the guard is forgotten, and the lock is unlocked by its handle.
        std::mem::forget(self.mutex.lock()?);
        Ok(())
    }
    #[inline]
    fn unlock(&mut self) -> Result<()> {
        Ok(self.mutex.force_unlock()?)
    }
}

impl Signal for Ours {
    fn wait(&mut self) -> Result<()> {
        let guard = self.mutex.assume_locked();
        std::mem::forget(self.condvar.wait(guard)?);
        Ok(())
    }
    fn notify(&mut self) -> Result<()> {
        self.condvar.notify_one();
        Ok(())
    }
}

/// Measures the nanoseconds for a lock and unlock without another user.
pub fn alone(lock: &mut dyn Lock, rounds: u32) -> Result<Timing> {
    let mut samples = Vec::new();
    let (cpu, start) = (cpu_seconds(), Instant::now());
    for _ in 0..rounds / (BATCH * 32) {
        let begin = Instant::now();
        for _ in 0..BATCH * 32 {
            lock.lock()?;
            lock.unlock()?;
        }
        samples.push(begin.elapsed().as_nanos() as f64 / f64::from(BATCH * 32));
    }
    Ok(Timing::of(samples, (cpu_seconds() - cpu) / start.elapsed().as_secs_f64()))
}

/// Clears the words of an earlier measurement. Call it before the other end connects.
pub fn reset(memory: &Mapping) {
    memory.store_release_u64(TURN, 0);
    memory.store_release_u64(COUNT, 0);
}

/// Ends the other end's loop.
pub fn stop(memory: &Mapping) {
    memory.store_release_u64(TURN, OVER);
}

/// Both ends lock all the time; the end whose turn it is passes the turn to the other. `me` is 0 for the timing end, which
/// returns the nanoseconds of each hand-over.
pub fn hand_over(lock: &mut dyn Lock, memory: &Mapping, me: u64, rounds: u32) -> Result<Timing> {
    let mut turn = || -> Result<bool> {
        loop {
            lock.lock()?;
            let turn = memory.load_relaxed_u64(TURN);
            if turn == me {
                memory.store_relaxed_u64(TURN, 1 - me);
            }
            lock.unlock()?;
            if turn == me || turn == OVER {
                return Ok(turn == me);
            }
        }
    };
    play(me, rounds, &mut turn)
}

/// Does the same, but an end that waits for its turn sleeps on the condition variable.
pub fn signals(pair: &mut dyn Signal, memory: &Mapping, me: u64, rounds: u32) -> Result<Timing> {
    let mut turn = || -> Result<bool> {
        pair.lock()?;
        let turn = loop {
            match memory.load_relaxed_u64(TURN) {
                turn if turn == me || turn == OVER => break turn,
                _ => pair.wait()?,
            }
        };
        if turn == me {
            memory.store_relaxed_u64(TURN, 1 - me);
            pair.notify()?;
        }
        pair.unlock()?;
        Ok(turn == me)
    };
    play(me, rounds, &mut turn)
}

/// Takes turns until the timing end has had `rounds` of them. Each of its turns except the first comes two hand-overs after the
/// one before.
fn play(me: u64, rounds: u32, turn: &mut dyn FnMut() -> Result<bool>) -> Result<Timing> {
    if me == 1 {
        while turn()? {}
        return Ok(Timing::of(Vec::new(), 0.0));
    }
    for _ in 0..rounds / 10 + 1 {
        turn()?;
    }
    let mut samples = Vec::new();
    let (cpu, start) = (cpu_seconds(), Instant::now());
    for _ in 0..rounds / BATCH {
        let begin = Instant::now();
        for _ in 0..BATCH {
            turn()?;
        }
        samples.push(begin.elapsed().as_nanos() as f64 / f64::from(2 * BATCH));
    }
    Ok(Timing::of(samples, (cpu_seconds() - cpu) / start.elapsed().as_secs_f64()))
}

/// Both ends lock, count and unlock as often as they can. Returns nanoseconds of wall time for each count of either end.
pub fn crowd(lock: &mut dyn Lock, memory: &Mapping, me: u64, rounds: u32) -> Result<Timing> {
    let count = |lock: &mut dyn Lock| -> Result<()> {
        lock.lock()?;
        memory.store_relaxed_u64(COUNT, memory.load_relaxed_u64(COUNT) + 1);
        lock.unlock()
    };
    if me == 1 {
        while memory.load_relaxed_u64(TURN) != OVER {
            count(lock)?;
        }
        return Ok(Timing::of(Vec::new(), 0.0));
    }
    let mut samples = Vec::new();
    let (cpu, start) = (cpu_seconds(), Instant::now());
    for _ in 0..20 {
        let (begin, before) = (Instant::now(), memory.load_relaxed_u64(COUNT));
        for _ in 0..rounds / 20 {
            count(lock)?;
        }
        let counted = memory.load_relaxed_u64(COUNT).checked_sub(before).context("the count went back")?;
        samples.push(begin.elapsed().as_nanos() as f64 / counted as f64);
    }
    Ok(Timing::of(samples, (cpu_seconds() - cpu) / start.elapsed().as_secs_f64()))
}
