//! The keys that were found in memory. The client reports them to the server while the server is short of memory, so
//! that it keeps the items that are used.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The number of hashes that are remembered, each in its entry. Two hashes with the same entry displace each other
/// and are both reported: with many more keys than entries, the reports are a sample of all hits.
const ENTRIES: usize = 4096;
/// The most hits in one report. The others were used no less, but a sample is enough.
const MOST: usize = 256;
/// The time between two reports.
const BETWEEN: Duration = Duration::from_millis(10);
/// How long a reported key is not reported again.
const FORGOTTEN: Duration = Duration::from_secs(1);
/// How long the client makes no other attempt if there is no server.
const PAUSE: Duration = Duration::from_secs(5);

/// Hits that have been or will be reported to the server.
pub struct Hits {
    known: Box<[AtomicU64]>,
    pending: Mutex<Pending>,
}

struct Pending {
    hashes: Vec<u64>,
    /// When the next report may be sent.
    due: Instant,
    /// When the entries are cleared.
    forget: Instant,
}

impl Hits {
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            known: (0..ENTRIES).map(|_| AtomicU64::new(0)).collect(),
            pending: Mutex::new(Pending {
                hashes: Vec::with_capacity(MOST),
                due: now,
                forget: now + FORGOTTEN,
            }),
        }
    }

    /// Records a hit of a thread that has had `count` hits before. Returns true if it is time for a report.
    #[inline]
    pub fn note(&self, hash: u64, count: u64) -> bool {
        let entry = &self.known[(hash >> 20) as usize % ENTRIES];
        let is_new = entry.load(Ordering::Relaxed) != hash;
        // Reading the clock has a cost, so hits of known keys read it only now and then.
        if !is_new && !count.is_multiple_of(64) {
            return false;
        }
        self.look(entry, hash, is_new)
    }

    fn look(&self, entry: &AtomicU64, hash: u64, is_new: bool) -> bool {
        let Ok(mut pending) = self.pending.try_lock() else { return false };
        if is_new && pending.hashes.len() < MOST {
            entry.store(hash, Ordering::Relaxed);
            pending.hashes.push(hash);
        }
        let now = Instant::now();
        if now >= pending.forget {
            pending.forget = now + FORGOTTEN;
            self.known.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
        }
        now >= pending.due && !pending.hashes.is_empty()
    }

    /// Takes the hits to report. No other thread reports them.
    pub fn take(&self, hashes: &mut Vec<u64>) {
        let Ok(mut pending) = self.pending.try_lock() else { return };
        let now = Instant::now();
        if now >= pending.due {
            pending.due = now + BETWEEN;
            hashes.append(&mut pending.hashes);
        }
    }

    /// Begins the pause after there was no server to report to.
    pub fn pause(&self) {
        if let Ok(mut pending) = self.pending.try_lock() {
            pending.due = Instant::now() + PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_told_once_in_a_while() {
        let (hits, mut told) = (Hits::new(), Vec::new());
        let hash = |key: u64| key << 20;
        assert!(hits.note(hash(1), 1));
        assert!(!hits.note(hash(1), 2), "known, and the clock is not looked at");
        hits.note(hash(2), 3);
        let before = Instant::now();
        hits.take(&mut told);
        assert_eq!(told, [hash(1), hash(2)]);
        // A busy machine may have kept this thread from running for that long.
        assert!(!hits.note(hash(3), 4) || before.elapsed() >= BETWEEN, "too soon");
        for key in 4..5000 {
            hits.note(hash(key), key);
        }
        std::thread::sleep(BETWEEN);
        assert!(hits.note(hash(9000), 64), "time has passed");
        told.clear();
        hits.take(&mut told);
        assert_eq!(told.len(), MOST, "a bound");
        hits.pause();
        std::thread::sleep(BETWEEN);
        assert!(!hits.note(hash(9001), 64));
    }
}
