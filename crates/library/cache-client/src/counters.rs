//! The counters of a client.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The number of counter groups, over which threads are spread.
const SHARDS: usize = 16;

/// What a client has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Items that were found in memory.
    pub hits: u64,
    /// Keys that have no item, according to memory.
    pub misses: u64,
    /// Keys that the server was asked for, because memory could not tell.
    pub asked: u64,
    /// Requests whose answers were lost.
    pub lost: u64,
    /// Connections that were opened to servers.
    pub connections: u64,
    /// Keys whose hits were reported to the server.
    pub reported: u64,
}

/// A pair of cache lines, which processors fetch together.
#[repr(align(128))]
#[derive(Default)]
struct Shard {
    hits: AtomicU64,
    misses: AtomicU64,
}

/// The counters of a client, which several threads update.
#[derive(Default)]
pub struct CounterSet {
    shards: [Shard; SHARDS],
    pub asked: AtomicU64,
    pub lost: AtomicU64,
    pub connections: AtomicU64,
    pub reported: AtomicU64,
}

fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
    // A thread that is ending has no thread-local value any more.
    MINE.try_with(|mine| *mine).unwrap_or(0)
}

impl CounterSet {
    /// Counts hits. Returns about how many hits this thread has had before.
    #[inline]
    pub fn hit(&self, hits: u64) -> u64 {
        self.shards[shard()].hits.fetch_add(hits, Ordering::Relaxed)
    }

    #[inline]
    pub fn missed(&self, misses: u64) {
        self.shards[shard()].misses.fetch_add(misses, Ordering::Relaxed);
    }

    pub fn sum(&self) -> Counters {
        let sum = |which: fn(&Shard) -> &AtomicU64| {
            self.shards.iter().map(|shard| which(shard).load(Ordering::Relaxed)).sum()
        };
        Counters {
            hits: sum(|shard| &shard.hits),
            misses: sum(|shard| &shard.misses),
            asked: self.asked.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            connections: self.connections.load(Ordering::Relaxed),
            reported: self.reported.load(Ordering::Relaxed),
        }
    }
}
