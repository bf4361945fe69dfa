//! Hit rates with the same amount of memory: each program asks for a key, and stores the item if it was not there.

use super::Cache;
use super::memcached::Memcached;
use super::trace::{KEYS, Kind, Request, Trace};
use crate::report::Better;
use anyhow::Result;
use ginnel_cache_store::reader::{Found, Reader};
use ginnel_cache_store::shape::plan;
use ginnel_cache_store::store::Store;
use ginnel_shmem::Mapping;

/// The memory of each program in MiB.
const MIB: usize = 64;
/// The number of requests that fill the caches, and of those that count.
const WARMUP: u64 = 2_000_000;
const COUNTED: u64 = 3_000_000;
/// The number of keys in one request.
const BATCH: usize = 50;
/// The number of requests that count as a second, and as ten milliseconds.
const SECOND: u64 = 200_000;
const MOMENT: u64 = SECOND / 100;
/// The number of hits that a reader remembers having reported in this second.
const REPORTED: usize = 4096;

/// The name of the peer.
const PEER: &str = "memcached -m 64";

/// Returns the part of the counted requests for which `serve` finds the items, in per cent. `serve` gets batches of requests
/// and returns the number of hits.
fn run(kind: Kind, mut serve: impl FnMut(&[Request]) -> Result<usize>) -> Result<f64> {
    let mut trace = Trace::new(kind, WARMUP + COUNTED);
    let (mut asked, mut hits) = (0, 0);
    while asked < WARMUP + COUNTED {
        let batch: Vec<Request> = trace.by_ref().take(BATCH).collect();
        let found = serve(&batch)?;
        if asked >= WARMUP {
            hits += found;
        }
        asked += batch.len() as u64;
    }
    Ok(hits as f64 * 100.0 / COUNTED as f64)
}

fn key(request: &Request) -> String {
    key_of(request.key)
}

fn key_of(number: u64) -> String {
    format!("user:{number:010}")
}

/// The result of a run.
struct Outcome {
    /// Hits, in per cent.
    rate: f64,
    /// The bytes of keys and values that are stored at the end, in MiB.
    kept: f64,
    /// The note for the row.
    note: String,
}

fn value_of(request: &Request) -> &'static [u8] {
    static BYTES: [u8; 4096] = [b'v'; 4096];
    &BYTES[..request.len]
}

/// Measures memcached.
fn of_memcached(kind: Kind) -> Result<Outcome> {
    let mut memcached = Memcached::start(MIB)?;
    let rate = run(kind, |batch| {
        let keys: Vec<String> = batch.iter().map(key).collect();
        let mut is_there = vec![false; batch.len()];
        let mut next = 0;
        memcached.get(&keys, |found, _| {
            // Answers have the order of the keys.
            while next < keys.len() && keys[next] != found {
                next += 1;
            }
            is_there[next] = true;
            next += 1;
        })?;
        let missing = (0..batch.len()).filter(|one| !is_there[*one]);
        memcached.set(missing.map(|one| (&*keys[one], value_of(&batch[one]))))?;
        Ok(is_there.iter().filter(|is_there| **is_there).count())
    })?;
    let note = format!("the peer's process has {:.0} MiB", memcached.resident()?);
    let mut kept = 0;
    for first in (0..KEYS).step_by(BATCH) {
        let keys: Vec<String> = (first..KEYS.min(first + BATCH as u64)).map(key_of).collect();
        memcached.get(&keys, |key, len| kept += key.len() + len)?;
    }
    Ok(Outcome { rate, kept: kept as f64 / f64::from(1 << 20), note })
}

/// Hits of a reader that have not been reported yet.
struct Reports {
    seen: Vec<u64>,
    waiting: Vec<u64>,
    sent: usize,
}

/// Measures a store in a block of this size, which contains everything: items, index and header.
fn of_store(kind: Kind, by_reader: bool) -> Result<Outcome> {
    let memory = Mapping::anonymous(MIB << 20)?;
    let shape = plan(MIB << 20, 1 << 20, 150)?;
    let mut store = Store::create(memory.clone(), shape, [1, 2], 0)?;
    let reader = Reader::new(memory)?;
    let mut reports = Reports { seen: vec![0; REPORTED], waiting: Vec::new(), sent: 0 };
    let (mut bytes, mut asked, mut all_hits) = (Vec::new(), 0, 0);
    let rate = run(kind, |batch| {
        let keys: Vec<String> = batch.iter().map(key).collect();
        let mut missing = Vec::new();
        for (one, key) in keys.iter().enumerate() {
            bytes.clear();
            let is_there = if by_reader {
                let hash = reader.hash(key.as_bytes());
                let is_there = matches!(reader.get_hashed(hash, key.as_bytes(), &mut bytes), Found::Hit(_));
                let seen = &mut reports.seen[hash as usize % REPORTED];
                if is_there && reader.wants_hits() && *seen != hash {
                    *seen = hash;
                    reports.waiting.push(hash);
                }
                is_there
            } else {
                store.get(key.as_bytes(), &mut bytes).is_some()
            };
            if !is_there {
                missing.push(one);
            }
        }
        let hits = batch.len() - missing.len();
        for one in missing {
            store.set(keys[one].as_bytes(), &[value_of(&batch[one])], 0, 0)?;
        }
        let before = asked;
        asked += batch.len() as u64;
        all_hits += hits;
        store.tick(asked * 1000 / SECOND);
        if before / MOMENT != asked / MOMENT {
            reports.sent += reports.waiting.len();
            reports.waiting.drain(..).for_each(|hash| store.used_by_reader(hash));
        }
        if before / SECOND != asked / SECOND {
            reports.seen.fill(0);
        }
        Ok(hits)
    })?;
    let mut note = format!("{MIB} MiB with index and headers");
    if by_reader {
        note += &format!("; {:.0} % of hits reported", reports.sent as f64 * 100.0 / all_hits as f64);
    }
    let kept: usize = (0..KEYS)
        .map(key_of)
        .filter_map(|key| store.peek(key.as_bytes()).map(|meta| key.len() + meta.len))
        .sum();
    Ok(Outcome { rate, kept: kept as f64 / f64::from(1 << 20), note })
}

/// Adds the rows.
pub fn hit_rate(bench: &mut Cache) -> Result<()> {
    for (kind, name, target) in [
        (Kind::Zipf, "zipf", Some(0.97)),
        (Kind::Scans, "zipf and scans", Some(0.97)),
        (Kind::Growing, "zipf, values grow", None),
    ] {
        let rows = [format!("hit rate, {name}, server"), format!("hit rate, {name}, readers")];
        if !rows.iter().any(|row| bench.wants(row)) {
            continue;
        }
        let peer = of_memcached(kind)?;
        for (row, by_reader) in rows.into_iter().zip([false, true]) {
            if !bench.wants(&row) {
                continue;
            }
            let own = of_store(kind, by_reader)?;
            let note = format!("{}; {}", own.note, peer.note);
            bench.report.pairs(row, "%", Better::Higher, &[own.rate], PEER, &[peer.rate], target, &note);
            // In a scan, other keys are in the cache as well.
            if kind != Kind::Scans && !by_reader {
                let row = format!("bytes of items kept, {name}");
                bench.report.pairs(row, "MiB", Better::Higher, &[own.kept], PEER, &[peer.kept], None, &note);
            }
        }
    }
    Ok(())
}
