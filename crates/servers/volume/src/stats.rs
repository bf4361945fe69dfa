//! Counters of a volume. One thread writes each counter, with plain stores; any thread can read it.

mod histogram;

use ginnel_volume_control::{OperationStat, QueueStat, ThreadStat};
pub use histogram::Histogram;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A counter that one thread writes and others read. Adding is a load and a store, not an atomic addition, since only
/// one thread writes.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the thread that owns the counter may call this.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Raises the value to at least `n`. Only the thread that owns the counter may call this.
    #[inline]
    pub fn raise(&self, n: u64) {
        if n > self.0.load(Relaxed) {
            self.0.store(n, Relaxed);
        }
    }

    /// Sets the value to `n`. Only the thread that owns the counter may call this.
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Returns the value, which may be slightly old.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Kinds of requests that the statistics distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    /// Data to the guest.
    Read,
    /// Data from the guest.
    Write,
    /// Makes written data durable.
    Flush,
    /// Gives space back to the image's file system or device.
    Discard,
    /// Writes zeroes without data from the guest.
    WriteZeroes,
    /// Any other request, such as one for the serial number.
    Other,
}

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Other];

    /// Returns the kind's word in the statistics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
            Self::Other => "other",
        }
    }
}

#[derive(Debug, Default)]
struct OperationCounters {
    bytes: Counter,
    errors: Counter,
    latency: Histogram,
}

/// Counters of a queue, written by the thread that owns the queue. They stay when the front end disconnects.
// Aligned to a pair of cache lines, since the neighbours belong to other threads.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCounters {
    /// Requests that were taken from the queue.
    pub taken: Counter,
    /// Kicks that were received from the driver.
    pub kicks: Counter,
    /// Calls that were sent to the driver.
    pub calls: Counter,
    /// Calls that were not sent because the driver did not want them.
    pub calls_saved: Counter,
    /// Requests that had to wait for a limit. Each counts once.
    pub throttled: Counter,
    /// Requests that currently wait for an operator because their disk has failed.
    pub held: Counter,
    /// Requests that the device could not interpret.
    pub malformed: Counter,
    /// The thread that owns the queue, or owned it last.
    pub thread: Counter,
    operations: [OperationCounters; Kind::ALL.len()],
}

impl QueueCounters {
    /// Counts a request that is given back, with its latency in nanoseconds.
    #[inline]
    pub fn done(&self, kind: Kind, bytes: u64, nanoseconds: u64, good: bool) {
        let operation = &self.operations[kind as usize];
        operation.latency.record(nanoseconds);
        operation.bytes.add(bytes);
        if !good {
            operation.errors.add(1);
        }
    }

    fn stat(&self, queue: usize) -> QueueStat {
        QueueStat {
            queue: queue as u16,
            thread: self.thread.get() as usize,
            taken: self.taken.get(),
            done: self.operations.iter().map(|o| o.latency.count()).sum(),
            kicks: self.kicks.get(),
            calls: self.calls.get(),
            calls_saved: self.calls_saved.get(),
            throttled: self.throttled.get(),
            held: self.held.get(),
            malformed: self.malformed.get(),
        }
    }
}

/// Counters of a thread.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ThreadCounters {
    /// Number of loop turns in which the thread looked for work.
    pub turns: Counter,
    /// Number of turns in which the thread found work.
    pub busy_turns: Counter,
    /// Number of times the thread has slept.
    pub sleeps: Counter,
    /// Duration of its longest turn, in nanoseconds, without sleep.
    pub longest_turn: Counter,
}

/// All counters of a volume.
#[derive(Debug, Default)]
pub struct Counters {
    /// The counters of each queue.
    pub queues: Vec<Arc<QueueCounters>>,
    /// The counters of each thread.
    pub threads: Vec<Arc<ThreadCounters>>,
}

impl Counters {
    /// Returns counters for this many queues and threads.
    pub fn new(queues: usize, threads: usize) -> Self {
        Self {
            queues: (0..queues).map(|_| Arc::default()).collect(),
            threads: (0..threads).map(|_| Arc::default()).collect(),
        }
    }

    /// Returns the statistics of all queues.
    pub fn queue_stats(&self) -> Vec<QueueStat> {
        self.queues.iter().enumerate().map(|(i, q)| q.stat(i)).collect()
    }

    /// Returns the statistics of all threads. `cpus` has the CPU to which each thread is bound, or is empty.
    pub fn thread_stats(&self, cpus: &[usize]) -> Vec<ThreadStat> {
        let stat = |(thread, t): (usize, &Arc<ThreadCounters>)| ThreadStat {
            thread,
            cpu: cpus.get(thread).copied(),
            turns: t.turns.get(),
            busy_turns: t.busy_turns.get(),
            sleeps: t.sleeps.get(),
            longest_turn_ns: t.longest_turn.get(),
        };
        self.threads.iter().enumerate().map(stat).collect()
    }

    /// Returns the statistics of each kind of request, over all queues.
    pub fn operation_stats(&self) -> Vec<OperationStat> {
        let stat = |kind: Kind| {
            let of =
                |q: &Arc<QueueCounters>, f: fn(&OperationCounters) -> u64| f(&q.operations[kind as usize]);
            let sum = |f| self.queues.iter().map(|q| of(q, f)).fold(0, u64::wrapping_add);
            let latency = Histogram::merged(self.queues.iter().map(|q| &q.operations[kind as usize].latency));
            OperationStat {
                operation: kind.word().into(),
                requests: latency.count,
                bytes: sum(|o| o.bytes.get()),
                errors: sum(|o| o.errors.get()),
                latency,
            }
        };
        Kind::ALL.into_iter().map(stat).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_add_up_over_queues() {
        let counters = Counters::new(2, 1);
        counters.queues[0].taken.add(2);
        counters.queues[0].done(Kind::Read, 4096, 900, true);
        counters.queues[0].done(Kind::Read, 4096, 1100, false);
        counters.queues[1].done(Kind::Read, 512, 500, true);
        counters.queues[1].done(Kind::Flush, 0, 1_000_000, true);
        let operations = counters.operation_stats();
        let read = &operations[Kind::Read as usize];
        assert_eq!((read.operation.as_str(), read.requests, read.bytes, read.errors), ("read", 3, 8704, 1));
        assert_eq!((read.latency.sum, read.latency.max), (2500, 1100));
        assert_eq!(operations[Kind::Flush as usize].requests, 1);
        let queues = counters.queue_stats();
        assert_eq!((queues[0].taken, queues[0].done, queues[1].done), (2, 2, 2));
        counters.threads[0].longest_turn.raise(5);
        counters.threads[0].longest_turn.raise(3);
        assert_eq!(counters.thread_stats(&[7])[0].longest_turn_ns, 5);
    }

    #[test]
    fn kinds_are_their_numbers() {
        for (i, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, i);
        }
    }
}
