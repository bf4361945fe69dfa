//! Which keys were found in memory: the server is told while it is short of memory, so that what is used stays.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Hashes that are remembered, each in its entry. Two that have the same place are told in turn: if there are many more keys than places,
/// what is told is a sample of all hits.
const ENTRIES: usize = 4096;
/// The most that are told at once; the others were no less used, but a sample is enough.
const MOST: usize = 256;
/// How often the server is told.
const BETWEEN: Duration = Duration::from_millis(10);
/// How long a key that was told is not told again.
const FORGOTTEN: Duration = Duration::from_secs(1);
/// How long there is no other try if there is no server.
const PAUSE: Duration = Duration::from_secs(5);

/// Hits that the server was or will be told.
pub struct Hits {
    known: Box<[AtomicU64]>,
    pending: Mutex<Pending>,
}

struct Pending {
    hashes: Vec<u64>,
    /// When the next ones may be told.
    due: Instant,
    /// When the places are emptied.
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

    /// Notes a hit, of a thread that has had so many before. True if it is time to tell the server.
    #[inline]
    pub fn note(&self, hash: u64, count: u64) -> bool {
        let entry = &self.known[(hash >> 20) as usize % ENTRIES];
        let is_new = entry.load(Ordering::Relaxed) != hash;
        // Looking at the clock costs something, so known ones do it now and then only.
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

    /// What is to be told now; nobody else tells it.
    pub fn take(&self, hashes: &mut Vec<u64>) {
        let Ok(mut pending) = self.pending.try_lock() else { return };
        let now = Instant::now();
        if now >= pending.due {
            pending.due = now + BETWEEN;
            hashes.append(&mut pending.hashes);
        }
    }

    /// There was nobody to tell.
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
        hits.take(&mut told);
        assert_eq!(told, [hash(1), hash(2)]);
        assert!(!hits.note(hash(3), 4), "too soon");
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
