//! Statistics of a queue pair for an administrator: what it has executed, and what it waits for.
//!
//! The owner keeps the totals in private memory; the tables have a copy, which only [`crate::inspect`] reads. An executed request
//! therefore costs two stores to a cache line that nobody else writes or polls. The reason for waiting is written each time a request is
//! tried and has to wait.

use ginnel_layout::verbs::{COUNTERS, Waits, counters};
use ginnel_shmem::SharedMemory;

/// Returns the time of CLOCK_MONOTONIC, in nanoseconds. Each machine has its own clock.
pub(crate) fn now() -> u64 {
    ginnel_clock::monotonic().as_nanos() as u64
}

/// The counters of a queue pair, as its owner writes them.
pub(crate) struct Counters<M> {
    tables: M,
    at: usize,
    executed: u64,
    bytes: u64,
    /// Bytes that this side has copied for requests of its peer.
    helped: u64,
    /// What the first waiting request waits for, and since when.
    waits: Waits,
    since: u64,
    /// Total time of all waits that have ended, in nanoseconds.
    waited: u64,
}

impl<M: SharedMemory> Counters<M> {
    /// Returns the counters of a new queue pair and clears their copy at the offset `at` of the tables.
    pub fn new(tables: M, at: usize) -> Self {
        let counters =
            Self { tables, at, executed: 0, bytes: 0, helped: 0, waits: Waits::NOTHING, since: 0, waited: 0 };
        for word in 0..COUNTERS / 8 {
            counters.store(word * 8, 0);
        }
        counters
    }

    #[inline]
    fn store(&self, word: usize, value: u64) {
        // In a loom model nobody reads the counters, and each store would multiply the orders that loom explores.
        if !cfg!(loom) {
            self.tables.store_relaxed_u64(self.at + word, value);
        }
    }

    /// Counts an executed request of so many bytes.
    #[inline]
    pub fn executed(&mut self, bytes: u32) {
        self.executed = self.executed.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(bytes.into());
        self.store(counters::EXECUTED, self.executed);
        self.store(counters::BYTES, self.bytes);
    }

    /// Counts bytes that were copied for a request of the peer.
    pub fn helped(&mut self, bytes: usize) {
        self.helped = self.helped.wrapping_add(bytes as u64);
        self.store(counters::HELPED, self.helped);
    }

    /// Records that a waiting request has been executed. The next one has not been tried yet.
    pub fn resumed(&mut self) {
        self.end_wait(now);
    }

    fn end_wait(&mut self, now: impl FnOnce() -> u64) {
        if self.waits != Waits::NOTHING {
            self.waited = self.waited.wrapping_add(now().saturating_sub(self.since));
            self.store(counters::WAITED, self.waited);
            self.waits = Waits::NOTHING;
        }
    }

    /// Records that so many requests wait. `waits` says what the first one waits for; `None` means that it has not been tried again.
    #[cold]
    pub fn waits(&mut self, requests: usize, waits: Option<Waits>) {
        if let Some(waits) = waits {
            let now = now();
            if self.waits != waits {
                self.end_wait(|| now);
                (self.waits, self.since) = (waits, now);
                self.store(counters::SINCE, now);
            }
            self.store(counters::TRIED, now);
        }
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        self.store(counters::WAITS, u64::from(self.waits.0) << 32 | u64::from(requests));
    }

    /// Records that no request waits any more.
    #[cold]
    pub fn idle(&mut self) {
        self.store(counters::WAITS, 0);
        self.end_wait(now);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_layout::verbs::{COUNTER_TABLE, TABLES};
    use ginnel_shmem::Mapping;

    #[test]
    fn the_time_of_a_wait_begins_when_its_reason_changes() {
        let tables = Mapping::anonymous(TABLES).unwrap();
        let word = |word| tables.load_relaxed_u64(COUNTER_TABLE + word);
        tables.store_relaxed_u64(COUNTER_TABLE + counters::WAITS, 7);
        let mut own = Counters::new(tables.clone(), COUNTER_TABLE);
        assert_eq!(word(counters::WAITS), 0);
        own.executed(5);
        own.executed(u32::MAX);
        assert_eq!((word(counters::EXECUTED), word(counters::BYTES)), (2, 5 + u64::from(u32::MAX)));

        let waits = |waits: Waits, requests| u64::from(waits.0) << 32 | requests;
        own.waits(1, Some(Waits::PEER));
        let (since, tried) = (word(counters::SINCE), word(counters::TRIED));
        assert!(since > 0 && tried == since && word(counters::WAITS) == waits(Waits::PEER, 1));
        while now() == tried {}
        own.waits(2, None);
        assert_eq!((word(counters::TRIED), word(counters::WAITS)), (tried, waits(Waits::PEER, 2)));
        own.waits(2, Some(Waits::PEER));
        assert!(word(counters::SINCE) == since && word(counters::TRIED) > tried);
        own.waits(2, Some(Waits::RECEIVE));
        let later = word(counters::SINCE);
        assert!(later > since && word(counters::WAITS) == waits(Waits::RECEIVE, 2));
        assert_eq!(word(counters::WAITED), later - since);
        while now() == later {}
        own.resumed();
        let waited = word(counters::WAITED);
        assert!(waited > later - since);
        own.resumed();
        assert_eq!(word(counters::WAITED), waited, "nothing waits");
        own.waits(1, Some(Waits::RECEIVE));
        let last = word(counters::SINCE);
        assert!(last > later && last - since >= waited);
        while now() == last {}
        own.idle();
        assert_eq!(word(counters::WAITS), 0);
        assert!(word(counters::WAITED) > waited);
    }
}
